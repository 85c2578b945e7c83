"""How long simulated kernels take by the cost model: of this plan, for rows of these lengths.

Owns: which rows a message is about and how long they are, and which formula counts. Does not own:
the formulas (engine/plan/cost), the draws (lengths.py), who waits for whom
(engine/run/simulated_workers/simulated_worker.py).

Assumed, where a real run may differ: a replica takes its chunks one after another, each decoded
from its start with a cache of its own; new weights that interrupt an answer cost no second prefill;
rows come from several Workers one after another, as fast as the reader's way is; while several
Workers of a host compute, each takes as much longer as a profile has measured; where they have all
cores, a function shares one, and they lose what it and the coordinator compute; equal work takes
equal time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from dataflow.node import Node
from dataflow.schema import TokenPrompt
from engine.plan.cost.memory import HOST_PARTS, SHARED_PARTS, lasting
from engine.plan.costs import PlanCosts
from engine.plan.joining_decode import PricedDecode
from engine.plan.leaving_batches import ForeseenRows, group_ends, list_batches
from engine.plan.plan import Plan, PlannedNode
from engine.plan.planned_input import PlannedInput
from engine.plan.row_lengths import RowLengths
from engine.protocol import messages as m
from engine.protocol.refs import Gather
from engine.protocol.staleness import NO_VERSION
from engine.run.simulated_workers.kernel_times import Rows, Times
from engine.simulation.lengths import DrawnLengths
from engine.simulation.load_times import LoadTimes
from engine.simulation.missing_times import require_known_times
from engine.simulation.priced_decode import begin_decode
from engine.simulation.routes import Ways
from engine.simulation.worker_sets import runs_beside_others

if TYPE_CHECKING:
    from engine.run.simulated_workers.workers import SimulatedWorkers

_REMEMBERED = 1 << 14
"""Chunks whose times are remembered at most: equal rows have equal times."""


@dataclass(slots=True)
class TrainedRows:
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
        require_known_times(plan, costs, seconds, cpu)
        self._plan, self._costs, self._drawn, self._world = plan, costs, drawn, world
        self._seconds, self._cpu = seconds, cpu
        self._nodes = {node.name: node for node in plan.nodes}
        self._ways = Ways(plan, costs)
        self._runs_beside = {node.name: runs_beside_others(plan, node) for node in plan.nodes}
        self._workers = {node.name: frozenset(node.workers) for node in plan.nodes}
        self._loads = LoadTimes(plan, costs, self._ways)
        self._makes_prompts = {node.name for node in plan.program.nodes if _makes_prompts(node)}
        self._row_bytes = _row_bytes(plan)
        # What was asked before: the same thing is asked of each chunk, version and turn.
        self._times: dict[tuple[str, str, float, bytes, bytes], Times] = {}
        self._turns: dict[str, float] = {}
        self._shares: dict[tuple[int, str], dict[str, RowLengths]] = {}
        """(assignment, who fetches its rows) -> the rows, by set."""
        self.trained: dict[tuple[int, str], TrainedRows] = {}
        """(Step, train node) -> what it had."""

    # --- rows -------------------------------------------------------------------------------------

    def lengths(self, chunk: m.RunChunk, node: PlannedNode) -> RowLengths:
        """Draw lengths where tokens are made; else take those of the rows that are read."""
        keys = chunk.keys
        if node.relation in ("expand", "source"):
            keys = keys.expand_spans(node.rows // node.inner, chunk.spans)
        if node.work == "source":
            prompts = self._drawn.prompts(node.name, keys)
            return RowLengths(prompts, self._drawn.completions(node.name, keys))
        read = self._read(node.inputs, chunk.inputs, len(chunk.keys), chunk)
        samples = np.full(len(read), len(keys) // max(1, len(read)))
        if chunk.spans is not None:
            samples = chunk.spans[:, 1] - chunk.spans[:, 0]
        if node.traits.generates:
            prompts = np.repeat(read.prompts, samples)
            # An episode has one row here: how many it needs nobody knows before a run.
            is_written = keys.sample % node.segments == 0
            answers = self._drawn.answers(node.name, keys)
            return RowLengths(prompts * is_written, answers * is_written)
        if node.relation == "expand":
            places = np.repeat(np.arange(len(read)), samples)
            read = read.take(places)
        if node.name in self._makes_prompts:
            # What was an answer is a part of the next prompt.
            return RowLengths(read.prompts + read.answers, np.zeros_like(read.answers))
        return read

    def rows(self, node: PlannedNode, rows: int, lengths: RowLengths | None, worker: str) -> Times:
        """Time the rows of a chunk: by continuous decoding, or all of them at once."""
        assert lengths is not None
        if not node.traits.computes:
            return np.zeros(rows), np.full(rows, self._function(node, rows))
        if not rows:
            return np.zeros(0), np.zeros(0)
        slower = self._slowdown(node)
        costs = self._costs.on(worker)
        device = costs.device_kind(node.name)
        key = node.name, device, slower, lengths.prompts.tobytes(), lengths.answers.tobytes()
        if key not in self._times:
            if len(self._times) >= _REMEMBERED:
                self._times.clear()
            self._times[key] = self._price(costs, node, lengths, slower)
        return self._times[key]

    def _price(
        self, costs: PlanCosts, node: PlannedNode, lengths: RowLengths, slower: float
    ) -> Times:
        if node.traits.generates:
            written = np.arange(0, len(lengths), node.segments)
            decoded = costs.decode(node.name, _at_least_one(lengths.take(written)))
            begins, ends = np.zeros(len(lengths)), np.zeros(len(lengths))
            begins[written] = decoded.begins * slower
            ends[written] = decoded.ends * slower
            return begins, ends
        seconds = costs.forward(node.name, lengths).seconds * slower
        return np.zeros(len(lengths)), np.full(len(lengths), seconds)

    def decode_run(self, node: PlannedNode, worker: str) -> PricedDecode:
        """Begin the decoding of one replica's rows, into which those of further chunks may come."""
        return begin_decode(self._costs.on(worker), node, lambda: self._slowdown(node))

    def _slowdown(self, node: PlannedNode) -> float:
        """How much longer a kernel takes while others compute on its host."""
        if self._is_crowded(node):
            return self._costs.beside(node.name)
        return 1.0

    def _is_crowded(self, node: PlannedNode) -> bool:
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
        """Threads of a node's kernel on a CPU; 0 on a GPU."""
        if node.workers[0] in self._plan.devices or not node.traits.computes:
            return 0
        return node.layout.threads

    def computing(self, node: PlannedNode) -> float:
        """The share of a function's seconds that was said or measured; all, where nobody knows."""
        if node.traits.computes:
            return 0.0
        return self._cpu.get(node.name, self._costs.computing(node.name))

    def cores(self, worker: str) -> int:
        """Cores of a Worker's host, as the plan's cluster says."""
        return self._costs.cores(worker)

    def batches(self, node: PlannedNode, rows: ForeseenRows) -> Iterator[tuple[float, np.ndarray]]:
        """As kernels hand them over."""
        return list_batches(node, rows)

    def interrupted_rows(
        self, node: PlannedNode, ends: np.ndarray, groups: np.ndarray, seconds: float
    ) -> np.ndarray:
        """All whole groups that have ended."""
        return np.flatnonzero(group_ends(ends, groups) <= seconds)

    # --- training ---------------------------------------------------------------------------------

    def train(self, message: m.TrainStep | m.TrainPart) -> float:
        """Seconds of one rank, by its own share of the rows; of a part without
        an update; none of a record node."""
        node = self._nodes[message.node]
        if not node.traits.computes:
            return 0.0
        # Tensor ranks have the rows that one of them fetches and broadcasts.
        row_sets = self._shares[message.id, message.giver or message.worker]
        row_sets = {name: rows for name, rows in row_sets.items() if len(rows)}
        if not row_sets:
            return 0.0
        is_share = message.mine is not None
        is_part = isinstance(message, m.TrainPart)
        costs = self._costs.on(message.worker)
        time = costs.train(node.name, row_sets, share=is_share, updates=not is_part)
        return time.seconds * self._slowdown(node)

    def finish(self, message: m.FinishStep) -> float:
        """Seconds of one rank's update."""
        node = self._nodes[message.node]
        return self._costs.on(message.worker).update(node.name).seconds * self._slowdown(node)

    def prepare(self, message: m.TrainStep | m.TrainPart | m.FinishStep) -> float:
        """Nothing beside the fetch."""
        return 0.0

    def _note_assignment(self, message: m.TrainStep | m.TrainPart) -> None:
        """Remember a rank's rows until it trains them; count them for the Step."""
        if not self._nodes[message.node].traits.computes:
            return
        if message.giver not in ("", message.worker):
            return
        self._forget_shares(message.id - _REMEMBERED)
        row_sets = self._row_sets(message)
        self._shares[message.id, message.worker] = row_sets
        trained = self.trained.setdefault((message.step, message.node), TrainedRows())
        for rows in row_sets.values():
            trained.rows += len(rows)
            trained.tokens += int(rows.prompts.sum() + rows.answers.sum())
        for gather in _gathers(message.inputs):
            if self._nodes[gather.producer].traits.generates and len(gather.row):
                self._count_lag(trained, message.step, gather)

    def _forget_shares(self, first: int) -> None:
        """Forget the rows of assignments before `first`."""
        for key in list(self._shares):
            if key[0] < first:
                del self._shares[key]

    def _row_sets(self, message: m.TrainStep | m.TrainPart) -> dict[str, RowLengths]:
        """How long the rows of an assignment are, by set."""
        row_sets: dict[str, RowLengths] = {}
        for name, inputs in self._nodes[message.node].row_sets.items():
            rows = message.others.get(name, message)
            row_sets[name] = self._read(inputs, message.inputs, len(rows.keys), message)
        return row_sets

    def _count_lag(self, trained: TrainedRows, step: int, gather: Gather) -> None:
        blocks = self._world().outbox.of(gather)
        versions = np.concatenate([block.version for block in blocks])[_places(blocks, gather)]
        versions = versions[versions != NO_VERSION]
        total, count = trained.lags.get(gather.producer, (0, 0))
        # With the version of the Step before a row is not late.
        late = np.maximum(step - 1 - versions, 0)
        trained.lags[gather.producer] = total + int(late.sum()), count + len(late)

    # --- ways -------------------------------------------------------------------------------------

    def fetch(
        self, message: Rows | m.FetchAhead, here: frozenset[tuple[str, int]] = frozenset()
    ) -> float:
        """Seconds until the rows of a message that other Workers keep are there, but for those
        `here`.
        """
        if isinstance(message, m.TrainStep | m.TrainPart):
            self._note_assignment(message)
        reader = message.worker
        seconds = delay = 0.0
        for gather in _gathers(message.inputs):
            if all(worker == reader for worker, _ in gather.refs):
                continue
            size = self._size(gather, message)
            counts = np.bincount(gather.block, minlength=len(gather.refs))
            for (sender, number), count in zip(gather.refs, counts.tolist(), strict=True):
                if sender != reader and (sender, number) not in here:
                    way = self._ways.between(sender, reader)
                    seconds += size * count / len(gather.row) / way.rate
                    delay = max(delay, way.delay)
        return seconds + delay

    def _size(self, gather: Gather, message: Rows | m.FetchAhead) -> float:
        """Bytes of a gather's rows, by their lengths; those of a plan's edge are the greatest."""
        consumer = "" if isinstance(message, m.Record) else message.node
        row_bytes = self._row_bytes.get((gather.producer, consumer), 0.0)
        most = self._drawn.greatest(gather.producer).row
        lengths = self._lengths_of(gather)
        tokens = float(lengths.prompts.sum() + lengths.answers.sum())
        if most and tokens:
            # As many of the greatest rows as have these tokens.
            return row_bytes * (tokens / most)
        return row_bytes * len(gather.row)

    def answer(self, message: m.Evaluate | m.Record) -> float:
        """Means and samples of rows take no time that counts."""
        return 0.0

    def offer(self, message: m.Offer) -> float:
        """Counted with the loads."""
        return 0.0

    def load(self, message: m.Load) -> float:
        """Seconds until one reader has a version."""
        return self._loads.seconds(message, self._world().away)

    def interrupts(self, reader: str) -> bool:
        """Whether new weights interrupt a reader, as its generate node says."""
        assert self._plan.program is not None
        node = self._nodes[reader]
        if not node.traits.generates or not node.lag:
            return False
        return self._plan.program.node(reader).params.get("on_update") == "interrupt"

    def turn(self, worker: str) -> float:
        """Seconds in which what a Worker holds on its GPU moves to the host, or back."""
        if worker not in self._plan.devices:
            return 0.0
        if worker not in self._turns:
            nodes = self._plan.nodes_on(worker)
            # What is on the host already stays there, and a cache is not moved.
            stays = (*HOST_PARTS, *SHARED_PARTS, "cache")
            moved = sum(lasting(node.estimate.bytes, without=stays) for node in nodes)
            computing = next(node.name for node in nodes if node.traits.computes)
            self._turns[worker] = moved / self._costs.place(computing).device.link
        return self._turns[worker]

    def start(self, worker: str) -> float:
        """Seconds of a replica that joins; the first ones are there before the first Step."""
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
        message: m.RunChunk | m.TrainStep | m.TrainPart,
    ) -> RowLengths:
        """How long rows are whose columns come by these gathers: the most that one of them says."""
        prompts, answers = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        for each in inputs:
            # A part of a concat has some of the samples alone.
            mine = each.within(message.keys.sample) if each.width else slice(None)
            for gather in gathers.get(each.name, ()):
                # An input that is reduced, of which a gather has keys, has rows of its own.
                if gather.keys is None and len(gather.row) == len(prompts[mine]):
                    lengths = self._lengths_of(gather)
                    prompts[mine] = np.maximum(prompts[mine], lengths.prompts)
                    answers[mine] = np.maximum(answers[mine], lengths.answers)
        return RowLengths(prompts, answers)

    def _lengths_of(self, gather: Gather) -> RowLengths:
        """How long the rows of one gather are; all 0 where some block does not say it."""
        blocks = self._world().outbox.of(gather)
        lengths = [block.lengths for block in blocks if block.lengths is not None]
        if len(lengths) < len(blocks) or not lengths:
            zeros = np.zeros(len(gather.row), np.int64)
            return RowLengths(zeros, zeros)
        if len(lengths) == 1:
            return lengths[0].take(gather.row)
        all_lengths = RowLengths(
            np.concatenate([each.prompts for each in lengths]),
            np.concatenate([each.answers for each in lengths]),
        )
        return all_lengths.take(_places(blocks, gather))


