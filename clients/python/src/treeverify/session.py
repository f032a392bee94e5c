"""The client's side of one session, and the flows of its calls. No input or output (see calls.py).

Owns the client's tokens, pending token, round number and digest chain, and every rule of recovery:

- a lost answer, a timeout, 429, 503: the same bytes again (calls.send); the server answers a round once;
- the server is elsewhere (409 length-, digest-, pending-mismatch, seq-gap; 422 seq-reused; 410 round-evicted): adopt its
  state and the tokens that were missed, if they continue the text handed out;
- the server has forgotten the session (409 epoch-changed, 410 session-expired, 404 session-not-found): create it again
  from the client's own tokens with the same seed, and go on behind the pending token that was already handed out.

Refuses to go on when digests differ: then the two sides have different texts.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import secrets
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from .calls import Context, Effect, Flow, Reply, Send, call, decode, send
from .digest import Digest
from .errors import ContractError, DesyncError, MovedError, NotFoundError, ProblemError, problem_of
from .tree import Tree, TreeError
from .values import Dtype, Logits, Model, Round, Rows, Rule, Sampling, Want, float_array, read_round, rows_body

T = TypeVar("T")
F64: TypeAlias = npt.NDArray[np.float64]

RECOVERIES_MAX = 4  # of one call; each is a change of the server's state by somebody else
TAIL_MAX = 4096
_WAIT_MS = 10_000
_B64_FROM = 64  # tokens; shorter lists stay readable

_ELSEWHERE = frozenset({"length-mismatch", "digest-mismatch", "pending-mismatch", "seq-gap"})
_UNKNOWN_ROUND = frozenset({"seq-reused", "round-evicted"})
_FORGOTTEN = frozenset({"epoch-changed", "session-expired", "session-not-found"})


def tokens_body(tokens: Sequence[int]) -> dict[str, Any]:
    """Member `tokens` or, for long lists, `tokens_b64`."""
    if len(tokens) < _B64_FROM:
        return {"tokens": [int(token) for token in tokens]}
    array = np.asarray(tokens)
    if array.ndim != 1 or array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= 2**31:
        raise ValueError("tokens: integers from 0 to 2^31 - 1")
    return {"tokens_b64": base64.b64encode(array.astype("<i4").tobytes()).decode()}


def fetch_model(context: Context) -> Flow[Model]:
    return Model.read((yield from call(context, "GET", "/v1/model")))


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a session was created with; needed again to resume it."""

    sampling: Sampling
    stop: tuple[int, ...] = ()
    max_len: int | None = None
    lease_s: int | None = None
    cache_salt: str = ""

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"sampling": self.sampling.body()}
        if self.stop or self.max_len is not None:
            body["stop"] = {}
            if self.stop:
                body["stop"]["token_ids"] = list(self.stop)
            if self.max_len is not None:
                body["stop"]["max_len"] = self.max_len
        if self.lease_s is not None:
            body["lease_s"] = self.lease_s
        if self.cache_salt:
            body["cache_salt"] = self.cache_salt
        return body


@dataclasses.dataclass
class Ask:
    """One round as the caller wants it; encoded anew only when the session has moved."""

    kind: Literal["verify", "decode", "extend"]
    fields: dict[str, Any]
    tree: Tree | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    keep_pending: bool = False

    def committed(self, pending: int, round: Round) -> list[int]:
        """The tokens that this answer added to the committed ones; ContractError when it contradicts itself."""
        if not round.new_tokens or round.new_tokens[-1] != round.pending:
            raise ContractError("new_tokens does not end with the pending token")
        if self.kind == "decode":
            return [pending, *round.new_tokens[:-1]]
        if self.kind == "extend":
            return ([pending] if self.keep_pending else []) + self.tokens
        assert self.tree is not None
        nodes = round.accepted_nodes
        if self.tree.walk(round.accepted_tokens[1:]) != nodes or round.accepted_tokens[:1] != [pending]:
            raise ContractError(f"accepted {nodes} is not a path of the tree with these tokens")
        if round.accepted_tokens[1:] != round.new_tokens[:-1]:
            raise ContractError("new_tokens is not the accepted path and the pending token")
        return round.accepted_tokens


