"""The promises of the coordinator, each a function that asserts it on a finished simulation.

record.py says what the run did, expected.py what should become of a prompt.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from math import inf

from dataflow.batch import Keys
from engine.plan.plan import PlannedNode
from engine.plan.planned_source import PlannedSource
from engine.protocol.messages import (
    Checkpoint,
    Checkpointed,
    ChunkDone,
    Evaluate,
    Evaluated,
    FetchAhead,
    FetchFailed,
    Load,
    Record,
    RunChunk,
    Short,
    StepClosed,
    Stepped,
    TrainStep,
    WorkerLost,
    WorkerOpened,
)
from engine.protocol.refs import SourceCut
from engine.protocol.staleness import NO_VERSION
from tests.schedules.expected import Prompt
from tests.schedules.record import RunRecord, is_for_lead, rows_of

Rows = tuple[tuple, ...]
"""Keys, spans and weights, as of `rows_of`."""


class Proof(RunRecord):
    """A run and what it should have done; past: what it went on from."""

    def all(self) -> None:
        """Every promise."""
        assert self.run.finish is not None
        error = self.run.finish.error
        no_step = error.startswith("the data has ended without a Step: ") and not self.last_step
        assert no_step or not error, error
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
        self.fetched_in_time()
        self.crossed_once()
        if not self.past:
            self.admitted_in_order()

    def left_whole(self) -> None:
        """Every promise of a run that goes on from its last checkpoint with another layout."""
        self.nothing_leaks()
        self.steps_in_order()
        self.groups_whole()
        self.lag_held()
        self.step_reads_its_version()
        self.fetched_in_time()
        for message in self.said(Checkpoint):
            for name, cut in message.sources.items():
                self._in_one_state(message.step, name, cut)

    def nothing_leaks(self) -> None:
        left = sorted(self.run.workers.outbox.blocks)
        assert not left, f"blocks never released: {left}"

    def crossed_once(self) -> None:
        """A version goes into a region once, and once more for each Worker that is lost or comes
        later.
        """
        regions = self.plan.regions
        crossings: Counter[tuple[str, int, str]] = Counter()
        for load in self.said(Load):
            if load.source and regions[load.source] != regions[load.worker]:
                written = load.leader or load.model
                crossings[written, load.version, regions[load.worker]] += 1
        more = WorkerLost | FetchFailed | WorkerOpened
        often = 1 + sum(isinstance(event, more) for _, event in self.history.events)
        assert max(crossings.values(), default=0) <= often, crossings

    def fetched_in_time(self) -> None:
        """Rows are fetched ahead for the next Step alone, once for a node, and only with a lag.
        That they are there, and the right ones, is checked by who fetches them.
        """
        step = self.first_step
        told: set[tuple[str, str, int]] = set()
        for _, message in self.history.instructions:
            match message:
                case StepClosed(step=step):
                    pass
                case FetchAhead():
                    assert step < message.step <= step + 2, f"step {message.step} after {step}"
                    place = message.node, message.worker, message.step
                    assert place not in told, f"{place} twice"
                    told.add(place)
        assert not told or all(source.max_lag for source in self.plan.sources)

    def steps_in_order(self) -> None:
        """Steps follow one another; in each, train nodes come last, in the order of the sinks."""
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
        began = {message.step: at for at, message in reversed(self._train_steps)}
        chunks = self.said(RunChunk)
        below = {m.id: m.step for m in chunks if self.plan.node(m.node).region == "step"}
        for when, event in self.history.events:
            if isinstance(event, ChunkDone) and event.id in below:
                step = below[event.id]
                soon = when <= began.get(step, when)
                assert soon, f"{event.node} still ran when step {step} was trained"

    def _one_after_another(self) -> None:
        """A train node is told when the one before has updated, or could not fetch its rows."""
        ends = {(e.node, e.step): t for t, e in self.history.events if isinstance(e, Stepped)}
        dropped = {
            e.id: t for t, e in reversed(self.history.events) if isinstance(e, FetchFailed | Short)
        }
        # a rank in its sleep is told later than the others
        begins = {message.id: (at, message) for at, message in reversed(self._train_steps)}
        for (_, before), (begin, _) in pairwise(begins[task] for task in sorted(begins)):
            end = dropped[before.id] if before.id in dropped else ends[before.node, before.step]
            done = f"{before.node} was not done in step {before.step}"
            assert end <= begin, f"{done} when the next was told to train"

    def groups_whole(self) -> None:
        """A prompt is in one Step, with all rows; train nodes that read the same see the same."""
        home: dict[tuple[str, int], int] = {}
        for node in self.sets:
            for step, keys in self.trained[node.name].items():
                where = f"{node.name}, step {step}"
                assert keys == sorted(set(keys)), f"{where}: a row twice, or not in order"
                for prompt in {(p, a) for p, _, a in keys}:
                    first = home.setdefault((node.source, prompt[0]), step)
                    assert first == step, f"{prompt} is trained in step {first} and in step {step}"
                    wanted = self.expected.trained_rows(node, prompt)
                    rows = _of_prompt(keys, prompt)
                    assert rows == wanted, f"{where}: of {prompt} {rows}, expected {wanted}"
        if len(self.plan.sources) == 1:
            for (_, position), step in home.items():
                self._nobody_missed(position, step)

    def _nobody_missed(self, position: int, step: int) -> None:
        """Train nodes without a row of a prompt that others have in a Step were to have none."""
        attempts = {node.name: self._attempts(node, position, step) for node in self.sets}
        every = set().union(*attempts.values())
        for node in self.sets:
            if not attempts[node.name]:
                missed = self.expected.trained_rows(node, (position, *every))
                assert not missed, f"{node.name} missed {position}"

    def _attempts(self, node: PlannedNode, position: int, step: int) -> set[int]:
        return {a for p, _, a in self.trained[node.name].get(step, ()) if p == position}

    def lag_held(self) -> None:
        """No row is older than max_lag; what the run reports is what was measured."""
        widest = max(node.inner for node in self.sets)
        for message, versions in self.history.trained:
            for node in (n for n in self.sets if n.name.partition("/")[0] == message.node):
                read = {f.producer for i in node.inputs for f in i.fetches} & versions.keys()
                lag = (
                    message.step
                    - 1
                    - min(_known({name: versions[name] for name in read}), default=message.step - 1)
                )
                self._of_lag(node, message.step, lag, reported=node.inner == widest)
        if all(source.intake != "admission" for source in self.plan.sources):
            self._no_step_lags_more(max(source.max_lag for source in self.plan.sources))

    def _of_lag(self, node: PlannedNode, step: int, lag: int, *, reported: bool) -> None:
        source, told = self.source(node.source), f"{node.name}, step {step}: lag {lag}"
        assert lag >= 0, told
        assert lag <= source.max_lag or source.intake == "admission", told
        if reported:
            assert lag <= self.steps[step].metrics["policy/lag/max"], told

    def _no_step_lags_more(self, bound: int) -> None:
        lags = [c.metrics["policy/lag/max"] for c in self.steps.values() if c.metrics]
        assert max(lags, default=0) <= bound

    def step_reads_its_version(self) -> None:
        """Below the cut a reader has the version the Step starts from; an evaluation has one."""
        for message, versions in self.history.trained:
            for name, seen in versions.items():
                if self.plan.node(name).region == "step":
                    beyond = set(seen) - {NO_VERSION, message.step - 1}
                    assert not beyond, f"{name}: {beyond} in step {message.step}"
        if self.faulty:  # a Step may have been undone meanwhile
            return
        for read in self.history.reads:
            assert read.first <= read.last
            wanted = {"step": read.step - 1, "stream": read.first}.get(read.region, read.step)
            right = read.region == "stream" or read.first == read.last == wanted
            assert right, f"{read} should have seen version {wanted}"

    def batches_full(self) -> None:
        """Every Step has its batch, unless the data ended; none has more."""
        settings, full = self.case.settings, sum(source.batch for source in self.plan.sources)
        short = self.last_step if settings.steps is None else -1
        for step in self.steps.keys() - {self.first_step}:
            prompts = self.steps[step].metrics["data/prompts"]
            assert prompts <= full
            assert prompts == full or step == short, f"step {step}: {prompts} prompts of {full}"
        assert settings.steps in (None, self.last_step)

    def evaluated_when_due(self) -> None:
        """At the start, every k Steps and the last, once, on every row, before what comes next."""
        for node in self.plan.nodes:
            if node.work == "evaluate":
                self._evaluated(node)
        events = [e for _, e in self.history.events if isinstance(e, Evaluated)]
        told = self.once((m.node, m.version) for m in self.said(Evaluate))
        assert sorted((e.node, e.version) for e in events) == sorted(told)

    def _evaluated(self, node: PlannedNode) -> None:
        told = [m for m in self.said(Evaluate) if m.node == node.name]
        due = self._due(node)
        versions = self.once(m.version for m in told)
        extra = set() if self.own_steps else {self.first_step}
        right = set(versions) - extra == due - extra
        assert right, f"{node.name} ran at {versions}, due were {sorted(due)}"
        assert versions == sorted(set(versions))
        rows = range(self.case.rows[node.source])
        wanted = set().union(*(self.expected.trained_rows(node, (p, 0)) for p in rows))
        assert all(set(m.keys.rows()) == wanted for m in told)

    def _due(self, node: PlannedNode) -> set[int]:
        """The versions that an evaluation is due for."""
        due = {version for version in self.own_steps if version % node.every == 0}
        due |= {self.last_step} if self.own_steps else set()
        return due if self.past else due | {0}

    def followers_moved(self) -> None:
        """A follower moves once for each version that is a multiple of `every`, never at 0."""
        moves = Counter(
            (m.model, m.reader, m.worker, m.version) for m in self.said(Load) if m.leader
        )
        wanted = Counter(
            (model.name, reader, worker, version)
            for model in self.plan.states
            if model.follows
            for reader in model.readers
            for worker in self.plan.node(reader).workers
            for version in self.own_steps
            if version % model.every == 0
        )
        assert moves == wanted

    def samples_those_of_steps(self) -> None:
        """Each Step has samples of the rows it was trained on; nothing else has any at the end."""
        recorded = self.once(m.step for m in self.said(Record))
        steps = list(self.own_steps) if self.plan.recorded else []
        # told, and never formed again as the data had ended
        undone = [self.last_step + 1] if self.faulty else []
        assert recorded in (steps, steps + undone), f"samples were told for {recorded}"
        assert sorted(self.history.samples) == steps
        for step, found in self.history.samples.items():
            for recorded in self.plan.recorded:
                self._samples_of(step, self.plan.node(recorded.gate), found[recorded.name])

    def _samples_of(self, step: int, gate: PlannedNode, keys: Keys) -> None:
        trains = [n for n in self.sets if n.source == gate.source]
        prompts = {(p, a) for n in trains for p, _, a in self.trained[n.name].get(step, ())}
        for prompt in prompts:
            expected = self.expected.keys(gate.rows, prompt).take(self.expected.rows(gate, prompt))
            shown = _of_prompt(keys.rows(), prompt)
            assert set(expected.rows()) == shown, f"samples of step {step}: {prompt}"
        others = {p for p, _, a in keys.rows() if (p, a) not in prompts}
        wrong = others & set().union(*(self._positions(node) for node in trains))
        assert not wrong, f"samples of step {step}: {wrong} are of another"

    def _positions(self, node: PlannedNode, last: float = inf) -> set[int]:
        """Of the prompts that a node trained up to a Step."""
        steps = self.trained[node.name].items()
        return {p for step, keys in steps if step <= last for p, _, _ in keys}

    def cuts_exact(self) -> None:
        """Checkpoints come every k Steps, by the clock and at the end; a position has one state."""
        every = self.case.settings.checkpoint_every
        by_step = self.once(m.step for m in self.said(Checkpoint) if not m.timed)
        timed = set(self.once(m.step for m in self.said(Checkpoint) if m.timed))
        due = {step for step in self.own_steps if every and step % every == 0}
        assert not due & timed, f"due by Steps, and told as timed: {due & timed}"
        due |= {self.last_step} - {self.first_step, *timed}
        assert by_step == sorted(due), f"checkpoints at {by_step}, due were {sorted(due)}"
        self._by_the_clock()
        for message in self.said(Checkpoint):
            for name, cut in message.sources.items():
                self._in_one_state(message.step, name, cut)

    def _in_one_state(self, step: int, name: str, cut: SourceCut) -> None:
        """Each position of a source is, and none that was trained is live."""
        live = [k[0] for k in (*cut.running, *cut.finished)]
        states = [*range(cut.watermark), *cut.retired, *live]
        assert sorted(states) == list(range(cut.next)), f"{name} at step {step}: {cut}"
        for node in self.sets:
            both = set(live) & self._positions(node, step) if node.source == name else set()
            assert not both, f"{name}: trained and still live at step {step}"

    def measured_once(self) -> None:
        """Without lag, a chunk's metrics count before its Step or evaluation is closed."""
        told = self.history.instructions
        closed = {m.step: when for when, m in told if isinstance(m, StepClosed)}
        for (node, step, keys), counted in self._counted().items():
            what = f"{node}: the metrics of {keys}"
            # one version may be evaluated in two rounds
            once = self.plan.node(node).region == "stream"
            assert len(counted) <= 1 or not once, f"{what} count {len(counted)} times"
            for each in self._steps_of(node, step, keys[0]):
                assert counted, f"{what} never came before step {each}"
                assert max(counted) <= closed[each], f"{what} came too late for step {each}"

    def _counted(self) -> dict[tuple[str, int, Rows], list[float]]:
        """(node, Step, rows) -> when the metrics of such a chunk counted."""
        ends = {e.id: when for when, e in self.history.events if isinstance(e, ChunkDone)}
        runs: dict[tuple[str, int, Rows], list[float]] = defaultdict(list)
        for chunk in filter(is_for_lead, self.said(RunChunk)):
            if self.plan.node(chunk.node).region == "evaluation" or self._waves(chunk.node):
                counted = runs[chunk.node, chunk.step, rows_of(chunk)]
                counted += [ends[chunk.id]] if chunk.id in ends and not chunk.again else []
        return runs

    def _waves(self, node: str) -> bool:
        """Whether this is a node above the cut of a synchronous source."""
        planned = self.plan.node(node)
        return planned.region == "stream" and not self.source(planned.source).max_lag

    def _steps_of(self, node: str, step: int, keys: Iterable[tuple[int, int, int]]) -> set[int]:
        """The closed Steps that rows of a chunk went into."""
        if self.plan.node(node).region == "evaluation":
            return {step} & self.steps.keys()
        source = self.plan.node(node).source
        return set().union(*(self._home.get((source, p, a), ()) for p, _, a in keys))

    def _by_the_clock(self) -> None:
        """A timed checkpoint comes at the first Step's end that is late enough, never sooner."""
        seconds = self.case.settings.checkpoint_seconds
        told = [(at, m) for at, m in self.history.instructions if isinstance(m, Checkpoint)]
        for at, m in told:
            late = seconds and at - self._stored_before(m.step, 0.0) >= seconds
            assert late or not m.timed, f"step {m.step} was stored too soon"
        if seconds and self.run.finish is not None:
            self._stored_in_time(seconds, {m.step for _, m in told})

    def _stored_in_time(self, seconds: float, steps: set[int]) -> None:
        begun = self.history.events[0][0]
        for at, m in self.history.instructions:
            if isinstance(m, StepClosed) and m.step > self.first_step:
                late = at - self._stored_before(m.step, begun) >= seconds
                assert not late or m.step in steps, f"step {m.step} was not stored"

    def _stored_before(self, step: int, begun: float) -> float:
        """When the last checkpoint of an earlier Step was stored."""
        stored = [(at, e) for at, e in self.history.events if isinstance(e, Checkpointed)]
        return max((at for at, e in stored if e.step < step), default=begun)

    def admitted_in_order(self) -> None:
        """Fresh prompts are admitted in the source's order; an attempt follows the one before."""
        for prompts in self.admitted.values():
            fresh = [p for p, a in prompts if a == 0]
            fresh = sorted(fresh) if self.faulty else fresh  # told late where nobody is
            assert fresh == list(range(len(fresh)))
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
        nodes = [node for node in self.sets if node.source == source]
        if self.expected.fate(source, prompt) != "trained":
            seen = {(p, a) for n in nodes for ks in self.trained[n.name].values() for p, _, a in ks}
            assert prompt not in seen, f"{prompt} should not have been trained"
            return True
        return all(self._has_trained(node, prompt) for node in nodes)

    def _has_trained(self, node: PlannedNode, prompt: Prompt) -> bool:
        """Whether a Step of the node had all of a prompt's rows that it was to get, if any."""
        wanted = self.expected.trained_rows(node, prompt)
        return not wanted or any(wanted <= set(keys) for keys in self.trained[node.name].values())

    def _excuses(self, source: PlannedSource) -> int:
        """How many prompts may be neither trained nor given up when the run ends."""
        if len(self.plan.sources) > 1:  # the other source ended first
            return (1 + source.max_lag) * source.batch
        if self.case.settings.steps is not None:  # too old, waiting to begin once more
            return source.max_lag * source.batch if source.intake == "drop" else 0
        return 0


def _of_prompt(keys: Iterable[tuple[int, int, int]], prompt: Prompt) -> set:
    return {key for key in keys if (key[0], key[2]) == prompt}


def _known(versions: Mapping[str, Iterable[int]]) -> list[int]:
    return [v for many in versions.values() for v in many if v != NO_VERSION]
