"""Known prompts over HTTP: what cached_len says, for whom, how long, and that no bit of an answer depends on it."""

import unittest

from harness import Caller, round_body, verify_path, wait_until
from real import RealDaemon

PROMPT = [(37 * i + 5) % 250 for i in range(100)]
WANT = {"logits": {"rows": "all", "dtype": "f32"}}


def first_round(caller, state):
    """The answer's parts that do not tell the time, of a round of a small tree; then the session ends."""
    drafts = [(state["pending"] + i) % 250 for i in (1, 2, 3)]
    answer = caller.call("POST", verify_path(state), round_body(state, drafts, [0, 0, 1], want=WANT))
    assert answer.status == 200, answer.body
    caller.call("DELETE", f"/v1/sessions/{state['session']}")
    return {name: answer.json[name] for name in ("accepted", "pending", "digest", "margin", "logits")}


class PrefixTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.daemon = RealDaemon("--page-size", "16", "--pages", "40", "--idle-pages-s", "0").__enter__()

    @classmethod
    def tearDownClass(cls):
        cls.daemon.__exit__(None, None, None)

    def setUp(self):
        self.caller = Caller(self.daemon)
        self.free = self.pages()["free"]

    def tearDown(self):
        wait_until(lambda: self.pages()["free"] == self.free, 60, "every page is free or cached again")
        self.caller.close()

    def pages(self):
        return self.caller.call("GET", "/v1/model").json["pages"]

    def create(self, salt, **fields):
        body = {"tokens": PROMPT, "sampling": {"seed": "5"}, "cache_salt": salt, "lease_s": 3600, **fields}
        answer = self.caller.call("POST", "/v1/sessions", body)
        self.assertEqual(answer.status, 201, answer.body)
        return answer.json

    def delete(self, state):
        self.assertEqual(self.caller.call("DELETE", f"/v1/sessions/{state['session']}").status, 204)

    def test_known_while_it_lives_and_afterwards(self):
        first = self.create("lives")
        second = self.create("lives", expected_digest=first["digest"])
        self.assertEqual((first["cached_len"], second["cached_len"]), (0, 96))
        self.assertEqual(first["pending"], second["pending"])
        self.delete(first)
        self.assertEqual(first_round(self.caller, second), first_round(self.caller, self.create("lives")))
        wait_until(lambda: self.pages()["cached"] >= 6, 60, "whole pages of the prompt are kept")
        third = self.create("lives")
        self.assertEqual(third["cached_len"], 96)
        self.delete(third)
        other = self.create("another")
        self.assertEqual(other["cached_len"], 0)
        self.delete(other)

    def test_known_after_the_lease(self):
        state = self.create("lease", lease_s=1)
        # a look at the session itself would renew its lease
        wait_until(lambda: not self.caller.call("GET", "/v1/sessions").json["sessions"], 60, "the lease is over")
        again = self.create("lease")
        self.assertEqual((again["cached_len"], again["pending"], again["digest"]), (96, state["pending"], state["digest"]))
        self.delete(again)

    def test_all_but_the_last_position_is_taken_over(self):
        for length, known in ((96, 80), (97, 96), (16, 0), (17, 16), (5, 0)):
            states = [self.create("length", tokens=PROMPT[:length]) for _ in range(2)]
            self.assertEqual(states[1]["cached_len"], known, length)
            self.assertEqual(states[0]["pending"], states[1]["pending"], length)
            for state in states:
                self.delete(state)

    def test_a_digest_that_is_expected_is_checked(self):
        body = {"tokens": PROMPT, "expected_digest": "0" * 32}
        answer = self.caller.call("POST", "/v1/sessions", body)
        self.assertEqual((answer.status, answer.code), (409, "digest-mismatch"))

    def test_a_prefix_names_the_tokens_of_a_session(self):
        source = self.create("source")
        named = {"session": source["session"], "len": 50}
        state = self.caller.call("POST", "/v1/sessions", {"prefix": named, "cache_salt": "source", "sampling": {"seed": "5"}})
        self.assertEqual((state.status, state.json["committed_len"], state.json["cached_len"]), (201, 50, 48), state.body)
        same = self.create("source", tokens=PROMPT[:50])
        self.assertEqual(first_round(self.caller, state.json), first_round(self.caller, same))
        self.delete(source)
        gone = self.caller.call("POST", "/v1/sessions", {"prefix": named})
        self.assertEqual((gone.status, gone.code), (404, "session-not-found"))

    def test_kept_pages_never_refuse_a_call(self):
        """Prompts of half the pool, one after the other: each finds its room, and a live session keeps its own."""
        live = self.create("crowd")
        for turn in range(12):
            tokens = [(7 * i + turn) % 250 for i in range(200 + turn)]
            self.delete(self.create("crowd", tokens=tokens))
            tree = {"tokens": [1, 2], "parents": [-1, 0]}
            answer = self.caller.call("POST", "/v1/verify", {"tokens": tokens[::-1], "tree": tree})
            self.assertEqual(answer.status, 200, answer.body)
        again = self.create("crowd")
        self.assertEqual(again["cached_len"], 96)
        self.assertEqual(first_round(self.caller, again), first_round(self.caller, live))

    def test_switched_off_answers_the_same_bits(self):
        tree = {"tokens": [9, 8, 7], "parents": [-1, 0, 0]}
        body = {"tokens": PROMPT[:96], "tree": tree, "sampling": {"seed": "3"}, "want": WANT}
        known = [self.caller.call("POST", "/v1/verify", body).json for _ in range(2)]
        states = [self.create("off") for _ in range(2)]
        rounds = [first_round(self.caller, state) for state in states]
        with RealDaemon("--page-size", "16", "--prefix-cache", "off") as daemon:
            caller = Caller(daemon)
            for _ in range(2):
                answer = caller.call("POST", "/v1/sessions", {"tokens": PROMPT, "sampling": {"seed": "5"}, "cache_salt": "off"})
                self.assertEqual(answer.json["cached_len"], 0)
                state = answer.json
            self.assertEqual([first_round(caller, state)] * 2, rounds)
            plain = caller.call("POST", "/v1/verify", body).json
            self.assertEqual([plain["logits"]] * 2, [answer["logits"] for answer in known])
            self.assertEqual(caller.call("GET", "/v1/model").json["pages"]["cached"], 0)
            caller.close()


if __name__ == "__main__":
    unittest.main()
