"""The real daemon on the bundled checkpoint: /v1/model, readiness and one round against the contract."""

import os
import subprocess
import unittest

import harness
from harness import Caller, FixedDaemon, round_body, verify_path


class ModelTest(unittest.TestCase):
    def test_model_and_round(self):
        harness.PROGRAM = os.environ["TREEVERIFYD"]
        daemon = FixedDaemon("--threads", "1")
        daemon.model = os.environ["TV_MODEL_DIR"]
        with daemon:
            for admin in (False, True):
                caller = Caller(daemon, admin)
                model = caller.call("GET", "/v1/model").json
                self.assertEqual((model["architecture"], model["vocab"]), ("deepseek_v3", 260))
                self.assertRegex(model["versions"]["http"], r"^\d+\.\d+\.\d+")
                self.assertTrue(caller.call("GET", "/readyz?deep=1").json["ready"])
                caller.close()
            caller = Caller(daemon)
            state = caller.session()
            for _ in range(3):
                answer = caller.call("POST", verify_path(state), round_body(state, [5, 6, 7], [0, 0, 1]))
                self.assertEqual(answer.status, 200)
                state.update(answer.json)
            self.assertTrue(caller.call("POST", "/v1/parity", {}).json["ok"])
            for share in (1e-300, 1e-9, 1):  # the smallest is 0 as a 32-bit number
                state = caller.session(sampling={"top_p": share})
                self.assertEqual(caller.call("POST", verify_path(state), round_body(state)).status, 200)
            caller.close()

    def test_hint(self):
        """The curve of this server lies between the medians of what its rounds say of themselves."""
        harness.PROGRAM = os.environ["TREEVERIFYD"]
        daemon = FixedDaemon("--threads", "1")
        daemon.model = os.environ["TV_MODEL_DIR"]
        with daemon:
            caller = Caller(daemon)
            state = caller.session()
            for nodes in (1, 4, 16):
                gpu, total, drafts = [], [], list(range(1, nodes))
                for _ in range(7):
                    body = round_body(state, drafts, [0] * len(drafts))
                    answer = caller.call("POST", verify_path(state), body)
                    self.assertEqual(answer.status, 200)
                    state.update(answer.json)
                    gpu.append(state["timing_us"]["gpu"])
                    total.append(state["timing_us"]["total"])
                curve = dict(state["hint"]["verify_us"])
                self.assertTrue(harness.median(gpu) <= curve[nodes] <= harness.median(total), (curve, gpu, total))
                self.assertIn(state["hint"]["max_useful_nodes"], range(1, 2 * nodes + 1))
                self.assertEqual(state["hint"]["queue_depth"], 0)
            self.assertEqual(caller.call("GET", "/v1/model").json["verify_us"], state["hint"]["verify_us"])
            caller.close()

    def test_pool_is_poisoned(self):
        """The daemons of this run take TREEVERIFY_POISON; what it does to the pool is test_poison.c's."""
        command = [os.environ["TREEVERIFYD"], "--print-config"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        self.assertIn(f"# environment\npoison = {os.environ['TREEVERIFY_POISON']}\n", text)


if __name__ == "__main__":
    unittest.main(verbosity=1)
