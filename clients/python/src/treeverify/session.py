"""The client's side of one session, and the flows of its calls. No input or output (see calls.py).

Owns the client's tokens, pending token, round number and digest chain, and every rule of recovery:

- a lost answer, a timeout, 429, 503: the same bytes again (calls.send); the server answers a round once;
- the server is elsewhere (409 length-, digest-, pending-mismatch, seq-gap; 422 seq-reused; 410 round-evicted): adopt its
  state and the tokens that were missed, if they continue the text handed out;
- the server has forgotten the session (409 epoch-changed, 410 session-expired, 404 session-not-found): create it again
  from the client's own tokens with the same seed, and go on behind the pending token that was already handed out;
- a round is held that nobody got the proposal of: discard it.

Refuses to go on when digests differ: then the two sides have different texts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import secrets
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np

from .asks import Ask, Held, Settings, Settle, Tokens, given, token_list, tokens_body
from .calls import Context, Effect, Flow, Reply, Send, call, send
from .digest import Digest
from .errors import ContractError, DesyncError, MovedError, NotFoundError, ProblemError
from .tree import Tree, TreeError
from .values import (
    F32,
    I32,
    Dtype,
    Hidden,
    HiddenDtype,
    HiddenWant,
    Logits,
    Model,
    Round,
    Rows,
    Rule,
    Sampling,
    Want,
    float_array,
    read_commit,
    read_rollback,
    read_round,
    rows_body,
)

T = TypeVar("T")

RECOVERIES_MAX = 4  # of one call; each is a change of the server's state by somebody else
TAIL_MAX = 4096
LEAVING_S = 2.0
_WAIT_MS = 10_000

_ELSEWHERE = frozenset({"length-mismatch", "digest-mismatch", "pending-mismatch", "seq-gap"})
_UNKNOWN_ROUND = frozenset({"seq-reused", "round-evicted"})
_FORGOTTEN = frozenset({"epoch-changed", "session-expired", "session-not-found"})


def fetch_model(context: Context) -> Flow[Model]:
    return Model.read((yield from call(context, "GET", "/v1/model")))


class SessionCore:
    """State and flows. Not thread-safe; one call at a time (RuntimeError otherwise)."""

    def __init__(self, context: Context, model: Model, settings: Settings, tokens: list[int]) -> None:
        self.context = context
        self.model = model
        self.settings = settings
        self.tokens = tokens
        self.prompt_len = len(tokens)
        self.digest = Digest(model.model_id, settings.cache_salt).push(tokens)
        self.id = self.epoch = ""
        self.pending = -1
        self.next_seq = 0
        self.finish: str | None = None
        self.held: Held | None = None
        self.unsure = 0  # number of a verify to be held whose answer has not come
        self.max_nodes, self.max_depth = model.max_nodes, model.max_depth
        self.cached_len = 0
        self.lease_expires_at = ""
        self.hidden: Hidden | None = None  # of the prompt, when it was asked for
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

    # --- create, resume, fork -------------------------------------------------------------------------------------

    def open(self, prefix: str | None = None, hidden: HiddenWant | None = None) -> Flow[None]:
        """POST /v1/sessions from the client's tokens, or from those of the session `prefix`, which begins with them.
        All attempts have one Idempotency-Key, so a lost answer leaves no second session behind."""
        named = tokens_body(self.tokens) if prefix is None else {"prefix": {"session": prefix, "len": len(self.tokens)}}
        body: dict[str, Any] = {**named, **self.settings.body(), "expected_digest": self.digest.hex()}
        if hidden is not None:
            body["want"] = {"hidden": hidden.body()}
        try:
            answer = yield from call(self.context, "POST", "/v1/sessions", body, key=secrets.token_hex(16))
        except ProblemError as problem:
            if prefix is None or problem.code not in _FORGOTTEN:
                raise
            yield from self.open(hidden=hidden)  # that session is no more, but its tokens are known
            return
        self._opened(answer)

    def _opened(self, answer: Mapping[str, Any]) -> None:
        """Become what a create or fork answered."""
        try:
            if answer["committed_len"] != len(self.tokens) or answer["digest"] != self.digest.hex():
                raise ContractError("the created session has other tokens than were sent")
            limits = answer["limits"]
            self.max_nodes, self.max_depth = limits["max_nodes"], limits["max_depth"]
            self.settings = dataclasses.replace(self.settings, sampling=Sampling.read(answer["sampling"]))
            self.id, self.epoch = answer["session"], answer["epoch"]
            self.pending, self.next_seq = answer["pending"], answer["next_seq"]
            self.finish, self.lease_expires_at = answer["finish"], answer["lease_expires_at"]
            self.cached_len = int(answer["cached_len"])
            self.held, self.unsure = None, 0
            if "hidden" in answer:
                self.hidden = Hidden.read(answer["hidden"])
        except (KeyError, TypeError, ValueError) as error:
            raise ContractError(f"create: {error!r}") from error

    def resume(self, tokens: list[int], pending: int | None) -> Flow[None]:
        """Make the session anew with these tokens. pending: what was handed out behind them and stays; the new session
        draws the same one (same seed, same position), and if a near tie went the other way it is put in its place."""
        model = yield from fetch_model(self.context)
        if model.model_id != self.model.model_id:
            raise DesyncError(f"the server has another model now: {model.name} {model.model_id}")
        before = dict(vars(self))
        try:
            self.tokens, self.digest = tokens, Digest(model.model_id, self.settings.cache_salt).push(tokens)
            yield from self.open()
            if pending is not None and self.pending != pending:
                yield from self._once(self._ask_rollback(len(tokens), pending))
        except BaseException:
            # the next call meets the same refusal and starts over; a half-made session ends with its lease
            vars(self).update(before)
            raise
        self.model = model
        self.resumed += 1

    def fork(self, length: int | None, seed: int | None, lease_s: int | None) -> Flow[SessionCore]:
        """A session of its own behind the first `length` tokens (all of them): nothing is computed."""
        length = len(self.tokens) if length is None else length
        if not 1 <= length <= len(self.tokens):
            raise ValueError(f"fork: a length from 1 to {len(self.tokens)}")
        if seed is not None and not 0 <= seed < 1 << 64:
            raise ValueError("seed: an unsigned 64-bit integer")
        return self.exclusive(self._fork(length, seed, lease_s))

    def _fork(self, length: int, seed: int | None, lease_s: int | None) -> Flow[SessionCore]:
        left = RECOVERIES_MAX
        while True:
            body = {"epoch": self.epoch, "len": length, **given({"lease_s": lease_s})}
            if seed is not None:
                body["seed"] = str(seed)
            try:
                answer = yield from call(
                    self.context, "POST", f"{self.path}/fork", body, key=secrets.token_hex(16)
                )
                break
            except ProblemError as problem:
                left -= 1
                if left == 0 or problem.code not in _FORGOTTEN:
                    raise
                if problem.session_state is None:
                    yield from self._recover(problem, Ask("verify", {}))
                else:
                    # the rest of the state may have tokens of a lost round: those are the next round's to hand out
                    self._take_epoch(problem.session_state)
        settings = dataclasses.replace(self.settings, lease_s=self.settings.lease_s if lease_s is None else lease_s)
        child = SessionCore(self.context, self.model, settings, self.tokens[:length])
        child.prompt_len = min(self.prompt_len, length)
        child._opened(answer)
        if child.pending != (self.tokens[length] if length < len(self.tokens) else self.pending):
            raise ContractError(f"the fork begins with token {child.pending}, which does not follow there")
        return child

    def _take_epoch(self, state: Mapping[str, Any]) -> None:
        epoch = state.get("epoch")
        if not isinstance(epoch, str):
            raise ContractError("session_state: no epoch")
        self.epoch = epoch

    # --- rounds --------------------------------------------------------------------------------------------------

    def ask_verify(
        self,
        tree: Tree,
        rule: Rule | None,
        want: Want | None,
        hold: bool = False,
        commit_prev: tuple[Sequence[int], int | None] | None = None,
        **options: int | None,
    ) -> Ask:
        if not isinstance(tree, Tree):
            raise TypeError(f"verify takes a Tree, not {type(tree).__name__}")
        settle = None if commit_prev is None else self._settle(*commit_prev)
        fields: dict[str, Any] = {"tree": tree.body(), **given(options)}
        if rule is not None:
            fields["rule"] = rule
        if want is not None:
            fields["want"] = want.body()
        if hold:
            fields["commit"] = "hold"
        ask = Ask("verify", fields, tree=tree, settle=settle)
        ask.holds = hold or (rule or self.settings.sampling.rule) == "client"
        _, pending = ask.before(self.tokens, self.pending)
        if tree.tokens[0] != pending:
            text = f"node 0 is token {tree.tokens[0]}, but {pending} is pending"
            raise TreeError("pending-mismatch", text, 0)
        tree.check(self.model.vocab, self.max_nodes, self.max_depth)
        return ask

    def _settle(self, path: Sequence[int], next_token: int | None) -> Settle:
        if self.held is None:
            raise RuntimeError("no round of this session is held")
        return Settle.of(self.held, path, next_token)

    def _ask_rollback(self, length: int, pending: int | None, **options: int | None) -> Ask:
        if not 1 <= length <= len(self.tokens):
            raise ValueError(f"rollback: a length from 1 to {len(self.tokens)}")
        fields = given({"len": length, "pending": pending, **options})
        return Ask("rollback", dict(fields), length=length, pending=pending)

    def verify(
        self,
        tree: Tree,
        rule: Rule | None,
        want: Want | None,
        hold: bool = False,
        commit_prev: tuple[Sequence[int], int | None] | None = None,
        **options: int | None,
    ) -> Flow[Round]:
        return self.exclusive(self._round(self.ask_verify(tree, rule, want, hold, commit_prev, **options)))

    def commit(self, path: Sequence[int], next_token: int | None, **options: int | None) -> Flow[Round]:
        settle = self._settle(path, next_token)
        return self.exclusive(self._round(Ask("commit", dict(given(options)), settle=settle)))

    def rollback(self, length: int, pending: int | None, **options: int | None) -> Flow[Round]:
        return self.exclusive(self._round(self._ask_rollback(length, pending, **options)))

    def decode(self, max_tokens: int, **options: int | None) -> Flow[Round]:
        return self.exclusive(self._round(Ask("decode", {"max_tokens": max_tokens, **given(options)})))

    def extend(self, tokens: Tokens, keep_pending: bool, **options: int | None) -> Flow[Round]:
        ids = token_list(tokens)
        fields = {**tokens_body(ids), **given(options)}
        return self.exclusive(self._round(Ask("extend", fields, tokens=ids, keep_pending=keep_pending)))

    def round_body(self, ask: Ask) -> dict[str, Any]:
        """The round at the present state."""
        body: dict[str, Any] = {"seq": self.next_seq, "epoch": self.epoch, **ask.fields}
        if ask.kind == "commit":
            assert ask.settle is not None
            return {**ask.settle.body(), **body}  # its own number, not the held round's
        added, _ = ask.before(self.tokens, self.pending)
        body["expected_len"] = len(self.tokens) + len(added)
        body["expected_digest"] = self.digest.copy().push(added).hex()
        if ask.settle is not None:
            body["commit_prev"] = ask.settle.body()
        if ask.keep_pending:
            body["keep_pending"] = True
        return body

    def _once(self, ask: Ask) -> Flow[Round]:
        """The round at the present state, retried unchanged; no recovery."""
        self.unsure = self.next_seq if ask.holds else self.unsure
        answer = yield from call(self.context, "POST", f"{self.path}/{ask.kind}", self.round_body(ask))
        return self._take(ask, answer)

    def _take(self, ask: Ask, answer: Mapping[str, Any]) -> Round:
        """Check the answer against the client's own state, then move on. The state is untouched on an error."""
        round = ask.read(answer, self.settings.sampling.rule)
        if round.held != ask.holds:
            raise ContractError(f"a round that is {'' if round.held else 'not '}held, unlike what was asked")
        before, pending = ask.before(self.tokens, self.pending)
        added = before + ask.added(pending, round)
        behind = ask.pending_behind(self.tokens, pending, round)
        kept = ask.kept(len(self.tokens))
        digest = self.digest.copy()
        if kept < len(self.tokens):
            digest = Digest(self.model.model_id, self.settings.cache_salt).push(self.tokens[:kept])
        digest.push(added)
        if round.seq != self.next_seq or answer.get("next_seq") != self.next_seq + 1:
            raise ContractError(f"answer of round {round.seq} to round {self.next_seq}")
        if round.committed_len != kept + len(added):
            raise ContractError(f"committed_len {round.committed_len}, not {kept + len(added)}")
        if round.digest != digest.hex():
            raise ContractError(f"digest {round.digest} is not the chain over the tokens, {digest.hex()}")
        self.tokens[kept:] = added
        self.prompt_len = min(self.prompt_len, kept)
        self.digest, self.pending = digest, behind
        self.held = Held(round.seq, ask.tree) if round.held and ask.tree is not None else None
        self.finish = self.finish if round.held else round.finish
        self.next_seq, self.unsure = self.next_seq + 1, 0
        self.lease_expires_at = str(answer.get("lease_expires_at", ""))
        return dataclasses.replace(round, pending=behind) if round.held and not round.accepted_nodes else round

    def _round(self, ask: Ask) -> Flow[Round]:
        context = self.context
        started, retries = context.clock(), context.retries
        recovered: Literal["resync", "resumed"] | None = None
        for left in range(RECOVERIES_MAX, -1, -1):
            added, pending = ask.before(self.tokens, self.pending)
            text = [*self.tokens, *added, pending]
            try:
                round = yield from self._once(ask)
                break
            except ProblemError as problem:
                if problem.committed and ask.kind == "verify" and ask.settle is not None:
                    self._settled(ask)
                if left == 0:
                    raise
                recovered = yield from self._recover(problem, ask)
                missed = self._missed(text, ask, problem)
            if missed is not None:
                round = self._summary(missed)
                break
        return dataclasses.replace(
            round, recovered=recovered, rtt_s=context.clock() - started, retries=context.retries - retries
        )

    def _settled(self, ask: Ask) -> None:
        """A commit_prev counts by itself, also when the round that carried it failed."""
        added, self.pending = ask.before(self.tokens, self.pending)
        self.tokens += added
        self.digest.push(added)
        self.held, ask.settle = None, None

    def _missed(self, text: list[int], ask: Ask, problem: ProblemError) -> list[int] | None:
        """Tokens that the server is ahead of the text handed out; None when the round should be sent again."""
        now = [*self.tokens, self.pending]
        if ask.settle is not None:
            if self.held is not None and self.held.seq == ask.settle.seq:
                return None
            if ask.kind == "verify":
                ask.settle = None  # it is, or it went with its session
        if ask.kind in ("extend", "rollback"):
            if now == text or (problem.code in _FORGOTTEN and problem.session_state is None):
                return None
            raise MovedError(f"the session had moved before the {ask.kind}", problem)
        if now[: len(text)] != text:
            raise MovedError("the server's text is not a continuation of the one handed out", problem)
        return now[len(text) :] if ask.kind == "commit" or len(now) > len(text) else None

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
            added, pending = ask.before(self.tokens, self.pending)
            if ask.kind == "commit" and ask.settle is not None and ask.settle.next is not None:
                added, pending = ask.settle.tokens, ask.settle.next
            keep = ask.kind != "extend" or ask.keep_pending
            yield from self.resume([*self.tokens, *added], pending if keep else None)
            return "resumed"
        if problem.code in _UNKNOWN_ROUND:
            yield from self._await_round()
            state = None
        elif problem.code == "round-held":
            if self.held is not None or state is None or state.get("held_seq") != self.unsure:
                raise problem
        elif problem.code not in _ELSEWHERE and problem.code != "epoch-changed":
            raise problem
        if state is None or not self._adopt(state):
            state = yield from call(self.context, "GET", f"{self.path}?tail={TAIL_MAX}")
            if not self._adopt(state):
                raise DesyncError("the server's tokens are not those of this client") from problem
        held = state.get("held_seq")
        if held is not None and self.held is None and held == self.unsure:
            # a verify whose answer never came is held: nobody can choose from it, and nothing of it was handed out
            yield from self._once(Ask("commit", {}, settle=Settle(int(held), [], [], None)))
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
            digest_hex, held = str(state["digest"]), state.get("held_seq")
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
        self.prompt_len = min(self.prompt_len, length)
        if self.held is not None and self.held.seq != held:
            self.held = None
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
        if answer.get("status") == "running":
            return None
        if "timing_us" in answer:
            return read_round(answer)
        return read_commit(answer) if "accepted" in answer else read_rollback(answer, self.settings.sampling.rule)

    def fetch_logits(self, round: Round, rows: Rows | None, dtype: Dtype | None) -> Flow[Logits]:
        logits = round.logits
        if logits is None or logits.href is None:
            raise ValueError('the round was not asked for logits with logits_via="fetch"')
        query, nodes = _part(round, logits.nodes, rows, dtype)
        shape, dtype_sent, values = read_tensor((yield from send(self.context, Send("GET", logits.href + query))))
        if len(shape) != 2 or shape[0] != len(nodes):
            raise ContractError(f"a tensor of shape {shape}, not of {len(nodes)} rows")
        return Logits(nodes, (shape[0], shape[1]), dtype_sent, values)

    def fetch_hidden(self, round: Round, rows: Rows | None, dtype: HiddenDtype | None) -> Flow[Hidden]:
        hidden = round.hidden
        if hidden is None or hidden.href is None:
            raise ValueError('the round was not asked for hidden rows with via="fetch"')
        query, nodes = _part(round, hidden.nodes, rows, dtype)
        shape, dtype_sent, values = read_tensor((yield from send(self.context, Send("GET", hidden.href + query))))
        if shape != (*hidden.shape[:-2], len(nodes), hidden.shape[-1]):
            raise ContractError(f"a tensor of shape {shape}, not a part of {hidden.shape} with {len(nodes)} rows")
        return Hidden(hidden.taps, nodes, shape, dtype_sent, values, hidden.projected)

    def mark(self) -> dict[str, Any]:
        """All of it as it is now, for back_to."""
        return {**vars(self), "tokens": list(self.tokens), "digest": self.digest.copy()}

    def back_to(self, mark: dict[str, Any]) -> None:
        vars(self).update(mark)

    def close(self, leaving: bool = False) -> Flow[None]:
        """DELETE; an unknown id is fine. leaving: an exception is on its way and does not wait for a server that is slow
        or gone; the lease ends what one attempt does not."""
        if not self.closed:
            self.closed = True
            with contextlib.suppress(NotFoundError):
                if leaving:
                    yield Send("DELETE", self.path, limit_s=LEAVING_S)
                else:
                    yield from call(self.context, "DELETE", self.path, patient=False)


