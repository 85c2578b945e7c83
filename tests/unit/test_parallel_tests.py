"""Tests on several processes: each runs once, and none is lost with its process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.kit.processes import call_python

CONFTEST = """
from tests.kit.parallel_tests import ParallelTests

def pytest_configure(config):
    config.pluginmanager.register(ParallelTests(2))
"""
TESTS = """
import os, signal
from pathlib import Path
import pytest

HERE = Path(__file__).parent

@pytest.fixture(scope="module")
def process():
    yield os.getpid()
    (HERE / f"torn.{os.getpid()}").touch()

@pytest.mark.parametrize("number", range(30))
def test_it(number, process, tmp_path):
    (HERE / f"ran.{number}").open("x").close()
    assert process == os.getpid()
    print("printed by", number)
    exec(ENDS.get(number, "pass"))
"""
ENDS = {
    0: "assert number < 0, 'too great'",
    14: "os.kill(os.getpid(), signal.SIGKILL)",
    15: "os._exit(3)",
    29: "raise KeyError('the last')",
}
"""How some tests end, of which each half of them has two."""


def outcome(folder: Path, ends: dict[int, str], *words: str) -> tuple[int, str]:
    """The exit code and the output of a run of these tests."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(f"{TESTS}\nENDS = {ends}\n")
    done = call_python("-m", "pytest", "-p", "no:cacheprovider", *words, cwd=folder)
    return done.returncode, done.stdout + done.stderr


def ran(folder: Path) -> set[int]:
    return {int(path.suffix[1:]) for path in folder.glob("ran.*")}


@pytest.mark.long
def test_each_runs_once_and_fixtures_end(tmp_path: Path) -> None:
    code, text = outcome(tmp_path, {})
    assert code == 0, text
    assert "30 passed" in text
    assert ran(tmp_path) == set(range(30))
    assert len(list(tmp_path.glob("torn.*"))) == 2


@pytest.mark.long
def test_failures_and_lost_processes_are_told_and_the_others_go_on(tmp_path: Path) -> None:
    status, text = outcome(tmp_path, ENDS)
    assert status == 1
    assert "4 failed, 26 passed" in text
    assert ran(tmp_path) == set(range(30))
    failed = re.findall(r"FAILED test_it\.py::test_it\[(\d+)\]", text)
    assert sorted(map(int, failed)) == [0, 14, 15, 29]
    expected = ("too great", "the last", "its process ended with signal SIGKILL", "exit code 3")
    assert [words for words in expected if words not in text] == []
    # What a test printed is shown where it failed, and nowhere else.
    assert sorted(re.findall("printed by (.*)", text)) == ["0", "29"]


@pytest.mark.long
def test_with_x_no_further_test_begins(tmp_path: Path) -> None:
    status, text = outcome(tmp_path, dict.fromkeys(range(30), "raise ValueError"), "-x")
    assert status == 1
    assert "stopping after" in text
    assert len(ran(tmp_path)) <= 4  # two at a time, and each was told the next
