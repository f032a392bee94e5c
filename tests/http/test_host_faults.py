"""B56, B59, B60, B61, B64, B70: what a GPU host does to a service, as far as a machine without one can show it."""

import os
import re
import resource
import subprocess
import unittest

from harness import Caller, FixedDaemon, round_body, verify_path

DAEMON = os.environ.get("TREEVERIFYD", "")
PLANTED = os.environ.get("TREEVERIFYD_PLANTED", "")
MODEL = os.environ.get("TV_MODEL_DIR", "")
UNITS = os.environ.get("TV_UNITS", "")
EXIT_NO_DEVICE, EXIT_FAULT, EXIT_NO_MEMORY = 69, 70, 71
NO_RETRY = {64, 65, 75, 78}  # of the unit's exit codes


def unit():
    """[(key, value)] of the service, in order."""
    with open(os.path.join(UNITS, "treeverifyd.service")) as file:
        return re.findall(r"^(\w+)=(.*)$", file.read(), re.M)


class HostFaultsTest(unittest.TestCase):
    def values(self, key):
        return [value for name, value in unit() if name == key]

    def value(self, key, default=None):
        """The last one counts."""
        return (self.values(key) or [default])[-1]

    def test_b56_a_session_goes_on_behind_a_lost_device(self):
        """Exit 70, which the unit restarts; the next process has another epoch, and the text goes on by its prefix."""
        self.assertNotIn(EXIT_FAULT, {int(code) for code in self.value("RestartPreventExitStatus").split()})
        daemon = FixedDaemon().__enter__()
        caller = Caller(daemon)
        state = caller.session(tokens=[1, 2, 3])
        text = [1, 2, 3, state["pending"]]
        for _ in range(3):
            state.update(caller.call("POST", verify_path(state), round_body(state)).json)
            text += state["new_tokens"]
        daemon.order("lose")
        daemon.stat()  # orders are taken one after the other
        lost = caller.call("POST", verify_path(state), round_body(state))
        self.assertEqual((lost.status, lost.code, lost.json["committed"]), (500, "kernel-fault", False))
        self.assertEqual(daemon.process.wait(timeout=60), EXIT_FAULT)
        caller.close()
        daemon.stop()
        with FixedDaemon() as again:
            caller = Caller(again)
            old = caller.call("POST", verify_path(state), round_body(state))
            self.assertEqual((old.status, old.code), (409, "epoch-changed"))
            resumed = caller.session(tokens=text[: state["committed_len"]])
            self.assertEqual((resumed["pending"], resumed["digest"]), (state["pending"], state["digest"]))
            caller.close()

    def test_b59_no_device_is_no_cpu_fallback(self):
        """A start that asked for cuda and finds none ends with 69, at once and before it listens; the unit tries again."""
        env = dict(os.environ, TREEVERIFY_CUDA_LIB="/nonexistent/libtreeverify-cuda.so")
        command = [DAEMON, "--model", MODEL, "--backend", "cuda", "--listen", "127.0.0.1:0"]
        for _ in range(2):  # and once more: nothing is remembered
            ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
            self.assertEqual((ended.returncode, ended.stdout), (EXIT_NO_DEVICE, ""), ended.stderr)
            self.assertIn("backend cuda", ended.stderr)
        self.assertEqual((self.value("Restart"), self.value("RestartSec")), ("on-failure", "5"))
        self.assertEqual({int(code) for code in self.value("RestartPreventExitStatus").split()}, NO_RETRY)
        after = " ".join(self.values("After")).split()
        self.assertIn("modprobe@nvidia_uvm.service", after)
        self.assertIn("modprobe@nvidia_uvm.service", " ".join(self.values("Wants")).split())
        self.assertEqual((self.value("StartLimitIntervalSec"), self.value("StartLimitBurst")), ("300", "5"))

    def test_b60_the_sandbox_leaves_cuda_what_it_needs(self):
        """None of the options that are known to break it (each was found so by somebody)."""
        self.assertNotEqual(self.value("PrivateDevices", "no"), "yes")  # no /dev/nvidia*
        self.assertEqual(self.value("ProcSubset", "all"), "all")  # /proc/driver/nvidia is read
        filters = [word for value in self.values("SystemCallFilter") for word in value.split()]
        self.assertIn("@system-service", filters)  # with memfd_create, which is in @ipc
        refused = {word for value in self.values("SystemCallFilter") if value.startswith("~") for word in value[1:].split()}
        self.assertFalse(refused & {"@ipc", "memfd_create", "@resources", "mbind", "@memlock", "mlock"}, refused)
        if self.value("ProtectClock") == "yes":  # it turns the list of devices on
            self.assertTrue(self.values("DeviceAllow"))
        families = self.value("RestrictAddressFamilies").split()
        self.assertIn("AF_UNIX", families)  # persistence daemon and journal
        self.assertNotEqual(self.value("PrivateNetwork", "no"), "yes")

    def test_b61_the_devices_are_in_the_unit(self):
        """So that `systemctl daemon-reload` sets the same rules again: nothing sets them behind systemd's back."""
        self.assertEqual(self.value("DevicePolicy"), "closed")
        allowed = self.values("DeviceAllow")
        for group in ("char-nvidia", "char-nvidia-frontend", "char-nvidiactl", "char-nvidia-uvm", "char-nvidia-caps"):
            self.assertIn(f"{group} rw", allowed)
        self.assertFalse([value for value in allowed if "*" in value or value.startswith("/dev/")], "globs and paths")

    def test_b64_little_locked_memory(self):
        """64 KiB, the limit of a login shell, and none at all: the daemon starts, serves and says nothing odd."""
        self.assertEqual(self.value("LimitMEMLOCK"), "infinity")
        for limit in (65536, 0):
            command = [DAEMON, "--model", MODEL, "--listen", "127.0.0.1:0", "--threads", "1"]
            place = lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=place) as process:
                words = process.stdout.readline().split()
                self.assertEqual(words[:1], ["listening"])
                daemon = FixedDaemon()
                daemon.port = int(words[1].rsplit(":", 1)[1])
                daemon.host = "127.0.0.1"
                caller = Caller(daemon)
                state = caller.session(tokens=[73, 110])
                self.assertEqual(caller.call("POST", verify_path(state), round_body(state)).status, 200)
                caller.close()
                process.terminate()
                _, log = process.communicate(timeout=60)
                self.assertEqual(process.returncode, 0, log)
                self.assertNotRegex(log, "(?i)mlock|locked|cannot allocate")

    def test_b70_the_check_names_the_step_that_failed(self):
        """nvidia-smi may be fine: --check-gpu goes through library, driver, device and memory, and says which was not."""
        library = dict(os.environ, TREEVERIFY_CUDA_LIB=os.path.join(UNITS, "treeverifyd.service"))  # a file, but no library
        steps = [
            (DAEMON, library, EXIT_NO_DEVICE, "invalid ELF header|file too short"),
            (DAEMON, dict(library, TREEVERIFY_CUDA_LIB="/nonexistent/lib.so"), EXIT_NO_DEVICE, "cannot open shared object"),
            (PLANTED, dict(os.environ, TV_PLANT="device", TV_PLANT_MIB="100"), EXIT_NO_MEMORY, "100 of 100 MiB free"),
        ]
        for program, env, code, says in steps:
            ended = subprocess.run([program, "--check-gpu"], env=env, capture_output=True, text=True, timeout=60, check=False)
            self.assertEqual((ended.returncode, ended.stdout), (code, ""), ended.stderr)
            self.assertRegex(ended.stderr, says)
        env = dict(os.environ, TV_PLANT="device", TV_PLANT_MIB="2048")
        fine = subprocess.run([PLANTED, "--check-gpu"], env=env, capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual((fine.returncode, fine.stderr), (0, ""), fine.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=1)
