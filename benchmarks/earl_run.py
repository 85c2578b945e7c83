"""A simulated run of 72B whose answers grow from 1K to 32K tokens, with one layout and with two.

    hosts       8 H100 that generate: two replicas of 4 tensor ranks, or one of 8; 32 that train
    rows        64 of a Step, of which a replica decodes 32 at once
    generation  TP 4 as the cost model has it without a limit of its cache; TP 8 as much faster or
                slower as EARL (arXiv:2510.05943) measured at 32 answers, between its rows by a line
    caches      those of the plans: which rows would be sent back follows from them alone

Owns: the two plans, times by the grid, the run over its switches. Does not own: the grid
(published.toml), when a run switches (engine/coordinator/relayout_policy.py).

Planner, coordinator, policy and loop are the real ones; Workers are simulated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.gpu_plans import EACH, GpuPlan, make_graph, write_inputs
from benchmarks.published import inputs, sizes
from dataflow.batch import Keys
from engine.coordinator.relayout_policy import RelayoutPolicy
from engine.coordinator.run_settings import Settings
from engine.plan.cost.decode import schedule_decode
from engine.plan.costs import PlanCosts, plan_costs
from engine.plan.layout_table import LayoutBucket, LayoutTable, RunLayout, measured_table
from engine.plan.options import RunOptions
from engine.plan.plan import Plan, PlannedNode
from engine.plan.row_lengths import RowLengths
from engine.plan.searched_table import find_room
from engine.protocol import messages as m
from engine.protocol.events import InstructionTold
from engine.run.simulated_workers.behaviour import Durations, Outcomes
from engine.run.simulated_workers.kernel_times import Times
from engine.run.simulated_workers.simulation import Simulation
from engine.run.simulated_workers.store import SimulatedCheckpoint
from engine.session.planning import plan
from engine.simulation.lengths import DrawnLengths, UnknownDistributions
from engine.simulation.priced_times import PricedTimes

K = 1024
SHORTEST, LONGEST = K, 32 * K
"""Tokens of a row, with its prompt."""
PROMPT, PROMPTS, SAMPLES, AT_ONCE = 64, 8, 8, 32
ROWS = PROMPTS * SAMPLES
TRAINING = 32
TP4, TP8 = 0, 1
NODE = "rollout"


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowingRun:
    """How a run went. seconds: of each Step, without switches. sent_back: rows. switches: (the Step
    before, its layout, the next one's). switching: seconds of all switches.
    """

    seconds: tuple[float, ...]
    sent_back: int
    switches: tuple[tuple[int, int, int], ...] = ()
    switching: float = 0.0


def plan_layouts(folder: Path) -> tuple[Plan, Plan]:
    """The same run with 4 and with 8 tensor ranks of generation."""
    model = sizes(inputs(), "72B")
    hosts = 1 + TRAINING // EACH
    files = write_inputs(folder, model, "H100", hosts=hosts)
    asked = GpuPlan(
        model=model,
        device="H100",
        generating=EACH,
        training=TRAINING,
        tensor=EACH,
        prompts=PROMPTS,
        samples=SAMPLES,
        longest=LONGEST - PROMPT,
        longest_prompt=PROMPT,
        minibatches=1,
    )
    graph = make_graph(files.base, files.data, asked)
    trainers = ",".join(f"t{n}@h-{1 + n // EACH}" for n in range(TRAINING))
    plans: list[Plan] = []
    for tensor in (4, 8):
        replicas = ",".join(f"g{n}@h-0" for n in range(EACH // tensor))
        options = RunOptions(
            cluster=files.hosts,
            workers="apart",
            kernel={NODE: "vllm"},
            pin={NODE: replicas, "train_policy": trainers},
            tensor={NODE: tensor, "train_policy": EACH},
            slots={NODE: AT_ONCE},
            shard=True,
            stream="off",
        )
        plans.append(plan(graph, options, simulated=True))
    return plans[0], plans[1]


def gain_at(context: float) -> float:
    """How much more tokens a device and second TP 8 gives than TP 4, with 32 answers."""
    earl = inputs()["earl"]
    place = earl["answers"].index(AT_ONCE)
    points = sorted((int(tokens), row[place]) for tokens, row in earl["grid"].items())
    logarithms = [math.log2(tokens) for tokens, _ in points]
    return float(np.interp(math.log2(context), logarithms, [gain for _, gain in points])) / 100.0


class _GridTimes(PricedTimes):
    """Generation by the grid. sent_back: rows that the caches had no room for."""

    def __init__(self, planned: Plan, costs: PlanCosts, drawn: DrawnLengths) -> None:
        super().__init__(planned, costs, drawn, lambda: self.simulation.workers, {"score": 0.0}, {})
        self._prices = costs
        self._known: dict[int, float] = {}
        self.sent_back = 0
        self.simulation: Simulation

    def rows(self, node: PlannedNode, rows: int, lengths: RowLengths | None, worker: str) -> Times:
        """See PricedTimes."""
        if node.name != NODE:
            return super().rows(node, rows, lengths, worker)
        assert lengths is not None
        self.sent_back += self._prices.decode(NODE, lengths).sent_back
        context = int(lengths.prompts[0] + lengths.answers[0])
        waves = -(-rows // AT_ONCE)
        seconds = waves * self._wave_seconds(context, lengths)
        if node.layout.inner == 8:
            seconds /= 2.0 * (1.0 + gain_at(context))
        return np.zeros(rows), np.full(rows, seconds)

    def _wave_seconds(self, context: int, lengths: RowLengths) -> float:
        """Of 32 rows on 4 GPUs, whatever the cache."""
        if context not in self._known:
            wave = lengths.take(np.arange(AT_ONCE))
            limits = self._prices.decode_limits(NODE)
            batch = replace(limits, prompts=wave.prompts, answers=wave.answers, room=0)
            place = replace(self._prices.place(NODE), tensor=4)
            decoded = schedule_decode(self._prices.require_sizes(NODE), place, batch)
            self._known[context] = decoded.seconds
        return self._known[context]


class _GrowingLengths(DrawnLengths):
    """All rows of a Step are as long as each other. contexts: tokens of a row, by Step."""

    def __init__(self, planned: Plan, contexts: Sequence[int]) -> None:
        super().__init__(planned, UnknownDistributions(), 0)
        self._contexts = np.array(contexts)

    def prompts(self, source: str, keys: Keys) -> np.ndarray:
        """See DrawnLengths."""
        return np.full(len(keys), PROMPT)

    def answers(self, node: str, keys: Keys) -> np.ndarray:
        """See DrawnLengths. At lag 0 a Step has the next prompts of the data."""
        steps = np.minimum(keys.position // PROMPTS, len(self._contexts) - 1)
        return self._contexts[steps] - PROMPT


def list_contexts(steps: int, shortest: int = SHORTEST) -> list[int]:
    """Tokens of a row of each Step, in equal shares of growth."""
    growth = (LONGEST / shortest) ** (1.0 / (steps - 1))
    return [min(LONGEST, round(shortest * growth**step)) for step in range(steps)]


def make_grid_table(plans: Sequence[Plan]) -> LayoutTable:
    """The grid at 32 answers as measured rates, with the room of each plan's caches."""
    layouts: list[RunLayout] = []
    for planned, text in zip(plans, ("tensor.rollout=4", "tensor.rollout=8"), strict=True):
        layouts.append(RunLayout(text=text, most=find_room(planned, plan_costs(planned))))
    grid: dict[int, tuple[float, ...]] = {}
    for context in inputs()["earl"]["grid"]:
        live = ROWS * int(context)
        seconds = (1.0, 1.0 / (1.0 + gain_at(int(context))))
        rooms = [layout.most for layout in layouts]
        grid[live] = tuple(
            time if live <= room else math.inf for time, room in zip(seconds, rooms, strict=True)
        )
    return measured_table(layouts, grid)


@dataclass(slots=True)
class _GrowingAttempts:
    """A run over its attempts."""

    plans: Sequence[Plan]
    policy: RelayoutPolicy
    contexts: Sequence[int]
    ends: list[float] = field(default_factory=list)
    """Of each Step, in seconds of its attempt; after each switch from 0 again."""
    sent_back: int = 0
    stored: SimulatedCheckpoint | None = None

    takes = (m.StepClosed,)

    def take(self, event: InstructionTold) -> None:
        """See `engine.protocol.events`."""
        self.ends.append(event.at)

    def attempt(self) -> m.Relayout | None:
        # From a checkpoint on no Step's end tells when the next one begins.
        self.ends = [] if self.stored is None else [0.0]
        planned = self.plans[self.policy.layout]
        costs = plan_costs(planned)
        times = _GridTimes(planned, costs, _GrowingLengths(planned, self.contexts))
        times.simulation = run = Simulation(
            planned,
            Settings(steps=len(self.contexts), relayout=self.policy),
            rows={source.name: 2 * PROMPTS * len(self.contexts) for source in planned.sources},
            durations=Durations(),
            outcomes=Outcomes(),
            latest=self.stored,
            watchers=(self,),
            kernels=times,
        )
        run.run()
        self.sent_back += times.sent_back
        if run.store.stored:
            self.stored = run.store.stored[-1]
        return run.relayout


def simulate_run(
    plans: Sequence[Plan],
    table: LayoutTable,
    contexts: Sequence[int],
    *,
    layout: int | None = None,
) -> GrowingRun:
    """Run to the end. contexts: tokens of a row of each Step. layout: the only one; None: as the
    policy switches.
    """
    if layout is not None:
        bucket = LayoutBucket(start=0, best=0)
        table = LayoutTable(layouts=(RunLayout(),), buckets=(bucket,))
        plans = (plans[layout],)
    course = _GrowingAttempts(plans, RelayoutPolicy(table), contexts)
    seconds: list[float] = []
    switches: list[tuple[int, int, int]] = []
    switching = 0.0
    while True:
        relayout = course.attempt()
        seconds += [end - begin for begin, end in pairwise(course.ends)]
        if relayout is None:
            break
        switches.append((relayout.step, relayout.before, relayout.layout))
        course.policy.note_switch(relayout.layout)
        cost = _start_seconds(plans[relayout.layout])
        course.policy.note_cost(cost)
        switching += cost
    return GrowingRun(
        seconds=tuple(seconds),
        sent_back=course.sent_back,
        switches=tuple(switches),
        switching=switching,
    )


def _start_seconds(planned: Plan) -> float:
    """Until all Workers are open again."""
    costs = plan_costs(planned)
    return max(map(costs.start, planned.workers))
