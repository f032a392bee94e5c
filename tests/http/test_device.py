"""F25: what a start makes of a device's memory, and that a daemon takes none of it once it is ready.

The device is the host's memory told as one of so many MiB (tests/support/planted_device.c).
"""

import errno
import os
import re
import subprocess
import tempfile
import unittest

import harness
from harness import Caller, FixedDaemon, round_body, verify_path, wait_until

PLANTED = os.environ.get("TREEVERIFYD_PLANTED", "")
MODEL = os.environ.get("TV_MODEL_DIR", "")
MIB = 1 << 20
PAGE_BYTES = 64 * 576 * 4 * 4  # rows, values, bytes, layers
PARTS = re.compile(r"of (\d+) MiB: contexts and others (\d+), weights (\d+), scratch (\d+), pages (\d+), graphs (\d+), reserve (\d+)")


def planted(*options, mib=256):
    harness.PROGRAM = PLANTED
    daemon = FixedDaemon("--threads", "1", *options, env={"TV_PLANT": "device", "TV_PLANT_MIB": str(mib)})
    daemon.model = MODEL
    return daemon


class DeviceTest(unittest.TestCase):
    def start(self, *options):
        """Pages, and the parts of the table in MiB."""
        with planted(*options) as daemon:
            caller = Caller(daemon)
            model = caller.call("GET", "/v1/model").json
            caller.close()
            log = daemon.text()
        self.assertIn("compute capability 9.0, driver for CUDA 13.0, toolkit 13.0, images sm_90 compute_120, running sm_90", log)
        found = PARTS.search(log)
        self.assertIsNotNone(found, log)
        return model["pages"]["total"], [int(number) for number in found.groups()]

    def test_pages_take_what_is_left(self):
        pages, (total, _, _, _, pool, _, reserve) = self.start("--device-reserve", str(64 * MIB))
        self.assertEqual(total, 256)
        self.assertLessEqual(abs(pool - pages * PAGE_BYTES // MIB), 1)
        self.assertIn(reserve, range(60, 65))  # less what the engine takes behind the pool
        self.assertGreater(pool, 100)
        half, (_, _, _, _, half_pool, _, _) = self.start("--device-reserve", str(64 * MIB), "--pages-share", "0.5")
        self.assertLessEqual(abs(2 * half - pages), 2)
        self.assertLessEqual(abs(2 * half_pool - pool), 2)

    def test_too_little_is_said_with_the_table(self):
        for mib, word in ((90, r"room for 0 KV pages, 2 are needed .*weights 17"), (8, "no memory for it; 8 of")):
            with self.subTest(mib=mib):
                env = dict(os.environ, TV_PLANT="device", TV_PLANT_MIB=str(mib))
                command = [PLANTED, "--model", MODEL, "--threads", "1", "--listen", "127.0.0.1:0"]
                ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
                self.assertEqual(ended.returncode, 71, ended.stderr)
                self.assertRegex(ended.stderr, word)

    def test_check_gpu(self):
        """What a start would find, without a model: the device and its memory, or the reason why there is none."""
        command = [PLANTED, "--check-gpu", "--device-reserve", str(512 * MIB)]
        for mib, code in ((2048, 0), (200, 71)):
            env = dict(os.environ, TV_PLANT="device", TV_PLANT_MIB=str(mib))
            ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
            self.assertEqual(ended.returncode, code, ended.stderr)
            said = ended.stdout if code == 0 else ended.stderr
            self.assertIn("compute capability 9.0, driver for CUDA 13.0, toolkit 13.0, images sm_90 compute_120", said)
            self.assertIn(f"{mib} of {mib} MiB free", said)

    def test_f24_check_gpu_without_one(self):
        """Neither driver nor device, nor the backend's own library: exit 69 and one line that says which."""
        program = os.environ["TREEVERIFYD"]
        library = os.environ.get("TREEVERIFY_CUDA_LIB")
        cases = [("/nonexistent/libtreeverify-cuda.so", "cannot open shared object")]
        if library is not None and not os.path.exists("/dev/nvidiactl"):
            cases.append((library, "backend cuda: "))
        for path, says in cases:
            env = dict(os.environ, TREEVERIFY_CUDA_LIB=path)
            ended = subprocess.run([program, "--check-gpu"], env=env, capture_output=True, text=True, timeout=60, check=False)
            self.assertEqual((ended.returncode, ended.stdout), (69, ""), ended.stderr)
            self.assertIn(says, ended.stderr)
            self.assertEqual(ended.stderr.count("\n"), 1)

    def test_b66_libraries_of_other_versions(self):
        """Another ABI, a driver that is too old, no code for the device: exit 69 before anything is loaded, saying which."""
        cases = (
            ("abi", "the library's ABI is "),
            (str(-errno.ENODEV), "there is no such device, or no driver that this library can use"),
            (str(-errno.EBUSY), "the device is another process's alone, or does not answer"),
            (str(-errno.ENOTSUP), "the device is older than sm_90, or the library holds no code for it"),
        )
        for fault, says in cases:
            for options in (["--check-gpu"], ["--backend", "cuda", "--model", MODEL, "--listen", "127.0.0.1:0"]):
                with self.subTest(fault=fault, options=options):
                    env = dict(os.environ, TREEVERIFY_CUDA_LIB=os.environ["TV_PLANTED_CUDA"], TV_PLANT_CUDA=fault)
                    command = [os.environ["TREEVERIFYD"], *options]
                    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
                    self.assertEqual((ended.returncode, ended.stdout), (69, ""), ended.stderr)
                    self.assertIn(f"backend cuda: {'device 0: ' if fault != 'abi' else ''}{says}", ended.stderr)

    def watched(self, steps):
        """A daemon on a GPU whose driver says each of these in turn: (numbers, what the log says then, readiness)."""
        with tempfile.TemporaryDirectory() as folder:
            told = os.path.join(folder, "nvml")
            env = {"TREEVERIFY_NVML_LIB": os.environ["TV_PLANTED_NVML"], "TV_NVML_FILE": told, "TV_PLANT": "device"}
            env |= {"TV_PLANT_MIB": "256", "CUDA_VISIBLE_DEVICES": "0"}

            def tell(numbers):
                with open(f"{told}.next", "w", encoding="ascii") as file:
                    file.write(numbers)
                os.rename(f"{told}.next", told)

            tell(steps[0][0])
            harness.PROGRAM = PLANTED
            daemon = FixedDaemon("--threads", "1", "--device-reserve", str(64 * MIB), env=env)
            daemon.model = MODEL
            with daemon:
                probe = Caller(daemon, admin=True)
                for numbers, says, ready in steps:
                    tell(numbers)
                    wait_until(lambda words=says: words in daemon.text(), 60, says)
                    wait_until(lambda status=ready: probe.call("GET", "/readyz").status == status, 60, says)
                checks = {check["name"]: check for check in probe.call("GET", "/readyz").json["checks"]}
                metrics = probe.call("GET", "/metrics").body.decode()
                caller = Caller(daemon)
                state = caller.session()  # rounds go on: the engine says itself when it cannot
                self.assertEqual(caller.call("POST", verify_path(state), round_body(state)).status, 200)
                caller.close()
                probe.close()
        return checks["device"], metrics

    def test_f31_b57_counters_of_a_broken_gpu(self):
        """What the driver counts is in /metrics; what was there before the start is reported and not held against it."""
        device, metrics = self.watched([
            ("5 2 1 0 0 0", "it comes with 2 uncorrected memory errors, rows to be remapped", 200),
            ("9 2 1 0 0 13", "gpu: Xid 13", 200),
            ("9 3 1 0 0 13", "hardware: 1 uncorrected memory errors", 503),
            ("9 3 1 1 0 48", "hardware: Xid 48", 503),
        ])  # fmt: skip
        self.assertEqual((device["ok"], device["detail"]), (False, "hardware: 1 uncorrected memory errors"))
        for line in ('ecc_total{kind="corrected"} 9', 'ecc_total{kind="uncorrected"} 3', "xids_total 2", "last_xid 48"):
            self.assertIn(f"\ntreeverify_gpu_{line}\n", metrics)

    def test_f31_b57_counters_that_come_late(self):
        """A driver that could not say at the start what it had counted by then is not held against the GPU either."""
        device, _ = self.watched([
            ("9 2 1 1 999 13", "gpu: Xid 13", 200),
            ("9 2 1 1 0 13", "it comes with 2 uncorrected memory errors, rows to be remapped", 200),
            ("9 3 1 1 0 13", "hardware: 1 uncorrected memory errors", 503),
        ])  # fmt: skip
        self.assertEqual((device["ok"], device["detail"]), (False, "hardware: 1 uncorrected memory errors"))

    def test_f31_b57_a_lost_gpu(self):
        """The first word stays: what follows from a lost GPU says less."""
        says = "hardware: the GPU is lost"
        device, _ = self.watched([("0 0 0 0 0 0", "", 200), ("0 0 0 0 15 0", says, 503), ("0 0 0 0 16 79", "hardware: Xid 79", 503)])
        self.assertEqual((device["ok"], device["detail"]), (False, says))

    def test_nothing_is_taken_once_ready(self):
        """Rounds of every shape, forks, rollbacks, oracles, prompts in slices and a self-test."""
        with planted("--pages", "100", "--page-size", "16", "--shadow", "all") as daemon:
            caller = Caller(daemon)
            state = caller.session(tokens=list(range(60)))
            for nodes in (1, 2, 9):
                drafts = [(state["pending"] + i) % 250 for i in range(1, nodes)]
                want = {"top_k": 3, "logits": {"rows": "all", "dtype": "f32"}, "shadow": True}
                answer = caller.call("POST", verify_path(state), round_body(state, drafts, [0] * (nodes - 1), want=want))
                self.assertEqual(answer.status, 200, answer.body)
                state.update(answer.json)
            path = f"/v1/sessions/{state['session']}"
            fork = caller.call("POST", f"{path}/fork", {"epoch": state["epoch"]})
            self.assertEqual(fork.status, 201, fork.body)
            child = fork.json
            answer = caller.call("POST", verify_path(child), round_body(child, [1, 2], [0, 0]))  # copies the last page
            self.assertEqual(answer.status, 200, answer.body)
            body = {"seq": state["next_seq"], "epoch": state["epoch"], "expected_len": state["committed_len"], "len": 50}
            self.assertEqual(caller.call("POST", f"{path}/rollback", body).status, 200)
            self.assertEqual(caller.call("GET", "/readyz?deep=1").status, 200)
            self.assertEqual(caller.call("GET", "/v1/model").json["device_allocations"], 0)
            metrics = caller.call("GET", "/metrics").body.decode()
            self.assertIn("\ntreeverify_device_allocations_total 0\n", metrics)
            caller.close()


if __name__ == "__main__":
    unittest.main()
