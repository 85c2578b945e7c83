"""Train and evaluate nodes: the rows of one Step, or of one evaluation, for a kernel's `step`.

    TrainStep    prepares where there are several ranks, else trains
    TrainPart    prepares where ranks have a part of the weights each, else adds up gradients
    FinishStep   prepares where there are several ranks, else makes the update of the sums
    Go           begins, once every rank is prepared; ranks with equal rows get them from the first

Owns: prepared Steps, the order of parts, the metrics of Steps and their labels. Does not own:
fetching (rows.py), the order of ranks (the coordinator), the training itself (kernels).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from dataflow.batch import Batch
from dataflow.errors import RunError
from dataflow.kernel import AssignedRows, Assignment
from dataflow.loss_terms import ROWS
from engine.channels.contract import PeerLost
from engine.plan.metric_labels import Label, metric_labels
from engine.plan.plan import Plan
from engine.protocol import messages as m
from engine.protocol.reports import Report
from engine.run.worker.kernel_loader import OpenKernels
from engine.run.worker.rows import WorkerRows
from engine.run.worker.short_memory import RanShort, ShortMemory
from engine.weights.hashed_pieces import weights_digest

if TYPE_CHECKING:
    from engine.channels.tensors.row_broadcast import RowBroadcast


Rows = m.TrainStep | m.TrainPart
"""What has rows to train on."""
Told = Rows | m.FinishStep
Done = m.Stepped | m.PartTrained | m.Short
Answer = Done | m.Prepared


class WorkerTraining:
    """Of one Worker. broadcast: to and from the ranks with equal rows, if there are any."""

    def __init__(
        self,
        worker: str,
        plan: Plan,
        kernels: OpenKernels,
        rows: WorkerRows,
        broadcast: RowBroadcast | None,
        *,
        digests: bool = False,
    ) -> None:
        """digests: of the weights after each Step."""
        self._worker = worker
        self._plan = plan
        self._kernels = kernels
        self._rows = rows
        self._memory = ShortMemory(worker, kernels)
        self._broadcast = broadcast
        self._digests = digests
        self._labels = metric_labels(plan)
        self._prepared: dict[str, tuple[Told, Assignment | None]] = {}
        self._parts: dict[str, tuple[int, int]] = {}
        """Of each train node: the Step whose parts come, and how many have come."""
        self._lost_peers: dict[str, str] = {}
        """Of each train node: the Worker whose loss keeps the next part from being fetched."""
        self._reports: list[Report] = []

    def train(self, message: Rows) -> Answer:
        """Train; where ranks compute together only fetch the rows that no other rank gives, before
        Go.
        """
        self._prepared.pop(message.node, None)
        if isinstance(message, m.TrainPart) and self._has_part(message):
            return self._part_trained(message)
        row_sets = {ROWS: _assigned_rows(message)}
        row_sets |= {name: _assigned_rows(rows) for name, rows in message.others.items()}
        inputs: dict[str, Batch] = {}
        if message.giver in ("", self._worker):
            try:
                inputs = self._fetch_row_sets(message, row_sets)
            except PeerLost as lost:
                self._lost_peers[message.node] = lost.peer
                raise
        self._rows.ahead.end_step(message.node, message.step)
        assignment = Assignment(
            sequence=message.id,
            step=message.step,
            keys=row_sets[ROWS].keys,
            inputs=inputs,
            mine=row_sets[ROWS].mine,
            total=row_sets[ROWS].total,
            others={name: rows for name, rows in row_sets.items() if name != ROWS},
        )
        return self._begin(message, assignment)

    def _has_part(self, message: m.TrainPart) -> bool:
        """Whether a part has been added up: it is told again where another rank could not fetch its
        rows. Raises PeerLost for one whose turn has not come, as those before it are told again.
        """
        step, count = self._parts.get(message.node, (message.step, 0))
        if step != message.step:
            count = 0
        if message.part > count and message.node in self._lost_peers:
            peer = self._lost_peers[message.node]
            raise PeerLost(peer, f"part {count} of step {step} comes first")
        return message.part < count

    def finish(self, message: m.FinishStep) -> Answer:
        """Make the update of a Step whose parts have come; of several ranks after Go."""
        self._prepared.pop(message.node, None)
        return self._begin(message, None)

    def _begin(self, message: Told, assignment: Assignment | None) -> Answer:
        """Compute, unless the ranks do it together, after Go."""
        node = self._kernels.nodes[message.node]
        # Ranks with whole weights and tokens add up the gradients of a part each by itself.
        is_alone = isinstance(message, m.TrainPart) and not node.layout.in_step
        if node.ranks == 1 or is_alone:
            return self._compute(message, assignment)
        self._prepared[message.node] = message, assignment
        return m.Prepared(id=message.id, node=message.node, worker=self._worker)

    def _fetch_row_sets(
        self, message: Rows, rows_by_set: Mapping[str, AssignedRows]
    ) -> dict[str, Batch]:
        """Fetch the rows of each set, in the order of the inputs."""
        row_sets, aligned = self._row_sets(message.node), self._kernels.aligned[message.node]
        batches_by_input: dict[str, Batch] = {}
        for name, rows in rows_by_set.items():
            inputs = {i: g for i, g in message.inputs.items() if row_sets.get(i, ROWS) == name}
            batches = self._rows.assemble_inputs(rows.keys, inputs, message.node)
            aligned.require_inputs(rows.keys, batches)
            batches_by_input |= batches
        return {name: batches_by_input[name] for name in message.inputs}

    def _row_sets(self, node: str) -> dict[str, str]:
        """The row set of each input."""
        return {i.name: i.row_set for i in self._kernels.nodes[node].inputs}

    def go(self, message: m.Go) -> Done:
        """Train what was prepared."""
        prepared, assignment = self._prepared.pop(message.node)
        return self._compute(prepared, assignment)

    def forget_prepared(self) -> None:
        """Drop all prepared Steps."""
        self._prepared.clear()

    def evaluate(self, message: m.Evaluate) -> m.Evaluated:
        """Run an evaluate node on all of its rows."""
        inputs = self._rows.assemble_inputs(message.keys, message.inputs, message.node)
        keys, version = message.keys, message.version
        assignment = Assignment(
            sequence=message.id,
            step=version,
            keys=keys,
            inputs=inputs,
            lost_rows=message.lost_rows,
        )
        what = f"version {version}, {len(keys)} rows"
        with self._kernels.during(message.node, message.node, what, task=message.id):
            metrics: Mapping[str, float] = self._kernels[message.node].step(assignment)
        self._reports += [(name, number, 1.0) for name, number in metrics.items()]
        score = next((number for name, number in metrics.items() if name.endswith("/reward")), None)
        return m.Evaluated(id=message.id, node=message.node, version=version, score=score)

    def reports(self) -> list[Report]:
        """Metrics since the last call."""
        reports, self._reports = self._reports, []
        if self._broadcast is not None and (came := self._broadcast.take_moved_bytes()):
            reports.append(("edge/broadcast/bytes", float(came), 1.0))
        return reports

    def _share_rows(self, message: Rows, assignment: Assignment) -> Assignment:
        """Give the assignment its rows; the first rank that has them gives them to the others."""
        if not message.giver:
            return assignment
        assert self._broadcast is not None
        what = f"rows of step {message.step}, {_count(assignment)} rows"
        try:
            with self._kernels.during(message.node, "share rows", what, task=message.id):
                if message.giver == self._worker:
                    self._broadcast.give(assignment.inputs)
                    return assignment
                received = self._broadcast.take(list(message.inputs))
        except PeerLost as lost:
            place = self._plan.place(message.node)
            raise RunError(f"{place}: rows of step {message.step}: {lost}") from lost
        keys, row_sets = assignment.keys, self._row_sets(message.node)
        by_set = {ROWS: keys} | {name: rows.keys for name, rows in assignment.others.items()}
        inputs: dict[str, Batch] = {}
        for name, (records, values) in received.items():
            its_keys = by_set[row_sets.get(name, ROWS)]
            inputs[name] = Batch(its_keys, records, self._rows.device.move_to_device(values))
        return replace(assignment, inputs=inputs)

    def _compute(self, message: Told, assignment: Assignment | None) -> Done:
        """Do all of a Step, a part of it, or its end; Short where memory ran out."""
        try:
            return self._compute_whole(message, assignment)
        except RanShort as short:
            error = str(short)
        self._parts.pop(message.node, None)
        return self._memory.give_back(message.node, message.id, error)

    def _compute_whole(self, message: Told, assignment: Assignment | None) -> Done:
        if isinstance(message, m.FinishStep):
            return self._finish_parts(message)
        assert assignment is not None
        assignment = self._share_rows(message, assignment)
        self._memory.limit(message.node, message.limits)
        if isinstance(message, m.TrainPart):
            return self._train_part(message, assignment)
        node = message.node
        self._parts.pop(node, None)
        count = _count(assignment)
        what = f"step {message.step}, {count} rows"
        with self._computing(message, what):
            kernel = self._kernels[node]
            metrics: Mapping[str, float] = kernel.step(assignment)
        return self._end_step(message, metrics)

    @contextmanager
    def _computing(self, message: Told, what: str) -> Iterator[None]:
        node = message.node
        with (
            self._memory.computing(node),
            self._kernels.during(node, node, what, task=message.id),
        ):
            yield

    def _train_part(self, message: m.TrainPart, assignment: Assignment) -> m.PartTrained:
        """Add up the gradients of a part; the first one begins anew."""
        node = message.node
        kernel = self._kernels[node]
        if message.part == 0:
            kernel.forget_parts()
            self._parts[node] = message.step, 0
        self._require_parts(message, message.part)
        count = _count(assignment)
        what = f"step {message.step}, part {message.part}, {count} rows"
        with self._computing(message, what):
            kernel.train_part(assignment)
        self._parts[node] = message.step, message.part + 1
        self._lost_peers.pop(node, None)
        return self._part_trained(message)

    def _part_trained(self, message: m.TrainPart) -> m.PartTrained:
        return m.PartTrained(
            id=message.id, node=message.node, step=message.step, worker=self._worker
        )

    def _finish_parts(self, message: m.FinishStep) -> m.Stepped:
        node = message.node
        self._require_parts(message, message.parts)
        kernel = self._kernels[node]
        what = f"step {message.step}, end of {message.parts} parts"
        with self._computing(message, what):
            metrics = kernel.finish_parts(message.step)
        self._parts.pop(node, None)
        return self._end_step(message, metrics)

    def _require_parts(self, message: m.TrainPart | m.FinishStep, parts: int) -> None:
        """Raise RunError if not exactly so many parts of the Step have come: sums in another order
        have other bits.
        """
        none = message.step, 0
        step, count = self._parts.get(message.node, none)
        if step == message.step and count == parts:
            return
        place = self._plan.place(message.node)
        raise RunError(
            f"{place}: expected {parts} parts of step {message.step} before message {message.id},"
            f" found {count} of step {step}. Fix: part 0 first, then each in its order, on every"
            " rank."
        )

    def _end_step(
        self, message: m.TrainStep | m.FinishStep, metrics: Mapping[str, float]
    ) -> m.Stepped:
        """Report the metrics of a Step that is done."""
        node = message.node
        if self._kernels.rank(node) == 0:
            # The metrics of a record node name its Table.
            label = self._labels.get(node, Label())
            self._reports += [(label.on(name), number, 1.0) for name, number in metrics.items()]
        return m.Stepped(
            id=message.id,
            node=node,
            step=message.step,
            worker=self._worker,
            digest=self._digest(node),
        )

    def _digest(self, node: str) -> str:
        """Of its weights, if that is wanted; the first rank's, which gets them from the others."""
        if not self._digests:
            return ""
        with self._kernels.during(node, "digest of its weights"):
            pieces = self._kernels[node].pieces()
            if self._kernels.rank(node) == 0:
                return weights_digest(pieces)
            deque(pieces, maxlen=0)
        return ""


def _assigned_rows(rows: Rows | m.OwnRows) -> AssignedRows:
    """Which rows of a set this rank has."""
    return AssignedRows(keys=rows.keys, mine=rows.mine, total=rows.total)


def _count(assignment: Assignment) -> int:
    """This rank's rows, of all sets."""
    return len(assignment.keys) + sum(len(rows.keys) for rows in assignment.others.values())
