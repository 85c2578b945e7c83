"""A project that `dataflow init` makes runs as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.processes import COMMAND_LINE, call_python
from tests.kit.runs import metrics

pytestmark = pytest.mark.timeout(240)


@pytest.mark.long
def test_the_three_commands_of_a_new_project_pass(tmp_path: Path) -> None:
    made = call_python("-c", COMMAND_LINE, "init", "mine", cwd=tmp_path)
    assert (made.returncode, made.stderr) == (0, "")
    commands = [line.strip() for line in made.stdout.splitlines() if line.startswith("    ")]
    assert [command.split()[0] for command in commands] == ["cd", "dataflow", "pytest", "dataflow"]
    folder = tmp_path / "mine"
    check = call_python("-P", "-c", COMMAND_LINE, *commands[1].split()[1:], cwd=folder)
    assert (check.returncode, check.stderr) == (0, "")
    assert "mine: 10 nodes, every rule holds" in check.stdout
    tests = call_python("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=folder)
    assert tests.returncode == 0, tests.stdout
    assert "13 passed, 2 skipped" in tests.stdout
    trained = call_python("-P", "-c", COMMAND_LINE, *commands[3].split()[1:], cwd=folder)
    assert trained.returncode == 0, trained.stderr
    learned(folder / "runs" / "mine")


def learned(run: Path) -> None:
    """The last Step's answers are digits, and so are the greedy ones to other prompts."""
    steps = metrics(run)
    assert len(steps) == 20
    assert steps[0]["reward/digits/mean"] < 0.5 < 0.8 < steps[-1]["reward/digits/mean"]
    assert steps[-1]["eval/digits"] > 0.8
