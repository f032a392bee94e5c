"""generate(pipeline=True): the same text as one round at a time, with right and wrong guesses, over a link with a round
trip and over one that loses answers."""

import random
import unittest

from harness import GREEDY, QUICK, SCALE, SEED, SEEDED, STORE, DaemonTest, FlakyProxy, main, prompts
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

    def test_a_drafter_without_guesses_of_its_own(self):
        prompt = prompts(1)[0]
        plain = self.plain(prompt, COUNT + 1)
        with self.client.session(prompt, sampling=GREEDY) as session:
            _, tokens = self.text_of(session, NgramDrafter.from_file(STORE), COUNT)
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
            for wrong in (0.0, 0.5):
                drafter = Knowing([*prompt, *plain], wrong)
                with client.session(prompt, sampling=GREEDY) as session:
                    _, tokens = self.text_of(session, drafter, COUNT)
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


class GuessTest(unittest.TestCase):
    def test_likely_end(self):
        tree = tv.Tree([5, 1, 2, 3], [-1, 0, 0, 2], [0.0, -2.0, -1.0, -1.5])
        drafter = Knowing([5, 2, 3, 9, 9], 0.0)
        self.assertEqual(ahead.path_tokens(tree, 3), [2, 3])
        self.assertEqual(ahead.likely_end(drafter, [5], tree), (3, 9))
        self.assertIsNone(ahead.likely_end(drafter, [6], tree))

        class Plain:
            draft = drafter.draft

        self.assertEqual(ahead.likely_end(Plain(), [5], tree), (3, 9))
        self.assertIsNone(ahead.likely_end(Plain(), [6], tree))


if __name__ == "__main__":
    main()
