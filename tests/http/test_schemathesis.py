"""R29: what schemathesis makes of proto/openapi.yaml, with all of its checks, against a running daemon: no finding.

The program is TV_SCHEMATHESIS, or `schemathesis` of the path (tests/run-all.sh installs one); without one the
test is skipped (exit 77). TV_TEST_SCALE says how many examples every operation gets.
"""

import os
import shutil
import subprocess
import sys
import tempfile

from harness import sized
from real import RealDaemon

HERE = os.path.dirname(os.path.abspath(__file__))
SCHEMA = os.path.join(HERE, "..", "..", "proto", "openapi.yaml")
SKIPPED = 77
ADMIN_ALONE = "^/(v1/admin/.*)?$"
BOTH = "^/(healthz|livez|health|readyz|metrics|v1/health|v1/model|v1/parity.*|v2/.*)$"
LIMIT_S = 300


def program():
    named = os.environ.get("TV_SCHEMATHESIS") or shutil.which("schemathesis")
    return named if named and os.access(named, os.X_OK) else None


def run(command, server, sessions, paths):
    """The exit code; what was found is in the output. sessions: where the sessions of good requests are made."""
    with tempfile.TemporaryDirectory() as folder:  # it keeps its examples where it is started
        shutil.copy(os.path.join(HERE, "schemathesis_hooks.py"), folder)
        env = dict(os.environ, SCHEMATHESIS_HOOKS="schemathesis_hooks", TV_SERVER=sessions, PYTHONPATH=folder)
        options = ["--checks", "all", "--seed", "20261130", "--max-examples", str(sized(2, 100)), "--no-color"]
        options += ["--request-timeout", "120", "--max-response-time", "120", "--suppress-health-check", "all", "--warnings", "off"]
        whole = [command, "--config-file", os.path.join(HERE, "schemathesis.toml"), "run", os.path.abspath(SCHEMA)]
        return subprocess.run([*whole, "--url", server, *options, *paths], cwd=folder, env=env, timeout=LIMIT_S).returncode


def main():
    command = program()
    if command is None:
        print("schemathesis is not installed")
        return SKIPPED
    with RealDaemon("--max-sessions", "64", "--taps", "0,2") as daemon:
        work = f"http://{daemon.host}:{daemon.port}"
        admin = f"http://{daemon.host}:{daemon.admin_port}"
        codes = [run(command, work, work, ["--exclude-path-regex", ADMIN_ALONE])]
        codes.append(run(command, admin, work, ["--include-path-regex", BOTH]))
        codes.append(run(command, admin, work, ["--include-path-regex", ADMIN_ALONE]))  # drains: last
        assert daemon.process.poll() is None, "the daemon has ended"
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
