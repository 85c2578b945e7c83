"""`dataflow init`: which names are refused, and what it writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.cli import main
from engine.cli.init import make_project


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("given, told", [
    ([], "dataflow init: expected a name, found 'nothing'. Fix: dataflow init NAME."),
    (["a", "b"], "dataflow init: expected a name, found 'a b'."),
    (["--name"], "dataflow init: expected a name, found '--name'."),
    (["my-project"], "found 'my-project'. Fix: dataflow init my_project."),
    (["a b/2nd"], "found 'a b/2nd'. Fix: dataflow init nd."),
    (["class"], "found 'class'. Fix: dataflow init class_project."),
    (["."], "found '.'. Fix: dataflow init my_project."),
    (["json"], "Python has a module 'json' already ("),
    (["torch"], "torch/__init__.py). Fix: dataflow init my_torch."),
    (["operators"], "operators/__init__.py). Fix: dataflow init my_operators."),
    (["sys"], "Python has a module 'sys' already (built-in). Fix: dataflow init my_sys."),
    (["full"], "expected 'full' not to be there, found a folder that is not empty. Fix: another"),
    (["a_file"], "expected 'a_file' not to be there, found a file."),
    (["a_file/mine"], "'a_file/mine' cannot be written: Not a directory. Fix: another folder."),
])  # fmt: skip
def test_names_that_cannot_be_are_refused(
    here: Path, capsys: pytest.CaptureFixture[str], given: list[str], told: str
) -> None:
    (here / "full").mkdir()
    (here / "full/kept.txt").touch()
    (here / "a_file").touch()
    before = sorted(here.rglob("*"))
    assert main(["init", *given]) == 2
    assert told in capsys.readouterr().err
    assert sorted(here.rglob("*")) == before


def test_a_path_names_the_project_by_its_last_part(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "experiments/mine").mkdir(parents=True)
    assert main(["init", "experiments/mine"]) == 0
    folder = here / "experiments/mine"
    names = ["README.md", "mine.py", "mine_files.py", "mine_reward.py", "test_mine.py"]
    assert sorted(path.name for path in folder.iterdir()) == names
    printed = capsys.readouterr().out
    assert "    cd experiments/mine\n    dataflow check mine.py:graph\n    pytest\n" in printed
    readme = (folder / "README.md").read_text()
    for command in ("dataflow check mine.py:graph", "pytest", "dataflow run mine.py:graph --steps"):
        assert f"\n    {command}" in printed
        assert f"\n    {command}" in readme


def test_the_files_have_the_name_in_them_and_lint(here: Path) -> None:
    for name, text in make_project("mine").items():
        assert "NAME" not in text
        (here / name).write_text(text)
    ruff = [sys.executable, "-m", "ruff"]
    rules = ["check", "--isolated", "--no-cache", "--line-length", "100", "--select", "E,F,W,I,B"]
    known = ["--config", "lint.isort.known-third-party=['dataflow','operators']"]
    subprocess.run([*ruff, *rules, *known, "."], cwd=here, check=True)
    form = ["format", "--isolated", "--no-cache", "--line-length", "100", "--check", "."]
    subprocess.run([*ruff, *form], cwd=here, check=True)
