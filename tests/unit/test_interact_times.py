"""The time of an episode, by a clock that the test moves: when it begins, and where it ends one."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from dataflow.kernel import Layout
from dataflow.prompt_types import Message
from operators.environments import Turn
from operators.kernels import episode_pass
from operators.kernels.torch.interact import TorchInteract
from tests.kit.environments import VowelTurns
from tests.kit.interact_kernels import kernels as kernels
from tests.kit.interact_kernels import open_interact, run_episodes


class HandClock:
    """Stands where `time` is. tick: seconds that pass with each look at it."""

    def __init__(self, tick: float) -> None:
        self.now = 0.0
        self._tick = tick

    def monotonic(self) -> float:
        self.now += self._tick
        return self.now


class SecondSteps(VowelTurns):
    """Each of its steps takes a second of the test's clock; it has many turns."""

    turns = 40
    clock: ClassVar[Any] = None

    def step(self, message: dict[str, Any]) -> Turn:
        type(self).clock.now += 1.0
        return super().step(message)


def set_clock(monkeypatch: pytest.MonkeyPatch, tick: float = 0.0) -> None:
    clock = HandClock(tick)
    monkeypatch.setattr(episode_pass, "time", clock)
    monkeypatch.setattr(SecondSteps, "clock", clock)


@pytest.mark.parametrize("pace", ["rounds", "free"])
def test_an_answer_that_comes_too_late_is_the_last(
    base: str, kernels: list[TorchInteract], monkeypatch: pytest.MonkeyPatch, pace: str
) -> None:
    set_clock(monkeypatch)
    kernel = open_interact(base, SecondSteps, timeout=2.5, max_turns=9, max_tokens=200, pace=pace)
    kernels.append(kernel)
    batch = run_episodes(kernel, ["hello"])
    assert batch.array("finish").to_pylist() == ["timeout"]
    assert len(batch.ragged("turn_end")[0]) == 3
    assert None not in batch.array("turn_reward")[0].as_py()


def test_a_turn_that_ends_too_late_is_not_shown(
    base: str, kernels: list[TorchInteract], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_clock(monkeypatch, tick=1.0)
    kernel = open_interact(base, SecondSteps, timeout=0.5)
    kernels.append(kernel)
    batch = run_episodes(kernel, ["hello"])
    assert batch.array("finish").to_pylist() == ["timeout"]
    assert batch.array("turn_reward").to_pylist() == [[None]]
    assert '"_turns_left"' not in batch.array("environment_state")[0].as_py()


def test_the_time_of_an_episode_begins_with_its_first_token(
    base: str, kernels: list[TorchInteract], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one slot the last of ten begins when the time of the first would be over."""
    set_clock(monkeypatch, tick=1.0)
    how: dict[str, Any] = {"max_turns": 1, "max_turn_tokens": 9, "timeout": 40.0}
    kernel = open_interact(base, VowelTurns, n=10, layout=Layout(slots=1), **how)
    kernels.append(kernel)
    batch = run_episodes(kernel, ["hello"])
    assert batch.array("finish").to_pylist() == ["turns"] * 10


def keep_two(messages: list[Message]) -> list[Message]:
    return [messages[0], messages[-1]]


def test_all_rows_of_an_episode_have_one_time_together(
    base: str, kernels: list[TorchInteract], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_clock(monkeypatch)
    how: dict[str, Any] = {"max_context": 30, "overflow": "segment", "compact": keep_two}
    how |= {"segments": 9, "max_turns": 9, "timeout": 4.5}
    kernel = open_interact(base, SecondSteps, **how)
    kernels.append(kernel)
    batch = run_episodes(kernel, ["hello"])
    turns = batch.ragged("turn_end").lengths
    assert len(batch) > 1
    assert int(turns.sum()) == 5
    assert turns[-1] < 5
    assert batch.array("finish").to_pylist()[-1] == "timeout"


@pytest.mark.parametrize(
    ("how", "is_in_rounds"),
    [
        ({}, True),
        ({"max_lag": 2}, False),
        ({"pace": "free"}, False),
        ({"max_lag": 2, "pace": "rounds"}, True),
    ],
)
def test_without_lag_all_environments_answer_before_the_model_goes_on(
    base: str, kernels: list[TorchInteract], how: dict[str, Any], is_in_rounds: bool
) -> None:
    kernel = open_interact(base, **how)
    kernels.append(kernel)
    assert kernel._rules.rounds == is_in_rounds  # type: ignore[attr-defined]
