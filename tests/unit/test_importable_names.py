"""What is written by its name: another process gets that very function or class, or asks for it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dataflow.diff import diff
from dataflow.errors import GraphError, RunError
from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.program_snapshot import read, write_snapshot
from dataflow.scripts import write_importable_snapshot
from dataflow.snapshot import from_json
from engine.api import resume
from engine.keep.checkpoint.content_digests import Files
from engine.keep.checkpoint.user_sources import sources_of
from graphs.grpo import grpo
from operators.advantage import group_advantage
from operators.data import prompts
from operators.generate import generate
from operators.losses import clipped_policy_loss
from operators.reward import reward
from operators.train import train
from tests.kit.files import save_jsonl

CALLABLES = """
from __future__ import annotations

import functools
from dataclasses import dataclass

from dataflow.loss import Now, Terms, loss
from dataflow.schema import Reward
from dataflow.user import Columns, operator


def times(factor):
    def decorate(fn):
        @functools.wraps(fn)
        def call(completions, **columns):
            return [factor * number for number in fn(completions, **columns)]

        return call

    return decorate


def plain(completions, **columns):
    return [float(len(text)) for text in completions]


@times(2)
def decorated(completions, **columns):
    return plain(completions)


scaled = times(5)(plain)
updated = functools.update_wrapper(functools.partial(plain, unused=1), plain)
partial = functools.partial(plain, unused=1)
cached = functools.cache(plain)


class Base:
    factor = 1

    def __init__(self, factor=1):
        self.factor = factor

    def method(self, completions, **columns):
        return [float(self.factor * len(text)) for text in completions]

    @classmethod
    def of_class(cls, completions, **columns):
        return [float(cls.factor * len(text)) for text in completions]

    @staticmethod
    def static(completions, **columns):
        return plain(completions)

    def __call__(self, completions, **columns):
        return self.method(completions)


class Derived(Base):
    factor = 3


@dataclass(frozen=True)
class Record:
    factor: int

    def __call__(self, completions, **columns):
        return [float(self.factor * len(text)) for text in completions]


def make():
    def nested(completions, **columns):
        return plain(completions)

    return nested


def rebound(completions, **columns):
    return [7.0 for text in completions]


first_rebound = rebound


def rebound(completions, **columns):
    return [8.0 for text in completions]


nested = make()
unnamed = lambda completions, **columns: plain(completions)
bound = Base(4).method
base_class = Base.of_class
inherited = Derived.of_class
static = Derived.static
called = Base(4)
record = Record(6)


@operator()
def doubled(score: Columns[Reward]) -> Columns[Reward]:
    return score


def halved(score: Columns[Reward]) -> Columns[Reward]:
    return score


elsewhere = operator()(halved)


@loss()
def own(now: Now, *, scale: float = 1.0) -> Terms:
    return Terms(-scale * now.logprobs)


first_own = own


@loss()
def own(now: Now, *, scale: float = 1.0) -> Terms:
    return Terms(scale * now.logprobs)
"""
SAME = ("plain", "decorated", "base_class", "static", "record", "rebound")
ASKED = (
    *("scaled", "updated", "partial", "cached", "bound", "inherited", "called"),
    *("nested", "unnamed", "first_rebound"),
)


@pytest.fixture
def callables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module with all kinds of them."""
    (tmp_path / "callables.py").write_text(CALLABLES)
    save_jsonl(tmp_path / "rows.jsonl", {"prompt": "a"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield importlib.import_module("callables")
    sys.modules.pop("callables", None)


def graph_with(function: Any) -> Graph:
    return grpo("hub/name", "rows.jsonl", function, n=2, batch=2)


def rewards(function: Any) -> list[float]:
    return function(completions=["a", "bcd"])


def imported_again(text: str) -> Graph:
    """The graph of a text, as another process reads it."""
    del sys.modules["callables"]
    graph = read(text)
    assert isinstance(graph, Graph)
    return graph


@pytest.mark.parametrize("name", SAME)
def test_what_its_name_leads_to_comes_back_as_it_is(callables: ModuleType, name: str) -> None:
    function = getattr(callables, name)
    text, _, notice = write_importable_snapshot(graph_with(function))
    assert notice == ""
    again = imported_again(text).node("score").params["fns"][0]
    assert again is not function
    assert rewards(again) == rewards(function)


@pytest.mark.parametrize("name", ASKED)
def test_what_its_name_does_not_lead_to_is_asked_for(callables: ModuleType, name: str) -> None:
    text, _, notice = write_importable_snapshot(graph_with(getattr(callables, name)))
    start = "`dataflow resume` will not be able to go on with this run: node 'score' has "
    assert notice.startswith(start)
    assert "graph= of resume and rerun" in notice
    with pytest.raises(
        GraphError, match=r"no other process can import. Fix: .*graph= of resume"
    ) as no:
        imported_again(text)
    assert [fault.where for fault in no.value.faults] == ["node 'score'"]
    looked_at = from_json(text, imports=False)
    assert write_snapshot(looked_at) == text


def test_a_name_that_is_given_away_later_leads_elsewhere(
    callables: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = graph_with(callables.plain)
    monkeypatch.setattr(callables, "plain", callables.scaled)
    assert (
        "has 'plain' (callables.py:23), whose name leads to another function"
        in write_importable_snapshot(graph)[2]
    )


def test_functions_of_one_name_are_not_the_same(callables: ModuleType) -> None:
    plain, scaled = graph_with(callables.plain), graph_with(callables.scaled)
    assert plain != scaled
    assert "changed 1" in str(diff(plain, scaled))
    twice = graph_with(callables.times(7)(callables.plain))
    assert twice != scaled


def test_operators_and_losses_are_asked_for_in_the_same_way(callables: ModuleType) -> None:
    policy = Model("policy", "hub/name", trainable=True)
    rollout = generate(policy, prompts("rows.jsonl", batch=2), n=2, max_tokens=4)
    score = callables.elsewhere(reward(callables.plain, rollout))
    loss = clipped_policy_loss(group_advantage(rollout, score)) + callables.first_own()
    text = write_snapshot(Graph("own", train(policy, rollout, loss=loss, lr=0.1)))
    with pytest.raises(GraphError) as asked:
        imported_again(text)
    message = [str(fault) for fault in asked.value.faults]
    assert len(message) == 2
    assert any("its operator 'halved'" in each for each in message)
    assert any("it holds 'own'" in each for each in message)
    assert write_snapshot(from_json(text, imports=False)) == text


def test_the_source_of_an_inherited_classmethod_counts(callables: ModuleType) -> None:
    assert set(sources_of(graph_with(callables.inherited), Files(), "")) == {"callables"}


def test_a_resume_names_what_takes_the_place_of_a_flag(tmp_path: Path) -> None:
    message = r"resume: 'set' is no option. Fix: settings=\[\"train_policy.lr=1e-5\"\]\."
    with pytest.raises(RunError, match=message):
        resume(tmp_path, set=["train_policy.lr=1e-5"])
    with pytest.raises(RunError, match=r"resume: 'stepz' is no option. Fix: steps=\."):
        resume(tmp_path, stepz=3)
