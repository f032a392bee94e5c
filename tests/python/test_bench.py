"""`python -m treeverify bench`, its synthetic drafts, and an async client that drives 256 sessions from one process."""

import asyncio
import json
import subprocess
import sys
import unittest

import numpy as np
from harness import GREEDY, MODEL, PACKAGE_ENV, SCALE, SERVER, Daemon, DaemonTest, prompts, url_of

import treeverify as tv
from treeverify.bench import Load, Synthetic, figures, table
from treeverify.drafters import TraceDrafter

SESSIONS = 256 if SCALE >= 1 else 24
ROUNDS = 5


class SyntheticTest(unittest.TestCase):
    def test_so_many_drafts_are_right(self):
        source = np.random.default_rng(3)
        text = source.integers(0, 260, 200).tolist()
        for right, nodes in ((3, 16), (0, 8), (5, 5), (4, 2), (2, 255)):
            drafter = Synthetic(text, right, 260, 7)
            for at in (1, 50, 150):
                tree = drafter.draft(text[:at], nodes, max(1, right))
                path = tree.walk(text[at:])
                self.assertEqual((len(path) - 1, len(tree)), (min(right, nodes), nodes + 1))
                self.assertEqual(drafter.guess(text[:at], tree), (path[-1], text[at + len(path) - 1]))
        self.assertEqual(len(drafter.draft(text, 4, 3)), 5)
        self.assertIsNone(drafter.guess(text, tv.Tree.root(text[-1])))

    def test_figures(self):
        rounds = [
            tv.Round(1, [1, 2], 2, 9, "", "greedy", True, None, [0, 1], [0, 1], timing=tv.Timing(at, 2 * at, 4 * at, 1),
                     rtt_s=at / 1e5)
            for at in range(1, 101)
        ]
        got = figures(Load(rounds, [1.0], 200, 4.0, 2))
        self.assertEqual(got["percentiles"]["round trip"], [0.505, 0.901, 0.9901, 1.0])
        self.assertEqual(got["percentiles"]["server"][3], 0.4)
        self.assertEqual((got["tokens_per_s"], got["accept_len_mean"], got["retries"]), (50.0, 2.0, 2))
        self.assertEqual(table(got).count("\n"), 6)


class BenchTest(DaemonTest):
    def bench(self, *options, code=0, said=False):
        command = [sys.executable, "-m", "treeverify", "bench", "--url", url_of(self.daemon), *options]
        got = subprocess.run(command, capture_output=True, env=PACKAGE_ENV, text=True, timeout=600)
        self.assertEqual(got.returncode, code, f"{options}: {got.stdout} {got.stderr}")
        return got.stderr if said else got.stdout

    def test_the_command(self):
        shape = ("--sessions", "3", "--rounds", "4", "--nodes", "6", "--accepted", "2")
        for more, least_ms in ((("--rtt-ms", "20"), 20.0), (("--pipeline",), 0.0)):
            run = json.loads(self.bench("--json", *shape, *more))
            self.assertEqual((run["rounds"], run["tokens"], run["accept_len_mean"]), (12, 36, 3.0))
            self.assertGreaterEqual(run["percentiles"]["round trip"][0], least_ms)
            self.assertLessEqual(run["percentiles"]["model"][3], run["percentiles"]["server"][3])
        said = self.bench(*shape, "--think-ms", "1")
        self.assertIn("p99", said)
        self.assertIn("12 rounds and 36 tokens in ", said)
        for option in ("--rtt-ms", "--think-ms"):
            for wrong in ("-1", "60001", "nan", "inf", "-inf", "1e999"):
                said = self.bench(f"{option}={wrong}", code=64, said=True)
                self.assertIn(f"argument {option}: {wrong} is not in 0 to 60000\n", said)
        self.bench("--sessions", "0", code=64)
        self.bench("--rounds", "100000", code=64)
        self.assertEqual(self.client.sessions(), [])


class ManySessionsTest(unittest.TestCase):
    def test_from_one_process(self):
        """Every session has its own text: what it would be alone, with every call of all others beside it."""
        starts = prompts(4, 40)
        options = ("--max-sessions", str(SESSIONS), "--queue-max", str(2 * SESSIONS), "--pages", str(4 * SESSIONS + 8))
        with Daemon(SERVER, MODEL, *options) as daemon:
            with tv.Client(url_of(daemon), timeout_s=120) as client:
                plain = []
                for prompt in starts:
                    with client.session(prompt, sampling=GREEDY) as session:
                        session.decode(4 * ROUNDS)
                        plain.append(session.new_tokens)

            async def one(client, at, arrived):
                prompt, text = starts[at % 4], plain[at % 4]
                async with await client.session(prompt, sampling=GREEDY) as session:
                    arrived.append(at)
                    while len(arrived) < SESSIONS:  # all are open at once
                        await asyncio.sleep(0.01)
                    drafter = TraceDrafter(prompt + text, wrong_every=4 + at % 3, wrong=1)
                    async for round in session.generate(drafter, 3 * ROUNDS, nodes=3, depth=3):
                        self.assertIsNone(round.recovered)
                    return session.new_tokens[: 3 * ROUNDS] == text[: 3 * ROUNDS]

            async def everything():
                arrived = []
                async with tv.AsyncClient(url_of(daemon), timeout_s=280, retry=tv.Retry(attempts=99, total_s=280)) as client:
                    return await asyncio.gather(*(one(client, at, arrived) for at in range(SESSIONS)))

            self.assertEqual(asyncio.run(everything()), [True] * SESSIONS)
