"""Shell completion: the words that may follow, and the scripts where their shells are installed."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.cli import COMMANDS, main
from engine.cli.completion import SCRIPTS
from engine.cli.graphs import shipped_graphs
from graphs.sft import sft
from tests.kit.kept_runs import kept_run
from tests.kit.processes import COMMAND_LINE, ROOT

PLAIN = """
from dataflow.graph import Graph
from graphs.grpo import grpo

raise_when_imported = {wrong}


def scored(completions):
    return [0.0 for _ in completions]


def mine(base: str, *, answers: int = 4) -> Graph:
    return grpo(base, "rows.jsonl", scored, n=answers)


def _hidden(base: str) -> Graph: ...
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "completed.py").write_text(PLAIN.format(wrong="1"))
    (tmp_path / "untouched.py").write_text(PLAIN.format(wrong="1 / 0"))
    (tmp_path / "broken.py").write_text("def (")
    kept_run(tmp_path / "runs/kept", sft("models/base", "rows.jsonl"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "completed", raising=False)
    return tmp_path


def completed(capsys: pytest.CaptureFixture[str], line: str, shell: str = "zsh") -> list[str]:
    assert main(["--complete", shell, line]) == 0
    return capsys.readouterr().out.splitlines()


LINES = [
    ("dataflow dr", ["draw"]),
    ("dataflow nothing ", []),
    ("dataflow graphs sf", ["sft", "sft_and_rl"]),
    ("dataflow check graphs.dap", ["graphs.dapo:dapo"]),
    ("dataflow check untouched.py:", ["untouched.py:scored", "untouched.py:mine"]),
    ("dataflow check untouched:m", ["untouched:mine"]),
    ("dataflow check broken.py:", []),
    ("dataflow check nowhere.inner:", []),
    ("dataflow check untouched.py:mine --a", ["--answers"]),
    ("dataflow check untouched.py:mine --st", ["--strict"]),
    ("dataflow check untouched.py:mine --no-", ["--no-strict"]),
    ("dataflow run graphs.dapo:dapo --max", ["--max-tokens", "--max-lag"]),
    ("dataflow diff graphs.grpo:grpo graphs.dapo:dapo --b", ["--base", "--batch", "--beta",
                                                            "--buffer"]),
    ("dataflow diff graphs.grpo:grpo graphs.gs", ["graphs.gspo:gspo"]),
    ("dataflow resume runs/x --acc", ["--accept-changes"]),
    ("dataflow top ", ["kept"]),
    ("dataflow watch kept k", ["kept"]),
    ("dataflow watch --o", ["--open"]),
    ("dataflow report r", ["runs/kept"]),
    ("dataflow run graphs.dapo:dapo --wa", ["--wait", "--watchdog", "--watch"]),
    ("dataflow resume runs/kept --no-wa", ["--no-watch"]),
    ("dataflow resume runs/kept --no-o", []),
    ("dataflow resume runs/kept --steps 3 --set train_policy.st", ["train_policy.start="]),
    ("dataflow peek runs/kept demo", ["demonstrations"]),
    ("dataflow rerun runs/kept --node train_p", ["train_policy"]),
    ("dataflow rerun runs/kept --st", ["--step"]),
    ("dataflow test my.py:f --e", ["--examples"]),
    ("dataflow check completed.py:mine --base b --set rollout.t",
     ["rollout.temperature=", "rollout.top_p=", "rollout.top_k="]),
    ("dataflow check completed.py:mine --base 'a b' --strict --set score.timeout=3 train_policy.st",
     ["train_policy.start="]),
    ("dataflow diff graphs.sft:sft completed.py:mine --base b --set advantage.sc",
     ["advantage.scale="]),
    ("dataflow peek completed.py:mine rollout --base b --set advantage.sc", ["advantage.scale="]),
    ("dataflow check completed.py:mine --answers ", []),
]  # fmt: skip


@pytest.mark.parametrize(("line", "words"), LINES)
def test_a_line_is_completed(
    folder: Path, capsys: pytest.CaptureFixture[str], line: str, words: list[str]
) -> None:
    assert completed(capsys, line) == words


def test_the_first_words_are_the_commands_and_the_graphs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(completed(capsys, "dataflow ")) > COMMANDS.keys()
    assert completed(capsys, "dataflow run ") == [
        f"graphs.{name}:{name}" for name in shipped_graphs()
    ]


def test_bash_is_told_only_what_follows_a_colon(capsys: pytest.CaptureFixture[str]) -> None:
    assert completed(capsys, "dataflow run graphs.dapo:d", "bash") == ["dapo"]
    assert completed(capsys, "dataflow run graphs.dap", "bash") == ["graphs.dapo:dapo"]


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--completion", "fsh"]) == 2
    assert "Fix: dataflow --completion fish." in capsys.readouterr().err
    assert main(["--completion"]) == 2
    assert main(["--completion", "fish"]) == 0
    assert capsys.readouterr().out == SCRIPTS["fish"]


ASK = {
    "bash": 'COMP_LINE="{line}"; COMP_POINT=${{#COMP_LINE}}; _dataflow; printf "%s\\n"'
    ' "${{COMPREPLY[@]}}"',
    "fish": 'complete -C "{line}"',
}


@pytest.mark.parametrize(("shell", "word"), [("bash", "dapo"), ("fish", "graphs.dapo:dapo")])
def test_the_shell_completes(shell: str, word: str, tmp_path: Path) -> None:
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"no {shell} here")
    command = tmp_path / "dataflow"
    command.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-c", COMMAND_LINE])} "$@"\n')
    command.chmod(0o755)
    asked = ASK[shell].format(line="dataflow run graphs.dapo:")
    done = subprocess.run(
        [found, "-c", f"{SCRIPTS[shell]}\n{asked}"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert done.stdout.split() == [word], done.stderr
