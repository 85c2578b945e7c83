"""What a plan will do: the real coordinator and loop, kernels that take the cost model's time.

Owns: putting them together, and what a Step came to. Does not own: the times (priced_times.py),
what is said of the outcome (report.py).

    predict(plan, steps=5, lengths=..., seconds={"score": 0.002}).steps

Messages that come within a ten-thousandth of the longest node's time are handled together, so that
times are as exact as that. The same plan, lengths and seed give the same Prediction to the bit, but
for the seconds that the coordinator itself took.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import get_args

import numpy as np

from dataflow.batch import Keys
from engine.coordinator.coordinator import Coordinator
from engine.coordinator.replicas import METRIC as REPLICAS
from engine.coordinator.run_settings import Scaling, Settings
from engine.plan.cost.machine_load import MachineLoad
from engine.plan.cost.profile import Profile
from engine.plan.costs import plan_costs
from engine.plan.plan import Plan
from engine.plan.source_rows import rows_in_data
from engine.protocol import messages as m
from engine.protocol.events import EventHeard, EventStream, InstructionTold, RunEvent
from engine.run.loop.loop import Loop
from engine.run.simulated_workers.history import ModelRead
from engine.run.simulated_workers.store import MemoryStore
from engine.run.simulated_workers.workers import SimulatedWorkers
from engine.simulation.lengths import Distributions, DrawnLengths, UnknownDistributions
from engine.simulation.prediction import CoordinatorLoad, Prediction, SimulatedStep
from engine.simulation.priced_times import PricedTimes, TrainedRows
from engine.simulation.row_origins import describe_row_origins
from engine.simulation.selections import make_outcomes, require_shares

_TOGETHER = 1 << 16
"""Messages that are handled together at most."""
_EXACT = 1e-4
"""Of the longest node's seconds: within it messages are handled together."""
_AHEAD = 8
"""Batches of a source's data beyond those that a run can ask for."""


def predict(
    plan: Plan,
    *,
    steps: int,
    lengths: Distributions | None = None,
    seed: int = 0,
    profile: Profile | None = None,
    seconds: Mapping[str, float] | None = None,
    cpu: Mapping[str, float] | None = None,
    kept: Mapping[str, float] | None = None,
    spans: bool = True,
    scaling: Scaling = "fixed",
    grace: float = Settings.grace,
    measures_loads: bool = False,
) -> Prediction:
    """Simulate so many Steps of a plan. lengths: of rows, in tokens; None: of prompts as counted in
    the data, of others the greatest. seed: of their draws. seconds: a row of nodes that are
    functions; cpu: the share of these in which they compute; before those of the profile. kept: the
    share of rows that a selection keeps, all of one that has none. spans: keep who did what when.
    scaling, grace, measures_loads: as the options of a run say. Raises PlanError for a node whose
    time nobody knows, for a row that a cache cannot hold, and for a share of what is no selection.
    """
    assert plan.program is not None
    shares = kept or {}
    require_shares(plan.program, shares)
    costs = plan_costs(plan, profile)
    drawn = DrawnLengths(plan, lengths or UnknownDistributions(), seed)
    rows = _count_source_rows(plan, steps)
    # The times ask which Workers are there, and these ask for times: hence a function of them.
    times = PricedTimes(plan, costs, drawn, lambda: world, seconds or {}, cpu or {})
    longest = max((node.estimate.seconds or 0.0 for node in plan.nodes), default=0.0)
    several = {node.name: node.segments for node in plan.nodes if node.segments > 1}
    outcomes = replace(make_outcomes(plan.program, shares, seed), segments=several)
    world = SimulatedWorkers(
        plan,
        _NoNotes(),
        rows=rows,
        kernels=times,
        outcomes=outcomes,
        within=_EXACT * longest,
        message=costs.message,
        handling=costs.handling,
        log=spans,
        proving=False,
    )
    settings = Settings(steps=steps, scaling=scaling, grace=grace, measures_loads=measures_loads)
    coordinator = _TimedCoordinator(plan, settings)
    record = _Record()
    loop = Loop(
        coordinator,
        world,
        MemoryStore(plan),
        EventStream(record),
        clock=lambda: world.clock.now,
        together=_TOGETHER,
    )
    with _without_gc():
        loop.run()
    load = CoordinatorLoad(
        events=record.events, instructions=record.instructions, seconds=coordinator.seconds
    )
    return Prediction(
        plan=plan,
        seconds=world.clock.now,
        steps=tuple(_make_steps(record, times)),
        spans=tuple(world.log.all()) if world.log is not None else (),
        coordinator=load,
        present=world.present,
        rows=describe_row_origins(plan, drawn, rows),
        load=profile.load if profile is not None else MachineLoad(),
    )


