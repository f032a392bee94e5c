"""Check requests and answers against proto/openapi.yaml. Used by every black-box suite.

    contract = Contract("proto/openapi.yaml")
    contract.answer("POST", "/v1/sessions/s_…/verify?x=1", 200, headers, body_bytes)   # raises Mismatch

Answers are checked for: documented path, method and status; media type; body against its schema; the
headers that the answer must have; a problem's code against those that the operation lists (x-codes). An answer to HEAD is that to GET without its body. Refused bodies of
POST are checked through Contract.accepts.
"""

import json
import re

import jsonschema
import yaml

CODES = {
    400: {"bad-request", "bad-json", "unknown-field", "missing-field", "wrong-type"},
    401: {"unauthenticated"},
    403: {"forbidden"},
    404: {"session-not-found", "not-found", "round-not-found"},
    405: {"method-not-allowed"},
    408: {"timeout"},
    409: {
        "length-mismatch",
        "digest-mismatch",
        "pending-mismatch",
        "seq-gap",
        "epoch-changed",
        "session-busy",
        "session-finished",
        "round-held",
        "parity-mismatch",
    },
    410: {"session-expired", "round-evicted"},
    413: {"body-too-large"},
    415: {"media-type"},
    422: {"wrong-value", "tree-invalid", "tree-too-large", "context-full", "seq-reused"},
    429: {"rate-limited", "work-budget"},
    500: {"kernel-fault", "internal", "numeric-fault"},
    503: {"loading", "draining", "overloaded", "kv-full", "parity-quarantine"},
    504: {"deadline"},
}


class Mismatch(AssertionError):
    """An exchange that the contract does not describe."""


def refuse_constant(name):
    raise ValueError(f"{name} is not JSON")


def unique(pairs):
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("repeated member")
    return members


def strict_json(body):
    """Decode UTF-8 JSON without NaN, infinities or repeated members."""
    return json.loads(
        body.decode("utf-8"), parse_constant=refuse_constant, object_pairs_hook=unique
    )


class Contract:
    def __init__(self, path):
        with open(path, encoding="utf-8") as file:
            self.document = yaml.safe_load(file)
        self.resolver = jsonschema.RefResolver("", self.document)
        self.validators = {}  # by the schema's identity: schemas live as long as the document
        self.routes = []
        for template in self.document["paths"]:
            parts = re.split(r"\{\w+\}", template)
            self.routes.append((re.compile("[^/]+".join(map(re.escape, parts)) + "$"), template))

    def item(self, url):
        """The path item behind a URL, or None."""
        path = url.split("?", 1)[0]
        for pattern, template in self.routes:
            if pattern.match(path):
                return self.document["paths"][template]
        return None

    def resolve(self, node):
        while "$ref" in node and len(node) == 1:
            node = self.resolver.resolve(node["$ref"])[1]
        return node

    def errors(self, schema, value):
        validator = self.validators.get(id(schema))
        if validator is None:
            validator = jsonschema.Draft202012Validator(schema, resolver=self.resolver)
            self.validators[id(schema)] = validator
        return [
            f"/{'/'.join(map(str, error.absolute_path))}: {error.message[:200]}"
            for error in validator.iter_errors(value)
        ]

    def accepts(self, method, url, value):
        """Whether the request schema of a route accepts a body."""
        operation = self.item(url)[method.lower()]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        return not self.errors(schema, value)

    def response(self, method, url, status):
        item = self.item(url)
        method = "GET" if method == "HEAD" else method
        if item is None or method.lower() not in item:
            if status in (400, 401, 404, 405):
                return self.document["components"]["responses"]["Problem"]
            raise Mismatch(f"{method} {url}: {status} on an undocumented route")
        responses = item[method.lower()]["responses"]
        if str(status) in responses:
            return self.resolve(responses[str(status)])
        if status < 400:
            raise Mismatch(f"{method} {url}: undocumented status {status}")
        return self.resolve(responses["default"])

    def codes(self, method, url):
        """The codes of problems that an operation may answer."""
        item, groups = self.item(url), self.document["x-codes"]
        method = "get" if method == "HEAD" else method.lower()
        if item is None or method not in item:
            return {*groups["every"], "not-found", "method-not-allowed"}
        names = item[method].get("x-codes")
        if names is None:
            raise Mismatch(f"{method} {url}: openapi.yaml does not list which codes it may answer (x-codes)")
        own = {code for name in names for code in groups.get(name, [name])}
        return own.union(groups["every"])

    def answer(self, method, url, status, headers, body):
        """Check one answer; headers is any mapping. Returns the decoded body (bytes if not JSON)."""
        where = f"{method} {url}: {status}"
        headers = {name.lower(): value for name, value in dict(headers).items()}
        response = self.response(method, url, status)
        for name, header in response.get("headers", {}).items():
            value = headers.get(name.lower())
            if value is None and header.get("required"):
                raise Mismatch(f"{where}: header {name} is missing")
            if value is not None and self.errors(header["schema"], value):
                raise Mismatch(f"{where}: header {name}: {value!r}")
        if "content" not in response:
            if body or headers.get("content-type"):
                raise Mismatch(f"{where}: a body of {len(body)} bytes where none is documented")
            return None
        media = headers.get("content-type", "").split(";")[0].strip()
        if media not in response["content"]:
            raise Mismatch(f"{where}: media type {media!r}, not {list(response['content'])}")
        if method == "HEAD":
            if body:
                raise Mismatch(f"{where}: an answer to HEAD has a body")
            return None
        schema = response["content"][media].get("schema")
        if schema is None or not media.endswith("json"):
            return body
        try:
            value = strict_json(body)
        except ValueError as error:
            raise Mismatch(f"{where}: not JSON: {error}: {body[:200]!r}") from error
        errors = self.errors(schema, value)
        if errors:
            raise Mismatch(f"{where}: " + "; ".join(errors[:5]))
        if media == "application/problem+json":
            self.problem(where, status, headers, value)
            if value["code"] not in self.codes(method, url):
                raise Mismatch(f"{where}: {value['code']} is not a code of this operation")
        return value

    def event(self, url, name, data):
        """Check the data of one event of a stream (x-events). Returns it decoded."""
        content = self.response("GET", url, 200)["content"]["text/event-stream"]
        if name not in content["x-events"]:
            raise Mismatch(f"GET {url}: undocumented event {name!r}")
        value = strict_json(data.encode())
        errors = self.errors(content["x-events"][name], value)
        if errors:
            raise Mismatch(f"GET {url}: event {name}: " + "; ".join(errors[:5]))
        return value

    def problem(self, where, status, headers, value):
        """What a schema cannot say: members that repeat each other and the status line."""
        if value["status"] != status or value["code"] not in CODES.get(status, ()):
            raise Mismatch(f"{where}: status {value['status']}, code {value['code']}")
        if value["type"] != "urn:treeverify:error:" + value["code"]:
            raise Mismatch(f"{where}: type {value['type']}")
        if "x-request-id" in headers and value["instance"] != headers["x-request-id"]:
            raise Mismatch(f"{where}: instance is not the request id")
        if value["code"] == "digest-mismatch" and "/sessions/" in where and "session_state" not in value:
            raise Mismatch(f"{where}: no session_state")
        if status in (429, 503) and not headers.get("retry-after", "").isdigit():
            raise Mismatch(f"{where}: no Retry-After")
        if (status == 401) != ("www-authenticate" in headers):
            raise Mismatch(f"{where}: WWW-Authenticate comes with 401, and with nothing else")
        if status == 405 and not headers.get("allow"):
            raise Mismatch(f"{where}: no Allow")
