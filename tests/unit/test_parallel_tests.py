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
    if number in NUMBERS:
        CODE
"""


def outcome(folder: Path, code: str = "pass", numbers: str = "()", *words: str) -> tuple[int, str]:
    """The exit code and the output of a run of these tests."""
    (folder / "conftest.py").write_text(CONFTEST)
    text = TESTS.replace("NUMBERS", numbers).replace("CODE", code)
    (folder / "test_it.py").write_text(text)
    done = call_python("-m", "pytest", "-p", "no:cacheprovider", *words, cwd=folder)
    return done.returncode, done.stdout + done.stderr


def ran(folder: Path) -> set[int]:
    return {int(path.suffix[1:]) for path in folder.glob("ran.*")}


def test_each_runs_once_and_fixtures_end(tmp_path: Path) -> None:
    code, text = outcome(tmp_path)
    assert code == 0, text
    assert "30 passed" in text
    assert ran(tmp_path) == set(range(30))
    assert len(list(tmp_path.glob("torn.*"))) == 2


@pytest.mark.parametrize("code,told", [
    ("assert number < 0, 'too great'", "too great"),
    ("raise KeyError(number)", "KeyError"),
    ("os.kill(os.getpid(), signal.SIGKILL)", "its process ended with signal SIGKILL"),
    ("os._exit(3)", "its process ended with exit code 3"),
])  # fmt: skip
def test_a_failure_is_told_and_the_others_go_on(tmp_path: Path, code: str, told: str) -> None:
    status, text = outcome(tmp_path, code, "(0, 14, 15, 29)")
    assert status == 1
    assert "4 failed, 26 passed" in text
    assert told in text
    assert sorted(map(int, re.findall(r"FAILED test_it\.py::test_it\[(\d+)\]", text))) == [
        0,
        14,
        15,
        29,
    ]
    assert ran(tmp_path) == set(range(30))


def test_what_a_failed_test_printed_is_shown_and_nothing_else(tmp_path: Path) -> None:
    _, text = outcome(tmp_path, "raise ValueError", "(7,)")
    assert re.findall("printed by (.*)", text) == ["7"]


def test_with_x_no_further_test_begins(tmp_path: Path) -> None:
    status, text = outcome(tmp_path, "raise ValueError", "range(30)", "-x")
    assert status == 1
    assert "stopping after" in text
    assert len(ran(tmp_path)) <= 4  # two at a time, and each was told the next
