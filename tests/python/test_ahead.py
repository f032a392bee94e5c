"""generate(pipeline=True): the same text as one round at a time, with right and wrong guesses, over a link with a round
trip and over one that loses answers."""

import asyncio
import contextlib
import random
import unittest

import httpx
from harness import GREEDY, QUICK, SCALE, SEED, SEEDED, STORE, DaemonTest, FlakyProxy, prompts, url_of
from delay_proxy import DelayProxy

import treeverify as tv
from treeverify import ahead
from treeverify.drafters import NgramDrafter

COUNT = 60 if SCALE >= 1 else 24


class Knowing:
    """Drafts the text that is to come, and guesses the end of its trees; `wrong`: how often it guesses another token."""

    def __init__(self, text, wrong, seed=SEED):
        self.text, self.wrong, self.random = text, wrong, random.Random(seed)
        self.right = self.misses = 0

    def draft(self, tokens, nodes, depth):
        known = self.text[len(tokens) : len(tokens) + min(nodes, depth, 3)]
        return tv.Tree.chain([tokens[-1], *known] if tokens == self.text[: len(tokens)] else tokens[-1:])

    def guess(self, tokens, tree):
        at = len(tokens) + len(tree) - 1
        if at >= len(self.text) or tokens != self.text[: len(tokens)]:
            return None
        wrong = self.random.random() < self.wrong
        self.right, self.misses = self.right + (not wrong), self.misses + wrong
        return len(tree) - 1, self.text[at] if not wrong else (self.text[at] + 1) % 256


class Several(Knowing):
    """Guesses `count` ends, the right one last."""

    def __init__(self, text, count):
        super().__init__(text, 0.0)
        self.count = count

    def guess(self, tokens, tree):
        end = super().guess(tokens, tree)
        if end is None:
            return None
        leaf, right = end
        return [*((leaf, token) for token in range(self.count) if token != right)][: self.count - 1] + [end]


class Failing(Knowing):
    """Raises at its call number `at`, counted over draft and guess."""

    def __init__(self, text, wrong, at):
        super().__init__(text, wrong)
        self.left = at

    def count(self):
        self.left -= 1
        if self.left == 0:
            raise KeyError("no draft today")

    def draft(self, tokens, nodes, depth):
        self.count()
        return super().draft(tokens, nodes, depth)

    def guess(self, tokens, tree):
        self.count()
        return super().guess(tokens, tree)