class SessionCore:
    """State and flows. Not thread-safe; one call at a time (RuntimeError otherwise)."""

    def __init__(self, context: Context, model: Model, settings: Settings, tokens: list[int]) -> None:
        self.context = context
        self.model = model
        self.settings = settings
        self.tokens = tokens
        self.digest = Digest(model.model_id, settings.cache_salt).push(tokens)
        self.id = self.epoch = ""
        self.pending = -1
        self.next_seq = 0
        self.finish: str | None = None
        self.max_nodes, self.max_depth = model.max_nodes, model.max_depth
        self.lease_expires_at = ""
        self.resumed = 0  # how often the session was made anew
        self.closed = False
        self.busy = False

    @property
    def path(self) -> str:
        return f"/v1/sessions/{self.id}"

    def exclusive(self, flow: Generator[Effect, Reply | None, T]) -> Flow[T]:
        """Only one flow at a time changes the session; an abandoned one lets go."""
        if self.closed:
            raise RuntimeError("the session is closed")
        if self.busy:
            raise RuntimeError("another call of this session is under way")
        self.busy = True
        try:
            return (yield from flow)
        finally:
            self.busy = False

    # --- create, resume ------------------------------------------------------------------------------------------

    def open(self) -> Flow[None]:
        """POST /v1/sessions from the client's tokens. All attempts have one Idempotency-Key, so a lost answer leaves no
        second session behind."""
        body = {**tokens_body(self.tokens), **self.settings.body(), "expected_digest": self.digest.hex()}
        answer = yield from call(self.context, "POST", "/v1/sessions", body, key=secrets.token_hex(16))
        try:
            if answer["committed_len"] != len(self.tokens) or answer["digest"] != self.digest.hex():
                raise ContractError("the created session has other tokens than were sent")
            limits = answer["limits"]
            self.max_nodes, self.max_depth = limits["max_nodes"], limits["max_depth"]
            self.settings = dataclasses.replace(self.settings, sampling=Sampling.read(answer["sampling"]))
            self.id, self.epoch = answer["session"], answer["epoch"]
            self.pending, self.next_seq = answer["pending"], answer["next_seq"]
            self.finish, self.lease_expires_at = answer["finish"], answer["lease_expires_at"]
        except (KeyError, TypeError, ValueError) as error:
            raise ContractError(f"create: {error!r}") from error

    def resume(self, keep_text: bool) -> Flow[None]:
        """Make the session anew. With keep_text the pending token that was handed out stays part of the text: the new
        session draws the same one (same seed, same position), and if a near tie went the other way it is appended."""
        model = yield from fetch_model(self.context)
        if model.model_id != self.model.model_id:
            raise DesyncError(f"the server has another model now: {model.name} {model.model_id}")
        handed_out = self.pending
        before = (self.id, self.epoch, self.pending, self.next_seq, self.finish)
        try:
            yield from self.open()
            if keep_text and self.pending != handed_out:
                yield from self._once(Ask("extend", tokens_body([handed_out]), tokens=[handed_out]))
        except BaseException:
            # the next call meets the same refusal and starts over; a half-made session ends with its lease
            self.id, self.epoch, self.pending, self.next_seq, self.finish = before
            raise
        self.model = model
        self.resumed += 1

    # --- rounds --------------------------------------------------------------------------------------------------

    def ask_verify(self, tree: Tree, rule: Rule | None, want: Want | None, **options: int | None) -> Ask:
        if tree.tokens[0] != self.pending:
            text = f"node 0 is token {tree.tokens[0]}, but {self.pending} is pending"
            raise TreeError("pending-mismatch", text, 0)
        tree.check(self.model.vocab, self.max_nodes, self.max_depth)
        fields: dict[str, Any] = {"tree": tree.body(), **_given(options)}
        if rule is not None:
            fields["rule"] = rule
        if want is not None:
            fields["want"] = want.body()
        return Ask("verify", fields, tree=tree)

    def verify(self, tree: Tree, rule: Rule | None, want: Want | None, **options: int | None) -> Flow[Round]:
        return self.exclusive(self._round(self.ask_verify(tree, rule, want, **options)))

    def decode(self, max_tokens: int, **options: int | None) -> Flow[Round]:
        return self.exclusive(self._round(Ask("decode", {"max_tokens": max_tokens, **_given(options)})))

    def extend(self, tokens: Sequence[int], keep_pending: bool, **options: int | None) -> Flow[Round]:
        tokens = [int(token) for token in tokens]
        fields = {**tokens_body(tokens), **_given(options)}
        return self.exclusive(self._round(Ask("extend", fields, tokens=tokens, keep_pending=keep_pending)))

    def round_body(self, ask: Ask) -> dict[str, Any]:
        """The round at the present state."""
        body: dict[str, Any] = {
            "seq": self.next_seq, "epoch": self.epoch, "expected_len": len(self.tokens),
            "expected_digest": self.digest.hex(), **ask.fields,
        }
        if ask.keep_pending:
            body["keep_pending"] = True
        return body

    def _once(self, ask: Ask) -> Flow[Round]:
        """The round at the present state, retried unchanged; no recovery."""
        answer = yield from call(self.context, "POST", f"{self.path}/{ask.kind}", self.round_body(ask))
        return self._take(ask, answer)

    def _take(self, ask: Ask, answer: Mapping[str, Any]) -> Round:
        """Check the answer against the client's own state, then move on. The state is untouched on an error."""
        round = read_round(answer)
        added = ask.committed(self.pending, round)
        digest = self.digest.copy().push(added)
        if round.seq != self.next_seq or answer.get("next_seq") != self.next_seq + 1:
            raise ContractError(f"answer of round {round.seq} to round {self.next_seq}")
        if round.committed_len != len(self.tokens) + len(added):
            raise ContractError(f"committed_len {round.committed_len}, not {len(self.tokens) + len(added)}")
        if round.digest != digest.hex():
            raise ContractError(f"digest {round.digest} is not the chain over the tokens, {digest.hex()}")
        self.tokens += added
        self.digest = digest
        self.pending, self.finish = round.pending, round.finish
        self.next_seq += 1
        self.lease_expires_at = str(answer.get("lease_expires_at", ""))
        return round

    def _round(self, ask: Ask) -> Flow[Round]:
        context = self.context
        started, retries = context.clock(), context.retries
        recovered: Literal["resync", "resumed"] | None = None
        for left in range(RECOVERIES_MAX, -1, -1):
            before = [*self.tokens, self.pending]
            try:
                round = yield from self._once(ask)
                break
            except ProblemError as problem:
                if left == 0:
                    raise
                recovered = yield from self._recover(problem, ask)
                missed = self._missed(before, ask, problem)
            if missed:
                round = self._summary(missed)
                break
        return dataclasses.replace(
            round, recovered=recovered, rtt_s=context.clock() - started, retries=context.retries - retries
        )

    def _missed(self, before: list[int], ask: Ask, problem: ProblemError) -> list[int]:
        """Tokens that the server is ahead of the text handed out; [] when the round should be sent again."""
        now = [*self.tokens, self.pending]
        if ask.kind == "extend":
            if problem.code in _FORGOTTEN and "session_state" not in problem.body:
                ask.keep_pending = ask.keep_pending and len(now) == len(before)
                return []
            if now == before:
                return []
            raise MovedError("the session had moved before the extend", problem)
        if now[: len(before)] != before:
            raise MovedError("the server's text is not a continuation of the one handed out", problem)
        return now[len(before) :]

    def _summary(self, tokens: list[int]) -> Round:
        return Round(
            seq=0, new_tokens=tokens, pending=self.pending, committed_len=len(self.tokens), digest=self.digest.hex(),
            rule=self.settings.sampling.rule, lossless=True, finish=self.finish,  # type: ignore[arg-type]
            accepted_nodes=[], accepted_tokens=[],
        )

    # --- recovery ------------------------------------------------------------------------------------------------

    def _recover(self, problem: ProblemError, ask: Ask) -> Flow[Literal["resync", "resumed"]]:
        """Bring the client's state to where the server is, or the server to where the client is; re-raises what
        neither helps."""
        state = problem.session_state
        if problem.code in _FORGOTTEN and state is None:
            yield from self.resume(ask.kind != "extend" or ask.keep_pending)
            return "resumed"
        if problem.code in _UNKNOWN_ROUND:
            yield from self._await_round()
            state = None
        elif problem.code not in _ELSEWHERE and problem.code != "epoch-changed":
            raise problem
        if state is None or not self._adopt(state):
            state = yield from call(self.context, "GET", f"{self.path}?tail={TAIL_MAX}")
            if not self._adopt(state):
                raise DesyncError("the server's tokens are not those of this client") from problem
        return "resync"

    def _await_round(self) -> Flow[None]:
        """An earlier body of this round may still run (a call that was given up); let it end."""
        try:
            yield from call(
                self.context, "GET", f"{self.path}/rounds/{self.next_seq}?wait_ms={_WAIT_MS}", wait_s=_WAIT_MS / 1000
            )
        except ProblemError as problem:
            if problem.code not in ("round-not-found", "round-evicted"):
                raise

    def _adopt(self, state: Mapping[str, Any]) -> bool:
        """Take the server's state if its tail and digest fit what this client has; False leaves all as it was."""
        try:
            length, tail = int(state["committed_len"]), list(state.get("tail", []))
            start = int(state.get("tail_from", length))
            fresh = (
                str(state["session"]), str(state["epoch"]), int(state["pending"]), int(state["next_seq"]),
                state["finish"], str(state["lease_expires_at"]),
            )
            digest_hex = str(state["digest"])
        except (KeyError, TypeError, ValueError) as error:
            raise ContractError(f"session_state: {error!r}") from error
        tokens = (self.tokens[: min(start, length)] + tail)[:length]
        if len(tokens) != length:
            return False
        if length >= len(self.tokens) and tokens[: len(self.tokens)] == self.tokens:
            digest = self.digest.copy().push(tokens[len(self.tokens) :])
        else:
            digest = Digest(self.model.model_id, self.settings.cache_salt).push(tokens)
        if digest.hex() != digest_hex:
            return False
        self.tokens, self.digest = tokens, digest
        self.id, self.epoch, self.pending, self.next_seq, self.finish, self.lease_expires_at = fresh
        return True

    # --- the rest ------------------------------------------------------------------------------------------------

    def state(self, tail: int | None) -> Flow[dict[str, Any]]:
        return call(self.context, "GET", self.path + ("" if tail is None else f"?tail={tail}"))

    def renew(self, lease_s: int) -> Flow[dict[str, Any]]:
        answer = yield from call(self.context, "POST", f"{self.path}/renew", {"lease_s": lease_s})
        self.lease_expires_at = str(answer.get("lease_expires_at", ""))
        return answer

    def stored_round(self, seq: int, wait_ms: int) -> Flow[Round | None]:
        """None while the round is running; of a skipped one, the round that it names as its outcome."""
        path = f"{self.path}/rounds/{seq}?wait_ms={wait_ms}"
        answer = yield from call(self.context, "GET", path, wait_s=wait_ms / 1000)
        answer = answer.get("outcome", answer)  # a skipped round has none of its own
        return None if answer.get("status") == "running" else read_round(answer)

    def fetch_logits(self, round: Round, rows: Rows | None, dtype: Dtype | None) -> Flow[Logits]:
        logits = round.logits
        if logits is None or logits.href is None:
            raise ValueError('the round was not asked for logits with logits_via="fetch"')
        query, nodes = "", logits.nodes
        if dtype is not None:
            query += f"&dtype={dtype}"
        if rows is not None:
            spelled = rows_body(rows)
            query += "&rows=" + (spelled if isinstance(spelled, str) else ",".join(map(str, spelled)))
            lists = {"stop": round.accepted_nodes[-1:], "path": round.accepted_nodes, "all": list(range(round.nodes))}
            nodes = np.array(lists[spelled] if isinstance(spelled, str) else spelled, dtype=np.int32)
        reply = yield from send(self.context, Send("GET", logits.href + query))
        return read_tensor(reply, nodes)

    def close(self) -> Flow[None]:
        """DELETE; an unknown id is fine."""
        if not self.closed:
            self.closed = True
            try:
                yield from call(self.context, "DELETE", self.path)
            except NotFoundError:
                pass


