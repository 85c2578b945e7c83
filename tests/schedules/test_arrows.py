"""Arrows between spans, in random schedules: each joins the chunk that made rows, or a version,
with what took it, and never goes back in time; without deaths none is missing.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from engine.keep.trace.arrows import Arrow
from engine.keep.trace.timeline import Trace, read_trace
from engine.protocol import messages as m
from engine.protocol.events import WorkersMeasured
from engine.run.simulated_workers.faults import FaultModel
from engine.run.simulated_workers.simulation import Simulation
from tests.kit.traces import sound_arrows
from tests.schedules.elastic import elastic_case, with_moves
from tests.schedules.plans import ScheduleCase, drawn_case
from tests.schedules.watched import WatchedSpans
from tests.schedules.weather import begun, drawn

SEEDS = [
    range(15),
    pytest.param(range(15, 30), marks=[pytest.mark.long, pytest.mark.repeats]),
]


def watched(seed: int, *, deaths: bool) -> WatchedSpans:
    """A run of a random case, until it ends or has to go back."""
    faults = drawn(random.Random(f"arrows {seed}"), 4) if deaths else None
    return watched_case(drawn_case(seed), faults)[1]


def watched_case(case: ScheduleCase, faults: FaultModel | None) -> tuple[Simulation, WatchedSpans]:
    watcher = WatchedSpans()
    run = begun(case, 0, faults=faults, watchers=[watcher])
    run.run()
    watcher.take(WorkersMeasured(at=0.0, reports=[], spans=[], doing=[]))
    return run, watcher


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_arrows_join_what_was_made_with_what_took_it(seeds: range) -> None:
    for seed in seeds:
        watcher = watched(seed, deaths=False)
        require_all_right(watcher)
        pointed: dict[tuple[int, str], set[tuple[str, int]]] = {}
        for joined in watcher.joined:
            taken = {(a.source.worker, a.source.block) for a in joined.arrows if a.kind == "rows"}
            pointed.setdefault((joined.span.task, joined.span.worker), set()).update(taken)
        for place, blocks in pointed.items():
            assert blocks == reads(watcher.tasks[place]), f"seed {seed}: {watcher.tasks[place]}"
        require_versions(watcher)


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_where_workers_die_no_arrow_is_wrong(seeds: range) -> None:
    for seed in seeds:
        require_all_right(watched(seed, deaths=True))


@pytest.mark.long
def test_where_replicas_come_and_go_no_arrow_is_wrong() -> None:
    retired = 0
    for seed in range(20):
        draw = random.Random(f"arrows {seed}")
        faults = with_moves(draw, drawn(draw, 2), last=False)
        run, watcher = watched_case(elastic_case(seed), faults)
        retired += sum(isinstance(order, m.Retire) for _, order in run.history.instructions)
        require_all_right(watcher)
    assert retired > 10


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_the_file_is_sound(seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        watcher = watched(seed, deaths=seed % 2 == 0)
        path = tmp_path / f"{seed}.json"
        trace = Trace(path)
        trace.show(watcher.joined)
        trace.close()
        drawn = sound_arrows(read_trace(path))
        assert len(drawn) == sum(len(joined.arrows) for joined in watcher.joined)


def test_what_is_over_is_forgotten() -> None:
    """A hundred Steps keep no more than ten."""
    for seed in range(8):
        watcher = watched(seed, deaths=False)
        told = {number for number, _ in watcher.tasks}
        assert len(watcher.arrows) <= max(20, len(told) // 4), f"seed {seed}"


def require_all_right(watcher: WatchedSpans) -> None:
    for joined in watcher.joined:
        for arrow in joined.arrows:
            require_right(watcher, arrow)


def require_right(watcher: WatchedSpans, arrow: Arrow) -> None:
    """Of rows: the source made a block that the target reads. Of a version: the target loads what
    the source trained, or computes with what the source loaded.
    """
    source, target = arrow.source, arrow.target
    assert source.start <= target.start
    task = watcher.tasks[target.task, target.worker]
    if arrow.kind == "rows":
        assert watcher.made[source.worker, source.block].id == source.task
        assert (source.worker, source.block) in reads(task)
        return
    made = watcher.tasks[source.task, source.worker]
    if isinstance(task, m.Offer | m.Load):
        assert isinstance(made, m.TrainStep)
        assert (made.node, made.step) == (task.writer, task.version)
    else:
        assert isinstance(task, m.RunChunk)
        assert isinstance(made, m.Load)
        assert made.reader == task.node


def require_versions(watcher: WatchedSpans) -> None:
    """Each load has an arrow from the train Step of its version; a Step without rows has none."""
    trained = {(t.node, t.step) for t in watcher.tasks.values() if isinstance(t, m.TrainStep)}
    for each in watcher.joined:
        task = watcher.tasks[each.span.task, each.span.worker]
        if isinstance(task, m.Load):
            wanted = ["version"] if (task.writer, task.version) in trained else []
            assert [arrow.kind for arrow in each.arrows] == wanted, each


def reads(task: m.Task) -> set[tuple[str, int]]:
    """The blocks that a task has arrows from: those that it reads; samples have none."""
    if isinstance(task, m.Offer | m.Load | m.Record):
        return set()
    return {ref for of in task.inputs.values() for gather in of for ref in gather.refs}
