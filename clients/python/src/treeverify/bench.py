"""The command `bench`: many synthetic drafters at a distance, and what their rounds take.

Owns the load and the table. The text is the model's own, decoded once for each prompt, so that drafts of a known quality
can be made without a drafter's time; sampling is greedy.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import ssl
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from .aio import AsyncClient
from .client import Client
from .command import OK, add_common, between, guarded, reach, real
from .terminal import LiveLine, bar
from .tree import Tree
from .values import Model, Round, Sampling

PERCENTILES = (50, 90, 99, 100)
PROMPT_TOKENS = 64
TEXTS_MAX = 4  # different ones; drafters beyond share
WAIT_MS_MAX = 60_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--sessions", type=between(1, 4096), default=16, help="drafters side by side, each with a session (16)")
    add("--rounds", type=between(1, 100_000), default=20, help="of each (20)")
    add("--nodes", type=between(1, 1023), default=16, help="drafts of a tree, node 0 not counted (16)")
    add("--accepted", type=between(0, 63), default=3, help="drafts of a tree that are right (3)")
    add("--rtt-ms", type=real(0, WAIT_MS_MAX), default=0.0, help="round trip that is added to the link's own (0)")
    add("--think-ms", type=real(0, WAIT_MS_MAX), default=0.0, help="a drafter's time between two rounds (0)")
    add("--pipeline", action="store_true", help="send the next tree while a round is under way")
    add("--seed", type=between(0, (1 << 64) - 1), default=1, help="of prompts and wrong drafts (1)")
    add_common(parser)


class FarTransport(httpx.AsyncBaseTransport):
    """A link with a round trip: every request and every answer is late by half of it."""

    def __init__(self, rtt_s: float, ca_file: str | None = None) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        trusted: ssl.SSLContext | bool = True if ca_file is None else ssl.create_default_context(cafile=ca_file)
        self._inner = httpx.AsyncHTTPTransport(limits=limits, verify=trusted)
        self._half_s = rtt_s / 2

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(self._half_s)
        response = await self._inner.handle_async_request(request)
        await response.aread()
        await asyncio.sleep(self._half_s)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class Synthetic:
    """A drafter that knows the text: `right` drafts are its next tokens, the others beside them are wrong."""

    def __init__(self, text: Sequence[int], right: int, vocab: int, seed: int) -> None:
        self._text, self._right, self._vocab = text, right, vocab
        self._random = random.Random(seed)

    def draft(self, tokens: Sequence[int], nodes: int, depth: int) -> Tree:
        at = len(tokens)
        chain = [int(token) for token in self._text[at : at + min(self._right, nodes, depth)]]
        out, parents = [int(tokens[-1]), *chain], list(range(-1, len(chain)))
        taken = set(zip(parents, out))
        truth = [*chain, int(self._text[at + len(chain)])] if at + len(chain) < len(self._text) else chain
        for node, token in enumerate(truth):
            taken.add((node, token))
        for _ in range(8 * nodes):
            if len(out) > nodes:
                break
            edge = (self._random.randrange(len(truth) or 1), self._random.randrange(min(self._vocab, 256)))
            if edge not in taken and edge[0] < depth:
                taken.add(edge)
                out.append(edge[1])
                parents.append(edge[0])
        return Tree(out, parents)

    def guess(self, tokens: Sequence[int], tree: Tree) -> tuple[int, int] | None:
        path = tree.walk(int(token) for token in self._text[len(tokens) :])
        behind = len(tokens) + len(path) - 1
        return (path[-1], int(self._text[behind])) if behind < len(self._text) else None


@dataclass
class Load:
    """What has happened so far."""

    rounds: list[Round] = field(default_factory=list)
    sessions_s: list[float] = field(default_factory=list)
    tokens: int = 0
    wall_s: float = 0.0
    retries: int = 0


def texts(client: Client, model: Model, options: argparse.Namespace, line: LiveLine | None) -> list[list[int]]:
    """Prompts and how the model goes on behind each, as far as the benchmark needs."""
    source, made = random.Random(options.seed), []
    wanted = (options.accepted + 1) * (options.rounds + 1)
    prompt_len = min(PROMPT_TOKENS, model.max_len // 2)
    if prompt_len + wanted + 2 > model.max_len:
        raise ValueError(f"{options.rounds} rounds of {options.accepted + 1} tokens do not fit {model.max_len} positions")
    count = min(TEXTS_MAX, options.sessions)
    for number in range(count):
        prompt = [source.randrange(min(model.vocab, 256)) for _ in range(prompt_len)]
        with client.session(prompt, sampling=Sampling(rule="greedy")) as session:
            while len(session.new_tokens) <= wanted:
                session.decode(min(64, wanted + 1 - len(session.new_tokens) + 1))
                if line is not None:
                    line.show(f"text {number + 1} of {count} {bar(len(session.new_tokens), wanted)}")
            made.append(session.sequence)
    return made


async def _one(
    client: AsyncClient, text: list[int], prompt_len: int, number: int, options: argparse.Namespace, load: Load
) -> None:
    async with await client.session(text[:prompt_len], sampling=Sampling(rule="greedy")) as session:
        drafter = Synthetic(text, options.accepted, session.model.vocab, options.seed + number)
        started, count = time.monotonic(), 0
        wanted = options.rounds * (options.accepted + 1)
        rounds = session.generate(
            drafter, wanted, nodes=options.nodes, depth=max(1, options.accepted), pipeline=options.pipeline
        )
        async with contextlib.aclosing(rounds):
            async for round in rounds:
                load.rounds.append(round)
                load.tokens += len(round.new_tokens)
                count += 1
                if options.think_ms > 0:
                    await asyncio.sleep(options.think_ms / 1e3)
                if count == options.rounds:
                    break
        load.sessions_s.append(time.monotonic() - started)


async def _all(made: list[list[int]], prompt_len: int, options: argparse.Namespace, line: LiveLine | None) -> Load:
    load = Load()
    transport = FarTransport(options.rtt_ms / 1e3, options.cacert) if options.rtt_ms > 0 else None
    async with AsyncClient(options.url, transport=transport, timeout_s=600.0, **reach(options)) as client:
        started = time.monotonic()
        work = asyncio.gather(
            *(_one(client, made[at % len(made)], prompt_len, at, options, load) for at in range(options.sessions))
        )
        while not work.done():
            await asyncio.wait([work], timeout=0.2)
            if line is not None:
                line.show(f"rounds {bar(len(load.rounds), options.sessions * options.rounds)}")
        await work
        load.wall_s, load.retries = time.monotonic() - started, client.retries
    return load


def figures(load: Load) -> dict[str, Any]:
    """Milliseconds of rounds, as [p50, p90, p99, largest], and rates."""
    columns: dict[str, list[float]] = {"round trip": [], "server": [], "queue": [], "model": [], "rounds in a launch": []}
    for round in load.rounds:
        timing = round.timing
        if timing is None:
            continue
        values = (round.rtt_s * 1e3, timing.total_us / 1e3, timing.queue_us / 1e3, timing.gpu_us / 1e3, float(timing.batch))
        for column, value in zip(columns.values(), values):
            column.append(value)
    return {
        "rounds": len(load.rounds), "tokens": load.tokens, "seconds": round_to(load.wall_s),
        "tokens_per_s": round_to(load.tokens / load.wall_s), "rounds_per_s": round_to(len(load.rounds) / load.wall_s),
        "accept_len_mean": round_to(load.tokens / len(load.rounds)) if load.rounds else 0.0, "retries": load.retries,
        "percentiles": {
            name: [round_to(float(value)) for value in np.percentile(column, PERCENTILES)]
            for name, column in columns.items() if column
        },
    }


def round_to(value: float) -> float:
    return float(f"{value:.4g}")


def table(numbers: dict[str, Any]) -> str:
    rows = [f"{'ms':>20} {'p50':>9} {'p90':>9} {'p99':>9} {'largest':>9}"]
    for name, values in numbers["percentiles"].items():
        rows.append(f"{name:>20} " + " ".join(f"{value:9.4g}" for value in values))
    rows.append(
        f"{numbers['rounds']} rounds and {numbers['tokens']} tokens in {numbers['seconds']:g} s: "
        f"{numbers['tokens_per_s']:g} tokens/s, {numbers['rounds_per_s']:g} rounds/s, "
        f"acceptance length {numbers['accept_len_mean']:g}, {numbers['retries']} retries"
    )
    return "\n".join(rows)


def _bench(options: argparse.Namespace) -> int:
    with contextlib.ExitStack() as stack:
        shown = options.live == "auto" and sys.stderr.isatty() and not options.json
        line = stack.enter_context(LiveLine(sys.stderr)) if shown else None
        client = stack.enter_context(Client(options.url, timeout_s=600.0, **reach(options)))
        model = client.model()
        made = texts(client, model, options, line)
        load = asyncio.run(_all(made, min(PROMPT_TOKENS, model.max_len // 2), options, line))
    numbers = figures(load)
    print(json.dumps(numbers) if options.json else table(numbers))
    return OK


def run(options: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    return guarded(_bench, options)
