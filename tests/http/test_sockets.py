"""Listening sockets that a service manager hands over (sd_listen_fds), and the units that say so.

TV_SYSTEMD: without libsystemd nobody is asked for sockets, and that part is skipped.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import unittest

from harness import Caller, FixedDaemon, Reader, request_bytes, round_body, verify_path

UNITS = os.environ["TV_UNITS"]
SOURCES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "deploy", "systemd")
FIRST = 3  # SD_LISTEN_FDS_START
# its own number is known to a process alone: this is what runs before the daemon takes its place
EXEC = 'LISTEN_PID=$$ exec "$0" "$@"'


def bound(host="127.0.0.1", kind=socket.SOCK_STREAM, listen=True):
    sock = socket.socket(socket.AF_INET, kind)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, 0))
    if listen and kind == socket.SOCK_STREAM:
        sock.listen(100)
    return sock


def handed(command, socks, names, env=None, **how):
    """Popen with these sockets at the place where a manager puts them."""
    env = dict(os.environ, LISTEN_FDS=str(len(socks)), LISTEN_FDNAMES=names, **(env or {}))

    def place():
        # copies above the range first: a source may lie where a target goes
        copies = [os.dup(sock.fileno()) for sock in socks]
        high = [os.dup2(fd, 100 + i) for i, fd in enumerate(copies)]
        for i, fd in enumerate(high):
            os.dup2(fd, FIRST + i)

    numbers = tuple(range(FIRST, FIRST + len(socks)))
    return subprocess.Popen(["/bin/sh", "-c", EXEC, *command], env=env, preexec_fn=place, pass_fds=numbers, text=True, **how)


class HandedDaemon(FixedDaemon):
    def __init__(self, socks, names, *options):
        super().__init__(*options)
        self.socks, self.names = socks, names

    def __enter__(self):
        self.log = tempfile.TemporaryFile(mode="w+")
        command = [self.program, "--model", "fixed", "--listen", "127.0.0.1:0", *self.options]
        pipe = subprocess.PIPE
        self.process = handed(command, self.socks, self.names, stdin=pipe, stdout=pipe, stderr=self.log)
        words = self.process.stdout.readline().split()
        if len(words) != 4:
            self.process.wait(timeout=60)
            raise RuntimeError(f"no start: {words} exit {self.process.returncode}\n{self.text()}")
        self.host = "127.0.0.1"
        self.port, self.admin_port = (int(word.rsplit(":", 1)[1]) for word in (words[1], words[3]))
        return self


@unittest.skipIf(os.environ["TV_SYSTEMD"] != "1", "this build asks no service manager")
class SocketsTest(unittest.TestCase):
    def setUp(self):
        self.work, self.admin = bound(), bound()
        self.addCleanup(self.work.close)
        self.addCleanup(self.admin.close)

    def test_both(self):
        with HandedDaemon([self.admin, self.work], "admin:work") as daemon:
            ports = (self.work.getsockname()[1], self.admin.getsockname()[1])
            self.assertEqual((daemon.port, daemon.admin_port), ports)
            caller, probe = Caller(daemon), Caller(daemon, admin=True)
            state = caller.session()
            self.assertEqual(caller.call("POST", verify_path(state), round_body(state)).status, 200)
            self.assertEqual(probe.call("GET", "/readyz").status, 200)
            self.assertEqual(probe.call("POST", "/v1/sessions", {"tokens": [1]}).status, 404)
            caller.close()
            probe.close()

    def test_one(self):
        """The admin listener is bound by the daemon itself then, beside its own work address."""
        with HandedDaemon([self.work], "work") as daemon:
            self.assertEqual(daemon.port, self.work.getsockname()[1])
            self.assertNotEqual(daemon.admin_port, daemon.port)
            probe = Caller(daemon, admin=True)
            self.assertEqual(probe.call("GET", "/readyz").status, 200)
            probe.close()

    def test_a_restart_refuses_nobody(self):
        """A request that comes between two daemons is answered by the second: the stop leaves the socket as it was."""
        waiting = []
        for _ in range(3):
            with HandedDaemon([self.work, self.admin], "work:admin", "--drain-grace-s", "0") as daemon:
                for sock in waiting:
                    answer = Reader(sock).answer("GET", "/healthz")
                    self.assertEqual(answer.status, 200)
                    sock.close()
                self.assertEqual(daemon.stop(signal.SIGTERM), 0)
            waiting = [socket.create_connection(self.work.getsockname(), timeout=60) for _ in range(5)]
            for sock in waiting:
                sock.sendall(request_bytes("GET", "/healthz"))
        for sock in waiting:
            sock.close()

    def refused(self, socks, names, *options):
        command = [os.environ["TREEVERIFYD_FIXED"], "--model", "m", "--listen", "127.0.0.1:0", *options]
        process = handed(command, socks, names, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        _, error = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 78, error)
        return error

    def test_what_is_no_listener(self):
        self.assertIn("named other", self.refused([self.work], "other"))
        self.assertIn("each once", self.refused([self.work, self.admin], "work:work"))
        with bound(listen=False) as sock:
            self.assertIn("the work socket that was handed over", self.refused([sock], "work"))
        with bound(kind=socket.SOCK_DGRAM) as sock:
            self.assertIn("the admin socket that was handed over", self.refused([sock], "admin"))
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as sock:
            sock.bind(os.path.join(folder, "s"))
            sock.listen(1)
            self.assertIn("the work socket that was handed over", self.refused([sock], "work"))

    def test_other_addresses_need_keys(self):
        """Where a socket is bound decides, not what `listen` says."""
        with bound("0.0.0.0") as sock:
            self.assertIn("needs an api_key_file", self.refused([sock], "work"))
            self.assertIn("needs an api_key_file", self.refused([sock], "admin"))
            with tempfile.NamedTemporaryFile("w") as keys:
                keys.write("alice:verify:alice-secret-0123456789\n")
                keys.flush()
                with HandedDaemon([sock], "work", "--api-key-file", keys.name) as daemon:
                    self.assertIn("NOT ENCRYPTED", daemon.text())


class UnitsTest(unittest.TestCase):
    """systemd's own word on the units, where its tools are."""

    def test_verify(self):
        """All of them together are clean, with a program in the place of the one that is not installed here."""
        if shutil.which("systemd-analyze") is None:
            self.skipTest("systemd-analyze is not installed")
        with tempfile.TemporaryDirectory() as folder:
            names = ("treeverifyd.service", "treeverifyd.socket", "treeverifyd-admin.socket")
            for name in names:
                source = os.path.join(UNITS, name)
                self.copy(source if os.path.exists(source) else os.path.join(SOURCES, name), os.path.join(folder, name))
            dropins = os.path.join(folder, "treeverifyd.service.d")
            os.mkdir(dropins)
            self.copy(os.path.join(UNITS, "gpu.conf"), os.path.join(dropins, "gpu.conf"))
            paths = [os.path.join(folder, name) for name in names]
            env = dict(os.environ, SYSTEMD_UNIT_PATH=f"{folder}:")
            done = subprocess.run(
                ["systemd-analyze", "verify", "--man=no", *paths], capture_output=True, text=True, env=env
            )
        own = [line for line in done.stderr.split("\n") if "treeverifyd" in line or "gpu.conf" in line]
        self.assertEqual((done.returncode, own), (0, []), done.stderr)

    def copy(self, source, target):
        with open(source) as unit, open(target, "w") as file:
            file.write(re.sub(r"^(ExecStart(?:Pre)?)=\S+", r"\1=/bin/true", unit.read(), flags=re.M))

    def test_what_the_daemon_relies_on(self):
        """Names of descriptors, of credentials, and of devices."""
        for name, descriptor in (("treeverifyd", "work"), ("treeverifyd-admin", "admin")):
            with open(os.path.join(SOURCES, f"{name}.socket")) as file:
                self.assertIn(f"\nFileDescriptorName={descriptor}\n", file.read())
        with open(os.path.join(UNITS, "treeverifyd.service")) as file:
            text = file.read()
        for name in ("api_keys", "tls_cert", "tls_key"):
            self.assertRegex(text, rf"(?m)^LoadCredential={name}:/etc/treeverify/")
            self.assertIn(f"\nSetCredential={name}:#\n", text)
        devices = re.findall(r"^DeviceAllow=(.*)$", text, re.M)
        groups = ("nvidia", "nvidia-frontend", "nvidiactl", "nvidia-uvm", "nvidia-caps")
        self.assertEqual(devices, [f"char-{group} rw" for group in groups])
        self.assertIn("\nDevicePolicy=closed\n", text)
        with open(os.path.join(UNITS, "gpu.conf")) as file:
            self.assertRegex(file.read(), r"(?m)^ExecStartPre=/\S+/treeverifyd --config \S+ --check-gpu$")


if __name__ == "__main__":
    unittest.main(verbosity=1)