def read_tensor(reply: Reply, nodes: np.ndarray[Any, np.dtype[np.int32]]) -> Logits:
    """Raw rows from their answer; the ETag is the content's SHA-256 and is checked."""
    try:
        height, width = (int(word) for word in reply.headers["x-tensor-shape"].split(","))
        dtype, tag = reply.headers["x-tensor-dtype"], reply.headers["etag"].strip('"')
    except (KeyError, ValueError) as error:
        raise ContractError(f"tensor headers: {error!r}") from error
    if height != len(nodes):
        raise ContractError(f"{height} rows, not {len(nodes)}")
    if hashlib.sha256(reply.content).hexdigest() != tag:
        raise ContractError("the tensor's bytes are not those of its ETag")
    return Logits(nodes, (height, width), dtype, float_array(reply.content, dtype, (height, width)))


def _given(options: Mapping[str, int | None]) -> dict[str, int]:
    return {name: value for name, value in options.items() if value is not None}


def create(context: Context, tokens: Sequence[int], settings: Settings) -> Flow[SessionCore]:
    """A session from a prompt."""
    model = yield from fetch_model(context)
    core = SessionCore(context, model, settings, [int(token) for token in tokens])
    yield from core.open()
    return core


def one_shot(
    context: Context, tokens: Sequence[int], tree: Tree, sampling: Sampling | None, want: Want | None,
    deadline_ms: int | None,
) -> Flow[Round]:
    """POST /v1/verify: nothing is kept, so it may be repeated at will."""
    body: dict[str, Any] = {**tokens_body(tokens), "tree": tree.body()}
    if sampling is not None:
        body["sampling"] = sampling.body()
    if want is not None:
        body["want"] = want.body()
    if deadline_ms is not None:
        body["deadline_ms"] = deadline_ms
    started, retries = context.clock(), context.retries
    answer = yield from call(context, "POST", "/v1/verify", body)
    round = read_round(answer)
    if tree.walk(round.accepted_tokens[1:]) != round.accepted_nodes:
        raise ContractError(f"accepted {round.accepted_nodes} is not a path of the tree with these tokens")
    return dataclasses.replace(round, rtt_s=context.clock() - started, retries=context.retries - retries)


