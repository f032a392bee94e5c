"""R34: how much of the host code the tests reach, by folder: lines and branches, as gcov counts them.

    coverage.py run SOURCE_ROOT BUILD   builds in BUILD with -Db_coverage, runs the suites, prints the table
    coverage.py sum SOURCE_ROOT BUILD   prints the table of what has run in BUILD so far
    coverage.py missed SOURCE_ROOT BUILD PATH   lines of one file that nothing has reached

Without assertions, whose failing branch nobody reaches, without the checks of sources and packages, and without those that
run alone, which take hours so; loops are as short as a sanitizer's. What a process
did that was killed, or left by _exit, is not counted. A file that several programs contain counts once: a line or a
branch is reached when it is in any of them.
"""

import collections
import json
import os
import subprocess
import sys

HOST = ("proto/", "daemon/", "kernels/", "clients/")
SUITES_NOT = ("fence", "packages", "bench", "alone")
# counters that threads share have to be atomic: gcc ends loops by them, and a loop whose counter another thread moved runs on
OPTIONS = ("-Dcuda=disabled", "-Db_coverage=true", "-Db_ndebug=true", "-Doptimization=1", "-Dc_args=-fprofile-update=atomic")


def collected(source, build):
    """{path: ({line: reached}, {(line, branch): reached})} of the host code."""
    found = collections.defaultdict(lambda: ({}, {}))
    for folder, _, leaves in os.walk(build):
        counted = sorted(leaf for leaf in leaves if leaf.endswith(".gcno"))
        for at in range(0, len(counted), 20):
            command = ["gcov", "--json-format", "--stdout", "--branch-probabilities", *counted[at : at + 20]]
            output = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout
            for document in output.splitlines():
                if document.startswith("{"):
                    add(found, source, json.loads(document))
    return found


def add(found, source, document):
    for file in document["files"]:
        path = os.path.relpath(os.path.join(document["current_working_directory"], file["file"]), source)
        if not path.startswith(HOST):
            continue
        lines, branches = found[path]
        for line in file["lines"]:
            number = line["line_number"]
            lines[number] = lines.get(number, False) or line["count"] > 0
            for index, branch in enumerate(line["branches"]):
                branches[number, index] = branches.get((number, index), False) or branch["count"] > 0


def share(counts):
    reached, total = sum(counts), len(counts)
    return f"{reached:6} of {total:6} {100 * reached / max(total, 1):6.1f} %"


def table(found):
    folders = collections.defaultdict(lambda: ([], []))
    for path, (lines, branches) in found.items():
        for folder in (os.path.dirname(path), "everything"):
            folders[folder][0].extend(lines.values())
            folders[folder][1].extend(branches.values())
    for folder in sorted(folders, key=lambda name: (name == "everything", name)):
        lines, branches = folders[folder]
        print(f"{folder:20} lines {share(lines)}   branches {share(branches)}")


def missed(found, path):
    lines, branches = found[path]
    for number in sorted(lines):
        gone = sum(1 for (line, _), reached in branches.items() if line == number and not reached)
        if not lines[number] or gone:
            print(f"{path}:{number}: {'not reached' if not lines[number] else f'{gone} branches are not taken'}")


def run(source, build):
    if not os.path.exists(os.path.join(build, "build.ninja")):
        subprocess.run(["meson", "setup", build, source, *OPTIONS], check=True, stdout=subprocess.DEVNULL)
    suites = [word for suite in SUITES_NOT for word in ("--no-suite", suite)]
    subprocess.run(["ninja", "-C", build, "--quiet"], check=True)
    command = ["meson", "test", "-C", build, "--no-rebuild", "--timeout-multiplier", "8", *suites]
    short = {"TV_TEST_SCALE": "0.1", "TV_KDTR_GEN_ARGS": "--only h8_"}
    tests = subprocess.run(command, env={**short, **os.environ}, check=False)
    return tests.returncode


def main():
    command, source, build = sys.argv[1], os.path.abspath(sys.argv[2]), os.path.abspath(sys.argv[3])
    code = run(source, build) if command == "run" else 0
    found = collected(source, build)
    if command == "missed":
        missed(found, sys.argv[4])
    else:
        table(found)
    return code if found else 1


if __name__ == "__main__":
    sys.exit(main())
