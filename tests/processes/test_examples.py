"""Every example and every command of the README runs unchanged, at a small size.

Examples run in this process, which imports torch once; those with Ray, which a process starts once,
and one more run as scripts.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest

from dataflow import Columns, Reward, Rollout, check
from dataflow.batch import Batch, Keys
from dataflow.diff import diff
from engine.api import Result
from engine.cli import main as dataflow
from tests.kit.processes import COMMAND_LINE, ROOT, call_python
from tests.kit.ray_clusters import needs_ray, ray_cluster, ray_environment
from tests.kit.runs import Rows, metrics

EXAMPLES = ROOT / "examples"
ADDED = ("user_operator", "user_advantage", "user_loss", "user_reward")
"""Examples that add one part of the user's own."""

RUNS = (
    *ADDED, "run_trl_reward", "verl_parquet", "ppo_edit", "dapo", "several_rewards", "async_lag",
    "edits", "agent_calculator", "agent_trl_environment", "agent_coding", "user_side",
)  # fmt: skip
"""Examples with main(steps)."""

SLOW = ("async_lag", "edits")
"""Examples that run in processes, or several times."""

PARTS = ("tiny", "character_model", "trl_reward", "trl_guess", "verl_score")
"""Files that examples use."""

ELSEWHERE = ("demo", "demo_task", "demo_agent", "demo_agent_seeds", "demo_game", "agent_task")
"""Tested elsewhere."""

SCRIPTS = ("cluster_demo",)
"""Examples that run as scripts alone."""

pytestmark = pytest.mark.timeout(600)


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


def test_every_example_is_run() -> None:
    there = {path.stem for path in EXAMPLES.glob("*.py")}
    assert there == {*RUNS, *PARTS, *ELSEWHERE, *SCRIPTS, "notebook"}


@pytest.mark.parametrize("name", ADDED)
def test_what_a_user_adds_is_short_and_stands_alone(name: str) -> None:
    """Under 15 lines of code between the marks; nothing of the packages is touched."""
    text = (EXAMPLES / f"{name}.py").read_text()
    added = text.partition("# begin: what you add\n")[2].partition("# end\n")[0]
    lines = [line.strip() for line in added.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    assert 1 < len(lines) < 15
    assert "setattr" not in text
    assert "monkeypatch" not in text


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long if n in SLOW else ()) for n in RUNS]
)
def test_example_runs(name: str, here: Path) -> None:
    result: Result = importlib.import_module(name).main(steps=2)
    rows = metrics(result)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(0.0 <= row["reward/mean"] <= 2.0 for row in rows)
    assert result.trained["policy"].is_dir()
    CHECKS.get(name, lambda rows: None)(rows)
    undocumented = {k for k in rows[0] if k != "step" and not documented(k)}
    assert undocumented == ({"policy/weight"} if name == "user_loss" else set())  # its own metric


def test_each_edit_is_at_most_four_lines_and_is_told(here: Path) -> None:
    edits = importlib.import_module("edits")
    assert {after.__name__ for _, after in edits.EDITS} >= {
        "grpo",
        "dapo",
        "gspo",
        "decoupled",
        "distilled",
    }
    for before, after in edits.EDITS:
        lines = [inspect.getsource(f).splitlines()[2:] for f in (before, after)]
        changes = [line for line in difflib.ndiff(*lines) if line[0] in "-+"]
        removed, added = ([c for c in changes if c[0] == sign] for sign in "-+")
        assert 0 < max(len(removed), len(added)) <= 4, after.__name__
        assert check(after())
        told = str(diff(before(), after()))
        assert "~ train_policy" in told


def documented(metric: str) -> bool:
    """Whether docs/metrics.md has a name of this form."""
    names = re.findall(r"`([^`\s]+/[^`\s]*)`", (ROOT / "docs" / "metrics.md").read_text())
    return any(re.fullmatch(re.sub(r"<[^>]*>", "[^/]+", name), metric) for name in names)


