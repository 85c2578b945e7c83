"""What a script defines: whether another process finds it, and what is said where none does."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dataflow.graph import Graph
from dataflow.program_snapshot import read, write_snapshot
from dataflow.scripts import Script, guards, script, write_importable_snapshot
from engine.keep.checkpoint.provenance import differences, provenance
from graphs.grpo import grpo
from tests.kit.files import save_jsonl
from tests.kit.run_graphs import vowels

PARTS = """
from __future__ import annotations

import numpy as np

from dataflow.graph import Graph
from dataflow.loss import Now, Tensors, Terms, loss
from dataflow.model import Model
from dataflow.schema import Advantage, Reward, Rollout
from dataflow.user import Columns, operator
from operators.advantage import group_advantage
from operators.data import prompts
from operators.generate import generate
from operators.reward import reward
from operators.train import train


class Doubled(Reward):
    pass


def first(completions, **columns):
    return [float(len(text)) for text in completions]


@operator()
def doubled(rollout: Columns[Rollout], score: Columns[Reward]) -> Columns[Doubled]:
    return Columns.make(Doubled, like=score, reward=2 * score["reward"])


@loss()
def own(now: Now, advantage: Tensors[Advantage], *, scale: float = 1.0) -> Terms:
    return Terms(-scale * now.logprobs * advantage["advantage"])


def graph():
    policy = Model("policy", "hub/name", trainable=True)
    rollout = generate(policy, prompts("rows.jsonl", batch=2), n=2, max_tokens=4)
    score = doubled(rollout, reward(first, rollout))
    return Graph("own", train(policy, rollout, loss=own(group_advantage(rollout, score)), lr=0.1))
"""
GUARDED = PARTS + '\n\nif __name__ == "__main__":\n    started(graph())\n'
UNGUARDED = PARTS + "\n\nstarted(graph())\n"


Started = Callable[..., tuple[Any, ...]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    save_jsonl(tmp_path / "rows.jsonl", {"prompt": "a", "answer": "b"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("my_script", None)


@pytest.fixture
def started(here: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    """Runs a text as the script of this process; returns what a run at that point would keep."""

    def run(text: str, name: str = "my_script") -> tuple[Any, ...]:
        found: list[Any] = []

        def start(graph: Graph) -> None:
            found.extend((graph, *write_importable_snapshot(graph)))
            found.append(provenance(graph, script=found[2].module))

        path = here / f"{name}.py"
        path.write_text(text)
        module = ModuleType("__main__")
        vars(module).update({"__file__": str(path), "started": start})
        monkeypatch.setitem(sys.modules, "__main__", module)
        exec(compile(text, str(path), "exec"), vars(module))
        return tuple(found)

    return run


def test_what_a_guarded_script_defines_is_found_again_and_is_the_same(started: Started) -> None:
    _, text, of, notice, then = started(GUARDED)
    assert (of.module, notice) == ("my_script", "")
    assert "__main__" not in text
    importlib.invalidate_caches()
    again = read(text)
    assert again.node("reward").params["fns"][0].__module__ == "my_script"
    assert write_snapshot(again) == text
    now = provenance(again)
    assert set(now.sources) == {"my_script"}
    assert (now.nodes, now.sources["my_script"]) == (then.nodes, then.sources["my_script"])


OF_EPISODES = """
from graphs.agent import agent


class Echo:
    def reset(self):
        return None

    def step(self, message):
        return "", float(len(message["content"])), True


if __name__ == "__main__":
    started(agent("hub/name", "rows.jsonl", Echo, n=2, batch=2))
