"""Every example and every command of the README runs as it stands, at a small size.

Owns: that they run and do what they say. Does not own: whether anything is learned.
Examples run in this process, one after another (torch is imported once); one of them runs as a
script, as a reader would start it.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from dataflow import Columns, Reward, Rollout
from dataflow.batch import Batch, Keys
from engine.api import Result
from engine.cli import main as dataflow

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
ADDED = ("user_operator", "user_advantage", "user_loss", "user_reward")
"""Examples that add one thing of the user's own."""

RUNS = (
    *ADDED,
    "run_trl_reward",
    "verl_parquet",
    "ppo_edit",
    "dapo",
    "several_rewards",
    "async_lag",
)
"""Examples with main(steps)."""

PARTS = ("tiny", "character_model", "trl_reward", "verl_score")
"""Files that examples use."""

ELSEWHERE = ("demo", "demo_task")
"""Tested elsewhere."""

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory that sees the examples as the repository's root does."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith((str(EXAMPLES), str(tmp_path))):
            del sys.modules[name]


def rows(result: Result) -> list[dict[str, float]]:
    """The metrics of each Step."""
    return [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]


def test_every_example_is_run() -> None:
    there = {path.stem for path in EXAMPLES.glob("*.py")}
    assert there == {*RUNS, *PARTS, *ELSEWHERE, "notebook"}


@pytest.mark.parametrize("name", ADDED)
def test_what_a_user_adds_is_short_and_stands_alone(name: str) -> None:
    """Under 15 lines of code between the marks, and nothing of the four packages is touched outside
    of them.
    """
    text = (EXAMPLES / f"{name}.py").read_text()
    added = text.partition("# begin: what you add\n")[2].partition("# end\n")[0]
    lines = [
        line for line in added.splitlines() if line.strip() and not line.strip().startswith("#")
    ]
    assert 1 < len(lines) < 15
    assert "setattr" not in text
    assert "monkeypatch" not in text


def run_example(name: str, steps: int) -> tuple[ModuleType, Result]:
    module = importlib.import_module(name)
    return module, module.main(steps=steps)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long if n == "async_lag" else ()) for n in RUNS]
)
def test_example_runs(name: str, here: Path) -> None:
    _, result = run_example(name, 2)
    found = rows(result)
    assert [row["step"] for row in found] == [1, 2]
    assert all(0.0 <= row["reward/mean"] <= 2.0 for row in found)
    assert result.trained["policy"].is_dir()
    CHECKS.get(name, lambda rows: None)(found)
    undocumented = {k for k in found[0] if k != "step" and not documented(k)}
    assert undocumented == ({"policy/weight"} if name == "user_loss" else set())  # its own metric


def documented(metric: str) -> bool:
    """Whether docs/metrics.md has a name of this form."""
    names = re.findall(r"`([^`\s]+/[^`\s]*)`", (ROOT / "docs" / "metrics.md").read_text())
    return any(re.fullmatch(re.sub(r"<[^>]*>", "[^/]+", name), metric) for name in names)


def operator_changes_the_reward(found: list[dict[str, float]]) -> None:
    assert all(row["reward/mean"] > row["reward/short_digits/mean"] for row in found)


def both_rewards_are_logged(found: list[dict[str, float]]) -> None:
    for row in found:
        total = row["reward/correct/mean"] + 0.2 * row["reward/only_digits/mean"]
        assert row["reward/mean"] == pytest.approx(total, abs=1e-6)


def steps_are_full(found: list[dict[str, float]]) -> None:
    assert all(row["data/prompts"] == 8 and row["data/rows"] == 64 for row in found)
    assert min(row["select/kept"] for row in found) < 1.0
    assert all(0.0 < row["reward/has_seven/mean"] < 1.0 for row in found)


def rows_lag(found: list[dict[str, float]]) -> None:
    assert [row["policy/lag/max"] for row in found] == [0.0, 1.0]


def critic_is_trained(found: list[dict[str, float]]) -> None:
    assert all("value/squared_error" in row and "loss/clipped_policy_loss" in row for row in found)


def three_functions_are_logged(found: list[dict[str, float]]) -> None:
    names = {
        "reward/digits/mean",
        "reward/even_answer/mean",
        "reward/remote_judge/mean",
        "reward/digits/empty",
    }
    assert names <= found[0].keys()


CHECKS: dict[str, Callable[[list[dict[str, float]]], None]] = {
    "user_operator": operator_changes_the_reward,
    "user_loss": lambda found: _has(found, "loss/capped_weight_loss", "policy/weight"),
    "user_advantage": lambda found: _has(found, "time/rank_advantage"),
    "run_trl_reward": both_rewards_are_logged,
    "verl_parquet": lambda found: _has(
        found, "reward/compute_score/mean", "reward/compute_score/acc"
    ),
    "ppo_edit": critic_is_trained,
    "dapo": steps_are_full,
    "several_rewards": three_functions_are_logged,
    "async_lag": rows_lag,
}


def _has(found: list[dict[str, float]], *names: str) -> None:
    for row in found:
        assert set(names) <= row.keys()


def test_trl_and_verl_files_import_nothing_of_ours() -> None:
    for name in ("trl_reward", "verl_score"):
        text = (EXAMPLES / f"{name}.py").read_text()
        assert not re.search(
            r"^(?:from|import) (?:dataflow|operators|graphs|engine|tiny)", text, re.MULTILINE
        )


def test_user_operator_is_a_plain_function(here: Path) -> None:
    """`.fn` on columns made by hand: in a group of three, the two equal openings get nothing."""
    novelty = importlib.import_module("user_operator").novelty
    keys = Keys.of([0, 0, 0], [0, 1, 2])
    score = Columns(Batch.make(keys, {"reward": np.zeros(3, np.float32)}, Reward), Reward)
    rollout = Columns(Batch.make(keys, {"completion": ["12a", "12b", "3"]}, Rollout), Rollout)
    assert novelty.fn(rollout, score, weight=0.5)["reward"].tolist() == [0.0, 0.0, 0.5]


def test_notebook_runs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module("notebook")
    assert len(module.curve) == 10
    assert module.result.step == 10
    assert "the cut: 8 prompts x8" in capsys.readouterr().out


@pytest.mark.long
def test_example_as_a_script(here: Path) -> None:
    """As a reader starts it; the reward function is then one of __main__."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    script = "examples/user_reward.py"
    done = subprocess.run(
        [sys.executable, script], env=env, capture_output=True, text=True, timeout=220, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("step 1  short_digits 0.")


# --- the README -----------------------------------------------------------------------------------


def blocks(language: str) -> list[str]:
    """Blocks of the README that are marked to be run: ```bash run, ```python run."""
    return re.findall(
        rf"^```{language} run\n(.*?)^```",
        (ROOT / "README.md").read_text(),
        re.DOTALL | re.MULTILINE,
    )


def commands(block: str) -> Iterator[list[str]]:
    """Each command's words; lines that end in a backslash go on."""
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


def run_command(words: list[str]) -> int:
    """`dataflow` in this process, `python` in another."""
    if words[0] == "dataflow":
        return dataflow(words[1:])
    assert words[0] == "python", f"README: a command that the test does not know: {words}"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *words[1:]], env=env, timeout=220, check=False
    ).returncode


def test_commands_of_the_readme(here: Path) -> None:
    found = [words for block in blocks("bash") for words in commands(block)]
    assert {words[1] for words in found if words[0] == "dataflow"} >= {
        "check", "draw", "explain", "run", "resume", "peek", "diff",
    }  # fmt: skip
    for words in found:
        assert run_command(words) == 0, shlex.join(words)
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
