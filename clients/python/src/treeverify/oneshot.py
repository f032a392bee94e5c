"""Calls that need no session, or many: one-shot verify, score, batch, parity, readiness. Flows, like session.py's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .asks import Tokens, tokens_body
from .calls import Context, Flow, Reply, call, decode
from .errors import ContractError, ProblemError, problem_of
from .session import SessionCore
from .tree import Tree
from .values import Round, Rule, Sampling, Want, read_round

F64: TypeAlias = npt.NDArray[np.float64]


def one_shot(
    context: Context, tokens: Tokens, tree: Tree, sampling: Sampling | None, want: Want | None,
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
    context: Context, tokens: Tokens | None, tree: Tree, session: SessionCore | None, deadline_ms: int | None
) -> Flow[F64]:
    """POST /v1/score: behind a prefix or a session; nothing is committed."""
    if (tokens is None) == (session is None):
        raise ValueError("score: tokens or a session")
    body: dict[str, Any] = {"session": session.id} if session is not None else tokens_body(() if tokens is None else tokens)
    body["tree"] = tree.body()
    if deadline_ms is not None:
        body["deadline_ms"] = deadline_ms
    answer = yield from call(context, "POST", "/v1/score", body)
    scores = answer.get("logprobs")
    if not isinstance(scores, list) or len(scores) != len(tree) or scores[0] is not None:
        raise ContractError(f"not one score for each of {len(tree)} nodes")
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
        for core, ask in zip(cores, asks):
            core.unsure = core.next_seq if ask.holds else core.unsure
        items = [{"session": core.id, **core.round_body(ask)} for core, ask in zip(cores, asks)]
        answer = yield from call(context, "POST", "/v1/verify:batch", {"items": items})
        answers = answer.get("items")
        if not isinstance(answers, list) or len(answers) != len(cores):
            raise ContractError(f"not one answer for each of {len(cores)} rounds")
        results: list[Round | ProblemError] = []
        for core, ask, item in zip(cores, asks, answers):
            if "body" in item:
                results.append(core._take(ask, item["body"]))
            else:
                results.append(problem_of(int(item["status"]), item["problem"]))
        return results
    finally:
        for core in cores:
            core.busy = False


def parity(
    context: Context, tokens: Tokens | None, tree: Tree | None, session: SessionCore | None,
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
