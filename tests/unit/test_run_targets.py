"""Run folders as targets: what of them is imported, which options hold, what is refused."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataflow.errors import DataflowError, RunError
from dataflow.graph import Graph
from engine.cli import main
from engine.cli.check import CheckOptions
from engine.cli.explain import ExplainOptions
from engine.cli.flags import graph_and
from engine.cli.target import UsageError, load_target
from engine.plan.options import RunOptions
from graphs.grpo import grpo
from graphs.sft import sft
from tests.kit.kept_runs import kept_run
from tests.kit.processes import call_python

PARTS = """
from pathlib import Path
Path(__file__).with_name("imported").touch()

def score(completions):
    return [0.0 for _ in completions]
"""
KEPT = RunOptions(workers="apart", pin={"train_policy": "trainer"}, threads=3, seed=7, steps=9)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with runs/plain, and runs/own, whose reward is in parts/own_parts.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    kept_run(tmp_path / "runs" / "plain", sft("models/base", "rows.jsonl"), options=KEPT)
    parts = tmp_path / "parts"
    parts.mkdir()
    (parts / "own_parts.py").write_text(PARTS)
    with monkeypatch.context() as there:
        there.syspath_prepend(parts)
        own = grpo("models/base", "rows.jsonl", importlib.import_module("own_parts").score)
        kept_run(tmp_path / "runs" / "own", own, options=KEPT, imports=[str(parts)])
    del sys.modules["own_parts"]
    importlib.invalidate_caches()
    (parts / "imported").unlink()
    yield tmp_path
    sys.modules.pop("own_parts", None)


@pytest.mark.parametrize("target", ["runs/own", "runs/own/", "runs/own/graph.json"])
def test_looking_at_a_run_folder_imports_nothing_that_it_names(
    folder: Path, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["draw", target]) == 0
    assert "reward(score)" in capsys.readouterr().out
    assert main(["diff", target, "runs/plain"]) == 0
    assert "+ demonstrations" in capsys.readouterr().out
    assert not (folder / "parts" / "imported").exists()


def test_a_run_folders_functions_are_found_by_the_path_that_it_keeps(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert isinstance(load_target("runs/own", runs=True).graph(), Graph)
    parts = folder / "parts"
    assert (parts / "imported").exists()
    told = f"imports own_parts from {parts}/own_parts.py\nwhat these import is also looked for in "
    assert capsys.readouterr().err == f"{told}{parts}\n"


def test_a_graph_json_elsewhere_has_no_such_path(folder: Path) -> None:
    kept = (folder / "runs" / "own" / "graph.json").rename(folder / "graph.json")
    with pytest.raises(DataflowError, match="own_parts"):
        load_target(kept.name, runs=True).graph()


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("target", ["runs/plain", "runs/plain/graph.json"])
def test_the_options_that_a_plan_is_made_of_are_the_runs_own(target: str) -> None:
    _, options = graph_and(ExplainOptions, "explain", [target, "--seed", "1"])
    assert (options.workers, options.pin) == ("apart", {"train_policy": "trainer"})
    assert (options.threads, options.seed, options.steps) == (3, 1, None)
    _, options = graph_and(RunOptions, "run", [target, "--workers=one", "--pin"])
    assert (options.workers, options.pin, options.threads) == ("one", {}, 3)


def test_without_a_run_folder_the_options_have_their_defaults(folder: Path) -> None:
    (folder / "runs" / "plain" / "graph.json").rename(folder / "graph.json")
    assert graph_and(RunOptions, "run", ["graph.json"])[1] == RunOptions()


def test_only_what_needs_the_options_asks_for_them(folder: Path) -> None:
    (folder / "runs" / "plain" / "options.json").unlink()
    assert graph_and(CheckOptions, "check", ["runs/plain"])[0].name == "sft"
    told = r"runs/plain/options.json: expected the options of the run, found no such file. Fix: "
    for options, command in ((ExplainOptions, "explain"), (RunOptions, "run")):
        with pytest.raises(RunError, match=told):
            graph_and(options, command, ["runs/plain"])


def test_the_help_says_which_options_hold(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "runs/plain", "--help"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "are by default those of that run, and a flag overrides each" in told
    assert "`run` begins a new run; `dataflow resume` goes on with the old one." in told


@pytest.mark.parametrize("name, data, code, message", [
    ("graph.json", b"[]", 1, "runs/plain/graph.json: "),
    ("options.json", b'{"pin": 3}', 3, "runs/plain/options.json: Expected `object`"),
    ("options.json", b"\xff\xfe", 1, "options.json: expected options, found what cannot"),
])  # fmt: skip
def test_what_is_wrong_in_a_run_folder_is_one_line(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    data: bytes,
    code: int,
    message: str,
) -> None:
    """More of what may be wrong: test_bad_inputs.py."""
    (folder / "runs" / "plain" / name).write_bytes(data)
    assert main(["explain", "runs/plain"]) == code
    line = capsys.readouterr().err
    assert message in line
    assert "Fix: " in line
    assert line.count("\n") == 1


@pytest.mark.parametrize("target, told", [
    ("parts", "TARGET 'parts': expected a run folder (with versions.json in it), found"
     " another folder. Fix: module:function, file.py:function, a run folder or its graph.json."),
    ("runs", "TARGET 'runs': expected a run folder (with versions.json in it), found another"
     " folder. Fix: one of: runs/own, runs/plain."),
    ("runs/plian", "TARGET 'runs/plian': expected module:function, file.py:function, a run"
     " folder or its graph.json. Fix: runs/plain."),
    ("killed", "run folder killed: no graph.json in it: the run was killed before it was"
     " written. Fix: the module:function that it ran."),
])  # fmt: skip
def test_a_folder_that_is_no_target_is_refused(folder: Path, target: str, told: str) -> None:
    kept_run(folder / "killed")
    with pytest.raises(UsageError) as refused:
        load_target(target)
    assert str(refused.value) == told


LOOK = """
import sys
from engine.cli import main
for words in (["runs"], ["diff", "runs/own", "runs/plain"], ["draw", "runs/own"]):
    assert main(words) == 0
