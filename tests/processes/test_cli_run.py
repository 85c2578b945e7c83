"""Every command that runs something, once, on a model of a few thousand weights."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.kit.files import save_jsonl
from tests.kit.processes import COMMAND_LINE, call_python
from tests.kit.runs import column
from tests.kit.terminals import on_terminal, screen

CONSOLE_SCRIPT = "import sys; sys.path.remove(''); " + COMMAND_LINE
"""Like the installed `dataflow`: the current folder is not on the path by itself."""
REWARDS = """
import os, time

def same(completions, answer):
    return [float(c == a) for c, a in zip(completions, answer)]

def speaks(completions, answer):
    print("hears", *completions)
    return same(completions, answer)

def leaves_a_daemon(completions, answer):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            print("still here", os.getpid(), flush=True)
            time.sleep(1000)
        os._exit(0)
    return same(completions, answer)
"""
GRPO = "graphs.grpo:grpo --base model --data rows.jsonl --n 2 --batch 2 --max-tokens 3 --reward-fn "
MODULES = "json random torch numpy struct selectors pyarrow msgspec transformers"
"""Modules that Python and torch import; a user's file of that name must never run."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    save_jsonl(folder / "rows.jsonl", *({"prompt": a * 2, "answer": a} for a in "abcdef"))
    (folder / "my_rewards.py").write_text(REWARDS)
    shutil.copytree(tiny_folder / "model", folder / "model")
    return folder


def dataflow(
    folder: Path, words: str, code: int = 0, start: str = COMMAND_LINE
) -> subprocess.CompletedProcess[str]:
    """The command line, in this folder."""
    home = {"HOME": str(folder)}
    done = call_python("-c", start, *words.split(), cwd=folder, env=home, timeout=200)
    assert done.returncode == code, done.stderr
    return done


def test_run_then_resume(folder: Path) -> None:
    done = dataflow(folder, f"run {GRPO} my_rewards:same --steps 2 --threads 1 --no-progress")
    assert "step 2" in done.stdout
    changed = dataflow(folder, "resume runs/grpo --steps 3 --set train_policy.lr=0.5")
    told = "runs/grpo: from step 3 on:\n  node train_policy: lr: 1e-06 -> 0.5\n"
    assert told in changed.stderr
    assert column(folder / "runs" / "grpo", "step") == [1, 2, 3]
    assert column(folder / "runs" / "grpo", "optim/lr") == [1e-6, 1e-6, 0.5]
    done = dataflow(folder, "resume runs/grpo --set train_policy.lr=0.1")
    more = "To go on: dataflow resume runs/grpo --steps 6"
    told = f"all 3 steps are done: step 3; train_policy.lr=0.1 was not set. {more}"
    assert done.stdout == f"nothing to do, as {told}\n"


SCRIPT = """
import sys

from engine.api import run
from engine.plan.options import RunOptions
from graphs.grpo import grpo


def longer(completions, **columns):
    return [float(len(text)) for text in completions]


def main():
    graph = grpo("model", "rows.jsonl", longer, n=2, batch=2, max_tokens=6)
    run(graph, RunOptions(steps=1, threads=1, progress=False, overwrite=True))


"""


@pytest.mark.long
@pytest.mark.parametrize("guard", ['if __name__ == "__main__":\n    ', ""], ids=["guarded", "not"])
def test_a_run_of_a_script_is_resumed_from_the_command_line_or_says_that_it_cannot_be(
    folder: Path, guard: str
) -> None:
    (folder / "my_script.py").write_text(f"{SCRIPT}{guard}main()\n")
    done = call_python("my_script.py", cwd=folder, env={"HOME": str(folder)}, timeout=200)
    assert done.returncode == 0, done.stderr
    said = "`dataflow resume` will not be able to go on with this run: node 'score' has 'longer'"
    logs = "".join(path.read_text() for path in (folder / "runs" / "grpo").rglob("*.log"))
    assert (done.stderr.count(said), logs.count(said)) == ((0, 0) if guard else (1, 1))
    if guard:
        resumed = dataflow(folder, "resume runs/grpo --steps 2")
        assert f"imports my_script from {folder / 'my_script.py'}" in resumed.stderr
        assert column(folder / "runs" / "grpo", "step") == [1, 2]
    else:
        refused = dataflow(folder, "resume runs/grpo --steps 2", code=1)
        assert "which no other process can import" in refused.stderr


def test_what_reads_the_output_of_a_run_ends_with_it_although_a_reward_left_a_daemon(
    folder: Path,
) -> None:
    """`dataflow run ... | cat` and 2>&1: the call returns when both pipes are at their end."""
    target = f"{GRPO} my_rewards:leaves_a_daemon"
    done = dataflow(folder, f"run {target} --steps 1 --threads 1 --name left")
    said = "reward 'leaves_a_daemon' printed: still here "
    assert said in (folder / "runs" / "left" / "logs" / "main.log").read_text()
    for pid in [int(line.split()[-1]) for line in done.stderr.splitlines() if said in line]:
        assert not Path(f"/proc/{pid}").exists()


@pytest.mark.long
@pytest.mark.repeats
@pytest.mark.parametrize(
    ("how", "log_name"), [("--inproc", "main"), ("--workers apart", "coordinator")]
)
def test_what_a_reward_prints_is_named_above_the_bar_wherever_it_runs(
    folder: Path, how: str, log_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    flags = f"{how} --steps 2 --threads 1 --overwrite --name speaks"
    words = f"run {GRPO} my_rewards:speaks {flags}".split()
    code = f"import sys; sys.argv[1:] = {words!r}; " + COMMAND_LINE
    lines = screen(on_terminal(code, columns=60), 60)
    (bar,) = (number for number, line in enumerate(lines) if line.startswith("grpo "))
    assert lines[bar].endswith(" 2/2")
    assert lines[bar + 1].startswith("reward ")
    assert "printed" not in "".join(lines[bar:])
    named = "reward 'speaks' printed: hears "
    shown = sum(line.startswith(named) for line in lines[:bar])
    log = folder / "runs" / "speaks" / "logs" / f"{log_name}.log"
    assert shown == log.read_text().count(named) >= 2


def test_a_run_that_fails_ends_with_3_and_its_cause_last(folder: Path) -> None:
    (folder / "bad_rewards.py").write_text("def same(completions, answer):\n    return [1.0]\n")
    target = f"{GRPO} bad_rewards:same"
    done = dataflow(folder, f"run {target} --steps 1 --name bad --threads 1", code=3)
    assert "Traceback" not in done.stderr
    assert "same" in done.stderr
    assert "bad failed: " in dataflow(folder, "runs").stdout


@pytest.mark.long
def test_nothing_of_the_current_folder_takes_the_place_of_what_is_installed(
    folder: Path, tmp_path: Path
) -> None:
    """In the command, Workers and reward processes; a resume says what it imports beforehand."""
    here = tmp_path / "here"
    shutil.copytree(folder, here, ignore=shutil.ignore_patterns("runs"))
    for name in MODULES.split():
        (here / f"{name}.py").write_text(f"raise SystemExit('{name} of the current folder ran')\n")
    flags = "--steps 1 --workers apart --threads 1 --no-progress"
    dataflow(here, f"run {GRPO} my_rewards:same {flags}", start=CONSOLE_SCRIPT)
    done = dataflow(here, "resume runs/grpo --steps 2", start=CONSOLE_SCRIPT)
    assert done.stderr.startswith(f"imports my_rewards from {here / 'my_rewards.py'}\n")
