"""Starts that are refused: a backend with a planted fault (exit 70; and no readiness after one), weights that are
finite and whose logits are not (exit 65)."""

import json
import os
import shutil
import struct
import subprocess
import tempfile
import time
import unittest

import harness
import tensors
from harness import SANITIZED, Caller, FixedDaemon, Stopwatch, request_bytes, round_body, verify_path, wait_until

EXIT_CHECKPOINT, EXIT_FAULT = 65, 70
HUGE = {"BF16": b"\x96\x7e", "F32": struct.pack("<f", 1e38)}
VARIANT = os.path.join(os.environ["TV_GOLDEN_DIR"], "model_variants", "v3-all-dense-one-head")
FAULTS = ("scale-both", "scale-verify", "scale-prefill", "rope-verify", "rope-both", "value-heads", "absorb-heads", "router")
DERIVED = ("mscale", "rope-length")  # of YaRN, which the bundled model of the quick start has not
PLANTED = os.environ["TREEVERIFYD_PLANTED"]
MODEL = os.environ["TV_MODEL_DIR"]
YARN_MODEL = os.path.join(os.path.dirname(MODEL), "v2lite")
# a daemon that refuses to start ends before it has a second thread: its whole sweep says nothing to TSan
sweep = unittest.skipIf(os.environ.get("TV_SANITIZE") == "thread", "one thread")
FRESH_S = 1.0  # for so long the last deep check's result is told again


def start(fault, *options, model=MODEL):
    command = [PLANTED, "--model", model, "--listen", "127.0.0.1:0", "--threads", "1", *options]
    environment = dict(os.environ, TV_PLANT=fault)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def overwrite(path, name):
    """Every element of one tensor becomes 1e38."""
    with open(path, "r+b") as file:
        entries, begin = tensors.header(file)
        first, last = entries[name]["data_offsets"]
        element = HUGE[entries[name]["dtype"]]
        file.seek(begin + first)
        file.write(element * ((last - first) // len(element)))


class StartTest(unittest.TestCase):
    @sweep
    def test_absurd_weights_are_the_checkpoints_fault(self):
        for options in ((), ("--kv-dtype", "bf16")):
            with self.subTest(options=options), tempfile.TemporaryDirectory() as folder:
                for name in ("config.json", "model.safetensors"):
                    shutil.copy(os.path.join(VARIANT, name), folder)
                overwrite(os.path.join(folder, "model.safetensors"), "lm_head.weight")
                command = [os.environ["TREEVERIFYD"], "--model", folder, "--listen", "127.0.0.1:0", *options]
                ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
                self.assertEqual((ended.returncode, ended.stdout), (EXIT_CHECKPOINT, ""), ended.stderr)
                self.assertIn(f"model {folder}: finite weights, but no finite logits", ended.stderr)

    @sweep
    def test_wrong_forms_do_not_start_b28(self):
        for options in ((), ("--kv-dtype", "bf16")):
            for fault in FAULTS:
                ended = start(fault, *options)
                with self.subTest(fault=fault, options=options):
                    self.assertEqual(ended.returncode, EXIT_FAULT, ended.stderr)
                    self.assertEqual(ended.stdout, "")
                    self.assertIn("self-test: logits against the path oracle", ended.stderr)

    def test_r16_a_stuck_kernel_ends_readiness_in_five_seconds(self):
        """With the default limit; a launch that moves again is ready again."""
        with tempfile.TemporaryDirectory() as folder:
            switch = os.path.join(folder, "on")
            harness.PROGRAM = PLANTED
            daemon = FixedDaemon("--threads", "1", env={"TV_PLANT": "stuck", "TV_PLANT_FILE": switch})
            daemon.model = MODEL
            with daemon:
                caller, probe = Caller(daemon), Caller(daemon, True)
                state = caller.session()
                with open(switch, "w", encoding="ascii"):
                    pass
                began, watch = time.monotonic(), Stopwatch(daemon.process)
                body = json.dumps(round_body(state)).encode()
                caller.sock.sendall(request_bytes("POST", verify_path(state), body))
                wait_until(lambda: probe.call("GET", "/readyz").status == 503, 60, "readiness fails")
                seconds, wall_s = watch.seconds(), time.monotonic() - began
                checks = {check["name"]: check for check in probe.call("GET", "/readyz").json["checks"]}
                self.assertFalse(checks["worker"]["ok"])
                self.assertIn("without progress", checks["worker"]["detail"])
                self.assertEqual(probe.call("GET", "/readyz?deep=1").status, 503)  # and nobody waits for the worker
                self.assertEqual(probe.call("GET", "/healthz").status, 200)
                print(f"not ready {seconds:.2f} s after the round was sent")
                self.assertGreater(wall_s, 3.5)
                if not SANITIZED:
                    self.assertLess(seconds, 5.0)
                os.unlink(switch)
                self.assertEqual(caller.reader.answer("POST").status, 200)
                self.assertEqual(probe.call("GET", "/readyz").status, 200)
                caller.close()
                probe.close()

    @sweep
    def test_wrong_numbers_derived_from_the_file_do_not_start_b28(self):
        for options in ((), ("--kv-dtype", "bf16")):
            for fault in DERIVED:
                ended = start(fault, *options, model=YARN_MODEL)
                with self.subTest(fault=fault, options=options):
                    self.assertEqual(ended.returncode, EXIT_FAULT, ended.stderr)
                    self.assertEqual(ended.stdout, "")
                    self.assertIn("self-test: logits against the path oracle", ended.stderr)

    def test_a_comparison_sees_a_number_derived_from_the_file(self):
        """The softmax scale, wrong from some moment on: the kernels are asked the same, the path oracle asks nobody."""
        with tempfile.TemporaryDirectory() as folder:
            switch = os.path.join(folder, "on")
            harness.PROGRAM = PLANTED
            daemon = FixedDaemon("--threads", "1", env={"TV_PLANT": "mscale", "TV_PLANT_FILE": switch})
            daemon.model = YARN_MODEL
            with daemon:
                caller = Caller(daemon, True)
                for planted in (False, True):
                    answer = caller.call("POST", "/v1/parity", {}).json
                    self.assertEqual(answer["ok"], not planted, answer)
                    self.assertLessEqual(answer["kernel"]["rel_l2"], answer["bounds"]["kernel_rel_l2"])
                    with open(switch, "w", encoding="ascii"):
                        pass
                caller.close()

    def test_a_fault_after_the_start_ends_readiness_b54(self):
        with tempfile.TemporaryDirectory() as folder:
            switch = os.path.join(folder, "on")
            harness.PROGRAM = PLANTED
            daemon = FixedDaemon("--threads", "1", env={"TV_PLANT": "late", "TV_PLANT_FILE": switch})
            daemon.model = MODEL
            with daemon:
                caller = Caller(daemon, True)
                self.assertEqual(caller.call("GET", "/readyz?deep=1").status, 200)
                with open(switch, "w", encoding="ascii"):
                    pass
                status, ends_at = 200, time.monotonic() + 10 * FRESH_S
                while status == 200 and time.monotonic() < ends_at:
                    answer = caller.call("GET", "/readyz?deep=1")
                    status = answer.status
                self.assertEqual(status, 503)
                checks = {check["name"]: check for check in answer.json["checks"]}
                self.assertFalse(checks["self_test"]["ok"])
                self.assertIn("differ", checks["self_test"]["detail"])
                self.assertEqual(caller.call("GET", "/readyz").status, 503)  # shallow ones know it too
                caller.close()


if __name__ == "__main__":
    unittest.main(verbosity=1)
