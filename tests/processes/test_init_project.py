"""A project that `dataflow init` makes runs as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.processes import COMMAND_LINE, call_python
from tests.kit.runs import metrics

pytestmark = pytest.mark.timeout(240)


@pytest.mark.long
def test_a_new_projects_run_learns(tmp_path: Path) -> None:
    """By the last command that `init` names: the answers become digits, greedy ones to other
    prompts, too. The other commands: scripts/newcomer_steps.py.
    """
    begun = call_python("-c", COMMAND_LINE, "init", "mine", cwd=tmp_path)
    assert (begun.returncode, begun.stderr) == (0, "")
    commands = [line.split() for line in begun.stdout.splitlines() if line.startswith("    ")]
    assert [command[0] for command in commands] == ["cd", "dataflow", "pytest", "dataflow"]
    folder = tmp_path / "mine"
    trained = call_python("-P", "-c", COMMAND_LINE, *commands[3][1:], cwd=folder)
    assert trained.returncode == 0, trained.stderr
    steps = metrics(folder / "runs" / "mine")
    assert len(steps) == 20
    assert steps[0]["reward/digits/mean"] < 0.5 < 0.8 < steps[-1]["reward/digits/mean"]
    assert steps[-1]["eval/digits"] > 0.8