def operator_changes_the_reward(rows: Rows) -> None:
    assert all(row["reward/mean"] > row["reward/short_digits/mean"] for row in rows)


def both_rewards_are_logged(rows: Rows) -> None:
    for row in rows:
        total = row["reward/correct/mean"] + 0.2 * row["reward/only_digits/mean"]
        assert row["reward/mean"] == pytest.approx(total, abs=1e-6)


def steps_are_full(rows: Rows) -> None:
    assert all(row["data/prompts"] == 8 and row["data/rows"] == 64 for row in rows)
    assert min(row["select/kept"] for row in rows) < 1.0
    assert all(0.0 < row["reward/has_seven/mean"] < 1.0 for row in rows)


def rows_lag(rows: Rows) -> None:
    assert [row["policy/lag/max"] for row in rows] == [0.0, 1.0]


def critic_is_trained(rows: Rows) -> None:
    assert all("value/squared_error" in row and "loss/clipped_policy_loss" in row for row in rows)


def three_functions_are_logged(rows: Rows) -> None:
    means = {f"reward/{name}/mean" for name in ("digits", "even_answer", "remote_judge")}
    assert means | {"reward/digits/empty"} <= rows[0].keys()


def episodes_have_turns(rows: Rows) -> None:
    for row in rows:
        assert row["episode/turns"] >= 1.0
        assert row["env/errors"] == row["env/timeouts"] == 0.0


def episodes_are_rewarded(rows: Rows) -> None:
    episodes_have_turns(rows)
    _has(rows, "reward/correct/mean")
    assert all(0.0 < row["reward/mean"] < 0.5 for row in rows)


def programs_are_tested(rows: Rows) -> None:
    episodes_have_turns(rows)
    assert all(row["episode/reward"] == pytest.approx(row["reward/mean"]) for row in rows)
    assert max(row["episode/turns"] for row in rows) > 1.0


CHECKS: dict[str, Callable[[Rows], None]] = {
    "user_operator": operator_changes_the_reward,
    "user_loss": lambda rows: _has(rows, "loss/tapered_loss", "policy/weight"),
    "user_advantage": lambda rows: _has(rows, "time/rank_advantage"),
    "run_trl_reward": both_rewards_are_logged,
    "verl_parquet": lambda rows: _has(
        rows, "reward/compute_score/mean", "reward/compute_score/acc"
    ),
    "ppo_edit": critic_is_trained,
    "dapo": steps_are_full,
    "several_rewards": three_functions_are_logged,
    "async_lag": rows_lag,
    "agent_calculator": episodes_are_rewarded,
    "agent_trl_environment": episodes_have_turns,
    "agent_coding": programs_are_tested,
}


def _has(rows: Rows, *names: str) -> None:
    for row in rows:
        assert set(names) <= row.keys()


def test_trl_and_verl_files_import_nothing_of_ours() -> None:
    for name in ("trl_reward", "trl_guess", "verl_score"):
        text = (EXAMPLES / f"{name}.py").read_text()
        ours = r"^(?:from|import) (?:dataflow|operators|graphs|engine|tiny)"
        assert not re.search(ours, text, re.MULTILINE)


def test_user_operator_is_a_plain_function(here: Path) -> None:
    """`.fn` on columns made by hand: in a group of three, the two equal openings get nothing."""
    novelty = importlib.import_module("user_operator").novelty
    keys = Keys.of([0, 0, 0], [0, 1, 2])
    score = Columns(Batch.make(keys, {"reward": np.zeros(3, np.float32)}, Reward), Reward)
    rollout = Columns(Batch.make(keys, {"completion": ["12a", "12b", "3"]}, Rollout), Rollout)
    assert novelty.fn(rollout, score, weight=0.5)["reward"].tolist() == [0.0, 0.0, 0.5]