class AheadTest(DaemonTest):
    def text_of(self, session, drafter, count, **options):
        rounds = list(session.generate(drafter, count, pipeline=True, **options))
        for round in rounds:
            self.assertEqual(round.new_tokens[-1], round.pending)
        tokens = [token for round in rounds for token in round.new_tokens]
        self.assertEqual(session.new_tokens[1:], tokens)
        return rounds, tokens

    def check_state(self, session):
        state = session.state()
        self.assertEqual((state["committed_len"], state["digest"], state["pending"], state["next_seq"]),
                         (session.committed_len, session.digest, session.pending, session._core.next_seq))

    def test_the_text_is_the_same(self):
        for sampling in (GREEDY, SEEDED):
            for prompt in prompts(2):
                plain = self.plain(prompt, COUNT + 1, sampling)
                for wrong in (0.0, 0.4, 1.0):
                    drafter = Knowing([*prompt, *plain], wrong)
                    with self.client.session(prompt, sampling=sampling) as session:
                        rounds, tokens = self.text_of(session, drafter, COUNT)
                        self.assertEqual(tokens, plain[1:])
                        self.check_state(session)
                    self.assertEqual(drafter.misses > 0, wrong > 0)
                    self.assertEqual(drafter.right > 0, wrong < 1)
                    # four tokens a round, in numbers without holes but for the skipped ones
                    self.assertEqual(len(rounds), COUNT // 4)
                    self.assertTrue(all(a.seq < b.seq <= a.seq + 2 for a, b in zip(rounds, rounds[1:])))

    def test_several_guesses(self):
        """Alternatives: the right one among them runs, whichever it is, and none when there is none."""
        prompt = prompts(1)[0]
        for sampling in (GREEDY, SEEDED):
            plain = self.plain(prompt, COUNT + 1, sampling)
            for guesses, skipped in ((4, False), (3, True)):
                with self.client.session(prompt, sampling=sampling) as session:
                    rounds, tokens = self.text_of(session, Several([*prompt, *plain], 4), COUNT, guesses=guesses)
                    self.assertEqual(tokens, plain[1:])
                    self.check_state(session)
                self.assertEqual(len(rounds), COUNT // 4)
                self.assertEqual(rounds[-1].seq > len(rounds), skipped)
        with self.client.session(prompt) as session:
            for wrong in (0, ahead.GUESSES_MAX + 1):
                with self.assertRaises(ValueError):
                    self.text_of(session, Several(prompt, 2), 4, guesses=wrong)
            session.decode(1)

    def test_a_drafter_without_guesses_of_its_own(self):
        prompt = prompts(1)[0]
        plain = self.plain(prompt, COUNT + 1)
        for guesses in (1, 4):
            with self.client.session(prompt, sampling=GREEDY) as session:
                _, tokens = self.text_of(session, NgramDrafter.from_file(STORE), COUNT, guesses=guesses)
                self.assertEqual(tokens, plain[1:])
                self.check_state(session)

    def test_over_a_link_with_a_round_trip(self):
        prompt = prompts(1)[0]
        plain = self.plain(prompt, COUNT + 1)
        with DelayProxy(self.daemon.host, self.daemon.port, 0.02) as link, tv.Client(link.url, timeout_s=120) as client:
            drafter = Knowing([*prompt, *plain], 0.3)
            with client.session(prompt, sampling=GREEDY) as session:
                _, tokens = self.text_of(session, drafter, COUNT)
                self.assertEqual(tokens, plain[1:])
                self.check_state(session)

    def test_over_a_link_that_loses_answers(self):
        prompt = prompts(1)[0]
        plain = self.plain(prompt, COUNT + 1)
        flaky = FlakyProxy(self.daemon, 0.15)
        self.addCleanup(flaky.close)
        with tv.Client(flaky.url, retry=QUICK, timeout_s=120) as client:
            for drafter, guesses in ((Knowing([*prompt, *plain], 0.0), 1), (Knowing([*prompt, *plain], 0.5), 1),
                                     (Several([*prompt, *plain], 4), 4)):
                with client.session(prompt, sampling=GREEDY) as session:
                    _, tokens = self.text_of(session, drafter, COUNT, guesses=guesses)
                    self.assertEqual(tokens[:COUNT], plain[1:])
                    self.check_state(session)
        self.assertGreater(sum(flaky.fates.values()), flaky.fates["passed"])
        self.close_leftovers()

    def test_an_abandoned_iterator(self):
        """What was under way is part of the session, which goes on."""
        prompt = prompts(1)[0]
        plain = self.plain(prompt, COUNT + 1)
        for wrong in (0.0, 1.0):
            with self.client.session(prompt, sampling=GREEDY) as session:
                rounds = session.generate(Knowing([*prompt, *plain], wrong), COUNT, pipeline=True)
                first = next(rounds)
                self.assertRaises(RuntimeError, session.decode, 1)
                rounds.close()
                self.assertEqual(session.new_tokens, plain[: len(session.new_tokens)])
                self.assertGreater(len(session.new_tokens), len(first.new_tokens))
                self.check_state(session)
                session.decode(4)
                self.assertEqual(session.new_tokens, plain[: len(session.new_tokens)])

    def test_a_drafter_that_raises(self):
        """Whenever that is: what the server has done is handed out first, and the session goes on behind it."""
        prompt = prompts(1)[0]
        plain = self.plain(prompt, COUNT + 1)
        for wrong in (0.0, 1.0):
            for at in range(1, 9):
                with self.client.session(prompt, sampling=GREEDY) as session:
                    tokens = [session.pending]
                    with self.assertRaisesRegex(KeyError, "no draft today"):
                        for round in session.generate(Failing([*prompt, *plain], wrong, at), COUNT, pipeline=True):
                            tokens += round.new_tokens
                    self.assertEqual((wrong, at, session.new_tokens), (wrong, at, tokens))
                    self.assertEqual(tokens, plain[: len(tokens)])
                    self.assertEqual(len(tokens) > 1, at > 1)
                    self.check_state(session)
                    tokens += session.decode(2).new_tokens
                    self.assertEqual((session.new_tokens, tokens), (tokens, plain[: len(tokens)]))

    def test_the_number_went_to_another_tree(self):
        """A call that was given up had used the round's number: the skipped round behind it tells of that tree."""
        prompt = prompts(1)[0]
        plain = self.plain(prompt, COUNT + 1)

        class Astray(Knowing):
            leaf = None

            def draft(self, tokens, nodes, depth):
                return tv.Tree.chain([tokens[-1], (self.text[len(tokens)] + 1) % 256])

            def guess(self, tokens, tree):
                return self.leaf or len(tree) - 1, 0

        astray = Astray([*prompt, *plain], 0.0)
        with self.client.session(prompt, sampling=GREEDY) as session:
            given_up = {"seq": 1, "epoch": session.epoch, "expected_len": len(prompt), "tree": tv.Tree.chain(plain[:4]).body()}
            self.client.request("POST", f"/v1/sessions/{session.id}/verify", given_up)
            rounds = list(session.generate(astray, 12, pipeline=True))
            self.assertEqual((rounds[0].recovered, rounds[0].new_tokens), ("resync", plain[1:5]))
            self.assertEqual(session.new_tokens, plain[: len(session.new_tokens)])
            self.assertGreaterEqual(len(session.new_tokens), 13)
            for astray.leaf in (-1, 2):
                with self.assertRaisesRegex(ValueError, "guess: node"):
                    list(session.generate(astray, 4, pipeline=True))
            self.check_state(session)

    def test_a_stop_token_ends_it(self):
        prompt = prompts(1)[0]
        plain = self.plain(prompt, COUNT + 1)
        stop = plain[COUNT // 2]
        end = plain.index(stop, 1)
        if plain[0] == stop:
            self.skipTest("the stop token is pending at once")
        with self.client.session(prompt, sampling=GREEDY, stop=[stop]) as session:
            _, tokens = self.text_of(session, Knowing([*prompt, *plain], 0.2), COUNT)
            self.assertEqual((tokens, session.finish), (plain[1 : end + 1], "stop"))
            self.check_state(session)

    def test_the_session_is_forgotten_under_way(self):
        prompt = prompts(1)[0]
        plain = self.plain(prompt, COUNT + 1)
        with self.client.session(prompt, sampling=GREEDY) as session:
            rounds = session.generate(Knowing([*prompt, *plain], 0.0), COUNT, pipeline=True)
            tokens = list(next(rounds).new_tokens)
            self.raw.call("DELETE", f"/v1/sessions/{session.id}")
            for round in rounds:
                tokens += round.new_tokens
            self.assertEqual(tokens[:COUNT], plain[1:])
            self.assertEqual(session.resumed, 1)
            self.check_state(session)


class AsyncAheadTest(DaemonTest):
    """The same pipeline on an event loop."""

    async def text_of(self, session, drafter, count, **options):
        rounds = [round async for round in session.generate(drafter, count, pipeline=True, **options)]
        tokens = [token for round in rounds for token in round.new_tokens]
        self.assertEqual(session.new_tokens[1:], tokens)
        state = await session.state()
        self.assertEqual((state["committed_len"], state["digest"], state["pending"], state["next_seq"]),
                         (session.committed_len, session.digest, session.pending, session._core.next_seq))
        return rounds, tokens

    def test_sessions_side_by_side(self):
        starts = prompts(4, 60)
        plain = [self.plain(prompt, COUNT + 1) for prompt in starts]

        async def one(client, at):
            text = [*starts[at], *plain[at]]
            drafter, guesses = (Several(text, 4), 4) if at == 3 else (Knowing(text, (0.0, 0.4, 1.0)[at]), 1)
            async with await client.session(starts[at], sampling=GREEDY) as session:
                return await self.text_of(session, drafter, COUNT, guesses=guesses)

        async def everything(url):
            async with tv.AsyncClient(url, retry=QUICK, timeout_s=120) as client:
                return await asyncio.gather(*(one(client, at) for at in range(4)))

        for rounds, tokens in asyncio.run(everything(url_of(self.daemon))):
            self.assertIn(tokens, [text[1:] for text in plain])
            self.assertEqual(len(rounds), COUNT // 4)
        with DelayProxy(self.daemon.host, self.daemon.port, 0.02) as link:
            self.assertEqual([tokens for _, tokens in asyncio.run(everything(link.url))], [text[1:] for text in plain])
        flaky = FlakyProxy(self.daemon, 0.15)
        self.addCleanup(flaky.close)
        for (_, tokens), text in zip(asyncio.run(everything(flaky.url)), plain, strict=True):
            self.assertEqual(tokens[:COUNT], text[1:])
        self.close_leftovers()

    def test_a_drafter_that_raises(self):
        prompt = prompts(1)[0]
        plain = self.plain(prompt, COUNT + 1)

        async def play():
            async with tv.AsyncClient(url_of(self.daemon), timeout_s=120) as client:
                for wrong, at in ((0.0, 2), (0.0, 5), (1.0, 3), (1.0, 6)):
                    async with await client.session(prompt, sampling=GREEDY) as session:
                        tokens = [session.pending]
                        with self.assertRaisesRegex(KeyError, "no draft today"):
                            async for round in session.generate(Failing([*prompt, *plain], wrong, at), COUNT, pipeline=True):
                                tokens += round.new_tokens
                        self.assertEqual((session.new_tokens, len(tokens) > 1), (tokens, True))
                        tokens += (await session.decode(2)).new_tokens
                        self.assertEqual(tokens, plain[: len(tokens)])

        asyncio.run(play())

    def test_left_early_and_cancelled(self):
        prompt = prompts(1)[0]
        plain = self.plain(prompt, COUNT + 9)

        async def play():
            async with tv.AsyncClient(url_of(self.daemon), timeout_s=120) as client:
                session = await client.session(prompt, sampling=GREEDY)
                drafter = Knowing([*prompt, *plain], 0.0)
                async with contextlib.aclosing(session.generate(drafter, COUNT, pipeline=True)) as rounds:
                    first = await anext(rounds)
                    with self.assertRaises(RuntimeError):
                        await session.decode(1)
                self.assertGreater(len(session.new_tokens), 1 + len(first.new_tokens))
                self.assertEqual(session.new_tokens, plain[: len(session.new_tokens)])
                await session.decode(2)

                async def consume():
                    async for _ in session.generate(drafter, COUNT, pipeline=True):
                        started.set()

                started = asyncio.Event()
                task = asyncio.create_task(consume())
                await started.wait()
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                del task
                for _ in range(4):
                    await session.decode(1)
                self.assertEqual(session.new_tokens, plain[: len(session.new_tokens)])
                self.assertEqual((await session.state(tail=4096))["tail"], session.tokens)
                await session.close()

        asyncio.run(play())

    def test_cancelled_behind_an_answer(self):
        """The round's answer is there, but the one behind it is waited for: the next call hands the tokens out."""
        prompt = prompts(1)[0]
        plain = self.plain(prompt, COUNT)

        class Late(httpx.AsyncHTTPTransport):
            async def handle_async_request(self, request):
                if b'"if":' in request.content:
                    await asyncio.Event().wait()
                return await super().handle_async_request(request)

        async def play():
            async with tv.AsyncClient(url_of(self.daemon), timeout_s=120, transport=Late()) as client:
                session = await client.session(prompt, sampling=GREEDY)
                given = []

                async def consume():
                    async for round in session.generate(Knowing([*prompt, *plain], 1.0), COUNT, pipeline=True):
                        given.extend(round.new_tokens)

                task = asyncio.create_task(consume())
                while session.committed_len == len(prompt):
                    await asyncio.sleep(0.001)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                self.assertEqual(given, [])
                round = await session.verify(tv.Tree.root(session.pending))
                self.assertEqual(round.recovered, "resync")
                self.assertEqual(round.new_tokens, plain[1:5])
                self.assertEqual(session.new_tokens, plain[:5])
                await session.close()

        asyncio.run(play())

    def test_interrupted_behind_an_answer(self):
        """The same of the blocking client and Ctrl-C."""
        prompt = prompts(1)[0]
        plain = self.plain(prompt, COUNT)

        class Interrupted(httpx.HTTPTransport):
            def handle_request(self, request):
                if b'"if":' in request.content:
                    raise KeyboardInterrupt
                return super().handle_request(request)

        with tv.Client(url_of(self.daemon), timeout_s=120, transport=Interrupted()) as client:
            with client.session(prompt, sampling=GREEDY) as session:
                with self.assertRaises(KeyboardInterrupt):
                    next(session.generate(Knowing([*prompt, *plain], 1.0), COUNT, pipeline=True))
                round = session.verify(tv.Tree.root(session.pending))
                self.assertEqual((round.recovered, round.new_tokens), ("resync", plain[1:5]))


class GuessTest(unittest.TestCase):
    def test_likely_ends(self):
        tree = tv.Tree([5, 1, 2, 3], [-1, 0, 0, 2], [0.0, -2.0, -1.0, -1.5])
        drafter = Knowing([5, 2, 3, 9, 9], 0.0)
        self.assertEqual(ahead.path_tokens(tree, 3), [2, 3])
        self.assertEqual(ahead.likely_ends(drafter, [5], tree), [(3, 9)])
        self.assertEqual(ahead.likely_ends(drafter, [6], tree), [])

        class Plain:
            draft = drafter.draft

        self.assertEqual(ahead.likely_ends(Plain(), [5], tree), [(3, 9)])
        self.assertEqual(ahead.likely_ends(Plain(), [6], tree), [])

    def test_several_ends(self):
        """The leaves by score, then other tokens behind the best one."""

        class Digits:
            def draft(self, tokens, nodes, depth):
                return tv.Tree([tokens[-1], *range(7, 7 + min(nodes, 3))], [-1] + [0] * min(nodes, 3))

        tree = tv.Tree([5, 1, 2, 3, 4], [-1, 0, 0, 2, 2], [0.0, -1.7, -1.0, -1.5, -1.6])
        for count, ends in ((1, [(3, 7)]), (3, [(3, 7), (4, 7), (1, 7)]), (5, [(3, 7), (4, 7), (1, 7), (3, 8), (3, 9)])):
            self.assertEqual(ahead.likely_ends(Digits(), [5], tree, count), ends)
        self.assertEqual(ahead.likely_ends(Several([5, 1, 2], 3), [5], tv.Tree([5, 1], [-1, 0]), 2), [(1, 0), (1, 1)])