def _count_source_rows(plan: Plan, steps: int) -> dict[str, int]:
    """Rows of each source: more than can be asked for; of an evaluation's those of its data or,
    where nobody knows them, as many as have slots.
    """
    assert plan.program is not None
    counts: dict[str, int] = {}
    for source in plan.sources:
        counts[source.name] = source.batch * (steps + source.max_lag + _AHEAD)
    for node in plan.nodes:
        if node.work == "source" and node.name not in counts:
            rows = rows_in_data(plan.program.node(node.name))
            counts[node.name] = rows or _count_slots(plan, node.name)
    return counts


def _count_slots(plan: Plan, source: str) -> int:
    """The most slots of a generation of a source's rows; 1 without one."""
    readers = [node for node in plan.nodes if node.source == source]
    return max((node.layout.slots for node in readers if node.traits.generates), default=1)


def _make_steps(record: _Record, times: PricedTimes) -> Iterator[SimulatedStep]:
    (_, start), *closed = record.closed
    for closing, end in closed:
        step = closing.step
        parts = [rows for (when, _), rows in times.trained.items() if when == step]
        # What several nodes train on is not added up: often they are the same rows.
        most = max(parts, key=lambda part: part.tokens, default=TrainedRows())
        lags: dict[str, tuple[int, int]] = {}
        for part in parts:
            lags |= part.lags
        yield SimulatedStep(
            step=step,
            start=start,
            end=end,
            rows=most.rows,
            tokens=most.tokens,
            lag={name: total / count for name, (total, count) in lags.items() if count},
            replicas=_replica_counts(closing),
        )
        start = end


def _replica_counts(closing: m.StepClosed) -> dict[str, int]:
    """By elastic node, as a Step's metrics say."""
    counts: dict[str, int] = {}
    for metric, number in closing.metrics.items():
        if metric.startswith(REPLICAS):
            counts[metric.removeprefix(REPLICAS)] = int(number)
    return counts


@contextmanager
def _without_gc() -> Iterator[None]:
    """Nothing here is in a cycle, and looking for cycles among millions of messages takes long."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _TimedCoordinator(Coordinator):
    """seconds: of CPU that it has taken."""

    def __init__(self, plan: Plan, settings: Settings) -> None:
        super().__init__(plan, settings)
        self.seconds = 0.0

    def handle_together(self, events: Sequence[m.Event], now: float) -> list[m.Instruction]:
        """See Coordinator."""
        begun = time.process_time()
        instructions = super().handle_together(events, now)
        self.seconds += time.process_time() - begun
        return instructions


class _Record:
    """Counts events and instructions. closed: each Step's end and when it was, first the run's
    beginning.
    """

    takes = (*get_args(m.Event), *get_args(m.Instruction))

    def __init__(self) -> None:
        self.events = self.instructions = 0
        self.closed: list[tuple[m.StepClosed, float]] = []

    def take(self, event: RunEvent) -> None:
        """See `engine.protocol.events`."""
        match event:
            case EventHeard():
                self.events += 1
            case InstructionTold(instruction=instruction, at=at):
                self.instructions += 1
                if isinstance(instruction, m.StepClosed):
                    self.closed.append((instruction, at))


class _NoNotes:
    """See Notes: nothing is to be proved."""

    def note_read(self, read: ModelRead) -> None:
        """Nothing."""

    def note_trained(self, message: m.TrainStep, versions: dict[str, np.ndarray]) -> None:
        """Nothing."""

    def note_samples(self, step: int, keys: Mapping[str, Keys]) -> None:
        """Nothing."""
