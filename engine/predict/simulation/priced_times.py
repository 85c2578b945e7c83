"""How long simulated kernels take by the cost model: of this plan, for rows of these lengths.

Owns: which rows a message is about and how long they are, and which formula counts. Does not own:
the formulas (engine/plan/cost), the draws (lengths.py), who waits for whom
(engine/run/simulated_workers/simulated_worker.py).

Assumed, where a real run may differ: a replica takes its chunks one after another, each decoded
from its start with a cache of its own; new weights that interrupt an answer cost no second prefill;
rows come from several Workers one after another, as fast as the reader's way is; while several
Workers of a host compute, each takes as much longer as a profile has measured; a function shares a
core with one of them where they have all, and neither it nor the coordinator slows them; equal work
takes equal time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from dataflow.errors import PlanError, nearest_or_all
from dataflow.schema import TokenPrompt
from engine.plan.cost.memory import HOST_PARTS, lasting
from engine.plan.costs import PlanCosts, RowLengths
from engine.plan.plan import Plan, PlannedModel, PlannedNode
from engine.plan.planned_input import PlannedInput
from engine.predict.simulation.lengths import DrawnLengths
from engine.predict.simulation.routes import Ways
from engine.protocol import messages as m
from engine.protocol.refs import Gather
from engine.protocol.staleness import NO_VERSION
from engine.run.simulated_workers.kernel_times import Rows, Times

if TYPE_CHECKING:
    from engine.run.simulated_workers.workers import SimulatedWorkers

_KEPT = 1 << 14
"""Chunks whose times are remembered at most: equal rows have equal times."""


@dataclass(slots=True)
class Trained:
    """What a train node had of a Step. lags: by reader, (their sum, how many)."""

    rows: int = 0
    tokens: int = 0
    lags: dict[str, tuple[int, int]] = field(default_factory=dict)


class PricedTimes:
    """See KernelTimes. seconds, cpu: of nodes that are functions, a row's seconds and the share of
    these in which they compute, before those of a profile. Raises PlanError for a node whose time
    nobody knows.
    """

    def __init__(
        self,
        plan: Plan,
        costs: PlanCosts,
        drawn: DrawnLengths,
        world: Callable[[], SimulatedWorkers],
        seconds: Mapping[str, float],
        cpu: Mapping[str, float],
    ) -> None:
        assert plan.program is not None
        self._plan, self._costs, self._drawn, self._world = plan, costs, drawn, world
        self._nodes = {n.name: n for n in plan.nodes}
        self._seconds, self._cpu = seconds, cpu
        _require_known(plan, costs, seconds, cpu)
        self._ways = Ways(plan, costs)
        self._runs_beside = {n.name: _runs_beside(plan, n) for n in plan.nodes}
        self._workers = {n.name: frozenset(n.workers) for n in plan.nodes}
        self._far = {model.name: _far(plan, model) for model in plan.models}
        self._models = {model.name: model for model in plan.models}
        self._makes_prompts = {
            n.name for n in plan.program.nodes if any(issubclass(s, TokenPrompt) for s in n.schemas)
        }
        batches = {s.name: s.batch for s in plan.sources}
        self._row_bytes = {
            (e.producer, e.consumer): e.bytes
            / max(1, batches.get(self._nodes[e.producer].source, 1) * self._nodes[e.producer].rows)
            for e in plan.edges
        }
        self._known: dict[tuple[str, float, bytes, bytes], Times] = {}
        self._weights: dict[tuple[str, str, str, int], float] = {}
        self._turns: dict[str, float] = {}
        self._shares: dict[tuple[int, str], dict[str, RowLengths]] = {}
        """(assignment, who fetches its rows) -> the rows, by set."""
        self.trained: dict[tuple[int, str], Trained] = {}
        """(Step, train node) -> what it had."""

    # --- rows -------------------------------------------------------------------------------------

    def lengths(self, chunk: m.RunChunk, node: PlannedNode) -> RowLengths:
        """Drawn where tokens are made, else those of the rows that are read."""
        keys = chunk.keys
        if node.relation in ("expand", "source"):
            keys = keys.expand(node.rows // node.inner)
        if node.work == "source":
            prompts = self._drawn.prompts(node.name, keys)
            return RowLengths(prompts, self._drawn.demonstrated(node.name, keys))
        read = self._read(node.inputs, chunk.inputs, len(chunk.keys), chunk)
        if node.traits.generates:
            each = len(keys) // max(1, len(read))
            return RowLengths(np.repeat(read.prompts, each), self._drawn.answers(node.name, keys))
        if node.relation == "expand":
            read = read.take(np.repeat(np.arange(len(read)), len(keys) // max(1, len(read))))
        if node.name in self._makes_prompts:
            return RowLengths(read.prompts + read.answers, np.zeros_like(read.answers))
        return read

    def rows(self, node: PlannedNode, rows: int, lengths: RowLengths | None) -> Times:
        """By node: continuous decoding, or all rows at once."""
        assert lengths is not None
        if not node.traits.computes:
            return np.zeros(rows), np.full(rows, self._function(node, rows))
        if not rows:
            return np.zeros(0), np.zeros(0)
        beside = self._beside(node)
        at = node.name, beside, lengths.prompts.tobytes(), lengths.answers.tobytes()
        if at not in self._known:
            if len(self._known) >= _KEPT:
                self._known.clear()
            self._known[at] = self._passes(node, lengths)
        return self._known[at]

    def _passes(self, node: PlannedNode, lengths: RowLengths) -> Times:
        slower = self._beside(node)
        if node.traits.generates:
            found = self._costs.decode(node.name, _at_least_one(lengths))
            return found.begins * slower, found.ends * slower
        seconds = self._costs.forward(node.name, lengths).seconds * slower
        return np.zeros(len(lengths)), np.full(len(lengths), seconds)

    def _beside(self, node: PlannedNode) -> float:
        """How much longer a kernel takes while others compute on its host."""
        return self._costs.beside(node.name) if self._crowded(node) else 1.0

    def _crowded(self, node: PlannedNode) -> bool:
        """Whether other Workers of a CPU compute while this node does: those of other replicas that
        are there and of ranks, and, where streams run ahead, those of other nodes.
        """
        if node.workers[0] in self._plan.devices or not node.traits.computes:
            return False
        workers = self._workers[node.name]
        if len(workers) - len(workers & self._world().away) > 1:
            return True
        return self._runs_beside[node.name]

    def _function(self, node: PlannedNode, rows: int) -> float:
        if node.name in self._seconds:
            return self._seconds[node.name] * rows
        return self._costs.function(node.name, rows) or 0.0

    def threads(self, node: PlannedNode) -> int:
        """Of a kernel on a CPU."""
        on_cpu = node.workers[0] not in self._plan.devices
        return node.layout.threads if on_cpu and node.traits.computes else 0

    def computing(self, node: PlannedNode) -> float:
        """As was said or measured; a function of which nobody knows keeps a core busy."""
        if node.traits.computes:
            return 0.0
        return self._cpu.get(node.name, self._costs.computing(node.name))

    def cores(self, worker: str) -> int:
        """Of the plan's cluster."""
        return self._costs.cores(worker)

    def batches(self, node: PlannedNode, ends: np.ndarray) -> Iterator[np.ndarray]:
        """Rows that end at the same time; of a generation whole groups, all at once where they fit
        its slots, else as soon as there are enough for a quarter of them.
        """
        least, slots = 1, node.layout.slots
        if node.traits.generates:
            least = len(ends) if len(ends) <= slots else max(1, slots // 4)
            ends = _of_groups(node, ends)
        order = np.argsort(ends, kind="stable")
        batch: list[np.ndarray] = []
        same_time = np.split(order, np.flatnonzero(np.diff(ends[order])) + 1)
        for rows in same_time if len(order) else ():
            batch.append(rows)
            if sum(map(len, batch)) >= least:
                yield np.concatenate(batch)
                batch = []
        if batch:
            yield np.concatenate(batch)

    def interrupted(self, node: PlannedNode, ends: np.ndarray, seconds: float) -> np.ndarray:
        """All whole groups that have ended."""
        return np.flatnonzero(_of_groups(node, ends) <= seconds)

    # --- training ---------------------------------------------------------------------------------

    def train(self, message: m.TrainStep) -> float:
        """Of a rank, by its own share."""
        node = self._nodes[message.node]
        sets = self._shares[message.id, message.giver or message.worker]
        sets = {name: rows for name, rows in sets.items() if len(rows)}
        whole = message.mine is None
        seconds = self._costs.train(node.name, sets, share=not whole).seconds if sets else 0.0
        return seconds * self._beside(node)

    def prepare(self, message: m.TrainStep) -> float:
        """Nothing beside the fetch."""
        return 0.0

    def _told(self, message: m.TrainStep) -> None:
        """Remember a rank's rows until it trains them; count them for the Step."""
        if message.giver not in ("", message.worker):
            return
        node = self._nodes[message.node]
        for old in [at for at in self._shares if at[0] < message.id - len(self._nodes)]:
            del self._shares[old]
        sets: dict[str, RowLengths] = {}
        for name, inputs in node.row_sets.items():
            own = message.others.get(name, message)
            found = {i.name: message.inputs[i.name] for i in inputs if i.name in message.inputs}
            sets[name] = self._read(inputs, found, len(own.keys), message)
        self._shares[message.id, message.worker] = sets
        trained = self.trained.setdefault((message.step, message.node), Trained())
        for rows in sets.values():
            trained.rows += len(rows)
            trained.tokens += int(rows.prompts.sum() + rows.answers.sum())
        for gather in _gathers(message.inputs):
            if self._nodes[gather.producer].traits.generates and len(gather.row):
                self._count_lag(trained, message.step, gather)

    def _count_lag(self, trained: Trained, step: int, gather: Gather) -> None:
        blocks = self._world().outbox.of(gather)
        versions = np.concatenate([block.version for block in blocks])[_places(blocks, gather)]
        versions = versions[versions != NO_VERSION]
        total, count = trained.lags.get(gather.producer, (0, 0))
        late = np.maximum(step - 1 - versions, 0)
        trained.lags[gather.producer] = total + int(late.sum()), count + len(late)

    # --- ways -------------------------------------------------------------------------------------

    def fetch(self, message: Rows) -> float:
        """Of all rows of a message that other Workers keep."""
        if isinstance(message, m.TrainStep):
            self._told(message)
        reader = message.worker
        seconds = delay = 0.0
        for gather in _gathers(message.inputs):
            if all(worker == reader for worker, _ in gather.refs):
                continue
            size = self._size(gather, message)
            counts = np.bincount(gather.block, minlength=len(gather.refs))
            for (sender, _), count in zip(gather.refs, counts.tolist(), strict=True):
                if sender != reader:
                    way = self._ways.of(sender, reader)
                    seconds += size * count / len(gather.row) / way.rate
                    delay = max(delay, way.delay)
        return seconds + delay

    def _size(self, gather: Gather, message: Rows) -> float:
        """Bytes of a gather's rows, by their lengths; those of a plan's edge are the greatest."""
        consumer = message.node if not isinstance(message, m.Record) else ""
        each = self._row_bytes.get((gather.producer, consumer), 0.0)
        most = self._drawn.greatest(gather.producer).row
        lengths = self._of(gather)
        tokens = float(lengths.prompts.sum() + lengths.answers.sum())
        return each * (tokens / most if most and tokens else len(gather.row))

    def answer(self, message: m.Evaluate | m.Record) -> float:
        """Means and samples of rows take no time that counts."""
        return 0.0

    def offer(self, message: m.Offer) -> float:
        """Counted with the loads."""
        return 0.0

    def load(self, message: m.Load) -> float:
        """Of a version, to one reader of as many as there are."""
        if message.alias or message.leader:
            return 0.0
        model = self._models[message.model]
        far = self._far[message.model]
        readers = len(far) - len(far & self._world().away)
        at = message.model, message.reader, self._ways.kind(message.worker), readers
        if at not in self._weights:
            time = self._costs.weights(model, message.worker, max(1, readers))
            self._weights[at] = time.seconds
        return self._weights[at]

    def interrupts(self, reader: str) -> bool:
        """As the generate node says."""
        assert self._plan.program is not None
        node = self._nodes[reader]
        asked = self._plan.program.node(reader).params.get("on_update")
        return bool(node.traits.generates and node.lag and asked == "interrupt")

    def turn(self, worker: str) -> float:
        """What a Worker holds on its GPU moves to the host, or back; a CPU keeps it."""
        if worker not in self._plan.devices:
            return 0.0
        if worker not in self._turns:
            nodes = self._plan.nodes_on(worker)
            kept = (lasting(n.estimate.bytes, without=(*HOST_PARTS, "cache")) for n in nodes)
            computing = next(n.name for n in nodes if n.traits.computes)
            place = self._costs.place(computing)
            self._turns[worker] = sum(kept) / place.device.link
        return self._turns[worker]

    def start(self, worker: str) -> float:
        """Of a replica that joins; those of the beginning are there before the first Step."""
        return self._costs.start(worker)

    def open(self) -> float:
        """Before the first Step."""
        return 0.0

    def files(self) -> float:
        """Checkpoints are not simulated."""
        return 0.0

    # --- within -----------------------------------------------------------------------------------

    def _read(
        self,
        inputs: Iterable[PlannedInput],
        gathers: Mapping[str, tuple[Gather, ...]],
        rows: int,
        message: m.RunChunk | m.TrainStep,
    ) -> RowLengths:
        """Of rows whose columns come by these gathers: the longest that one of them says."""
        prompts, answers = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        for i in inputs:
            mine = i.within(message.keys.sample) if i.width else slice(None)
            for gather in gathers.get(i.name, ()):
                if gather.keys is None and len(gather.row) == len(prompts[mine]):
                    found = self._of(gather)
                    prompts[mine] = np.maximum(prompts[mine], found.prompts)
                    answers[mine] = np.maximum(answers[mine], found.answers)
        return RowLengths(prompts, answers)

    def _of(self, gather: Gather) -> RowLengths:
        """Of the rows of one gather."""
        blocks = self._world().outbox.of(gather)
        lengths = [block.lengths for block in blocks if block.lengths is not None]
        if len(lengths) < len(blocks) or not lengths:
            none = np.zeros(len(gather.row), np.int64)
            return RowLengths(none, none)
        if len(lengths) == 1:
            return lengths[0].take(gather.row)
        whole = RowLengths(
            np.concatenate([each.prompts for each in lengths]),
            np.concatenate([each.answers for each in lengths]),
        )
        return whole.take(_places(blocks, gather))


def _places(blocks: Iterable[object], gather: Gather) -> np.ndarray:
    """Where each row of a gather is in its blocks, one after another."""
    sizes = [len(block.version) for block in blocks]  # type: ignore[attr-defined]
    begins = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
    return begins[gather.block] + gather.row


def _gathers(inputs: Mapping[str, tuple[Gather, ...]]) -> Iterator[Gather]:
    for many in inputs.values():
        yield from many


def _at_least_one(lengths: RowLengths) -> RowLengths:
    """Each row gets a token at least."""
    return RowLengths(lengths.prompts, np.maximum(lengths.answers, 1))


def _of_groups(node: PlannedNode, ends: np.ndarray) -> np.ndarray:
    """When the last row of each row's group ends."""
    samples = node.rows // max(1, node.inner)
    return np.repeat(ends.reshape(-1, samples).max(axis=1), samples)


def _far(plan: Plan, model: PlannedModel) -> frozenset[str]:
    """Workers that fetch each version of a Model."""
    readers = frozenset(w for r in model.copied for w in plan.node(r).workers)
    return readers - {plan.node(model.writer).workers[0]} if model.writer else readers


def _runs_beside(plan: Plan, node: PlannedNode) -> bool:
    """Whether Workers of other nodes compute while this one does."""
    others = {w for n in plan.nodes if n.traits.computes for w in n.workers}
    return _runs_ahead(plan) and others != set(node.workers)


def _runs_ahead(plan: Plan) -> bool:
    """Whether one node works for a Step while another does for the next."""
    return any(s.max_lag for s in plan.sources)


def _require_known(
    plan: Plan, costs: PlanCosts, seconds: Mapping[str, float], cpu: Mapping[str, float]
) -> None:
    """Raises PlanError for nodes whose time nobody knows, and for what is said of no function, or
    cannot be.
    """
    functions = [n.name for n in plan.nodes if not n.traits.computes and n.work != "train"]
    for what, names in (("seconds", seconds), ("cpu", cpu)):
        for name in (name for name in names if name not in functions):
            problem = f"expected a node that is a function, found {name!r}"
            raise PlanError(f"{what}: {problem}. Fix: {nearest_or_all(name, functions)}.")
    for name, value in seconds.items():
        if not value >= 0:
            problem = f"{name}: expected seconds a row, 0 or more, found {value:g}"
            raise PlanError(f"seconds: {problem}. Fix: --seconds {name}=0.001.")
    for name, share in cpu.items():
        if not 0 <= share <= 1:
            problem = f"{name}: expected a share from 0 to 1, found {share:g}"
            raise PlanError(f"cpu: {problem}. Fix: --cpu {name}=0.01.")
    unknown = [_unknown(plan, costs, node, seconds) for node in plan.nodes]
    if problems := [problem for problem in unknown if problem]:
        raise PlanError("\n".join(problems))


def _unknown(plan: Plan, costs: PlanCosts, node: PlannedNode, seconds: Mapping[str, float]) -> str:
    if node.work == "evaluate":
        return ""
    if node.traits.computes:
        why = costs.unpriced(node.name)
        fix = "measure it: dataflow profile GRAPH there, and --profile FILE"
        if costs.sizes(node.name) is None:
            fix = "a base with a config.json and safetensors"
        return f"simulate: {node.name}: {why}. Fix: {fix}." if why else ""
    if node.name in seconds or costs.function(node.name, 1) is not None:
        return ""
    problem = "expected the seconds of a row of a user's function, found none"
    return f"simulate: {node.name}: {problem}. Fix: --seconds {node.name}=0.001, or --profile FILE."
