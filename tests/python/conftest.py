"""What pytest is told besides clients/python/pyproject.toml: where the package and the tests' helpers are, and that a file
which cannot run here ends as Meson wants it."""

import os
import sys

import pytest

SKIPPED = 77
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path[:0] = [os.path.join(ROOT, "tests", "support"), os.path.join(ROOT, "clients", "python", "src")]


def pytest_sessionfinish(session, exitstatus):
    """A run in which every file was skipped while it was imported is a skipped test, not one without tests."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and reporter.stats.get("skipped"):
        session.exitstatus = SKIPPED
