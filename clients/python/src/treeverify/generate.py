"""The command `generate`: continue a prompt with drafts, show what was accepted, count.

Owns the counts and the order of things; the tokens' text is text.py's business, the drawing terminal.py's and report.py's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import report
from .client import Client, Session
from .command import NO_INPUT, NO_OUTPUT, OK, REFUSED, USAGE, Failure, add_common, between, guarded, reach, real
from .drafters import Drafter, NgramDrafter
from .terminal import LiveLine, Writer, bar
from .text import Tokenizer, text_of, tokenizer_for
from .values import Model, Round, Sampling

PROMPT_BYTES_MAX = 1 << 20
PREFILL_TOKENS = 1024  # of a long prompt at once, so that its progress can be shown
RECENT = 16
GREEDY_SHARPNESS = 0.6  # temperature of a drafter model under a greedy target (clients/README.md)


@dataclass
class Tally:
    """What happened so far; times in seconds."""

    max_tokens: int
    started: float = field(default_factory=time.monotonic)
    tokens: list[int] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    rounds: int = 0
    round_tokens: int = 0
    drafts: int = 0
    server_us: int = 0
    kept: list[Round] = field(default_factory=list)
    recent: list[tuple[float, int, int]] = field(default_factory=list)  # round trip, us at the server, us of the model
    seconds: float = 0.0

    def add(self, round: Round) -> list[tuple[int, bool]]:
        """Count a round; its tokens with "the model's own", as far as they are still wanted."""
        alone = not round.accepted_nodes
        self.rounds += len(round.new_tokens) if alone else 1
        self.round_tokens += len(round.new_tokens)
        self.drafts += max(0, round.nodes - 1) if not alone else 0
        took, model = (round.timing.total_us, round.timing.gpu_us) if round.timing is not None else (0, 0)
        self.server_us += took
        self.kept.append(round)
        self.recent = [*self.recent, (round.rtt_s, took, model)][-RECENT:]
        self.seconds = time.monotonic() - self.started
        last = len(round.new_tokens) - 1
        return self.take([(token, alone or at == last) for at, token in enumerate(round.new_tokens)])

    def take(self, pairs: list[tuple[int, bool]]) -> list[tuple[int, bool]]:
        pairs = pairs[: self.max_tokens - len(self.tokens)]
        self.tokens += [token for token, _ in pairs]
        self.own += [int(own) for _, own in pairs]
        return pairs

    @property
    def accept_len_mean(self) -> float:
        return self.round_tokens / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.round_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def rtt_ms(self) -> float:
        return 1e3 * sum(rtt for rtt, _, _ in self.recent) / len(self.recent) if self.recent else 0.0

    def line(self) -> str:
        """Times are means of the last rounds; model: the GPU's, or whatever device the server has."""
        count = max(1, len(self.recent))
        server, model = (sum(one[at] for one in self.recent) / 1e3 / count for at in (1, 2))
        return (
            f"{self.tokens_per_s:.0f} tokens/s | acceptance length {self.accept_len_mean:.2f} | {self.rounds} rounds | "
            f"RTT {self.rtt_ms:.1f} ms | server {server:.1f} | model {model:.1f}"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("prompt", help='the text to continue; "-": read from stdin')
    add("--store", metavar="FILE", help="text that the n-gram drafter knows besides the one so far")
    add("--onnx", metavar="FILE", help="draft with this causal model (needs onnxruntime) instead of n-grams")
    add("--hf", metavar="NAME", help="draft with this model of transformers (needs torch) instead of n-grams")
    add("--tokenizer", metavar="FILE", help="tokenizer.json of the served model (needs tokenizers); else bytes")
    add("--no-drafts", action="store_true", help="the server decodes alone: same text, one token at a time")
    add("--nodes", type=_nodes, default=32, help="drafts of a tree, node 0 not counted (32); auto: as many as pay")
    add("--depth", type=between(1, 1023), default=16, help="of a tree (16)")
    add("--ahead", action="store_true", help="send the next tree while a round is under way (for slow links)")
    add("--guesses", type=between(1, 32), default=1, help="with --ahead: ends that are guessed, each with a tree (1)")
    add("--max-tokens", type=between(1, 1 << 20), default=200, help="new tokens (200)")
    add("--temperature", type=real(0), default=0.0, help="0 is greedy, the default")
    add("--seed", type=between(0, (1 << 64) - 1), help="the same seed gives the same text")
    add("--stop", type=between(0, 2**31 - 1), action="append", default=[], metavar="ID", help="end at this token")
    add("--color", choices=("auto", "always", "never"), default="auto")
    add("--report", metavar="FILE", help="acceptance and times of every round: a page (.html) or, with matplotlib, a .png")
    add_common(parser)


def _prompt(text: str) -> bytes:
    data = sys.stdin.buffer.read(PROMPT_BYTES_MAX + 1) if text == "-" else os.fsencode(text)
    if not 0 < len(data) <= PROMPT_BYTES_MAX:
        raise Failure(USAGE, "usage", f"a prompt has 1 to {PROMPT_BYTES_MAX} bytes")
    return data


def _nodes(text: str) -> int | str:
    return text if text == "auto" else between(1, 1023)(text)


def _drafter(options: argparse.Namespace, tokenizer: Tokenizer) -> Drafter | None:
    if options.no_drafts:
        return None
    sharpness = 1.0 if options.temperature > 0 else GREEDY_SHARPNESS
    try:
        if options.onnx:
            from .drafters.onnx import OnnxDrafter

            if not Path(options.onnx).is_file():
                raise Failure(NO_INPUT, "no-input", f"{options.onnx}: no such file")
            return OnnxDrafter(options.onnx, temperature=sharpness)
        if options.hf:
            from .drafters.hf import HfDrafter

            return HfDrafter(options.hf, temperature=sharpness)
        return NgramDrafter(tokenizer.encode(Path(options.store).read_bytes()) if options.store else None)
    except ImportError as error:
        raise Failure(USAGE, "usage", f"the drafter needs a package: {error}") from error
    except OSError as error:
        raise Failure(NO_INPUT, "no-input", str(error)) from error


def _tokenizer(options: argparse.Namespace, model: Model) -> Tokenizer:
    try:
        return tokenizer_for(model, options.tokenizer)
    except ImportError as error:
        raise Failure(USAGE, "usage", f"--tokenizer needs a package: {error}") from error
    except ValueError as error:
        code = "not-bytes" if options.tokenizer is None else "no-tokenizer"
        raise Failure(REFUSED if options.tokenizer is None else NO_INPUT, code, str(error)) from error


def _open(client: Client, prompt: list[int], options: argparse.Namespace, line: LiveLine | None) -> Session:
    """A session behind the prompt. A long one goes in pieces when somebody watches: rows of an extension have the bits of
    a prompt's own."""
    sampling = Sampling(
        rule="target_walk" if options.temperature > 0 else "greedy", temperature=options.temperature, seed=options.seed
    )
    first = PREFILL_TOKENS if line is not None else len(prompt)
    session = client.session(prompt[:first], sampling=sampling, stop=options.stop)
    for start in range(first, len(prompt), PREFILL_TOKENS):
        assert line is not None
        line.show(f"prompt {bar(start, len(prompt))}")
        session.extend(prompt[start : start + PREFILL_TOKENS])
    return session


def _rounds(session: Session, drafter: Drafter | None, options: argparse.Namespace, tally: Tally, show: Any) -> None:
    show(tally.take([(session.pending, True)]), None)  # the prompt's pass gave the first token
    left = options.max_tokens - 1
    if left > 0:
        rounds = session.generate(
            drafter, left, nodes=options.nodes, depth=options.depth, pipeline=options.ahead, guesses=options.guesses
        )
        try:
            for round in rounds:
                show(tally.add(round), tally)
        except KeyboardInterrupt as error:
            rounds.throw(error)  # closed without a word, it would wait for what is under way


def _generate(options: argparse.Namespace) -> int:
    if options.report and report.is_png(options.report) and not report.can_png():
        raise Failure(NO_OUTPUT, "no-output", "a .png needs matplotlib: pip install 'treeverify[png]'")
    data = _prompt(options.prompt)
    color = options.color == "always" or (options.color == "auto" and sys.stdout.isatty())
    live = options.live == "auto" and sys.stderr.isatty() and not options.json
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(Client(options.url, **reach(options)))
        tokenizer = _tokenizer(options, client.model())
        prompt, drafter = tokenizer.encode(data), _drafter(options, tokenizer)
        writer = None if options.json else Writer(sys.stdout, color, tokenizer.stream())
        line = stack.enter_context(LiveLine(sys.stderr)) if live else None
        session = stack.enter_context(_open(client, prompt, options, line))
        tally = Tally(options.max_tokens)

        def show(pairs: list[tuple[int, bool]], counted: Tally | None) -> None:
            if writer is not None:
                for token, own in pairs:
                    writer.token(token, own)
                writer.flush()
            if line is not None and counted is not None:
                line.show(counted.line())

        if writer is not None:
            writer.prompt(prompt)
        try:
            _rounds(session, drafter, options, tally, show)
        finally:
            if writer is not None:
                writer.end()
        is_written = _report(options, tally, session, client, tokenizer)
    return OK if is_written else NO_OUTPUT


def _summary(tally: Tally, session: Session, client: Client, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "text": text_of(tokenizer, tally.tokens), "tokens": tally.tokens, "own": tally.own, "rounds": tally.rounds,
        "drafts": tally.drafts, "accept_len_mean": round(tally.accept_len_mean, 4),
        "tokens_per_s": round(tally.tokens_per_s, 1), "seconds": round(tally.seconds, 4),
        "rtt_ms": round(tally.rtt_ms, 3), "server_us": tally.server_us, "retries": client.retries,
        "resumed": session.resumed, "finish": session.finish or "max-tokens", "digest": session.digest,
    }


def _report(
    options: argparse.Namespace, tally: Tally, session: Session, client: Client, tokenizer: Tokenizer
) -> bool:
    """The result, then the report: is that written, or none wanted? One that cannot be written takes nothing of the result
    away, which is the one object of --json, so that failure goes to stderr alone."""
    summary = _summary(tally, session, client, tokenizer)
    if options.json:
        print(json.dumps(summary))
    else:
        print(
            f"\n{len(tally.tokens)} new tokens in {tally.rounds} rounds: acceptance length {tally.accept_len_mean:.2f}, "
            f"{tally.drafts / tally.rounds if tally.rounds else 0:.1f} drafts a round, "
            f"{tally.tokens_per_s:.0f} tokens/s ({summary['finish']})"
        )
    if options.report:
        try:
            if report.is_png(options.report):
                report.png(options.report, summary, tally.kept)
            else:
                Path(options.report).write_text(report.page(summary, tally.kept), encoding="utf-8")
        except OSError as error:
            print(f"treeverify: the report cannot be written: {error}", file=sys.stderr)
            return False
    return True


def run(options: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    return guarded(_generate, options)
