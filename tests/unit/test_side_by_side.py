"""Which processes run beside each other, and what comes of it; no kernel runs here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from engine.predict.profile import side_by_side
from engine.predict.profile.child import ChildResult
from engine.predict.profile.predictions import MeasuredCell, ProfiledWork
from engine.predict.profile.side_by_side import Crowding, MeasuredWork, measure_crowding
from tests.kit.plans import grpo_plan
from tests.unit.test_profile_file import CELL, SIZES

pytestmark = pytest.mark.usefixtures("tiny")


def node(*seconds: float | None, cores: int = 1, needed: Mapping[str, str] = {}) -> MeasuredWork:
    """One whose sizes took so long."""
    work = ProfiledWork(of=0, node="n", kind="train", model=SIZES, kernel="torch", cores=cores)
    cells = tuple(MeasuredCell(cell=replace(CELL, seconds=each)) for each in seconds)
    return MeasuredWork(plan=grpo_plan(), work=work, cells=cells, needed=needed)


Started = list[tuple[int, int]]
"""(nodes, threads) of each process."""


@pytest.fixture
def slower() -> float:
    """How much longer the first two processes take than those after."""
    return 1.5


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, slower: float) -> Started:
    found: Started = []

    def in_child(task: Callable[[], Iterator[Any]], *, threads: int, **_: Any) -> ChildResult:
        asked = task.args[0]  # type: ignore[attr-defined]
        found.append((len(asked), threads))
        times = slower if len(found) <= 2 else 1.0
        cells = (w.cells[0] for _, w, _ in asked)
        others = 0.5 if len(found) == 2 else 0.0
        told = (replace(c, seconds=times * c.estimated, others=others) for c in cells)
        return ChildResult(outputs=tuple(told))

    monkeypatch.setattr(side_by_side, "run_in_child", in_child)
    return found


def estimated(of: MeasuredWork, seconds: int) -> MeasuredWork:
    """One whose calls take so long, whatever was measured before."""
    cells = tuple(replace(c, cell=replace(c.cell, estimated=seconds)) for c in of.cells)
    return replace(of, cells=cells)


def test_all_nodes_are_in_one_process_a_core_and_then_alone(started: Started) -> None:
    crowdings = measure_crowding([estimated(node(0.1), 2), estimated(node(0.2), 4)], 2, quick=False)
    assert [each.slower for each in crowdings] == [1.5, 1.5]
    assert [each.others for each in crowdings] == [0.5, 0.5], (
        "of the process that others disturbed most"
    )
    assert started == [(2, 1)] * 3


def test_nodes_that_work_at_the_same_time_are_measured_beside_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each process begins with another node, and each node's seconds are its own."""
    orders: list[list[int]] = []

    def in_child(task: Callable[[], Iterator[Any]], **_: Any) -> ChildResult:
        asked = task.args[0]  # type: ignore[attr-defined]
        cells = [work.cells[0] for _, work, _ in asked]
        orders.append([cell.estimated for cell in cells])
        times = 1.0 if len(orders) == 3 else 2.0
        return ChildResult(outputs=tuple(replace(c, seconds=times * c.estimated) for c in cells))

    monkeypatch.setattr(side_by_side, "run_in_child", in_child)
    nodes = [estimated(node(0.1), 2), estimated(node(0.2), 7)]
    crowdings = measure_crowding(nodes, 2, quick=True, mixed=True)
    assert sorted(orders[:2]) == [[2, 7], [7, 2]]
    assert orders[2] == [2, 7]
    assert [each.slower for each in crowdings] == [2.0, 2.0]


@pytest.mark.parametrize("slower", [0.5])
def test_what_is_faster_beside_others_is_as_fast(started: Started) -> None:
    (crowding,) = measure_crowding([estimated(node(0.5), 2)], 2, quick=True)
    assert crowding.slower == 1.0
    assert started == [(1, 1)] * 3


def test_other_threads_and_variables_are_other_processes(started: Started) -> None:
    nodes = [node(0.1), node(0.1, needed={"A": "b"}), node(0.1, cores=2), node(0.1, cores=4)]
    measure_crowding([estimated(each, 1) for each in nodes], 4, quick=True)
    assert sorted(started) == [(1, 1)] * 10 + [(1, 2)] * 3, "four threads are alone"


def test_nothing_runs_where_nothing_was_measured(started: Started) -> None:
    nothing = measure_crowding([node(None), node(), node(0.1, cores=2)], 2, quick=False)
    assert nothing == [Crowding()] * 3
    assert started == []


@pytest.mark.parametrize(
    ("seconds", "typical"),
    [((0.1, 0.4, 3.0), 0.4), ((2.0, 3.0), 2.0), ((None, 0.2), 0.2), ((None,), 0.0)],
)
def test_the_longest_call_that_is_not_too_long_counts(
    seconds: tuple[float | None, ...], typical: float
) -> None:
    assert node(*seconds).typical == typical