@pytest.mark.long
def test_notebook_runs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module("notebook")
    assert len(module.curve) == 10
    assert module.result.step == 10
    assert "the cut: 8 prompts x8" in capsys.readouterr().out


@pytest.mark.long
def test_example_as_a_script(here: Path) -> None:
    """As a reader starts it; the reward function is then one of __main__."""
    done = call_python("examples/user_reward.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("step 1  short_digits 0.")


@pytest.mark.long
@pytest.mark.hosts
@pytest.mark.repeats(turn=2)  # what tests of lost nodes prove, as a script
def test_cluster_demo(here: Path) -> None:
    """A node is killed, and the run has the numbers of an undisturbed one."""
    done = call_python("examples/cluster_demo.py", env=ray_environment())
    assert done.returncode == 0, done.stdout + done.stderr
    ended = "the node `generator` is dead", "Worker gen was lost: host generator"
    for told in (*ended, "the node `substitute` is there", "the same to the bit"):
        assert told in done.stdout + done.stderr
    assert (here / "runs/cluster_demo/logs/host-generator.log").is_file()


def blocks(language: str, page: str = "README.md", how: str = "run") -> list[str]:
    """Blocks of a page that are marked to be run: ```bash run, ```python run, and with another how
    ```bash run on hosts.
    """
    block = rf"^```{language} {how}\n(.*?)^```"
    return re.findall(block, (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def commands(block: str) -> Iterator[list[str]]:
    """Each command's words; lines that end in a backslash go on."""
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


def run_command(words: list[str]) -> int:
    """`dataflow` in this process, with `> FILE` too; `python` in another."""
    if words[-2:-1] == [">"]:
        with open(words[-1], "w") as file, redirect_stdout(file):
            return run_command(words[:-2])
    if words[:2] == ["dataflow", "profile"]:  # other tests use the machine meanwhile
        words = [*words, "--busy", "accept"]
    if words[0] == "dataflow":
        return dataflow(words[1:])
    assert words[0] == "python", f"README: a command that the test does not know: {words}"
    return call_python(*words[1:]).returncode


@pytest.mark.long
@pytest.mark.timeout(900)  # `dataflow profile` measures for minutes where others use the cores
def test_commands_of_the_readme(here: Path) -> None:
    shown = [words for block in blocks("bash") for words in commands(block)]
    subcommands = {words[1] for words in shown if words[0] == "dataflow"}
    known = {"check", "draw", "explain", "run", "resume", "peek", "diff", "graphs", "test", "runs"}
    known |= {"profile", "simulate"}
    assert subcommands >= known
    for words in shown:
        assert run_command(words) == 0, shlex.join(words)
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.long
@pytest.mark.hosts
def test_commands_of_the_readme_on_several_hosts(here: Path) -> None:
    """Each in a process of its own. `ray start` of the block before them is what is simulated."""
    needs_ray()
    shown = [words for block in blocks("bash", how="run on hosts") for words in commands(block)]
    assert shown
    with ray_cluster():
        for words in shown:
            assert words[0] == "dataflow"
            done = call_python("-c", COMMAND_LINE, *words[1:])
            assert done.returncode == 0, done.stdout + done.stderr
    assert (here / "runs/hosts/logs/host-b.log").is_file()


@pytest.mark.long
def test_commands_of_the_how_to_page(here: Path) -> None:
    require_commands_run("docs/how-to.md", more_than=6)


@pytest.mark.long
def test_commands_of_the_page_of_agents(here: Path) -> None:
    require_commands_run("docs/agents.md", more_than=3)


def require_commands_run(page: str, *, more_than: int) -> None:
    """All commands of a page that are marked to be run, after the tiny model is made."""
    shown = [words for block in blocks("bash", page) for words in commands(block)]
    assert len(shown) > more_than
    assert call_python("examples/tiny.py").returncode == 0
    for words in shown:
        assert run_command(words) == 0, shlex.join(words)
