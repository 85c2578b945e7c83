"""Environments on the command line: a class, or what the user's file made with `tools` and such."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from dataflow.draw.node_calls import call_of
from engine.cli.flags import parse
from engine.cli.target import UsageError, load_target
from graphs.agent import agent
from operators.environments import as_environment

MINE = '''
from operators.environments import environments_by, isolated, tools


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


class Echo:
    def reset(self):
        return None

    def step(self, message):
        return "", 1.0, True


calculator = tools(add)
either = environments_by("kind", {"sums": calculator, "echo": isolated(Echo, processes=2)})
number = 3
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with my_environments.py, in which the command line is called."""
    (tmp_path / "my_environments.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_environments", raising=False)
    return tmp_path


def read_flags(name: str) -> dict[str, Any]:
    target = load_target("graphs.agent:agent")
    flags = ["--base", "b", "--data", "d.jsonl", "--environment", f"my_environments.py:{name}"]
    return parse("check", target, (), flags)[0]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", ["Echo", "calculator", "either"])
def test_an_environment_is_given_by_the_name_that_it_has_in_its_file(name: str) -> None:
    arguments = read_flags(name)
    module = importlib.import_module("my_environments")
    assert arguments["environment"] is getattr(module, name)
    params = agent(**arguments).node("episode").params
    assert params["environment"] == as_environment(getattr(module, name))


@pytest.mark.usefixtures("folder")
def test_what_is_neither_is_refused_by_its_flag() -> None:
    fix = "Fix: one of: add, Echo"
    with pytest.raises(UsageError, match=rf"--environment .*:number': no function .*{fix}"):
        read_flags("number")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("Echo", "Echo"),
        ("calculator", "tools(add)"),
        ("either", "environments_by(kind, sums: tools(add), echo: isolated(Echo, processes=2))"),
    ],
)
def test_a_drawing_names_the_environment(folder: Path, name: str, shown: str) -> None:
    node = agent(**read_flags(name)).node("episode")
    assert f"environment={shown}, " in call_of(node, "")


def test_other_parameters_take_functions_alone(folder: Path) -> None:
    target = load_target("graphs.grpo:grpo")
    flags = ["--base", "b", "--data", "d.jsonl", "--reward-fn", "my_environments.py:calculator"]
    with pytest.raises(UsageError, match="no function 'calculator'"):
        parse("check", target, (), flags)
