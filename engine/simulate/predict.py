"""What a plan will do: the real coordinator and loop, kernels that take the cost model's time.

Owns: putting them together, and what a Step came to. Does not own: the times (priced.py), what is
said of the outcome (report.py).

    predict(plan, steps=5, lengths=..., seconds={"score": 0.002}).steps

Messages that come within a ten-thousandth of the longest node's time are handled together, so that
times are as exact as that. The same plan, lengths and seed give the
same Prediction to the bit, but for the seconds that the coordinator itself took.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import get_args

import numpy as np

from dataflow.batch import Keys
from engine.coordinator import messages as m
from engine.coordinator.core import Coordinator
from engine.coordinator.settings import Settings
from engine.cost.machine_load import MachineLoad
from engine.cost.profile import Profile
from engine.observe.events import EventHeard, EventStream, InstructionTold, RunEvent
from engine.plan.costs import plan_costs
from engine.plan.plan import Plan
from engine.run.loop import Loop
from engine.simulate.behaviour import Outcomes
from engine.simulate.history import ModelRead
from engine.simulate.lengths import Distributions, DrawnLengths, Greatest
from engine.simulate.prediction import CoordinatorLoad, Prediction, SimulatedStep
from engine.simulate.priced import PricedTimes
from engine.simulate.store import MemoryStore
from engine.simulate.workers import SimulatedWorkers

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
    spans: bool = True,
) -> Prediction:
    """Simulate so many Steps of a plan. lengths: of rows, in tokens; None: the greatest. seed: of
    their draws. seconds: a row of nodes that are functions. spans: keep who did what when. Raises
    PlanError for a node whose time nobody knows, and for a row that a cache cannot hold.
    """
    costs = plan_costs(plan, profile)
    drawn = DrawnLengths(plan, lengths or Greatest(), seed)
    times = PricedTimes(plan, costs, drawn, lambda: world.outbox, seconds or {})
    world = SimulatedWorkers(
        plan,
        _NoNotes(),
        rows=_rows(plan, steps),
        kernels=times,
        outcomes=Outcomes(),
        within=_EXACT * max((n.estimate.seconds or 0.0 for n in plan.nodes), default=0.0),
        message=costs.message,
        log=spans,
        proving=False,
    )
    coordinator = _TimedCoordinator(plan, Settings(steps=steps))
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
    return Prediction(
        plan=plan,
        seconds=world.clock.now,
        steps=tuple(_steps(record, times)),
        spans=tuple(world.log.all()) if world.log is not None else (),
        coordinator=CoordinatorLoad(
            events=record.events, instructions=record.instructions, seconds=coordinator.seconds
        ),
        load=profile.load if profile is not None else MachineLoad(),
    )


def _rows(plan: Plan, steps: int) -> dict[str, int]:
    """Of each source: more than can be asked for; of an evaluation's as many as have slots."""
    found = {s.name: s.batch * (steps + s.max_lag + _AHEAD) for s in plan.sources}
    for node in (n for n in plan.nodes if n.work == "source" and n.name not in found):
        reads = [n for n in plan.nodes if n.source == node.name and n.traits.generates]
        found[node.name] = max((n.layout.slots for n in reads), default=1)
    return found


def _steps(record: _Record, times: PricedTimes) -> Iterator[SimulatedStep]:
    start, *closed = record.closed
    begun = start[1]
    for step, end in closed:
        parts = [trained for (at, _), trained in times.trained.items() if at == step]
        most = max(parts, key=lambda part: part.tokens, default=None)
        lags: dict[str, tuple[int, int]] = {}
        for part in parts:
            lags |= part.lags
        yield SimulatedStep(
            step=step,
            start=begun,
            end=end,
            rows=most.rows if most else 0,
            tokens=most.tokens if most else 0,
            lag={name: total / count for name, (total, count) in lags.items() if count},
        )
        begun = end


@contextmanager
def _without_gc() -> Iterator[None]:
    """Nothing here is in a cycle, and looking for cycles among millions of messages takes long."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class _TimedCoordinator(Coordinator):
    """seconds: of CPU that it has taken."""

    def __init__(self, plan: Plan, settings: Settings) -> None:
        super().__init__(plan, settings)
        self.seconds = 0.0

    def handle_together(self, events: Sequence[m.Event], now: float) -> list[m.Instruction]:
        """See Coordinator."""
        begun = time.process_time()
        told = super().handle_together(events, now)
        self.seconds += time.process_time() - begun
        return told


class _Record:
    """Counts what is heard and told. closed: each Step and when it was, first the run's begin."""

    takes = (*get_args(m.Event), *get_args(m.Instruction))

    def __init__(self) -> None:
        self.events = self.instructions = 0
        self.closed: list[tuple[int, float]] = []

    def take(self, event: RunEvent) -> None:
        """See `engine.observe.events`."""
        match event:
            case EventHeard():
                self.events += 1
            case InstructionTold(instruction=instruction, at=at):
                self.instructions += 1
                if isinstance(instruction, m.StepClosed):
                    self.closed.append((instruction.step, at))


class _NoNotes:
    """See Notes: nothing is to be proved."""

    def note_read(self, read: ModelRead) -> None:
        """Nothing."""

    def note_trained(self, message: m.TrainStep, versions: dict[str, np.ndarray]) -> None:
        """Nothing."""

    def note_samples(self, step: int, keys: Mapping[str, Keys]) -> None:
        """Nothing."""
