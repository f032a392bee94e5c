"""F28: the device is lost: what runs and what waits is refused, readiness fails, the process ends with exit code 70."""

import json
import os
import tempfile
import unittest

import harness
from harness import SANITIZED, Caller, FixedDaemon, Stopwatch, request_bytes, round_body, verify_path, wait_until

PLANTED = os.environ.get("TREEVERIFYD_PLANTED", "")
MODEL = os.environ.get("TV_MODEL_DIR", "")
EXIT_FAULT = 70
READY_S, END_S = 1.0, 5.0


class LostTest(unittest.TestCase):
    def judge(self, seconds, limit, what):
        print(f"{what} {seconds:.2f} s after the loss")
        if not SANITIZED:
            self.assertLess(seconds, limit)

    def refused(self, answer):
        self.assertEqual((answer.status, answer.json["code"]), (500, "kernel-fault"), answer.body)
        self.assertFalse(answer.json["committed"])

    def not_ready(self, probe, watch):
        """Readiness fails for the device; the answer that says so says why, for the process soon ends."""
        answers = []

        def refused():
            answers.append(probe.call("GET", "/readyz"))
            return answers[-1].status == 503

        wait_until(refused, 60, "readiness fails")
        seconds = watch.seconds()
        checks = {check["name"]: check for check in answers[-1].json["checks"]}
        self.assertFalse(checks["device"]["ok"])
        self.assertIn("lost", checks["device"]["detail"])
        self.judge(seconds, READY_S, "not ready")

    def ended(self, daemon, watch):
        seconds = watch.until_end()
        self.assertEqual(daemon.process.wait(timeout=60), EXIT_FAULT, daemon.text())
        self.judge(seconds, END_S, "ended")
        self.assertIn("the device is lost", daemon.text())
        daemon.stop()
        daemon.log.close()

    def test_f28_running_and_queued_rounds_are_answered(self):
        """More rounds than a launch takes; each has its answer before the process ends."""
        daemon = FixedDaemon().__enter__()
        callers = [Caller(daemon) for _ in range(12)]
        probe = Caller(daemon, admin=True)
        states = [caller.session() for caller in callers]
        daemon.hold()
        launches = daemon.stat()[0]
        for caller, state in zip(callers, states):
            caller.sock.sendall(request_bytes("POST", verify_path(state), json.dumps(round_body(state)).encode()))
        wait_until(lambda: daemon.stat()[0] == launches + 1, 60, "a launch is under way")
        self.assertEqual(probe.call("GET", "/readyz").status, 200)
        daemon.order("lose")
        daemon.release()
        watch = Stopwatch(daemon.process)
        self.not_ready(probe, watch)
        for caller, state in zip(callers, states):
            self.refused(caller.reader.answer("POST", verify_path(state)))
        self.ended(daemon, watch)
        for one in (*callers, probe):
            one.close()

    def test_f28_the_real_engine_tells_of_its_kernels(self):
        """The same through model, cache and engine: every kernel call fails from some moment on."""
        with tempfile.TemporaryDirectory() as folder:
            switch = os.path.join(folder, "on")
            harness.PROGRAM = PLANTED
            daemon = FixedDaemon("--threads", "1", env={"TV_PLANT": "lost", "TV_PLANT_FILE": switch})
            daemon.model = MODEL
            daemon.__enter__()
            caller, probe = Caller(daemon), Caller(daemon, admin=True)
            state = caller.session()
            answer = caller.call("POST", verify_path(state), round_body(state))
            self.assertEqual(answer.status, 200, answer.body)
            state.update(answer.json)
            with open(switch, "w", encoding="ascii"):
                pass
            watch = Stopwatch(daemon.process)
            self.refused(caller.call("POST", verify_path(state), round_body(state)))
            self.not_ready(probe, watch)
            self.ended(daemon, watch)
            caller.close()
            probe.close()


if __name__ == "__main__":
    unittest.main()
