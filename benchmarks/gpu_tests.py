"""The tests marked `gpu`: how many passed, failed and were skipped, and their output.

    python -m benchmarks.gpu_tests [--quick] [--json FILE]

Owns: which files have such tests, and counting. Does not own: the tests.

Only files that name the mark are collected: to collect all takes longer than such tests do, and
needs packages that the machine with the card may not have.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import tyro

from benchmarks.report import SavedResults, SideResult
from engine.plan.cost.machine import gpus

ROOT = Path(__file__).resolve().parents[1]
MARK = "mark.gpu"
_NOT_COLLECTED = ("vllm", "peers", "browser")
"""Folders of tests that need what is not there."""
_NOTHING_FAILED = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


def marked_files(tests: Path) -> list[Path]:
    """The files of tests that name the mark."""
    files: list[Path] = []
    for path in sorted(tests.rglob("test_*.py")):
        folder = path.relative_to(tests).parts[0]
        if folder not in _NOT_COLLECTED and MARK in path.read_text(encoding="utf-8"):
            files.append(path)
    return files


@dataclass(slots=True, eq=False)
class TestCounts:
    """A pytest plugin that counts outcomes, and writes them after each test: it may be killed."""

    __test__ = False
    results: SavedResults
    outcomes: Counter[str] = field(default_factory=Counter)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test's call counts; before and after it only what failed or was skipped."""
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] += 1
            self.save()

    def save(self) -> None:
        """Write the counts."""
        ran = self.outcomes["passed"] + self.outcomes["failed"]
        share = self.outcomes["passed"] / ran if ran else 0.0
        self.results.replace(
            SideResult(name="tests marked gpu that passed", value=share, unit="share", goal=1.0),
            SideResult(name="passed", value=self.outcomes["passed"], unit="tests"),
            SideResult(name="failed", value=self.outcomes["failed"], unit="tests"),
            SideResult(name="skipped", value=self.outcomes["skipped"], unit="tests"),
        )


def main(*, quick: bool = False, json: Path | None = None) -> None:
    """Run the tests. Ends with pytest's exit code, 0 also where all are skipped.

    Args:
        quick: of the first file alone.
        json: also write the results there, as a list of {name, value, unit, goal, holds}.
    """
    os.chdir(ROOT)
    if gpus():
        # Workers with a GPU have interpreters of their own: a fork cannot use CUDA if its parent
        # has looked for a device.
        os.environ["TEST_FORKS"] = "0"
    counts = TestCounts(SavedResults(json))
    files = marked_files(ROOT / "tests")
    if quick:
        files = files[:1]
    options = ["-m", "gpu", "-q", "-p", "no:cacheprovider", "--durations=10"]
    code = pytest.main([*options, *map(str, files)], plugins=[counts])
    counts.save()
    counts.results.show("tests marked gpu")
    sys.exit(0 if code in _NOTHING_FAILED else int(code))


if __name__ == "__main__":
    tyro.cli(main)