heavy = {"torch", "transformers", "vllm", "own_parts"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else 0)
"""


@pytest.mark.usefixtures("own_interpreters")
def test_looking_at_runs_imports_no_torch(folder: Path) -> None:
    done = call_python("-c", LOOK, cwd=folder, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("line, told, code", [
    ("{}['x']", "raised KeyError: 'x'. Fix: mend that line", 1),
    ("import sys; sys.exit('no --model')", "found sys.exit('no --model'). Fix: if __name__", 2),
])  # fmt: skip
@pytest.mark.parametrize("command", [["resume", "runs/own"], ["peek", "runs/own", "score"]])
def test_what_a_named_module_raises_is_told_as_its_own(
    folder: Path, command: list[str], line: str, told: str, code: int,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (folder / "parts" / "own_parts.py").write_text(f"{PARTS}\n{line}\n")
    assert main(command) == code
    error = " ".join(capsys.readouterr().err.split())
    assert "own_parts.py:8 " in error
    assert "graph.json, which imports 'own_parts': " in error
    assert told in error


@pytest.mark.parametrize("command", ["resume", "run", "explain"])
@pytest.mark.parametrize("words, told", [
    ("--lr 1e-4", "unknown flag '--lr': .*by node. Fix: --set train_policy.lr=1e-4."),
    ("--threads 2 --num-generations=8", "'--num-generations': .* Fix: --set rollout.n=8."),
    ("--max-steps 9", r"'--max-steps' \(TRL's name\). Fix: "),
])  # fmt: skip
def test_a_flag_for_a_parameter_of_a_kept_graph_names_the_setting(
    folder: Path, command: str, words: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "runs/own", *words.split()]) == 2
    assert re.search(told, " ".join(capsys.readouterr().err.split()))
    assert not (folder / "parts" / "imported").exists() or command == "run"
