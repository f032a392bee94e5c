"""A daemon whose acceptance of drafts is a coin at given rates: the rates come out, and every answer says so."""

import os
import unittest

import harness
from harness import Caller, FixedDaemon, round_body, sized, verify_path

LABEL = ["acceptance"]


def start(*options):
    harness.PROGRAM = os.environ["TREEVERIFYD"]
    daemon = FixedDaemon("--threads", "1", *options)
    daemon.model = os.environ["TV_MODEL_DIR"]
    return daemon



class SyntheticTest(unittest.TestCase):
    def accepted(self, caller, state, rounds):
        """Of walks that came to each depth of a chain of three drafts, those that went on."""
        tried, taken = [0] * 3, [0] * 3
        for _ in range(rounds):
            answer = caller.call("POST", verify_path(state), round_body(state, [5, 6, 7], [0, 1, 2]))
            self.assertEqual(answer.status, 200)
            state.update(answer.json)
            for depth in range(min(3, state["stats"]["accepted"] + 1)):
                tried[depth] += 1
                taken[depth] += state["stats"]["accepted"] > depth
        return tried, taken

    def test_rates_come_out(self):
        with start("--synthetic-acceptance", "0.8,0.5,0.25") as daemon:
            caller = Caller(daemon)
            states = []
            for _ in range(2):
                states.append(caller.session(sampling={"seed": "11"}))
                tried, taken = self.accepted(caller, states[-1], sized(200, 400, least=50))
                for rate, walks, on in zip((0.8, 0.5, 0.25), tried, taken):
                    # the seed is fixed, so this is decided once and for all
                    self.assertLess(abs(on - rate * walks), 4 * (walks * rate * (1 - rate)) ** 0.5, (tried, taken))
            # the same seed and text: the same coins and the same draws
            self.assertEqual(states[0]["digest"], states[1]["digest"])
            caller.close()

    def test_every_answer_is_labelled(self):
        with start("--synthetic-acceptance", "1") as daemon:
            caller = Caller(daemon)
            self.assertEqual(caller.call("GET", "/v1/model").json["synthetic"], LABEL)
            state = caller.session(sampling={"seed": "3"})
            session = state["session"]
            answers = [state]

            def call(name, body, status=200):
                answer = caller.call("POST", f"/v1/sessions/{session}/{name}", body)
                self.assertEqual(answer.status, status, answer.body)
                answers.append(answer.json)
                return answer.json

            body = round_body(state, [5, 6, 7], [0, 1, 2])
            first = call("verify", body)
            self.assertEqual(first["accepted"]["nodes"], [0, 1, 2, 3])
            self.assertEqual(first["margin"], {"min": None, "near_tie": False})
            self.assertTrue(call("verify", body)["replayed"])
            state = dict(first, epoch=state["epoch"])
            wrong = dict(round_body(state, [], []), expected_len=state["committed_len"])
            wrong.update({"if": {"seq": 1, "leaf": 0, "pending": state["pending"]}})
            skipped = call("verify", wrong)
            self.assertEqual(skipped["status"], "skipped")
            answers[-1] = skipped["outcome"]
            state = dict(skipped, epoch=state["epoch"])
            held = call("verify", round_body(state, [9], [0], commit="hold"))
            state.update(next_seq=held["next_seq"])
            commit = {"seq": state["next_seq"], "epoch": state["epoch"], "path": [0, 1], "next": 40}
            state.update(call("commit", commit))
            base = {"epoch": state["epoch"], "expected_len": state["committed_len"]}
            state.update(call("extend", dict(base, seq=state["next_seq"], tokens=[1, 2])))
            base["expected_len"] = state["committed_len"]
            state.update(call("decode", dict(base, seq=state["next_seq"], max_tokens=2)))
            base["expected_len"] = state["committed_len"]
            state.update(call("rollback", dict(base, seq=state["next_seq"], len=2)))
            call("fork", {"epoch": state["epoch"]}, 201)
            tree = {"tokens": [1, 5, 6], "parents": [-1, 0, 1]}
            oneshot = caller.call("POST", "/v1/verify", {"tokens": [4, 5], "tree": tree, "want": {"shadow": True}}).json
            self.assertEqual(oneshot["accepted"]["nodes"], [0, 1, 2])
            self.assertEqual((oneshot["shadow"]["ran"], oneshot["shadow"]["skipped"]), (False, "engine"))
            answers.append(oneshot)
            item = dict(round_body(dict(state, pending=state["pending"]), [8], [0]), session=session)
            batch = caller.call("POST", "/v1/verify:batch", {"items": [item]}).json["items"][0]
            answers.append(batch["body"])
            self.assertEqual(len(answers), 12)
            for answer in answers:
                self.assertEqual(answer["synthetic"], LABEL)
                self.assertFalse(answer.get("lossless", False))
            # what is about the model stays about the model
            self.assertTrue(caller.call("POST", "/v1/parity", {}).json["ok"])
            body = {"tokens": [4, 5], "tree": tree, "want": {"logprobs": True}}
            refused = caller.call("POST", "/v1/verify", body)
            self.assertEqual((refused.status, refused.code, refused.json["pointer"]), (422, "wrong-value", "/want/logprobs"))
            caller.close()

    def test_off_by_default(self):
        with start() as daemon:
            caller = Caller(daemon)
            self.assertIsNone(caller.call("GET", "/v1/model").json["synthetic"])
            state = caller.session()
            answer = caller.call("POST", verify_path(state), round_body(state, [5], [0], want={"logprobs": True}))
            self.assertEqual((answer.status, "synthetic" in answer.json, "synthetic" in state), (200, False, False))
            self.assertTrue(answer.json["lossless"])
            caller.close()


if __name__ == "__main__":
    unittest.main(verbosity=1)