def _places(blocks: Iterable[object], gather: Gather) -> np.ndarray:
    """Where each row of a gather is in its blocks, one after another."""
    sizes = [len(block.version) for block in blocks]  # type: ignore[attr-defined]
    begins = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
    return begins[gather.block] + gather.row


def _gathers(inputs: Mapping[str, tuple[Gather, ...]]) -> Iterator[Gather]:
    for gathers in inputs.values():
        yield from gathers


def _at_least_one(lengths: RowLengths) -> RowLengths:
    """Each row gets a token at least."""
    return RowLengths(lengths.prompts, np.maximum(lengths.answers, 1))


def _makes_prompts(node: Node) -> bool:
    return any(issubclass(schema, TokenPrompt) for schema in node.schemas)


def _row_bytes(plan: Plan) -> dict[tuple[str, str], float]:
    """(producer, consumer) -> bytes of one row, at its greatest length."""
    batches = {source.name: source.batch for source in plan.sources}
    sizes: dict[tuple[str, str], float] = {}
    for edge in plan.edges:
        producer = plan.node(edge.producer)
        # An evaluation's source has no batch.
        rows = batches.get(producer.source, 1) * producer.rows
        sizes[edge.producer, edge.consumer] = edge.bytes / max(1, rows)
    return sizes