def score(
    context: Context, tokens: Sequence[int] | None, tree: Tree, session: SessionCore | None, deadline_ms: int | None
) -> Flow[F64]:
    """POST /v1/score: behind a prefix or a session; nothing is committed."""
    if (tokens is None) == (session is None):
        raise ValueError("score: tokens or a session")
    body: dict[str, Any] = {"session": session.id} if session is not None else tokens_body(tokens or ())
    body["tree"] = tree.body()
    if deadline_ms is not None:
        body["deadline_ms"] = deadline_ms
    answer = yield from call(context, "POST", "/v1/score", body)
    scores = answer["logprobs"]
    if len(scores) != len(tree) or scores[0] is not None:
        raise ContractError(f"{len(scores)} scores for {len(tree)} nodes")
    return np.array([np.nan, *(-np.inf if score is None else score for score in scores[1:])], dtype=np.float64)


def batch(
    context: Context, rounds: Sequence[tuple[SessionCore, Tree]], rule: Rule | None, want: Want | None
) -> Flow[list[Round | ProblemError]]:
    """POST /v1/verify:batch: a round of each session. Lost answers are repeated whole; an item that the server refused
    is its exception, and that session stands where it stood."""
    cores = [core for core, _ in rounds]
    if len(set(map(id, cores))) != len(cores) or any(core.busy or core.closed for core in cores):
        raise RuntimeError("batch: open sessions without another call, each once")
    asks = [core.ask_verify(tree, rule, want) for core, tree in rounds]
    for core in cores:
        core.busy = True
    try:
        items = [{"session": core.id, **core.round_body(ask)} for core, ask in zip(cores, asks)]
        answer = yield from call(context, "POST", "/v1/verify:batch", {"items": items})
        results: list[Round | ProblemError] = []
        for core, ask, item in zip(cores, asks, answer["items"], strict=True):
            if "body" in item:
                results.append(core._take(ask, item["body"]))
            else:
                results.append(problem_of(int(item["status"]), item["problem"]))
        return results
    finally:
        for core in cores:
            core.busy = False


def parity(
    context: Context, tokens: Sequence[int] | None, tree: Tree | None, session: SessionCore | None,
    sampling: Sampling | None, strict: bool,
) -> Flow[dict[str, Any]]:
    """POST /v1/parity: a prefix and a tree, a session and a tree, or nothing for the built-in case."""
    body: dict[str, Any] = {}
    if (tree is None) != (tokens is None and session is None) or (tokens is not None and session is not None):
        raise ValueError("parity: tokens and tree, session and tree, or neither")
    if sampling is not None and tokens is None:
        raise ValueError("parity: sampling goes with tokens")
    if tree is not None:
        body["tree"] = tree.body()
    if tokens is not None:
        body.update(tokens_body(tokens))
    if session is not None:
        body["session"] = session.id
    if sampling is not None:
        body["sampling"] = sampling.body()
    return call(context, "POST", "/v1/parity" + ("?strict=1" if strict else ""), body)


def read_ready(reply: Reply) -> dict[str, Any]:
    """/readyz answers 200 or 503 with the same body; anything else is a problem."""
    if reply.status == 503 and not reply.headers.get("content-type", "").startswith("application/problem"):
        reply = Reply(200, reply.headers, reply.content)
    return decode(reply)
