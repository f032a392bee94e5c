"""The units as they are shipped, under a systemd that really runs: sandbox, readiness, credentials, sockets, stop.

systemd is the first process of namespaces of its own (tests/support/boot.sh). Where that cannot be had (no root, no
systemd, no control groups, nested too deeply) the test is skipped, and says why; it judges nothing but the daemon.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import unittest

import harness  # noqa: F401  (the folder of certs)
from certs import Authority

UNITS = os.environ["TV_UNITS"]
PROGRAM = os.environ["TREEVERIFYD"]
MODEL = os.environ["TV_MODEL_DIR"]
HERE = os.path.dirname(os.path.abspath(__file__))
SOURCES = os.path.join(HERE, "..", "..", "deploy", "systemd")
BOOT = os.path.join(HERE, "..", "support", "boot.sh")
BOOT_S, LIMIT_S = 30, 150  # until the first word, of the whole run: on a slow processor
NAMESPACES = ("--fork", "--pid", "--mount", "--uts", "--ipc", "--net", "--cgroup", "--kill-child")
SETUP = range(200, 250)  # exit codes of systemd's own, when the kernel refuses it a part of the sandbox

# What a service of this machine can rely on; the host's own units are out of sight.
STUBS = {
    "default.target": "[Unit]\nDefaultDependencies=no\nRequires=check.service\n",
    "check.service": (
        "[Unit]\nDefaultDependencies=no\n[Service]\nType=oneshot\nExecStart=/bin/bash /files/check.sh\n"
        "ExecStopPost=/bin/systemctl --force --no-block exit 3\n"
        "StandardOutput=file:/files/said\nStandardError=inherit\n"
    ),
    **{f"{name}.target": "[Unit]\nDefaultDependencies=no\n" for name in ("sysinit", "basic", "shutdown", "sockets", "network")},
}

# Each line of what it says is a name and a value.
CHECK = r"""
cd /files
show() { systemctl show treeverifyd.service -p "$1" --value; }
config() { { echo "model = /files/model"; echo "threads = 1"; printf '%s\n' "$@"; } >/etc/treeverify/treeverifyd.conf; }
mkdir -p /etc/treeverify
echo booted yes

config
systemctl start treeverifyd.service; echo "plain $?"
echo "plain_status $(show ExecMainStatus)"
echo "status $(show StatusText)"
echo "ready $(curl -sS http://127.0.0.1:8472/readyz)"
pid=$(show MainPID)
echo "user $(ps -o user= -p "$pid")"
for field in CapEff CapBnd NoNewPrivs Seccomp; do
    echo "$field $(sed -n "s/^$field:[[:space:]]*//p" "/proc/$pid/status")"
done
echo "maps $(wc -l <"/proc/$pid/uid_map")"
echo "writes $(nsenter -t "$pid" -m -- sh -c 'for f in /usr/x /etc/x /files/x /x; do touch $f 2>/dev/null && echo $f; done; true')"
systemctl reload treeverifyd.service; echo "reload $?"
systemctl stop treeverifyd.service; echo "stop $?"
echo "stop_result $(show Result) $(show ExecMainStatus)"

