"""Runs that go on with another layout at some Steps' ends: other Workers, replicas and ranks.

Owns: other layouts of a drawn case, a policy that switches at random, the run over all of them.
Does not own: cases (plans.py), what has to hold (proof.py), which faults there are (weather.py).
"""

from __future__ import annotations

import random
from dataclasses import replace

from dataflow.kernel import Layout
from engine.coordinator.relayout_policy import LayoutSwitch, RelayoutPolicy
from engine.plan.layout_table import LayoutBucket, LayoutTable, RunLayout
from engine.plan.plan import Plan, PlannedNode
from engine.run.simulated_workers.faults import FaultModel
from engine.run.simulated_workers.simulation import Simulation
from engine.run.simulated_workers.store import SimulatedCheckpoint
from tests.schedules.plans import ScheduleCase
from tests.schedules.proof import Proof
from tests.schedules.record import Past, contents, parts
from tests.schedules.repeated_parts import RepeatedParts
from tests.schedules.weather import begun, drawn, ended, require_same_steps, with_shorts

LAYOUTS = 3
MOST_LOSSES = 4
"""How often a run may go back; after that nobody dies."""


class DrawnPolicy(RelayoutPolicy):
    """Switches where a seed says so. chosen: how often."""

    def __init__(self, seed: int) -> None:
        layouts = tuple(RunLayout(text=str(number)) for number in range(LAYOUTS))
        super().__init__(LayoutTable(layouts=layouts, buckets=(LayoutBucket(start=0, best=0),)))
        self._draw = random.Random(f"{seed}/relayouts")
        self._often = self._draw.choice((0.3, 0.7, 1.0))
        self.chosen = 0

    def choose(self, steps_left: int | None) -> LayoutSwitch | None:
        if self._draw.random() >= self._often:
            return None
        self.chosen += 1
        others = [number for number in range(LAYOUTS) if number != self.layout]
        return LayoutSwitch(layout=self._draw.choice(others), reason=f"{steps_left} are left")


def _other_layout(plan: Plan, draw: random.Random) -> Plan:
    """The same nodes, in the same chunks, on other Workers: more, fewer, of other names."""
    pool = [f"{draw.choice('xyz')}{number}" for number in range(draw.randint(1, 5))]
    nodes = [_on_others(node, pool, draw) for node in plan.nodes]
    workers = [worker for node in nodes for worker in node.workers]
    hosts = {worker: draw.choice("abc") for worker in workers}
    return replace(
        plan,
        nodes=tuple(nodes),
        recorder=draw.choice(workers),
        turns=(),
        hosts=hosts if plan.hosts else {},
    )


def _on_others(node: PlannedNode, pool: list[str], draw: random.Random) -> PlannedNode:
    most = 1 if node.work == "record" else min(3, len(pool))
    workers = tuple(draw.sample(pool, draw.randint(1, most)))
    if node.work != "train":
        return replace(node, workers=workers)
    count = len(workers)
    tensor = draw.choice([n for n in range(1, count + 1) if count % n == 0])
    return replace(node, workers=workers, layout=Layout(data=count // tensor, tensor=tensor))


def prove_relayouts(case: ScheduleCase, *, deaths: bool) -> int:
    """Prove all promises of a run with switches; a synchronous one has the Steps of one without.
    Returns how many switches there were.
    """
    draw = random.Random(f"layouts {case.seed}")
    plans = [case.plan, *(_other_layout(case.plan, draw) for _ in range(LAYOUTS - 1))]
    course = _Course(case, plans, draw if deaths else None)
    run, past = course.to_the_end()
    whole = course.case_of(run.coordinator.plan)
    Proof(whole, run, past=past).all()
    if case.synchronous:
        plain = ended(begun(replace(case, together=1), 0))
        require_same_steps(run, plain, past)
        course.require_same_rows(plain)
    return course.switches


class _Course:
    """A run over all its attempts. draw: of the faults; None for none."""

    def __init__(self, case: ScheduleCase, plans: list[Plan], draw: random.Random | None) -> None:
        self._plans = plans
        self._draw = draw
        self._policy = DrawnPolicy(case.seed)
        self._case = replace(case, settings=replace(case.settings, relayout=self._policy))
        self._parts = RepeatedParts(self._case)
        self._left: list[Simulation] = []
        self._shorts = random.Random(f"shorts of {case.seed}")
        self.switches = 0

    def case_of(self, plan: Plan) -> ScheduleCase:
        """The case with the layout of an attempt, as that is told of the parts so far."""
        return replace(self._parts.next_case(), plan=plan)

    def to_the_end(self) -> tuple[Simulation, Past | None]:
        """The last attempt, and what it went on from."""
        past: Past | None = None
        stored: SimulatedCheckpoint | None = None
        losses = attempt = 0
        while True:
            faults = None
            if self._draw is not None:
                dying = self._draw.choice((0, 1, 2, 4)) if losses < MOST_LOSSES else 0
                faults = drawn(self._draw, dying)
            if self._case.shorts and losses < MOST_LOSSES:
                faults = with_shorts(
                    self._shorts, faults or FaultModel(deaths=0), self._case.shorts
                )
            case = self.case_of(self._plans[self._policy.layout])
            run = ended(begun(case, attempt, stored, faults))
            self._parts.note(run)
            attempt += 1
            if run.relayout is None and not run.went_back:
                return run, past
            losses += run.went_back
            proof = Proof(case, run, past=past)
            if run.store.stored:
                stored = run.store.stored[-1]
                past = proof.past_of(stored)
            if run.relayout is not None:
                self._switch(run, proof)

    def _switch(self, run: Simulation, proof: Proof) -> None:
        relayout = run.relayout
        assert relayout is not None
        assert run.store.stored[-1].message.step == relayout.step == proof.last_step
        assert relayout.before == self._policy.layout != relayout.layout
        proof.left_whole()
        self._left.append(run)
        self._policy.layout = relayout.layout
        self.switches += 1

    def require_same_rows(self, plain: Simulation) -> None:
        """What was trained before a switch is what a run without one trains there."""
        wanted, cut = contents(plain), parts(plain)
        by_arrival = any(source.stream == "arrival" for source in self._case.plan.sources)
        for run in self._left:
            for key, rows in contents(run).items():
                assert rows == wanted[key], f"{key}: {rows}, expected {wanted[key]}"
            if not by_arrival:
                assert all(rows == cut[place] for place, rows in parts(run).items())
