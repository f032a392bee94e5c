"""R33: do the tests bite? Plants every fault of faults.py in a copy of the sources and asks the tests named for it.

    mutants.py run SOURCE_ROOT [NAME...]   one line a fault: caught by which test, or NOT CAUGHT; then the sum
    mutants.py fit SOURCE_ROOT             does every fault still fit the sources, and are its tests there?

A fault that does not compile, or not within the time that one test has, counts as not caught; one with which the test
itself does not end by then counts as caught by time. The copy is under TMPDIR (some minutes, one build); the sources
themselves are only read. Exit 0: at least 30 faults and 95 % of them caught.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile

from faults import FAULTS

FAULTS_LEAST, CAUGHT_LEAST = 30, 0.95
TEST_S, STOP_S = 600, 20
LATE = f"no end in {TEST_S} s"
CAUGHT = ("FAIL", "TIMEOUT", "ERROR", LATE)


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def planted(text, old, new):
    if text.count(old) != 1:
        raise ValueError(f"stands in it {text.count(old)} times: {old!r}")
    return text.replace(old, new)


def tests_known(root):
    names = set()
    for folder, _, leaves in os.walk(os.path.join(root, "tests")):
        if "meson.build" in leaves:
            names.update(re.findall(r"\btest\('([^']+)'", read(os.path.join(folder, "meson.build"))))
    return names


def fit(root):
    """What is wrong with the list, as lines."""
    known, wrong, names = tests_known(root), [], set()
    for name, path, old, new, tests in FAULTS:
        try:
            if planted(read(os.path.join(root, path)), old, new) and old == new:
                raise ValueError("changes nothing")
        except (OSError, ValueError) as error:
            wrong.append(f"{name}: {path}: {error}")
        wrong += [f"{name}: there is no test {test}" for test in tests if test not in known]
        wrong += [f"{name}: stands twice in the list"] * (name in names)
        names.add(name)
    if len(FAULTS) < FAULTS_LEAST:
        wrong.append(f"{len(FAULTS)} faults are fewer than {FAULTS_LEAST}")
    return wrong


def within(command, seconds):
    """Whether it comes to its end by itself; it is ended else."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        try:
            process.wait(seconds)
            return True
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # meson ends its tests, which are groups of their own
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        return False


class Copy:
    """The sources and a build of them, in a folder that goes with it."""

    def __init__(self, root, folder):
        self.source, self.build = os.path.join(folder, "source"), os.path.join(folder, "source", "build")
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True).stdout
        os.mkdir(self.source)
        subprocess.run(["cp", "--parents", "--target-directory", self.source, *listed.decode().strip("\0").split("\0")], cwd=root, check=True)
        subprocess.run(["meson", "setup", self.build, self.source, "-Dcuda=disabled"], check=True, stdout=subprocess.DEVNULL)
        self.log = os.path.join(self.build, "meson-logs", "testlog.json")

    def ask(self, tests):
        """Results by test as far as they were asked: the first that fails is the last. None: it does not build."""
        results = {}
        for test in tests:
            if os.path.exists(self.log):
                os.remove(self.log)
            ended = within(["meson", "test", "-C", self.build, test], TEST_S)
            if not os.path.exists(self.log):  # which is made once all is built
                return None
            found = [json.loads(line)["result"] for line in read(self.log).splitlines()] if ended else [LATE]
            results[test] = found[0] if found else "NONE"
            if results[test] in CAUGHT:
                break
        return results

    def plant(self, fault):
        """Plants it, asks, takes it away: (caught, what was said)."""
        _, path, old, new, tests = fault
        at = os.path.join(self.source, path)
        text = read(at)
        with open(at, "w", encoding="utf-8") as file:
            file.write(planted(text, old, new))
        try:
            results = self.ask(tests)
        finally:
            with open(at, "w", encoding="utf-8") as file:
                file.write(text)
        if results is None:
            return False, f"does not build in {TEST_S} s"
        last = list(results)[-1]
        caught = results[last] in CAUGHT
        return caught, f"{last}: {results[last]}" if caught else f"seen by none of {', '.join(results)}"


def run(root, names):
    faults = [fault for fault in FAULTS if not names or fault[0] in names]
    caught, sound = 0, {}
    with tempfile.TemporaryDirectory(prefix="mutants.") as folder:
        copy = Copy(root, folder)
        for fault in faults:
            for test in fault[4]:  # a test that fails by itself sees everything
                if test not in sound:
                    sound[test] = copy.ask([test])
                if sound[test] != {test: "OK"}:
                    print(f"{test} does not pass without a fault: {sound[test]}")
                    return 1
            is_caught, said = copy.plant(fault)
            caught += is_caught
            print(f"{'caught' if is_caught else 'NOT CAUGHT':10} {fault[0]} ({fault[1]}): {said}", flush=True)
    print(f"{caught} of {len(faults)} faults are caught ({100 * caught / max(len(faults), 1):.0f} %)")
    return 0 if names or (len(faults) >= FAULTS_LEAST and caught >= CAUGHT_LEAST * len(faults)) else 1


def main():
    command, root, names = sys.argv[1], os.path.abspath(sys.argv[2]), sys.argv[3:]
    wrong = fit(root)
    for line in wrong:
        print(line)
    if wrong or command == "fit":
        print(f"{len(FAULTS)} faults, {len(wrong)} complaints")
        return 1 if wrong else 0
    return run(root, names)


if __name__ == "__main__":
    sys.exit(main())
