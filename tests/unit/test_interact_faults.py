"""Episodes that fail, hang or are given up: what is begun again, what is lost, what is left."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dataflow.batch import Batch
from operators.kernels.torch.interact import TorchInteract
from tests.kit.environments import (
    Assistant,
    Chatter,
    Failing,
    Flaky,
    FlakyReset,
    Flood,
    HangingIn,
    Hooked,
    Sluggish,
    VowelTurns,
)
from tests.kit.generate_suite import MIXED, tokens_of
from tests.kit.interact_kernels import kernels as kernels
from tests.kit.interact_kernels import (
    open_interact,
    require_sound,
    run_episodes,
    with_arguments,
)
from tests.kit.kernels import FakeSession, prompt_chunk

EIGHT_OF_FIVE = 40


@pytest.fixture
def open_one(base: str, kernels: list[TorchInteract]) -> Callable[..., tuple[Any, FakeSession]]:
    """Opens a kernel that is closed at the end; and its session."""

    def opened(environment: Any, **how: Any) -> tuple[TorchInteract, FakeSession]:
        session = FakeSession(node="episode")
        kernel = open_interact(base, environment, session=session, **how)
        kernels.append(kernel)
        return kernel, session

    return opened


Open = Callable[..., tuple[TorchInteract, FakeSession]]


def test_episodes_that_fail_are_begun_again_and_are_whole(open_one: Open, tmp_path: Path) -> None:
    steady, _ = open_one(VowelTurns, n=8)
    flaky, session = open_one(
        with_arguments(Flaky, folder=str(tmp_path), every=20), n=8, inproc=False
    )
    batch = run_episodes(flaky, MIXED)
    assert tokens_of(batch) == tokens_of(run_episodes(steady, MIXED))
    assert not session.tombstones
    assert session.metrics["env/errors"] == [(2.0, 1.0)]
    assert session.metrics["env/timeouts"] == [(0.0, 1.0)]
    assert session.metrics["generate/tokens"][0][1] == EIGHT_OF_FIVE
    require_sound(batch, flaky._model.base, completion=60, context=512)


def test_without_retries_one_in_twenty_costs_its_row_and_no_group(
    open_one: Open, tmp_path: Path
) -> None:
    environment = with_arguments(Flaky, folder=str(tmp_path), every=20)
    kernel, session = open_one(environment, n=8, inproc=False, retries=0)
    batch = run_episodes(kernel, MIXED)
    assert len(batch) == EIGHT_OF_FIVE - 2
    assert len(session.lost_alone) == len(session.tombstones) == 2
    assert set(batch.keys.position) == set(range(len(MIXED)))
    assert "RuntimeError: the lamp went out (1 attempt)" in session.tombstones[0][1]


@pytest.mark.parametrize(("on_error", "lost"), [("drop_row", 10), ("drop_group", 5)])
def test_groups_whose_every_row_fails(
    open_one: Open, tmp_path: Path, on_error: str, lost: int
) -> None:
    environment = with_arguments(Flaky, folder=str(tmp_path), every=1)
    kernel, session = open_one(environment, n=2, on_error=on_error)
    assert not len(run_episodes(kernel, MIXED))
    assert len(session.tombstones) == len({key for key, _ in session.tombstones}) == lost
    assert len(session.lost_alone) == (lost if on_error == "drop_row" else 0)
    assert session.metrics["env/errors"] == [(20.0, 1.0)]


def test_a_group_is_given_up_once(open_one: Open, tmp_path: Path) -> None:
    """Some of its rows do not begin, and the first prompt of the others is too long."""
    environment = with_arguments(FlakyReset, folder=str(tmp_path), every=3)
    how = {"overlong_prompt": "drop", "max_prompt_tokens": 50}
    kernel, session = open_one(environment, n=4, **how)
    assert not len(run_episodes(kernel, MIXED))
    assert [key[0] for key, _ in session.tombstones] == list(range(5))
    assert not session.lost_alone


class FloodOrFail(Flood, Failing):
    """A flood where it does not fail."""

    def step(self, message: dict[str, Any]) -> Any:
        if sum(map(ord, message["content"])) % 3 == 0:
            raise RuntimeError("the lamp went out")
        return Flood.step(self, message)


def test_a_group_that_overflowed_does_not_lose_rows_alone_as_well(open_one: Open) -> None:
    kernel, session = open_one(FloodOrFail, n=4, overflow="drop_group", retries=1)
    assert not len(run_episodes(kernel, MIXED))
    assert sorted(key[0] for key, _ in session.tombstones) == list(range(5))
    assert not session.lost_alone


def test_what_cannot_be_appended_is_the_fault_of_its_own_episode(open_one: Open) -> None:
    kernel, session = open_one(Assistant, n=3)
    prompts = [[{"role": "user", "content": text}] for text in MIXED]
    batch = run_episodes(kernel, prompts)
    assert 0 < len(batch) < 15
    assert len(session.lost_alone) == 15 - len(batch)
    assert "expected replies of a user or a tool" in session.tombstones[0][1]


class Bookkeeping(Assistant):
    """Cannot be appended, and writes down how it ends."""

    ends: ClassVar[list[str]] = []

    def finish(self, reason: str) -> None:
        self.ends.append(reason)

    def close(self) -> None:
        self.ends.append("close")


def test_an_environment_whose_answer_is_of_no_use_is_told_and_closed(
    open_one: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[str] = []
    monkeypatch.setattr(Bookkeeping, "ends", ends)
    kernel, session = open_one(Bookkeeping, retries=0)
    run_episodes(kernel, [[{"role": "user", "content": text}] for text in MIXED])
    failed = len(session.lost_alone)
    assert failed
    assert ends.count("error") == failed
    assert ends[ends.index("error") + 1] == "close"
    assert len(ends) - ends.count("close") == len(MIXED)
    kernel.close()
    assert ends[-1] == "close"


# --- time -----------------------------------------------------------------------------------------


@pytest.mark.timeout(60)
@pytest.mark.parametrize("call", ["reset", "step", "finish"])
def test_an_environment_that_hangs_costs_its_rows(open_one: Open, call: str) -> None:
    environment = with_arguments(HangingIn, call=call)
    limits = {"reset_timeout": 2.0, "step_timeout": 2.0, "retries": 0}
    kernel, session = open_one(environment, n=2, inproc=False, **limits)
    batch = run_episodes(kernel, ["hello", "abc"])
    assert set(batch.keys.position) == {0}
    assert [key[0] for key in session.lost_alone] == [1, 1]
    assert f"its {call} took longer than 2 s" in session.tombstones[0][1]
    assert session.metrics["env/timeouts"] == [(2.0, 1.0)]
    assert session.metrics["env/errors"] == [(0.0, 1.0)]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("pace", ["rounds", "free"])
def test_an_episode_out_of_time_ends_with_what_there_is_while_its_environment_works(
    open_one: Open, pace: str
) -> None:
    environment = with_arguments(HangingIn, call="step")
    kernel, session = open_one(environment, n=2, inproc=False, timeout=1.5, pace=pace)
    batch = run_episodes(kernel, ["hello", "abc"])
    assert not session.tombstones
    finishes = batch.array("finish").to_pylist()
    finals = batch.array("final_reward").to_pylist()
    assert finishes[2:] == ["timeout", "timeout"]
    assert finals[2:] == [None, None]
    assert finals[:2] == [1.0, 1.0]
    assert (batch.ragged("turn_end").lengths[2:] == 2).all()
    assert batch.array("turn_reward").to_pylist()[2][1] is None
    require_sound(batch, kernel._model.base, completion=60, context=512)
    assert not kernel._pool._processes  # type: ignore[attr-defined]


def test_an_episode_out_of_time_between_turns_is_finished(open_one: Open) -> None:
    kernel, session = open_one(with_arguments(Sluggish, seconds=0.3), timeout=0.2)
    batch = run_episodes(kernel, MIXED[:2])
    assert not session.tombstones
    assert batch.array("finish").to_pylist() == ["timeout"] * 2
    assert batch.array("final_reward").to_pylist() == [1.0, 1.0]
    states = [json.loads(state) for state in batch.array("environment_state").to_pylist()]
    assert [state["reason"] for state in states] == ["timeout"] * 2


def test_finish_has_time_of_its_own(open_one: Open) -> None:
    """In another process, whose answer is not there when the episode's time is up."""
    kernel, session = open_one(with_arguments(Sluggish, seconds=0.3), timeout=1e-6, inproc=False)
    batch = run_episodes(kernel, ["a"])
    assert not session.tombstones
    assert batch.array("finish").to_pylist() == ["timeout"]
    assert batch.array("final_reward").to_pylist() == [1.0]


