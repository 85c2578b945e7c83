"""A plugin of pytest: what each test came to, as lines of JSON in a file; and no test after a time.

Owns: these lines. Does not own: what is made of them (reach.py, trials.py). Loaded by `-p` in a
copy of the tree; where the variables are not set it does nothing.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tests.kit.parallel_tests import NUMBER

RECORDS = "MUTANTS_RECORDS"
"""The file."""
SECONDS = "MUTANTS_SECONDS"
"""After so many seconds of tests no other begins."""


class OutcomeRecords:
    """One line for each test that has ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: dict[str, float] = {}
        self._unwell: set[str] = set()

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up setup, call and teardown. A test that was skipped has not passed."""
        if NUMBER in os.environ:  # a test process, whose reports the first one has, too
            return
        test = report.nodeid
        self._seconds[test] = self._seconds.get(test, 0.0) + report.duration
        if not report.passed:
            self._unwell.add(test)
        if report.failed or report.when == "teardown":
            self._append(test, failed=report.failed)

    def _append(self, test: str, *, failed: bool) -> None:
        passed = test not in self._unwell
        line = {"test": test, "passed": passed, "failed": failed}
        line["seconds"] = round(self._seconds[test], 3)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class TimeBudget:
    """Leaves out the tests whose turn comes too late. They count as neither passed nor failed."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end: float | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        del item
        now = time.monotonic()
        if self._end is None:  # collecting does not count
            self._end = now + self._seconds
        return True if now >= self._end else None


def pytest_configure(config: pytest.Config) -> None:
    """Register what the environment asks for."""
    path, seconds = os.environ.get(RECORDS), os.environ.get(SECONDS)
    if path:
        config.pluginmanager.register(OutcomeRecords(Path(path)))
    if seconds:
        config.pluginmanager.register(TimeBudget(float(seconds)))
