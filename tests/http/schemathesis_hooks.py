"""Requests of schemathesis that are meant to be good come closer to being so; the bad ones stay as they are.

JSON Schema counts 3.0 as an integer, the contract does not; and most calls need a session that is there, its epoch
and its next round, and a tree, which no generator finds. TV_SERVER is where the daemon listens.
"""

import json
import os
import urllib.parse
import urllib.request

import schemathesis

SERVER = os.environ["TV_SERVER"]
VOCAB = 260
QUERY_MOST = 7000  # bytes of a value as it is sent; of `rows`, the longest, 6,055 with its commas as %2C
session = {}


def call(method, path, body=None):
    request = urllib.request.Request(SERVER + path, method=method, headers={"Content-Type": "application/json"})
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(request, data=data, timeout=30) as answer:
        return json.load(answer)


def state():
    """The session that good requests are about, as it is now."""
    global session
    try:
        session = call("GET", f"/v1/sessions/{session['session']}")
    except (KeyError, urllib.error.HTTPError):
        session = call("POST", "/v1/sessions", {"tokens": [73, 110, 32], "lease_s": 5})
    return session


def let_end(name):
    """A stream of events ends with its session's lease, which whoever made it may have wanted for a day."""
    try:
        call("POST", f"/v1/sessions/{urllib.parse.quote(name, safe='', errors='replace')}/renew", {"lease_s": 1})
    except urllib.error.HTTPError:
        pass  # there is none: the stream is refused


def integers(value):
    """Whole numbers are written as the contract wants them."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [integers(item) for item in value]
    if isinstance(value, dict):
        return {name: integers(item) for name, item in value.items()}
    return value


def grow(tree, pending):
    """The same nodes, in an order and below parents that make a tree of them."""
    tokens = tree.get("tokens")
    if not isinstance(tokens, list) or not tokens:
        return
    tokens[:] = [pending, *((int(token) + at) % VOCAB for at, token in enumerate(tokens[1:]))]
    tree["parents"] = [-1, *range(len(tokens) - 1)]
    for name in ("parents_b64", "tokens_b64", "q_topk", "q_dense"):
        tree.pop(name, None)


def short(value):
    """No longer than is wrong enough: with 32 KB of headers the library answers by itself."""
    while isinstance(value, str) and len(urllib.parse.quote(value, safe="", errors="replace")) > QUERY_MOST:
        value = value[: len(value) // 2]
    return value


def good(case):
    meta = getattr(case, "meta", None)
    return meta is not None and meta.generation.mode.is_positive


@schemathesis.hook
def before_call(context, case, kwargs):
    query, headers, path = case.query or {}, case.headers or {}, case.path_parameters or {}
    is_stream = case.operation.path.endswith("/events")
    if is_stream and isinstance(path.get("id"), str):
        let_end(path["id"])
    case.query = {name: short(value) for name, value in query.items()}
    query = case.query
    if not good(case):
        return
    if "rows" in query:  # none twice
        case.query = dict(query, rows=",".join(dict.fromkeys(str(query["rows"]).split(","))))
    if "Last-Event-ID" in headers:  # of a round that was
        headers["Last-Event-ID"] = "0"
    body = integers(case.body) if isinstance(case.body, (dict, list)) else case.body
    # one in two: unknown sessions have to be tried too
    known = hash(case.id) % 2 == 0 and case.method != "DELETE" and not is_stream
    if known and ("id" in path or (isinstance(body, dict) and "tree" in body)):
        now = state()
        if "id" in path:
            case.path_parameters = dict(path, id=now["session"])
        if isinstance(body, dict):
            for name, value in (("epoch", now["epoch"]), ("seq", now["next_seq"]), ("expected_len", now["committed_len"])):
                if name in body:
                    body[name] = value
            body.pop("expected_digest", None)
            if isinstance(body.get("tree"), dict):
                grow(body["tree"], now["pending"])
    case.body = body
