"""`pip install ./clients/python` into a fresh environment, then the README's drafter against a running daemon.

The environment sees the system's packages, so that nothing is fetched; skipped where it cannot be made (Debian:
python3-venv, python3-setuptools, python3-wheel).
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile

import pytest
from harness import ROOT, DaemonTest, readme_code, url_of

import treeverify as tv

for needed in ("venv", "ensurepip", "setuptools", "wheel"):
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed", allow_module_level=True)


class InstallTest(DaemonTest):
    def run_in(self, folder, *command):
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
        got = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240)
        self.assertEqual(got.returncode, 0, f"{command}: {got.stdout} {got.stderr}")
        return got.stdout

    def test_installed_package(self):
        with tempfile.TemporaryDirectory() as folder:
            source = os.path.join(folder, "source")  # a build leaves files beside what it builds
            shutil.copytree(os.path.join(ROOT, "clients", "python"), source, ignore=shutil.ignore_patterns("__pycache__"))
            self.run_in(folder, sys.executable, "-m", "venv", "--system-site-packages", "fresh")
            python = os.path.join(folder, "fresh", "bin", "python")
            options = ("--no-index", "--no-deps", "--no-build-isolation", "--quiet")
            self.run_in(folder, python, "-m", "pip", "install", *options, "./source")
            where = self.run_in(folder, python, "-c", "import treeverify; print(treeverify.__file__)").strip()
            self.assertTrue(where.startswith(os.path.join(folder, "fresh")), where)
            self.assertTrue(os.path.exists(os.path.join(os.path.dirname(where), "py.typed")))
            command = os.path.join(folder, "fresh", "bin", "treeverify-py")
            self.assertEqual(self.run_in(folder, command, "--version").strip(), tv.__version__)
            said = self.run_in(folder, python, "-c", readme_code(url_of(self.daemon)))
        self.assertEqual(said, bytes(self.plain(list(b"Holy, holy, holy, holy"), 61)[1:]).decode())
