"""Chunks that join a run of episodes, spans of a prompt's episodes, and heavier ones first: rows
are those of each chunk alone, and nothing is kept of what has left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataflow.batch import Batch
from dataflow.errors import KernelError
from dataflow.kernel import Chunk, Layout
from operators.kernels.torch.interact import TorchInteract
from tests.kit.environments import (
    Awaited,
    Chatter,
    Flaky,
    Gathered,
    Hooked,
    VowelTurns,
    first_and_last,
)
from tests.kit.generate_suite import MIXED, tokens_of
from tests.kit.interact_kernels import kernels as kernels
from tests.kit.interact_kernels import open_interact, require_sound, with_arguments
from tests.kit.joined_runs import (
    numbered_chunks,
    owner_of,
    require_rows_alone,
    run_alone,
    run_joined,
)
from tests.kit.kernels import FakeSession
from tests.kit.turns import example_count

CHUNKS = numbered_chunks([MIXED[:2], MIXED[2:4], ["b", "hello"], MIXED[4:]])
SEGMENTS: dict[str, Any] = {
    "max_context": 48,
    "overflow": "segment",
    "segments": 3,
    "compact": first_and_last,
}
Open = Callable[..., tuple[TorchInteract, FakeSession]]


@pytest.fixture
def open_one(base: str, kernels: list[TorchInteract]) -> Open:
    """Opens a kernel that is closed at the end; and its session."""

    def opened(environment: Any = Chatter, **how: Any) -> tuple[TorchInteract, FakeSession]:
        session = FakeSession(node="episode")
        kernel = open_interact(base, environment, session=session, **how)
        kernels.append(kernel)
        return kernel, session

    return opened


# --- spans ----------------------------------------------------------------------------------------


def cut_chunk(chunk: Chunk, cuts: list[int], n: int, places: int) -> list[Chunk]:
    """A chunk cut in two: of each prompt the first episodes, and the others."""
    at = np.array(cuts[: len(chunk.keys)], np.int32)
    parts: list[Chunk] = []
    ends = np.full_like(at, n)
    for number, (first, last) in enumerate(((np.zeros_like(at), at), (at, ends))):
        rows = np.flatnonzero(first < last)
        spans = np.stack([first, last], 1)[rows] * places
        keys = chunk.keys.take(rows)
        prompts = chunk.inputs["prompt"].take(rows)
        part = Chunk(id=number, step=1, keys=keys, inputs={"prompt": prompts}, spans=spans)
        parts.append(part)
    return parts


@pytest.mark.parametrize("pace", ["rounds", "free"])
@pytest.mark.parametrize("segments", [{}, SEGMENTS], ids=["rows", "segments"])
@settings(
    max_examples=example_count(6),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(cuts=st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_spans_are_the_same_episodes_wherever_they_are_played(
    open_one: Open, cuts: list[int], segments: dict[str, Any], pace: str
) -> None:
    kernel, session = open_one(n=3, pace=pace, **segments)
    [chunk] = numbered_chunks([MIXED[:4]])
    whole = run_alone(kernel, chunk)
    whole_losses = sorted(session.lost_alone)
    session.lost_alone.clear()
    parts = cut_chunk(chunk, cuts, 3, segments.get("segments", 1))
    batches = [run_alone(kernel, part) for part in parts if len(part.keys)]
    together = Batch.concat(batches).sort()
    assert tokens_of(together) == tokens_of(whole)
    for name in set(whole.names) & {"messages", "finish", "turn_end", "episode", "segment"}:
        assert together.array(name).equals(whole.array(name)), name
    assert sorted(session.lost_alone) == whole_losses


def test_spans_of_parts_of_episodes_are_refused(open_one: Open) -> None:
    kernel, _ = open_one(n=2, **SEGMENTS)
    chunk = replace(CHUNKS[0], spans=np.array([[0, 3], [2, 6]], np.int32))
    with pytest.raises(KernelError, match=r"expected spans of whole episodes, of 3 places .*2, 6"):
        run_alone(kernel, chunk)


# --- weights --------------------------------------------------------------------------------------


class NotedResets(VowelTurns):
    """Writes down which prompt it is reset for, and how many are alive."""

    begun: ClassVar[list[str]] = []
    alive: ClassVar[set[int]] = set()
    most: ClassVar[int] = 0

    def reset(self, prompt: str) -> None:  # type: ignore[override]
        super().reset()
        self.begun.append(prompt)
        self.alive.add(id(self))
        type(self).most = max(self.most, len(self.alive))

    def finish(self, reason: str) -> float:
        self.alive.discard(id(self))
        return 1.0

    def close(self) -> None:
        self.alive.discard(id(self))


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> type[NotedResets]:
    monkeypatch.setattr(NotedResets, "begun", [])
    monkeypatch.setattr(NotedResets, "alive", set())
    monkeypatch.setattr(NotedResets, "most", 0)
    return NotedResets


@pytest.mark.parametrize("pace", ["rounds", "free"])
def test_heavier_episodes_begin_first_and_are_the_same(
    open_one: Open, noted: type[NotedResets], pace: str
) -> None:
    kernel, _ = open_one(noted, pace=pace, layout=Layout(slots=1), max_turns=1)
    prompts = ["a", "bb", "ccc", "dddd"]
    [chunk] = numbered_chunks([prompts])
    expected = run_alone(kernel, chunk)
    ends: list[str] = []
    noted.begun.clear()
    weighed = replace(chunk, weights=np.array([1, 9, 2, 9], np.float32))
    for batch in kernel.run(weighed):
        ends += [prompts[position] for position in batch.keys.position]
    assert noted.begun == ["bb", "dddd", "ccc", "a"]
    if pace == "free":
        assert ends == noted.begun
    assert tokens_of(run_alone(kernel, weighed)) == tokens_of(expected)


# --- joins ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("segments", [{}, SEGMENTS], ids=["rows", "segments"])
@settings(
    max_examples=example_count(15),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    calls=st.sets(st.integers(0, 60), max_size=3),
    slots=st.integers(1, 9),
    n=st.integers(1, 3),
)
def test_episodes_that_join_at_any_call_are_those_of_their_chunk_alone(
    open_one: Open, base: str, calls: set[int], slots: int, n: int, segments: dict[str, Any]
) -> None:
    how: dict[str, Any] = {"n": n, "pace": "free", "layout": Layout(slots=slots, tokens=64)}
    kernel, session = open_one(Hooked, **how, **segments)
    made = [0]

    def interrupt() -> None:
        if made[0] in calls:
            kernel.interrupt()
        made[0] += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Hooked, "hook", interrupt)
        joined = run_joined(
            kernel, CHUNKS, lambda number: True, lambda batch: _require_one_chunk(batch)
        )
    require_sound(joined, base, completion=60, context=segments.get("max_context", 512))
    assert not kernel._pool._episodes  # type: ignore[attr-defined]
    assert session.flights[-1] == 0
    require_rows_alone(joined, kernel, CHUNKS)


def _require_one_chunk(batch: Batch) -> None:
    owner_of(batch, CHUNKS)


def test_a_chunk_that_joins_as_the_last_rows_leave_goes_on(open_one: Open) -> None:
    kernel, _ = open_one(n=2, pace="free")
    joined = run_joined(kernel, CHUNKS, lambda number: False)
    require_rows_alone(joined, kernel, CHUNKS)


def test_each_chunk_reports_before_its_last_rows_leave(open_one: Open) -> None:
    kernel, session = open_one(n=2, pace="free")
    reports: list[int] = []
    left = [0] * len(CHUNKS)

    def hear(batch: Batch) -> None:
        owner = owner_of(batch, CHUNKS)
        if owner is not None:
            left[owner] += len(batch)
            over = sum(count == 2 * len(CHUNKS[index].keys) for index, count in enumerate(left))
            reports.append(len(session.metrics.get("episode/turns", [])))
            assert reports[-1] == over

    joined = run_joined(kernel, CHUNKS, lambda number: True, hear)
    assert reports[-1] == len(CHUNKS)
    counts = [count for _, count in session.metrics["generate/tokens"]]
    assert sorted(counts) == sorted(2 * len(chunk.keys) for chunk in CHUNKS)
    means = session.metrics["episode/tokens"]
    assert (
        sum(mean * count for mean, count in means) == joined.ragged("completion_ids").lengths.sum()
    )


def test_chunks_of_rounds_do_not_join(open_one: Open) -> None:
    kernel, _ = open_one(n=2, max_lag=1, pace="rounds")
    assert not kernel.joinable
    with pytest.raises(KernelError, match="expected a run with pace='free' for chunk 1 to join"):
        run_joined(kernel, CHUNKS[:2], lambda number: True)
    free, _ = open_one(n=2, max_lag=1)
    assert free.joinable
    with pytest.raises(KernelError, match="for chunk 1 to join, found none"):
        free.join(CHUNKS[1])


def test_a_run_that_goes_on_keeps_what_is_in_it_alone(
    open_one: Open, noted: type[NotedResets]
) -> None:
    """Twenty chunks, two at a time; an environment is alive for each episode alone."""
    kernel, _ = open_one(noted, n=2, pace="free", layout=Layout(slots=4))
    chunks = numbered_chunks([[text] for text in (MIXED * 4)])
    sizes: list[int] = []

    def hear(batch: Batch) -> None:
        flow: Any = kernel._flow
        if flow._pass is not None:
            rows = len(flow._pass.loop.written.length)
            sizes.append(rows + len(flow._places) + len(kernel._chunks))

    kernel.interrupt()
    joined = run_joined(kernel, chunks, lambda number: len(kernel._chunks) < 2, hear)
    assert len(joined) == 40
    assert max(sizes) <= 30
    assert not noted.alive


def test_environments_begin_as_slots_come_near(open_one: Open, noted: type[NotedResets]) -> None:
    kernel, _ = open_one(noted, n=2, pace="free", layout=Layout(slots=4))
    batch = run_alone(kernel, numbered_chunks([MIXED * 4])[0])
    assert len(batch) == 40
    # The slots and half as many, and the rest of a group.
    assert noted.most <= 4 + 2 + 1


@pytest.mark.timeout(60)
def test_others_write_while_as_many_rows_as_there_are_slots_wait(
    open_one: Open, tmp_path: Path
) -> None:
    """Which is why a replica has credit for more rows than it has slots."""
    environment = with_arguments(Gathered, folder=str(tmp_path), count=4)
    how: dict[str, Any] = {"inproc": False, "step_timeout": 20.0}
    kernel, session = open_one(environment, pace="free", layout=Layout(slots=2), **how)
    kernel.interrupt()
    joined = run_joined(kernel, numbered_chunks([["a", "bcd"], ["b", "hello"]]), lambda _: True)
    assert len(joined) == 4
    assert [mean for mean, _ in session.metrics["env/timeouts"]] == [0.0, 0.0]


# --- what goes wrong ------------------------------------------------------------------------------


def test_failures_are_those_of_their_chunk(open_one: Open, tmp_path: Path) -> None:
    environment = with_arguments(Flaky, folder=str(tmp_path), every=5)
    kernel, session = open_one(environment, n=2, pace="free", retries=0)
    joined = run_joined(kernel, CHUNKS, lambda number: True)
    assert len(session.lost_alone) == 2
    assert len(joined) == 14 - 2
    assert set(joined.keys.rows()).isdisjoint(session.lost_alone)
    assert sum(mean * count for mean, count in session.metrics["env/errors"]) == 2


def test_episodes_that_fail_begin_again_at_once(open_one: Open, tmp_path: Path) -> None:
    environment = with_arguments(Flaky, folder=str(tmp_path), every=5)
    kernel, session = open_one(environment, n=2, pace="free")
    steady, _ = open_one(VowelTurns, n=2, pace="free")
    joined = run_joined(kernel, CHUNKS, lambda number: True)
    assert not session.tombstones
    require_rows_alone(joined, steady, CHUNKS)


def test_a_run_given_up_leaves_no_environment_of_any_chunk(
    open_one: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, session = open_one(Hooked, n=2, pace="free")
    expected = tokens_of(run_alone(kernel, CHUNKS[1]))
    monkeypatch.setattr(Hooked, "hook", kernel.interrupt)
    running: Any = kernel.run(CHUNKS[0])
    next(running)
    kernel.join(CHUNKS[1])
    next(running)
    running.close()
    assert not kernel._pool._episodes  # type: ignore[attr-defined]
    assert session.flights[-1] == 0
    monkeypatch.setattr(Hooked, "hook", None)
    assert tokens_of(run_alone(kernel, CHUNKS[1])) == expected


@pytest.mark.timeout(60)
def test_resets_of_a_chunk_that_joins_do_not_hold_up_the_others(
    open_one: Open, tmp_path: Path
) -> None:
    environment = with_arguments(Awaited, file=str(tmp_path / "over"))
    kernel, session = open_one(environment, pace="free", inproc=False, reset_timeout=30.0)
    chunks = numbered_chunks([["hello"], ["a", "bcd"]])
    kernel.interrupt()
    joined = run_joined(kernel, chunks, lambda number: True)
    assert not session.tombstones
    assert [mean for mean, _ in session.metrics["env/timeouts"]] == [0.0, 0.0]
    assert len(joined) == 3
    assert not kernel._pool._processes  # type: ignore[attr-defined]
