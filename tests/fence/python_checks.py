"""What machines can check of the Python package (mypy --strict, and ruff where there is one), its tests and the benchmarks
(ruff). usage: python_checks.py types|lint SOURCE_ROOT. Exit 77 (skip) without the tool; Debian 12 packages mypy but not
ruff. Changes nothing: mypy's cache goes to a temporary folder.
"""

import os
import shutil
import subprocess
import sys
import tempfile

SKIP = 77


def main():
    check, root = sys.argv[1:]
    package = os.path.join(root, "clients", "python")
    tool = {"types": "mypy", "lint": "ruff"}[check]
    program = shutil.which(tool)
    if program is None:
        print(f"{tool} is not installed")
        return SKIP
    if check == "lint":
        config = ["--config", os.path.join(package, "pyproject.toml"), "--no-cache"]
        folders = [package, os.path.join(root, "tests", "python"), os.path.join(root, "tests", "bench")]
        return subprocess.run([program, "check", *config, *folders], cwd=root, check=False).returncode
    with tempfile.TemporaryDirectory() as cache:
        command = [program, "--strict", "--cache-dir", cache, "--python-executable", sys.executable, "src"]
        return subprocess.run(command, cwd=package, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
