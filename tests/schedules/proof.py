"""What has to hold of every run, whatever its timing.

Owns: the promises of the coordinator, each as one function that asserts it on a finished
simulation. What should become of a prompt is derived here from the outcomes alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

import numpy as np

from dataflow.batch import Keys
from engine.coordinator.messages import (
    Checkpoint,
    Checkpointed,
    ChunkDone,
    Evaluate,
    Evaluated,
    FetchFailed,
    Load,
    Record,
    RunChunk,
    StepClosed,
    Stepped,
    TrainStep,
)
from engine.coordinator.refs import NO_VERSION
from engine.plan.plan import PlannedNode, PlannedSource
from engine.simulate.workers import Simulation, Stored
from tests.schedules.plans import ScheduleCase

T = TypeVar("T")
Prompt = tuple[int, int]
"""(position, attempt)."""


class Expected:
    """The fate of each prompt, from the outcomes of its rows."""

    def __init__(self, case: ScheduleCase) -> None:
        self.case = case
        self._rows: dict[tuple[str, Prompt], np.ndarray] = {}

    def keys(self, width: int, prompt: Prompt) -> Keys:
        return Keys.of([prompt[0]] * width, range(width), [prompt[1]] * width)

    def inputs(self, node: PlannedNode, prompt: Prompt) -> np.ndarray:
        """Boolean [inner]: the rows that reach a node."""
        there = np.ones(node.inner, dtype=bool)
        for i in [i for i in node.inputs if not i.fan_in]:
            there &= np.repeat(self.rows(self.case.plan.node(i.gate), prompt), i.ratio)
        return there

    def rows(self, node: PlannedNode, prompt: Prompt) -> np.ndarray:
        """Boolean [rows]: the rows that a node makes."""
        known = self._rows.get((node.name, prompt))
        if known is None:
            known = np.repeat(self.inputs(node, prompt), node.rows // node.inner)
            if node.relation == "subset":
                known = known & self.case.outcomes.kept(node.name, self.keys(node.rows, prompt))
            self._rows[node.name, prompt] = known
        return known

    def fate(self, source: str, prompt: Prompt) -> str:
        """What becomes of a prompt: dropped, rejected or trained."""
        line = [n for n in self.case.plan.nodes if n.source == source and n.region == "stream"]
        for node in line:
            made = np.repeat(self.inputs(node, prompt), node.rows // node.inner)
            if (
                self.childless(node, prompt)
                or (made & self.case.outcomes.failed(node.name, self.keys(node.rows, prompt))).any()
            ):
                return "dropped"
        if any(node.refill and not self.rows(node, prompt).any() for node in line):
            return "rejected"
        return "trained"

    def childless(self, node: PlannedNode, prompt: Prompt) -> bool:
        """Whether a node that reduces has a row of which nothing is left; not where a select above
        refills for it.
        """
        for i in [i for i in node.inputs if i.fan_in]:
            below = self.case.plan.node(i.gate)
            left = self.rows(below, prompt).reshape(node.inner, i.fan_in).any(axis=1)
            refilled = any(n.refill and not self.rows(n, prompt).any() for n in self.above(below))
            return not refilled and bool((self.inputs(node, prompt) & ~left).any())
        return False

    def above(self, node: PlannedNode) -> list[PlannedNode]:
        """A node, and all whose rows its own come of."""
        return [node, *(n for gate in node.gates for n in self.above(self.case.plan.node(gate)))]

    def trained_rows(self, node: PlannedNode, prompt: Prompt) -> set[tuple[int, int, int]]:
        """Keys of the rows of a prompt that a train node gets."""
        there = self.inputs(node, prompt)
        return set(self.keys(node.inner, prompt).take(there).rows())


@dataclass(frozen=True, kw_only=True)
class Past:
    """What survives of a run that was killed, as of its last checkpoint."""

    step: int
    trained: dict[str, dict[int, list]]
    prompts: dict[str, dict[int, int]]
    """Source -> position -> attempt, of the prompts that were retired or finished."""


class Proof:
    """A run and what it should have done; past: what it went on from."""

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

    def past_of(self, stored: Stored) -> Past:
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

    def all(self) -> None:
        """Every promise."""
        assert self.run.finish is not None
        if self.last_step or not self.run.finish.error.startswith(
            "the data has ended without a Step: "
        ):
            assert not self.run.finish.error, self.run.finish.error
        self.nothing_leaks()
        self.steps_in_order()
        self.groups_whole()
        self.lag_held()
        self.step_reads_its_version()
        self.batches_full()
        self.evaluated_when_due()
        self.followers_moved()
        self.samples_those_of_steps()
        self.cuts_exact()
        self.measured_once()
        self.nobody_lost()
        if not self.past:
            self.admitted_in_order()

    # --- what was said, by kind -------------------------------------------------------------------

    def said(self, kind: type) -> list:
        return [i for _, i in self.history.instructions if isinstance(i, kind)]

    def once(self, things: Iterable[T]) -> list[T]:
        """What was said; where Workers die, some of it once more."""
        return list(dict.fromkeys(things)) if self.faulty else list(things)

    @cached_property
    def trains(self) -> list[PlannedNode]:
        return [n for n in self.plan.nodes if n.work == "train"]

    @cached_property
    def admitted(self) -> dict[str, list[Prompt]]:
        found: dict[str, list[Prompt]] = {s.name: [] for s in self.plan.sources}
        for chunk in sorted(
            self.said(RunChunk), key=lambda c: c.id
        ):  # those for a sleeping Worker are told later
            if chunk.node in found:
                found[chunk.node] += [(p, a) for p, _, a in chunk.keys.rows()]
        return {
            source: list(dict.fromkeys(prompts)) for source, prompts in found.items()
        }  # made again where lost

    @cached_property
    def trained(self) -> dict[str, dict[int, list]]:
        """Train node -> Step -> keys."""
        found: dict[str, dict[int, list]] = defaultdict(dict)
        if self.past:
            found |= {node: dict(steps) for node, steps in self.past.trained.items()}
        for message, _ in self.history.trained:
            assert message.step not in found[message.node], (
                f"{message.node} trained step {message.step} twice"
            )
            found[message.node][message.step] = message.keys.rows()
        return found

    @cached_property
    def steps(self) -> dict[int, StepClosed]:
        """Step -> how it was closed, the first time."""
        found: dict[int, StepClosed] = {}
        for closed in self.said(StepClosed):
            found.setdefault(closed.step, closed)
        return found

    @property
    def last_step(self) -> int:
        return max(self.steps, default=self.first_step)

    def source(self, name: str) -> PlannedSource:
        return next(s for s in self.plan.sources if s.name == name)

    # --- the promises -----------------------------------------------------------------------------

    def nothing_leaks(self) -> None:
        assert not self.run.outbox.blocks, (
            f"blocks never released: {sorted(self.run.outbox.blocks)}"
        )

    def steps_in_order(self) -> None:
        """Steps follow one another; within one, train nodes in the order of the sinks, after
        everything else.
        """
        steps = list(self.steps)
        if self.past and self.first_step in steps:  # the end of the data came before a further Step
            assert steps.pop(0) == self.last_step
        assert steps == list(range(self.first_step + 1 if self.past else 0, self.last_step + 1))
        order = {n.name: i for i, n in enumerate(self.trains)}
        told = [m for m in self.said(TrainStep) if m.worker == self.plan.node(m.node).workers[0]]
        said = self.once((m.step, order[m.node]) for m in sorted(told, key=lambda m: m.id))
        assert said == sorted(set(said)), f"train nodes out of order: {said}"
        assert len({m.id for m in told}) == len(told)
        if not self.faulty:  # else a Step may have been told, and undone, or told once more
            self._nothing_beside()
        self._one_after_another()

    def _nothing_beside(self) -> None:
        """While train nodes run, nothing else does below the cut."""
        began = {
            m.step: when
            for when, m in reversed(self.history.instructions)
            if isinstance(m, TrainStep)
        }
        below = {
            m.id: m.step for m in self.said(RunChunk) if self.plan.node(m.node).region == "step"
        }
        for when, event in self.history.events:
            if isinstance(event, ChunkDone) and event.id in below:
                step = below[event.id]
                assert when <= began.get(step, when), (
                    f"{event.node} still ran when step {step} was trained"
                )

    def _one_after_another(self) -> None:
        """A train node is told when the one before has done its updates, or could not fetch its
        rows.
        """
        ends = {(e.node, e.step): t for t, e in self.history.events if isinstance(e, Stepped)}
        dropped = {e.id: t for t, e in reversed(self.history.events) if isinstance(e, FetchFailed)}
        begins: dict[int, tuple[float, TrainStep]] = {}
        for (
            when,
            message,
        ) in self.history.instructions:  # a rank in its sleep is told later than the others
            if isinstance(message, TrainStep):
                begins.setdefault(message.id, (when, message))
        for (_, before), (begin, _) in pairwise(begins[task] for task in sorted(begins)):
            end = dropped[before.id] if before.id in dropped else ends[before.node, before.step]
            assert end <= begin, (
                f"{before.node} was not done in step {before.step} when the next was told to train"
            )

    def groups_whole(self) -> None:
        """No prompt in two Steps; all of its rows in its own; train nodes that read the same see
        the same.
        """
        home: dict[tuple[str, int], int] = {}
        for node in self.trains:
            for step, keys in self.trained[node.name].items():
                assert len(keys) == len(set(keys)), f"{node.name}, step {step}: a row twice"
                assert keys == sorted(keys), (
                    f"{node.name}, step {step}: rows are not in the order of their keys"
                )
                for prompt in {(p, a) for p, _, a in keys}:
                    where = home.setdefault((node.source, prompt[0]), step)
                    assert where == step, (
                        f"prompt {prompt} is trained in step {where} and in step {step}"
                    )
                    wanted = self.expected.trained_rows(node, prompt)
                    found = {k for k in keys if (k[0], k[2]) == prompt}
                    assert found == wanted, (
                        f"{node.name}, step {step}: of {prompt} {found}, expected {wanted}"
                    )
        for (source, position), step in home.items():
            for node in self.trains:
                mine = {a for p, _, a in self.trained[node.name].get(step, ()) if p == position}
                attempts = {
                    a
                    for n in self.trains
                    for p, _, a in self.trained[n.name].get(step, ())
                    if p == position
                }
                if node.source == source and not mine and len(self.plan.sources) == 1:
                    assert not self.expected.trained_rows(node, (position, *attempts)), (
                        f"{node.name} missed {position}"
                    )

    def lag_held(self) -> None:
        """No row is older than max_lag; what the run reports is what was measured."""
        for message, versions in self.history.trained:
            source = self.source(self.plan.node(message.node).source)
            oldest = min(
                (v for many in versions.values() for v in many if v != NO_VERSION),
                default=message.step - 1,
            )
            lag = message.step - 1 - oldest
            assert lag >= 0, f"step {message.step} was trained on rows of the version {oldest}"
            if source.intake != "admission":
                assert lag <= source.max_lag, (
                    f"{message.node}, step {message.step}: lag {lag} > {source.max_lag}"
                )
            if self.plan.node(message.node).inner == max(n.inner for n in self.trains):
                assert lag <= self.steps[message.step].metrics["policy/lag/max"]
        if all(s.intake != "admission" for s in self.plan.sources):
            bound = max(s.max_lag for s in self.plan.sources)
            assert all(
                c.metrics["policy/lag/max"] <= bound for c in self.steps.values() if c.metrics
            )

    def step_reads_its_version(self) -> None:
        """Below the cut a reader has the version that the Step starts from; an evaluation has one
        version.
        """
        for message, versions in self.history.trained:
            for name, found in versions.items():
                if self.plan.node(name).region == "step":
                    assert set(found) <= {NO_VERSION, message.step - 1}, (
                        f"{name}: {found} in step {message.step}"
                    )
        for read in (
            self.history.reads if not self.faulty else ()
        ):  # else a Step may have been undone meanwhile
            if read.region != "stream":
                wanted = read.step - 1 if read.region == "step" else read.step
                assert (read.first, read.last) == (wanted, wanted), (
                    f"{read} should have seen version {wanted}"
                )
            assert read.first <= read.last

    def batches_full(self) -> None:
        """Every Step has its batch, unless the data ended; none has more."""
        full = sum(s.batch for s in self.plan.sources)
        for step, closed in self.steps.items():
            if step == self.first_step:
                continue
            prompts = closed.metrics["data/prompts"]
            assert prompts <= full
            ended = self.case.settings.steps is None
            if not (ended and step == self.last_step):
                assert prompts == full, f"step {step}: {prompts} prompts of {full}"
        if self.case.settings.steps is not None:
            assert self.last_step == self.case.settings.steps

    def evaluated_when_due(self) -> None:
        """At the start, every k Steps and at the last one, once each, on every row, before what
        comes next.
        """
        for node in (n for n in self.plan.nodes if n.work == "evaluate"):
            found = [m for m in self.said(Evaluate) if m.node == node.name]
            due = {v for v in range(self.first_step + 1, self.last_step + 1) if v % node.every == 0}
            due |= {self.last_step} if self.last_step > self.first_step else set()
            due |= {0} if not self.past else set()
            versions = self.once(m.version for m in found)
            extra = {self.first_step} if self.last_step == self.first_step else set()
            assert set(versions) - extra == due - extra, (
                f"{node.name} ran at {versions}, due were {sorted(due)}"
            )
            assert versions == sorted(set(versions))
            rows = self.case.rows[node.source]
            wanted = set().union(*(self.expected.trained_rows(node, (p, 0)) for p in range(rows)))
            assert all(set(m.keys.rows()) == wanted for m in found)
        evaluated = [
            (e.node, e.version) for _, e in self.history.events if isinstance(e, Evaluated)
        ]
        assert sorted(evaluated) == sorted(
            self.once((m.node, m.version) for m in self.said(Evaluate))
        )

    def followers_moved(self) -> None:
        """A follower moves once for each version that is a multiple of `every`, never at the start."""
        moves = Counter(
            (m.model, m.reader, m.worker, m.version) for m in self.said(Load) if m.leader
        )
        wanted = Counter(
            (model.name, reader, worker, version)
            for model in self.plan.models
            if model.follows
            for reader in model.readers
            for worker in self.plan.node(reader).workers
            for version in range(self.first_step + 1, self.last_step + 1)
            if version % model.every == 0
        )
        assert moves == wanted

    def samples_those_of_steps(self) -> None:
        """Each Step has its samples, of the rows that it was trained on; nothing else has any when
        the run ends.
        """
        recorded = self.once(m.step for m in self.said(Record))
        steps = list(range(self.first_step + 1, self.last_step + 1)) if self.plan.recorded else []
        undone = (
            [self.last_step + 1] if self.faulty else []
        )  # told, and never formed again as the data had ended
        assert recorded in (steps, steps + undone), f"samples were told for {recorded}"
        assert sorted(self.history.samples) == steps
        for step, found in self.history.samples.items():
            for recorded in self.plan.recorded:
                self._samples_of(step, self.plan.node(recorded.gate), found[recorded.name])

    def _samples_of(self, step: int, gate: PlannedNode, keys: Keys) -> None:
        trains = [n for n in self.trains if n.source == gate.source]
        prompts = {(p, a) for n in trains for p, _, a in self.trained[n.name].get(step, ())}
        for prompt in prompts:
            wanted = set(
                self.expected.keys(gate.rows, prompt).take(self.expected.rows(gate, prompt)).rows()
            )
            assert wanted == {k for k in keys.rows() if (k[0], k[2]) == prompt}, (
                f"samples of step {step}: {prompt}"
            )
        others = {p for p, _, a in keys.rows() if (p, a) not in prompts}
        for node in trains:
            trained = {p for rows in self.trained[node.name].values() for p, _, _ in rows}
            assert not others & trained, (
                f"samples of step {step}: {others & trained} are of another"
            )

    def cuts_exact(self) -> None:
        """Checkpoints come every k Steps, by the clock and at the end; every position is in exactly
        one state.
        """
        every = self.case.settings.checkpoint_every
        found = self.once(m.step for m in self.said(Checkpoint) if not m.timed)
        timed = self.once(m.step for m in self.said(Checkpoint) if m.timed)
        due = {
            s for s in range(self.first_step + 1, self.last_step + 1) if every and s % every == 0
        }
        assert not due & set(timed), f"due by Steps, and told as timed: {due & set(timed)}"
        due |= {self.last_step} - {self.first_step, *timed}
        assert found == sorted(due), f"checkpoints at {found}, due were {sorted(due)}"
        self._by_the_clock()
        for message in self.said(Checkpoint):
            for name, cut in message.sources.items():
                live = [k[0] for k in (*cut.running, *cut.finished)]
                states = [*range(cut.watermark), *cut.retired, *live]
                assert sorted(states) == list(range(cut.next)), (
                    f"{name} at step {message.step}: {cut}"
                )
                trained = {
                    p
                    for node in self.trains
                    if node.source == name
                    for step, keys in self.trained[node.name].items()
                    for p, _, _ in keys
                    if step <= message.step
                }
                assert not trained & set(live), (
                    f"{name}: trained and still live at step {message.step}"
                )

    def measured_once(self) -> None:
        """A chunk's metrics count when it first ends: whoever died, that is before its Step (or
        evaluation) is closed, but for sources with lag.
        """
        ends = {e.id: when for when, e in self.history.events if isinstance(e, ChunkDone)}
        closed = {
            m.step: when for when, m in self.history.instructions if isinstance(m, StepClosed)
        }
        runs: dict[tuple[str, int, tuple[tuple[int, int, int], ...]], list[float]] = defaultdict(
            list
        )
        for chunk in self.said(RunChunk):
            if self.plan.node(chunk.node).region == "evaluation" or self._waves(chunk.node):
                known = runs[chunk.node, chunk.step, tuple(chunk.keys.rows())]
                known += [ends[chunk.id]] if chunk.id in ends and not chunk.again else []
        for (node, step, keys), found in runs.items():
            once = (
                self.plan.node(node).region == "stream"
            )  # one version may be evaluated in two rounds
            assert len(found) <= 1 or not once, (
                f"{node}: the metrics of {keys} count {len(found)} times"
            )
            for each in self._steps_of(node, step, keys):
                assert found, f"{node}, step {each}: the metrics of {keys} never came"
                assert max(found) <= closed[each], (
                    f"{node}, step {each}: the metrics of {keys} came too late"
                )

    def _waves(self, node: str) -> bool:
        """Whether this is a node above the cut of a synchronous source."""
        planned = self.plan.node(node)
        return planned.region == "stream" and not self.source(planned.source).max_lag

    def _steps_of(self, node: str, step: int, keys: Iterable[tuple[int, int, int]]) -> set[int]:
        """The closed Steps that rows of a chunk went into."""
        if self.plan.node(node).region == "evaluation":
            return {step} & self.steps.keys()
        return set().union(
            *(self._home.get((self.plan.node(node).source, p, a), ()) for p, _, a in keys)
        )

    @cached_property
    def _home(self) -> dict[tuple[str, int, int], set[int]]:
        """(source, position, attempt) -> the closed Steps that trained on rows of it in this run."""
        found: dict[tuple[str, int, int], set[int]] = defaultdict(set)
        for message, _ in self.history.trained:
            for position, _, attempt in message.keys.rows() if message.step in self.steps else ():
                found[self.plan.node(message.node).source, position, attempt].add(message.step)
        return found

    def _by_the_clock(self) -> None:
        """A timed checkpoint comes at the first end of a Step that is late enough after the last,
        never sooner.
        """
        seconds = self.case.settings.checkpoint_seconds
        stored = [(at, e.step) for at, e in self.history.events if isinstance(e, Checkpointed)]
        told = [(at, m) for at, m in self.history.instructions if isinstance(m, Checkpoint)]
        for at, message in told:
            before = max((when for when, step in stored if step < message.step), default=0.0)
            assert not message.timed or (seconds and at - before >= seconds), (
                f"step {message.step} was stored too soon"
            )
        begun = self.history.events[0][0]
        closed = [(at, m) for at, m in self.history.instructions if isinstance(m, StepClosed)]
        for at, message in closed if seconds and self.run.finish is not None else ():
            before = max((when for when, step in stored if step < message.step), default=begun)
            if message.step > self.first_step and at - before >= seconds:
                assert message.step in {m.step for _, m in told}, (
                    f"step {message.step} was not stored"
                )

    def admitted_in_order(self) -> None:
        """Fresh prompts are admitted in the order of the source; a further attempt follows the one
        before.
        """
        for prompts in self.admitted.values():
            fresh = [p for p, a in prompts if a == 0]
            assert (sorted(fresh) if self.faulty else fresh) == list(
                range(len(fresh))
            )  # told late where nobody is
            seen: Counter[int] = Counter()
            for position, attempt in prompts:
                assert attempt == seen[position]
                seen[position] += 1

    def nobody_lost(self) -> None:
        """Every admitted prompt is trained, rejected or dropped; what is left over has a reason."""
        for source in self.plan.sources:
            last = self._last_attempts(source.name)
            if self.case.settings.steps is None and len(self.plan.sources) == 1:
                assert len(last) == self.case.rows[source.name], "the data was not used up"
            missing = [p for p in last.items() if not self._accounted(source.name, p)]
            assert len(missing) <= self._excuses(source), f"{source.name}: lost {missing}"

    def _accounted(self, source: str, prompt: Prompt) -> bool:
        if self.expected.fate(source, prompt) != "trained":
            seen = [
                k
                for n in self.trains
                if n.source == source
                for keys in self.trained[n.name].values()
                for k in keys
            ]
            assert prompt not in {(p, a) for p, _, a in seen}, (
                f"{prompt} should not have been trained"
            )
            return True
        for node in (n for n in self.trains if n.source == source):
            wanted = self.expected.trained_rows(node, prompt)
            if wanted and not any(wanted <= set(keys) for keys in self.trained[node.name].values()):
                return False
        return True

    def _excuses(self, source: PlannedSource) -> int:
        """How many prompts may be neither trained nor given up when the run ends."""
        if len(self.plan.sources) > 1:  # the other source ended first
            return (1 + source.max_lag) * source.batch
        if self.case.settings.steps is not None:  # too old, waiting to begin once more
            return source.max_lag * source.batch if source.intake == "drop" else 0
        return 0


def chunks(simulation: Simulation) -> dict[str, list[tuple]]:
    """Node -> its chunks in the order in which they were assigned: the Step (below the cut) and the
    keys.
    """
    found: dict[str, list[tuple]] = defaultdict(list)
    for _, message in simulation.history.instructions:
        if isinstance(message, RunChunk):
            found[message.node].append((message.step, tuple(message.keys.rows())))
    return found


def contents(simulation: Simulation) -> dict[tuple[str, int], list]:
    """(train node, Step) -> keys."""
    return {(m.node, m.step): m.keys.rows() for m, _ in simulation.history.trained}
