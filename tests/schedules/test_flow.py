"""What flows through random runs in simulated time: the figures add up, whatever happens."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import pytest

from engine.keep.flow.flow_sums import sum_flows
from engine.keep.flow.fold import FlowFold
from engine.keep.flow.records import Flow, Record
from engine.keep.flow.segments import read_live, read_steps
from engine.keep.flow.writer import FlowWriter
from engine.protocol import messages as m
from engine.run.simulated_workers.faults import FaultModel
from engine.run.simulated_workers.simulation import Simulation
from tests.schedules.elastic import elastic_case, with_moves
from tests.schedules.plans import ScheduleCase, drawn_case
from tests.schedules.weather import begun, drawn

SEEDS = [
    range(10),
    pytest.param(range(10, 20), marks=[pytest.mark.long, pytest.mark.repeats]),
]
KINDS = ("busy", "for_rows", "for_weights", "for_turn", "for_room", "for_outside", "idle")


def folded(seed: int, folder: Path, *, deaths: bool) -> tuple[Simulation, list[Flow], list[Flow]]:
    """A run, its Flows of Steps and of seconds."""
    case = drawn_case(seed, up=seed % 3 == 0, own=seed % 5 == 0)
    faults = drawn(random.Random(f"flow {seed}"), 4) if deaths else None
    return flows_of(case, faults, folder)


def flows_of(
    case: ScheduleCase, faults: FaultModel | None, folder: Path
) -> tuple[Simulation, list[Flow], list[Flow]]:
    writer = FlowWriter(folder, after=0)
    run: Simulation

    def cuts() -> dict[str, tuple[int, int, int, int]]:
        return run.coordinator.cuts()

    fold = FlowFold(case.plan, writer, cuts, wall=lambda: run.now)
    run = begun(case, 0, faults=faults, watchers=[fold])
    run.run()
    fold.fold()
    writer.close()
    return run, _flows(read_steps(folder)), read_live(folder)


def _flows(records: Iterable[Record]) -> list[Flow]:
    return [record for record in records if isinstance(record, Flow)]


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
@pytest.mark.parametrize("deaths", [False, True])
def test_figures_add_up(seeds: range, deaths: bool, tmp_path: Path) -> None:
    for seed in seeds:
        run, steps, seconds = folded(seed, tmp_path / f"{seed}", deaths=deaths)
        for flow in (*steps, *seconds):
            _adds_up(flow)
        _follow_one_another(steps)
        trained = [flow.step for flow in steps]
        assert trained == sorted(set(trained)), f"seed {seed}: a Step twice, or not in order"
        if run.finish is not None and not deaths:
            assert trained == list(range(1, run.history.closed + 1)), f"seed {seed}"
            _rows_are_those_of_the_run(run, steps)


@pytest.mark.long
def test_figures_of_replicas_that_come_and_go_add_up(tmp_path: Path) -> None:
    """One that was not there in a Step has no figures of it; one that worked then has some."""
    away = 0
    for seed in range(15):
        case, draw = elastic_case(seed), random.Random(f"flow {seed}")
        faults = with_moves(draw, drawn(draw, 2), last=False)
        run, steps, seconds = flows_of(case, faults, tmp_path / f"{seed}")
        for flow in (*steps, *seconds):
            _adds_up(flow)
        _follow_one_another(steps)
        places = {f"{n.name}@{w}" for n in case.plan.nodes for w in n.workers}
        away += sum(len(places - flow.nodes.keys()) for flow in steps)
        ends = [at for at, said in run.history.instructions if isinstance(said, m.StepClosed)]
        if steps and ends:
            worked = {f"{e.node}@{e.ref.worker}" for e in _made(run, ends[-1])}
            assert worked <= {name for flow in steps for name in flow.nodes}, f"seed {seed}"
    assert away > 0


def _made(run: Simulation, until: float) -> list[m.Produced]:
    return [e for at, e in run.history.events if isinstance(e, m.Produced) and at < until]


def _adds_up(flow: Flow) -> None:
    length = flow.end - flow.start
    for name, replica in flow.nodes.items():
        parts = [getattr(replica, kind) for kind in KINDS]
        assert min(parts) >= 0, f"{name}: {replica}"
        assert sum(parts) == pytest.approx(length, abs=1e-4 + 1e-6 * length), f"{name}: {replica}"
        waited = length - replica.busy - replica.idle
        assert sum(replica.blames.values()) <= waited + 1e-4 + 1e-6 * length
    for name, edge in flow.edges.items():
        assert edge.rows >= 0, name
        assert edge.waiting_rows >= 0, name
        assert (edge.age > 0) <= (edge.waiting_rows > 0), name
    for cut in flow.cuts.values():
        assert 0 <= cut.ready <= cut.outstanding <= cut.room


def _follow_one_another(steps: list[Flow]) -> None:
    for before, after in pairwise(steps):
        assert after.start == pytest.approx(before.end, abs=1e-5)


def _rows_are_those_of_the_run(run: Simulation, steps: list[Flow]) -> None:
    """Every train node trained the rows that it was told to; lags count those with a version."""
    if not steps:
        return
    whole = sum_flows(steps)
    told: Counter[str] = Counter()
    for _, said in run.history.instructions:
        if isinstance(said, m.TrainStep):
            told[f"{said.node}@{said.worker}"] += len(said.keys)
    for name, rows in told.items():
        assert whole.nodes[name].rows == rows, name
