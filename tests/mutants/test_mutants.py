"""What a fault is counted as when its build or its test takes too long: a meson that hangs stands for both."""

import os
import sys
import tempfile
import unittest

import mutants

FAULT = ("hangs", "one.c", "old", "new", ["first", "second"])
# leaves its result, or none, and then ends, or does not
MESON = """#!/bin/sh
log=$3/meson-logs/testlog.json
case $4:%s in
*:build) sleep 60 ;;
second:test) : > "$log"; sleep 60 ;;
*) echo '{"result": "OK"}' > "$log" ;;
esac
"""


class Late(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = folder.name
        self.addCleanup(os.environ.__setitem__, "PATH", os.environ["PATH"])
        os.environ["PATH"] = self.root + os.pathsep + os.environ["PATH"]
        self.addCleanup(setattr, mutants, "TEST_S", mutants.TEST_S)
        mutants.TEST_S = 1
        os.makedirs(os.path.join(self.root, "build", "meson-logs"))
        self.source = os.path.join(self.root, "one.c")
        with open(self.source, "w", encoding="utf-8") as file:
            file.write("old")

    def planted(self, what_hangs):
        meson = os.path.join(self.root, "meson")
        with open(meson, "w", encoding="utf-8") as file:
            file.write(MESON % what_hangs)
        os.chmod(meson, 0o755)
        copy = mutants.Copy.__new__(mutants.Copy)  # without a real build
        copy.source, copy.build = self.root, os.path.join(self.root, "build")
        copy.log = os.path.join(copy.build, "meson-logs", "testlog.json")
        said = copy.plant(FAULT)
        self.assertEqual(mutants.read(self.source), "old")
        return said

    def test_a_test_without_an_end_is_a_fault_caught_by_time(self):
        self.assertEqual(self.planted("test"), (True, f"second: {mutants.LATE}"))

    def test_a_build_without_an_end_is_none(self):
        caught, said = self.planted("build")
        self.assertFalse(caught)
        self.assertIn("does not build", said)

    def test_tests_that_end_are_asked_in_turn(self):
        self.assertEqual(self.planted("nothing"), (False, "seen by none of first, second"))


if __name__ == "__main__":
    sys.exit(unittest.main())
