"""Synthetic weights: the server says what is made up, in its description and in every answer that a model gave."""

import os
import unittest

from harness import Caller, round_body, verify_path
from real import RealDaemon

MODEL = os.path.join(os.environ.get("TV_GOLDEN_DIR", ""), "..", "models", "v3")
MADE_UP = ["weights"]


def answers(caller):
    """One of every kind of answer, by its name; the text that the model wrote."""
    state = caller.session(tokens=[5, 6, 7], sampling={"temperature": 0, "rule": "greedy"})
    given, text = {"create": dict(state)}, [state["pending"]]

    def call(name, path, body, status=200):
        answer = caller.call("POST", path, body)
        assert answer.status == status, answer.body
        given[name] = answer.json
        return answer.json

    def turn(name, fields):
        members = {key: state[key] for key in ("epoch",)} | {"seq": state["next_seq"], "expected_len": state["committed_len"]}
        done = call(name, f"/v1/sessions/{state['session']}/{name}", members | fields)
        state.update(done)
        text.extend(done.get("new_tokens") or [])

    done = call("verify", verify_path(state), round_body(state, [1, 2], [0, 0]))
    state.update(done)
    text.extend(done["new_tokens"])
    turn("decode", {"max_tokens": 4})
    turn("extend", {"tokens": [9, 10]})
    done = call("held", verify_path(state), round_body(state, [1], [0], commit="hold"))
    state.update(done)
    call("commit", f"/v1/sessions/{state['session']}/commit", {"epoch": state["epoch"], "seq": state["next_seq"], "path": [0],
                                                               "next": done["pending"]})
    state.update(given["commit"])
    call("fork", f"/v1/sessions/{state['session']}/fork", {"epoch": state["epoch"]}, 201)
    turn("rollback", {"len": 4})
    body = {"tokens": [1, 2, 3], "tree": {"tokens": [4, 5], "parents": [-1, 0]}}
    call("oneshot", "/v1/verify", body)
    call("score", "/v1/score", body)
    return given, text


class SyntheticTest(unittest.TestCase):
    def run_seed(self, *options):
        with RealDaemon(*options, model=MODEL) as daemon:
            caller = Caller(daemon)
            model = caller.call("GET", "/v1/model").json
            given, text = answers(caller)
            log = daemon.text()
            metrics = caller.call("GET", "/metrics").body.decode()
            self.assertIn(f"\ntreeverify_synthetic_weights {0 if model['synthetic'] is None else 1}\n", metrics)
            caller.close()
        return model, given, text, log

    def test_every_answer_says_so(self):
        model, given, text, log = self.run_seed("--synthetic-weights", "18446744073709551615")
        self.assertEqual(model["synthetic"], MADE_UP)
        self.assertEqual(model["weights_dtype"], "bf16")
        self.assertIn("synthetic weights of seed 18446744073709551615", log)
        for name, answer in given.items():
            with self.subTest(answer=name):
                self.assertEqual(answer["synthetic"], MADE_UP)
        again, _, text_again, _ = self.run_seed("--synthetic-weights", "18446744073709551615")
        self.assertEqual((again["model_id"], text_again), (model["model_id"], text))
        other, _, text_other, _ = self.run_seed("--synthetic-weights", "7")
        self.assertNotEqual(other["model_id"], model["model_id"])
        self.assertNotEqual(text_other, text)

    def test_prompts_with_random_rows(self):
        """What follows a long prompt hangs on its length and last slice alone; what is computed does not."""
        count = 600 if os.environ.get("TREEVERIFY_BACKEND", "cpu") == "cpu" else 2500  # more than a slice
        prompt = [(7 * i) % 200 for i in range(count)]
        other = [3] * 100 + prompt[100:]
        texts = {}
        for switch in ("on", "off"):
            with RealDaemon("--synthetic-weights", "3", "--synthetic-kv", switch, "--prefix-cache", "off", model=MODEL) as daemon:
                caller = Caller(daemon)
                for name, tokens in (("one", prompt), ("again", prompt), ("other", other)):
                    state = caller.session(tokens=tokens, sampling={"rule": "target_walk", "seed": "5"})
                    self.assertEqual((state["committed_len"], state["synthetic"]), (count, MADE_UP))
                    body = {"seq": 1, "epoch": state["epoch"], "expected_len": count, "max_tokens": 12}
                    answer = caller.call("POST", f"/v1/sessions/{state['session']}/decode", body)
                    self.assertEqual(answer.status, 200, answer.body)
                    texts[switch, name] = answer.json["new_tokens"]
                caller.close()
        for switch in ("on", "off"):
            self.assertEqual(texts[switch, "one"], texts[switch, "again"])
        self.assertEqual(texts["on", "one"], texts["on", "other"])
        self.assertNotEqual(texts["off", "one"], texts["off", "other"])
        self.assertNotEqual(texts["on", "one"], texts["off", "one"])

    def test_a_real_model_says_nothing(self):
        model, given, _, log = self.run_seed()
        self.assertIsNone(model["synthetic"])
        # taken since the start; there is no such number where memory is the host's
        self.assertEqual(model["device_allocations"], 0 if model["backend"] == "cuda" else None)
        self.assertNotIn("synthetic", log)
        for name, answer in given.items():
            with self.subTest(answer=name):
                self.assertNotIn("synthetic", answer)


if __name__ == "__main__":
    unittest.main()