def _part(round: Round, nodes: I32, rows: Rows | None, dtype: str | None) -> tuple[str, I32]:
    """The query for a part of a kept tensor, and the nodes of its rows."""
    query = "" if dtype is None else f"&dtype={dtype}"
    if rows is None:
        return query, nodes
    spelled = rows_body(rows)
    query += "&rows=" + (spelled if isinstance(spelled, str) else ",".join(map(str, spelled)))
    lists = {"stop": round.accepted_nodes[-1:], "path": round.accepted_nodes, "all": list(range(round.nodes))}
    return query, np.array(lists[spelled] if isinstance(spelled, str) else spelled, dtype=np.int32)


def read_tensor(reply: Reply) -> tuple[tuple[int, ...], str, F32]:
    """Shape, dtype and values of raw rows; the ETag is the content's SHA-256 and is checked."""
    try:
        shape = tuple(int(word) for word in reply.headers["x-tensor-shape"].split(","))
        dtype, tag = reply.headers["x-tensor-dtype"], reply.headers["etag"].strip('"')
    except (KeyError, ValueError) as error:
        raise ContractError(f"tensor headers: {error!r}") from error
    if hashlib.sha256(reply.content).hexdigest() != tag:
        raise ContractError("the tensor's bytes are not those of its ETag")
    return shape, dtype, float_array(reply.content, dtype, shape)


def create(
    context: Context, tokens: Tokens | None, prefix: tuple[SessionCore, int | None] | None, settings: Settings,
    hidden: HiddenWant | None = None,
) -> Flow[SessionCore]:
    """A session from a prompt, or from the first tokens of another session (all that are committed)."""
    model = yield from fetch_model(context)
    if (tokens is None) == (prefix is None):
        raise ValueError("session: tokens or a prefix")
    if prefix is None:
        core = SessionCore(context, model, settings, token_list(() if tokens is None else tokens))
        yield from core.open(hidden=hidden)
        return core
    parent, length = prefix
    length = len(parent.tokens) if length is None else length
    if not 1 <= length <= len(parent.tokens):
        raise ValueError(f"prefix: a length from 1 to {len(parent.tokens)}")
    core = SessionCore(context, model, settings, parent.tokens[:length])
    yield from core.open(parent.id, hidden)
    return core