"""


def test_a_class_that_a_guarded_script_defines_is_found_again(started: Started) -> None:
    _, text, of, notice, _ = started(OF_EPISODES)
    assert (of.module, notice) == ("my_script", "")
    importlib.invalidate_caches()
    environment = read(text).node("episode").params["environment"]
    assert environment.target.__module__ == "my_script"


def test_its_source_counts_without_what_starts_the_run(here: Path, started: Started) -> None:
    _, text, _, _, then = started(GUARDED)
    (here / "my_script.py").write_text(GUARDED.replace("started(", "print("))
    importlib.invalidate_caches()
    assert differences(then, provenance(read(text))) == []
    (here / "my_script.py").write_text(GUARDED.replace("2 * score", "30 * score"))
    del sys.modules["my_script"]
    importlib.invalidate_caches()
    told = "source file: my_script (my_script.py): its content changed: doubled"
    assert [str(each) for each in differences(then, provenance(read(text)))] == [told]


def test_a_script_that_an_import_would_start_again_says_so(started: Started) -> None:
    _, text, of, notice, _ = started(UNGUARDED)
    assert of.module == ""
    assert '"local": "__main__:first"' in text
    start = "`dataflow resume` will not be able to go on with this run: node 'reward' has 'first'"
    why = 'which starts the run outside of `if __name__ == "__main__":`'
    assert notice.startswith(f"{start} (my_script.py:22), defined in my_script.py, {why}")
    assert notice.endswith("; or graph= of resume and rerun in Python.")
    assert "\n" not in notice


def test_a_script_whose_name_means_another_file_is_not_found_by_it(started: Started) -> None:
    _, _, of, notice, _ = started(GUARDED, "json")
    assert of == Script(why="defined in json.py, which is not what `import json` finds")
    assert of.why in notice


def test_without_a_file_there_is_nothing_to_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    assert "a notebook or an interactive session" in script().why


WRAPPER = """
import functools

from operators.advantage import add


def longer(fn):
    @functools.wraps(fn)
    def call(completions, **columns):
        return [1.0 + number for number in fn(completions, **columns)]

    return call


plain = first
"""
MAIN_PART = """

if __name__ == "__main__":
"""
CHANGED_WITHIN = f"""{PARTS}{WRAPPER}{MAIN_PART}
    first = longer(first)
    started(graph())
"""
USED_TWICE = f"""{PARTS}{WRAPPER}
first = longer(first)


def twice():
    policy = Model("policy", "hub/name", trainable=True)
    rollout = generate(policy, prompts("rows.jsonl", batch=2), n=2, max_tokens=4)
    score = add(reward(first, rollout, name="a"), reward(longer(plain), rollout, name="b"))
    return Graph("own", train(policy, rollout, loss=own(group_advantage(rollout, score)), lr=0.1))
{MAIN_PART}
    started(twice())
"""


@pytest.mark.parametrize("text", [CHANGED_WITHIN, USED_TWICE], ids=["changed", "twice"])
def test_a_name_that_an_import_of_the_script_gives_something_else_is_not_used(
    text: str, started: Started
) -> None:
    _, kept_text, of, notice, _ = started(text)
    assert of.module == "my_script"
    assert '"local": "__main__:first"' in kept_text
    assert "which an import of the script does not find by that name" in notice


@pytest.mark.usefixtures("here")
def test_what_has_no_name_at_the_top_of_a_file_is_told_apart() -> None:
    def within(completions: list[str], **columns: object) -> list[float]:
        return [0.0 for _ in completions]

    def notice(fn: Any) -> str:
        return write_importable_snapshot(grpo("hub/name", "rows.jsonl", fn, n=2, batch=2))[2]

    assert notice(vowels) == ""
    for fn, told in (
        (within, "within' (test_scripts.py:"),
        (within, "defined within another function"),
        (lambda completions, **columns: [0.0 for _ in completions], "a lambda"),
        (functools.partial(vowels, extra=1), "has no name of its own"),
    ):
        assert told in notice(fn)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ('if __name__ == "__main__":\n    a\n    b\n', [1, 2, 3]),
        ('x = 1\nif "__main__" == __name__:\n    a\nelse:\n    b\n', [2, 3, 4]),
        ('if __name__ == "other":\n    a\n', []),
        ('def f():\n    if __name__ == "__main__":\n        a\n', []),
        ("not python (", []),
    ],
)
def test_the_lines_that_an_import_leaves_out(text: str, lines: list[int]) -> None:
    assert [number for found in guards(text) for number in found] == lines