def test_every_way_to_finish_is_told_to_the_environment(open_one: Open) -> None:
    ways = {
        "stop": {},
        "turns": {"max_turns": 2},
        "length": {"max_tokens": 12, "max_turn_tokens": None},
        "timeout": {"timeout": 1e-6},
    }
    for reason, how in ways.items():
        kernel, _ = open_one(with_arguments(Sluggish, seconds=0.0), **how)
        batch = run_episodes(kernel, ["hello"])
        assert batch.array("finish").to_pylist() == [reason]
        state = json.loads(batch.array("environment_state")[0].as_py())
        assert state["reason"] == reason


# --- chunks that are given up ---------------------------------------------------------------------


def test_a_chunk_given_up_before_its_first_reset_leaves_nothing(open_one: Open) -> None:
    kernel, _ = open_one(Chatter, n=2, inproc=False)
    expected = tokens_of(run_episodes(kernel, MIXED))
    kernel.interrupt()
    running: Any = kernel.run(prompt_chunk(MIXED))
    assert not len(next(running))
    running.close()
    assert not kernel._pool._processes  # type: ignore[attr-defined]
    assert tokens_of(run_episodes(kernel, MIXED)) == expected


def test_a_chunk_given_up_between_turns_leaves_nothing(
    open_one: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, session = open_one(Hooked, n=2)
    expected = tokens_of(run_episodes(kernel, MIXED))
    monkeypatch.setattr(Hooked, "hook", kernel.interrupt)
    running: Any = kernel.run(prompt_chunk(MIXED))
    next(running)
    running.close()
    assert not kernel._pool._episodes  # type: ignore[attr-defined]
    assert session.flights[-1] == 0
    monkeypatch.setattr(Hooked, "hook", None)
    kernel.interrupt()
    batches = list(kernel.run(prompt_chunk(MIXED)))
    assert not len(batches[0])
    assert tokens_of(Batch.concat(batches)) == expected


def test_an_interruption_is_heard_while_all_environments_work(
    open_one: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In time for new weights: its reset never ends."""
    environment = with_arguments(HangingIn, call="reset")
    kernel, session = open_one(environment, inproc=False, reset_timeout=3.0, retries=0)

    @contextmanager
    def interrupted_wait(reason: str) -> Iterator[None]:
        kernel.interrupt()
        yield

    monkeypatch.setattr(session, "waiting", interrupted_wait)
    running: Any = kernel.run(prompt_chunk(["a"]))
    assert not len(next(running))
    running.close()
    assert not session.tombstones, "the time limit of `reset` was waited for"


@pytest.mark.parametrize("inproc", [True, False])
def test_a_kernel_may_close_before_its_chunk_is_given_up(open_one: Open, inproc: bool) -> None:
    kernel, _ = open_one(Chatter, n=2, inproc=inproc)
    kernel.interrupt()
    running: Any = kernel.run(prompt_chunk(MIXED))
    next(running)
    kernel.close()
    running.close()
    kernel.interrupt()
