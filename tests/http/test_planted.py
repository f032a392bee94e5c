"""F27, F28, F34, R15: faults of single launches under the real engine, on any backend: what shadow mode finds, what is
refused and over, and what ends the process.

TREEVERIFY_BACKEND is the backend's; a device that is really lost needs one with memory of its own. "mask-bit", "page"
and "output" are in tests/support/planted_round.c.
"""

import itertools
import os
import tempfile
import threading
import time
import unittest

import harness
from harness import Caller, FixedDaemon, round_body, verify_path, wait_until

PLANTED = os.environ.get("TREEVERIFYD_PLANTED", "")
MODEL = os.path.join(os.path.dirname(os.environ.get("TV_MODEL_DIR", "")), "v3")
LAYERS = 3
SANITIZED = os.environ.get("TV_SANITIZE", "none") != "none"  # the tools' own time is not judged
ON_DEVICE = os.environ.get("TREEVERIFY_BACKEND", "cpu") != "cpu"
EXIT_FAULT = 70
READY_S, END_S = 1.0, 5.0
PROMPT = [(11 * i) % 250 for i in range(150)]
FAULTS = ("output", "page", "mask-bit")
TREE = ([40, 41, 42, 43, 44, 45, 46, 47], [0, 0, 1, 1, 2, 3, 3, 0])


class PlantedDaemon(FixedDaemon):
    """With a fault that is there while its switch is on."""

    def __init__(self, fault, *options, apart=False):
        self.folder = tempfile.TemporaryDirectory()
        self.file = os.path.join(self.folder.name, "on")
        harness.PROGRAM = PLANTED
        super().__init__("--threads", "1", "--pages", "256", *options, env={"TV_PLANT": fault, "TV_PLANT_FILE": self.file})
        if apart:
            self.env["TV_PLANT_APART"] = "1"
        self.program, self.model = PLANTED, MODEL

    def switch(self, on):
        if on:
            with open(self.file, "w", encoding="ascii"):
                pass
        else:
            os.unlink(self.file)


class ShadowTest(unittest.TestCase):
    def round(self, caller, state, **want):
        answer = caller.call("POST", verify_path(state), round_body(state, *TREE, want=want))
        self.assertEqual(answer.status, 200, answer.body)
        state.update(answer.json)
        return answer.json

    def test_f32_f34_every_fault_is_found(self):
        """One element, one bit of a row, one bit of the mask; right before and behind it nothing is found. With memory
        that is the host's, and with such as a device has (TV_PLANT_APART), where another judge works."""
        cases = list(itertools.product((False,) if ON_DEVICE else (True, False), ("bf16", "f32"), FAULTS))
        for apart, dtype, fault in cases if harness.SCALE >= 1 else cases[:4]:
            with self.subTest(apart=apart, dtype=dtype, fault=fault):
                with PlantedDaemon(fault, "--kv-dtype", dtype, "--page-size", "16", apart=apart) as daemon:
                    caller = Caller(daemon)
                    state = caller.session(tokens=PROMPT[:20], sampling={"rule": "greedy"})
                    for number, on in enumerate((False, True, False)):
                        if number > 0:
                            daemon.switch(on)
                        shadow = self.round(caller, state, shadow=True)["shadow"]
                        self.assertTrue(shadow["ran"], shadow)
                        self.assertEqual(shadow["kernel"]["layers"], LAYERS)
                        rounds = caller.call("GET", "/v1/parity").json
                        self.assertEqual(rounds["rounds"]["violation"], min(number, 1), rounds)
                        self.assertEqual(rounds["rounds"]["exact"], number + 1 - min(number, 1), rounds)
                    self.assertEqual([one["kind"] for one in rounds["violations"]], ["kernel"])
                    caller.close()

    def test_f32_sampled_rounds(self):
        """The same without being asked: every sampled round is judged, and the fault found."""
        with PlantedDaemon("output", "--shadow", "all") as daemon:
            caller = Caller(daemon)
            state = caller.session(tokens=PROMPT, sampling={"rule": "greedy"})
            for number in range(6):
                if number == 3:
                    daemon.switch(True)
                self.assertNotIn("shadow", self.round(caller, state))
            totals = {}

            def judged():
                totals.update(caller.call("GET", "/v1/parity").json["rounds"])
                return sum(totals.values()) == 6

            wait_until(judged, 120, "six judgements")
            self.assertEqual((totals["exact"], totals["violation"]), (3, 3), totals)
            caller.close()


class EndTest(unittest.TestCase):
    def test_f27_a_call_that_fails_is_over_when_it_is_over(self):
        with PlantedDaemon("hiccup") as daemon:
            caller, probe = Caller(daemon), Caller(daemon, admin=True)
            state = caller.session(tokens=PROMPT)
            for turn in range(2):
                daemon.switch(True)
                answer = caller.call("POST", verify_path(state), round_body(state, *TREE))
                self.assertEqual((answer.status, answer.json["code"]), (500, "kernel-fault"), answer.body)
                self.assertFalse(answer.json["committed"])
                self.assertEqual(probe.call("GET", "/readyz").status, 503)  # the last launch was not fine
                daemon.switch(False)
                answer = caller.call("POST", verify_path(state), round_body(state, *TREE))  # the same number again
                self.assertEqual(answer.status, 200, answer.body)
                state.update(answer.json)
                self.assertEqual(state["next_seq"], turn + 2)
                self.assertEqual(probe.call("GET", "/readyz").status, 200)
            self.assertIsNone(daemon.process.poll())
            caller.close()
            probe.close()

    @unittest.skipUnless(ON_DEVICE, "host memory cannot be lost")
    def test_f28_a_kernel_that_reads_nowhere(self):
        """The real thing: running and queued rounds of twelve callers are answered, and the process ends in time."""
        daemon = PlantedDaemon("fault").__enter__()
        callers = [Caller(daemon) for _ in range(12)]
        probe = Caller(daemon, admin=True)
        states = [caller.session(tokens=PROMPT, lease_s=3600) for caller in callers]
        answers, started = [[] for _ in callers], threading.Barrier(13)

        def rounds(caller, state, given):
            started.wait()
            while not given or given[-1].status == 200:
                given.append(caller.call("POST", verify_path(state), round_body(state, *TREE)))
                state.update(given[-1].json if given[-1].status == 200 else {})

        threads = [threading.Thread(target=rounds, args=one) for one in zip(callers, states, answers)]
        for thread in threads:
            thread.start()
        started.wait()
        wait_until(lambda: all(answers), 60, "everybody has an answer")
        daemon.switch(True)
        began = time.monotonic()
        wait_until(lambda: probe.call("GET", "/readyz").status == 503, 60, "readiness fails")
        ready_s = time.monotonic() - began
        code = daemon.process.wait(timeout=60)
        end_s = time.monotonic() - began
        for thread in threads:
            thread.join()
        print(f"not ready {ready_s:.2f} s, ended {end_s:.2f} s after a kernel read nowhere; {sum(map(len, answers))} answers")
        self.assertEqual(code, EXIT_FAULT, daemon.text())
        self.assertTrue(SANITIZED or (ready_s < READY_S and end_s < END_S), (ready_s, end_s))
        for given in answers:
            self.assertEqual((given[-1].status, given[-1].json["code"]), (500, "kernel-fault"), given[-1].body)
            self.assertFalse(given[-1].json["committed"])
        self.assertIn("the device is lost", daemon.text())
        daemon.stop()
        daemon.log.close()
        for one in (*callers, probe):
            one.close()


if __name__ == "__main__":
    unittest.main()
