"""The agents' demo: it runs at a tiny size, and at its own size it learns to ask."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.kit.processes import ROOT, call_python
from tests.kit.runs import Rows, metrics

sys.path.insert(0, str(ROOT / "examples"))
import agent_task


def run_demo(runs: Path, *words: object, timeout: float) -> tuple[Rows, str]:
    """The rows of both phases, and what was printed."""
    words = ("--runs", runs, *words)
    environment = {"COLUMNS": "120"}
    done = call_python("examples/demo_agent.py", *words, cwd=ROOT, env=environment, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return metrics(runs / "demo-agent"), done.stdout


@pytest.mark.timeout(180)
def test_the_agents_demo_runs_and_says_that_two_steps_are_too_few(tmp_path: Path) -> None:
    rows, printed = run_demo(tmp_path, "--steps", 2, "--warm-steps", 2, timeout=160)
    assert [(row["step"], row["phase"]) for row in rows] == [(1, 1), (2, 1), (3, 2), (4, 2)]
    assert "eval/initial/reward" in rows[2]
    assert "eval/reward" in rows[-1]
    for words in ("before RL", "after RL", "RL did not bring it to 0.85"):
        assert words in printed


@pytest.mark.long
@pytest.mark.timeout(900)  # other tests use the cores meanwhile
def test_the_model_learns_to_ask(tmp_path: Path) -> None:
    rows, printed = run_demo(tmp_path, "--seed", 1, timeout=880)
    first = next(row for row in rows if row["phase"] == 2)
    assert first["eval/initial/reward"] <= 0.2
    assert rows[-1]["eval/reward"] >= 0.85
    assert "did not bring" not in printed


def test_the_phone_book_rewards_only_what_was_asked_for() -> None:
    book = agent_task.PhoneBook()
    book.reset(seed=3, key="f")
    answer, reward, done = book.step({"content": "?f\n"})
    assert (answer[0], reward, done) == ("=", None, False)
    assert book.step({"content": f"{answer[1]}\n"}) == ("", 1.0, True)
    book.reset(seed=3, key="f")
    assert book.step({"content": f"{answer[1]}\n"}) == ("", 0.0, True)
    book.reset(seed=3, key="f")
    assert book.step({"content": "?g\n"}) == ("", 0.0, True)
