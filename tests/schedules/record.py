"""What a simulated run said and did, by kind; and what survives of one that was killed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from dataflow.batch import Keys
from dataflow.loss_terms import ROWS
from engine.plan.plan import PlannedNode
from engine.plan.planned_source import PlannedSource
from engine.protocol.messages import RunChunk, StepClosed, TrainStep
from engine.protocol.part_messages import TrainPart
from engine.run.simulated_workers.simulation import Simulation
from engine.run.simulated_workers.store import SimulatedCheckpoint
from tests.schedules.expected import Expected, Prompt
from tests.schedules.plans import ScheduleCase

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Past:
    """What survives of a run that was killed, as of its last checkpoint."""

    step: int
    trained: dict[str, dict[int, list]]
    prompts: dict[str, dict[int, int]]
    """Source -> position -> attempt, of the prompts that were retired or finished."""


class RunRecord:
    """A run, and its past: what it went on from."""

    def __init__(
        self, case: ScheduleCase, simulation: Simulation, *, past: Past | None = None
    ) -> None:
        self.case = case
        self.plan = case.plan
        self.run = simulation
        self.history = simulation.history
        self.expected = Expected(case)
        self.past = past
        self.faulty = simulation.faulty
        self.first_step = past.step if past else 0
        """The Step that the run began from."""

    def past_of(self, stored: SimulatedCheckpoint) -> Past:
        """What a later run goes on from."""
        step = stored.message.step
        trained = {
            node: {s: keys for s, keys in steps.items() if s <= step}
            for node, steps in self.trained.items()
        }
        prompts = {}
        for name, cut in stored.message.sources.items():
            retired = {*range(cut.watermark), *cut.retired}
            last = {p: a for p, a in self._last_attempts(name).items() if p in retired}
            prompts[name] = last | {p: a for p, _, a in cut.finished}
        return Past(step=step, trained=trained, prompts=prompts)

    def _last_attempts(self, source: str) -> dict[int, int]:
        return (self.past.prompts[source] if self.past else {}) | dict(self.admitted[source])

    def said(self, kind: type) -> list:
        return [i for _, i in self.history.instructions if isinstance(i, kind)]

    def once(self, things: Iterable[T]) -> list[T]:
        """What was said; where Workers die, some of it once more."""
        return list(dict.fromkeys(things)) if self.faulty else list(things)

    @cached_property
    def trains(self) -> list[PlannedNode]:
        return [n for n in self.plan.nodes if n.traits.steps]

    @cached_property
    def sets(self) -> list[PlannedNode]:
        """The train nodes, once for each set of rows that they train, as if it were all."""
        return [
            replace(
                node,
                name=_named(node.name, name),
                inputs=inputs,
                source=self.plan.node(inputs[0].gate).source,
                inner=max(self.plan.node(i.gate).rows for i in inputs),
            )
            for node in self.trains
            for name, inputs in node.row_sets.items()
        ]

    @cached_property
    def admitted(self) -> dict[str, list[Prompt]]:
        admitted: dict[str, list[Prompt]] = {s.name: [] for s in self.plan.sources}
        # those for a sleeping Worker are told later
        for chunk in sorted(self.said(RunChunk), key=lambda c: c.id):
            if chunk.node in admitted:
                admitted[chunk.node] += [(p, a) for p, _, a in chunk.keys.rows()]
        # some are made again where they were lost
        return {source: list(dict.fromkeys(prompts)) for source, prompts in admitted.items()}

    @cached_property
    def trained(self) -> dict[str, dict[int, list]]:
        """Train node, with the row set -> Step -> keys."""
        trained: dict[str, dict[int, list]] = defaultdict(dict)
        if self.past:
            trained |= {node: dict(steps) for node, steps in self.past.trained.items()}
        for message, _ in self.history.trained:
            for name, keys in _keys_of(message).items():
                twice = message.step in trained[name]
                assert not twice, f"{name} trained step {message.step} twice"
                trained[name][message.step] = keys.rows()
        return trained

    @cached_property
    def steps(self) -> dict[int, StepClosed]:
        """Step -> how it was closed, the first time."""
        steps: dict[int, StepClosed] = {}
        for closed in self.said(StepClosed):
            steps.setdefault(closed.step, closed)
        return steps

    @property
    def last_step(self) -> int:
        return max(self.steps, default=self.first_step)

    @property
    def own_steps(self) -> range:
        """The Steps that this run made itself."""
        return range(self.first_step + 1, self.last_step + 1)

    def source(self, name: str) -> PlannedSource:
        return next(s for s in self.plan.sources if s.name == name)

    @cached_property
    def _train_steps(self) -> list[tuple[float, TrainStep]]:
        return [(at, m) for at, m in self.history.instructions if isinstance(m, TrainStep)]

    @cached_property
    def _home(self) -> dict[tuple[str, int, int], set[int]]:
        """(source, position, attempt) -> the closed Steps that trained on rows of it."""
        homes: dict[tuple[str, int, int], set[int]] = defaultdict(set)
        sources = {node.name: node.source for node in self.sets}
        for message, _ in self.history.trained:
            for name, keys in _keys_of(message).items():
                for position, _, attempt in keys.rows() if message.step in self.steps else ():
                    homes[sources[name], position, attempt].add(message.step)
        return homes


def chunks(simulation: Simulation) -> dict[str, list[tuple]]:
    """Node -> its chunks in the order of assignment: the Step (below the cut) and the keys."""
    chunks_of: dict[str, list[tuple]] = defaultdict(list)
    for _, message in simulation.history.instructions:
        if isinstance(message, RunChunk) and is_for_lead(message):
            chunks_of[message.node].append((message.step, *rows_of(message)))
    return chunks_of


def parts(simulation: Simulation) -> dict[tuple[str, int, int], set[tuple[int, int, int]]]:
    """(train node, Step, part) -> the rows of it, those of all ranks, however often it was told."""
    rows_by_part: dict[tuple[str, int, int], set[tuple[int, int, int]]] = defaultdict(set)
    for _, message in simulation.history.instructions:
        if isinstance(message, TrainPart):
            rows_by_part[message.node, message.step, message.part].update(message.keys.rows())
    return rows_by_part


def is_for_lead(chunk: RunChunk) -> bool:
    """Whether it is told the one that keeps its rows, of several ranks that run it."""
    return chunk.giver in ("", chunk.worker)


def rows_of(chunk: RunChunk) -> tuple[tuple, ...]:
    """Its keys, spans and weights."""
    spans = () if chunk.spans is None else tuple(map(tuple, chunk.spans.tolist()))
    weights = () if chunk.weights is None else tuple(chunk.weights.tolist())
    return tuple(chunk.keys.rows()), spans, weights


def contents(simulation: Simulation) -> dict[tuple[str, int], list]:
    """(train node with the row set, Step) -> keys."""
    return {
        (name, message.step): keys.rows()
        for message, _ in simulation.history.trained
        for name, keys in _keys_of(message).items()
    }


def _named(node: str, row_set: str) -> str:
    return node if row_set == ROWS else f"{node}/{row_set}"


def _keys_of(message: TrainStep) -> dict[str, Keys]:
    """By train node and row set; a set without a row has none."""
    own = {ROWS: message.keys} | {name: rows.keys for name, rows in message.others.items()}
    return {_named(message.node, name): keys for name, keys in own.items() if len(keys)}