cp secrets/* /etc/treeverify/
config "api_key_file = credential:api_keys" "tls_cert = credential:tls_cert" "tls_key = credential:tls_key"
systemctl start treeverifyd.service; echo "secrets $?"
pid=$(show MainPID)
echo "secrets_ready $(curl -sS --cacert ca.pem https://127.0.0.1:8472/readyz)"
echo "secrets_denied $(curl -sS --cacert ca.pem -o /dev/null -w '%{http_code}' https://127.0.0.1:8471/v1/model)"
echo "secrets_modes $(nsenter -t "$pid" -m -- stat -c %U:%a /run/credentials/treeverifyd.service/api_keys)"
systemctl stop treeverifyd.service
rm /etc/treeverify/api_keys
systemctl start treeverifyd.service; echo "missing $?"
echo "missing_status $(show ExecMainStatus) $(show NRestarts)"
systemctl reset-failed treeverifyd.service

config
systemctl start treeverifyd.socket treeverifyd-admin.socket; echo "sockets $?"
echo "idle $(systemctl is-active treeverifyd.service)"
echo "first $(curl -sS http://127.0.0.1:8471/healthz)"
echo "busy $(systemctl is-active treeverifyd.service)"
systemctl restart treeverifyd.service &
answered=0
for _ in 1 2 3 4 5 6 7 8; do
    curl -sS --max-time 60 -o /dev/null http://127.0.0.1:8471/healthz && answered=$((answered + 1))
done
wait
echo "answered $answered"
systemctl stop treeverifyd.service treeverifyd.socket treeverifyd-admin.socket

cp -r dropins /etc/systemd/system/treeverifyd.service.d
systemctl daemon-reload
systemctl start treeverifyd.service; echo "gpu $?"
echo "gpu_status $(systemctl show treeverifyd.service -p ExecStartPre | sed 's/.*status=\([0-9]*\).*/\1/')"
echo end yes
"""


class BootedTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if os.environ["TV_SYSTEMD"] != "1" or os.environ.get("TV_TLS") != "1":
            raise unittest.SkipTest("this build has no libsystemd, or no TLS")
        for program in ("unshare", "pivot_root", "nsenter", "systemctl", "curl", "ps"):
            if shutil.which(program, path=os.environ["PATH"] + ":/usr/sbin:/sbin") is None:
                raise unittest.SkipTest(f"{program} is not installed")
        if os.geteuid() != 0 or not os.path.exists("/lib/systemd/systemd"):
            raise unittest.SkipTest("root and systemd are needed")
        cls.said = cls.boot()
        if "booted" not in cls.said:
            raise unittest.SkipTest(f"systemd cannot be started here: {cls.error[-300:]!r}")
        status = int(cls.said.get("plain_status", "0"))
        if status in SETUP:
            raise unittest.SkipTest(f"the kernel refuses a part of the sandbox here: exit {status}")

    @classmethod
    def files(cls, folder):
        """What the machine sees as /files, and its units."""
        units, files = os.path.join(folder, "units"), os.path.join(folder, "files")
        for path in (units, os.path.join(files, "secrets"), os.path.join(files, "dropins"), os.path.join(folder, "root")):
            os.makedirs(path)
        # nobody's in particular: the service has a user of its own
        os.chmod(files, 0o755)
        for name, text in STUBS.items():
            cls.write(os.path.join(units, name), text)
        for name in ("treeverifyd.service", "treeverifyd.socket", "treeverifyd-admin.socket"):
            source = os.path.join(UNITS, name)
            cls.unit(source if os.path.exists(source) else os.path.join(SOURCES, name), os.path.join(units, name))
        cls.unit(os.path.join(UNITS, "gpu.conf"), os.path.join(files, "dropins", "gpu.conf"))
        shutil.copy(PROGRAM, os.path.join(files, "treeverifyd"))
        shutil.copytree(MODEL, os.path.join(files, "model"))
        authority = Authority(os.path.join(files))
        cert, key = authority.issue("server")
        shutil.copy(cert, os.path.join(files, "secrets", "tls.crt"))
        shutil.copy(key, os.path.join(files, "secrets", "tls.key"))
        cls.write(os.path.join(files, "secrets", "api_keys"), "alice:verify:alice-secret-0123456789\n")
        cls.write(os.path.join(files, "check.sh"), CHECK)
        return units, files

    @staticmethod
    def write(path, text):
        with open(path, "w") as file:
            file.write(text)

    @classmethod
    def unit(cls, source, target):
        """As shipped, but for where the program is."""
        with open(source) as file:
            cls.write(target, re.sub(r"^(ExecStart(?:Pre)?)=\S+", r"\1=/files/treeverifyd", file.read(), flags=re.M))

    @classmethod
    def boot(cls):
        with tempfile.TemporaryDirectory() as folder:
            units, files = cls.files(folder)
            command = ["unshare", *NAMESPACES, "bash", BOOT, os.path.join(folder, "root"), units, files]
            env = dict(os.environ, PATH=os.environ["PATH"] + ":/usr/sbin:/sbin")
            machine = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
            for limit_s in (BOOT_S, LIMIT_S):
                try:
                    machine.wait(timeout=limit_s)
                    break
                except subprocess.TimeoutExpired:
                    if "booted" not in cls.words(files):
                        break  # a systemd that cannot go on stands still
            if machine.poll() is None:
                machine.send_signal(signal.SIGKILL)  # and with it all that is in there
            cls.error, _ = machine.communicate()
            return cls.words(files)

    @staticmethod
    def words(files):
        try:
            with open(os.path.join(files, "said")) as file:
                lines = file.read().split("\n")
        except OSError:
            lines = []
        return dict(line.split(" ", 1) for line in lines if " " in line)

    def word(self, name):
        self.assertIn(name, self.said, self.said)
        return self.said[name]

    def test_the_sandbox_lets_it_work(self):
        """Ready when systemd says so, as a user without a capability, who can write nowhere."""
        self.assertEqual(self.word("plain"), "0")
        self.assertEqual(self.word("status"), "serving on http://127.0.0.1:8471")
        self.assertTrue(json.loads(self.word("ready"))["ready"])
        self.assertNotEqual(self.word("user").strip(), "root")
        for field in ("CapEff", "CapBnd"):
            self.assertEqual(int(self.word(field), 16), 0)
        self.assertEqual((self.word("NoNewPrivs"), self.word("Seccomp")), ("1", "2"))
        self.assertEqual(self.word("writes").strip(), "")

    def test_reload_and_stop(self):
        self.assertEqual((self.word("reload"), self.word("stop")), ("0", "0"))
        self.assertEqual(self.word("stop_result"), "success 0")

    def test_credentials(self):
        """Keys and certificate reach the service alone; one that is missing is no start without it, and no restarts."""
        self.assertEqual(self.word("secrets"), "0")
        self.assertTrue(json.loads(self.word("secrets_ready"))["ready"])
        self.assertEqual(self.word("secrets_denied"), "401")
        self.assertRegex(self.word("secrets_modes"), "^[^:]+:4[04]0$")
        self.assertEqual((self.word("missing"), self.word("missing_status")), ("1", "78 0"))

    def test_sockets(self):
        """Who comes first starts it, and nobody is refused by a restart."""
        self.assertEqual((self.word("sockets"), self.word("idle")), ("0", "inactive"))
        self.assertEqual((self.word("first"), self.word("busy")), ('{"status":"ok"}', "active"))
        self.assertEqual(self.word("answered"), "8")

    def test_gpu_check(self):
        """The drop-in for hosts with a GPU ends the start of one without, before a model is read."""
        if os.path.exists("/dev/nvidiactl"):
            self.skipTest("there is a GPU")
        self.assertEqual((self.word("gpu"), self.word("gpu_status")), ("1", "69"))
        self.assertEqual(self.word("end"), "yes")


if __name__ == "__main__":
    unittest.main(verbosity=1)
