"""Train and evaluate nodes: the rows of one Step, or of one evaluation, for a kernel's `step`.

    TrainStep   prepares where there are several ranks, else trains
    Go          trains, once every rank is prepared; ranks with equal rows get them from the first

Owns: prepared Steps, the metrics of Steps and their labels. Does not own: fetching (rows.py), the
order of ranks (the coordinator), the training itself (kernels).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
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
from engine.weights.hashed_pieces import weights_digest

if TYPE_CHECKING:
    from engine.channels.tensors.row_broadcast import RowBroadcast


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
        self._broadcast = broadcast
        self._digests = digests
        self._labels = metric_labels(plan)
        self._prepared: dict[str, tuple[m.TrainStep, Assignment]] = {}
        self._reports: list[Report] = []

    def train(self, message: m.TrainStep) -> m.Stepped | m.Prepared:
        """Train; with several ranks only fetch the rows that no other rank gives, before Go."""
        self._prepared.pop(message.node, None)
        row_sets = {ROWS: _assigned_rows(message)}
        row_sets |= {name: _assigned_rows(rows) for name, rows in message.others.items()}
        inputs: dict[str, Batch] = {}
        if message.giver in ("", self._worker):
            inputs = self._fetch_row_sets(message, row_sets)
        assignment = Assignment(
            sequence=message.id,
            step=message.step,
            keys=row_sets[ROWS].keys,
            inputs=inputs,
            mine=row_sets[ROWS].mine,
            total=row_sets[ROWS].total,
            others={name: rows for name, rows in row_sets.items() if name != ROWS},
        )
        if self._kernels.nodes[message.node].ranks == 1:
            return self._run_step(message, assignment)
        self._prepared[message.node] = message, assignment
        return m.Prepared(id=message.id, node=message.node, worker=self._worker)

    def _fetch_row_sets(
        self, message: m.TrainStep, rows_by_set: Mapping[str, AssignedRows]
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

    def go(self, message: m.Go) -> m.Stepped:
        """Train what was prepared."""
        prepared, assignment = self._prepared.pop(message.node)
        return self._run_step(prepared, self._share_rows(prepared, assignment))

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

    def _share_rows(self, message: m.TrainStep, assignment: Assignment) -> Assignment:
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

    def _run_step(self, message: m.TrainStep, assignment: Assignment) -> m.Stepped:
        node = message.node
        what = f"step {assignment.step}, {_count(assignment)} rows"
        with self._kernels.during(node, node, what, task=message.id):
            metrics: Mapping[str, float] = self._kernels[node].step(assignment)
        if self._kernels.rank(node) == 0:
            # The metrics of a record node name its Table.
            label = self._labels.get(node, Label())
            self._reports += [(label.on(name), number, 1.0) for name, number in metrics.items()]
        return m.Stepped(
            id=message.id,
            node=node,
            step=assignment.step,
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


def _assigned_rows(rows: m.TrainStep | m.OwnRows) -> AssignedRows:
    """Which rows of a set this rank has."""
    return AssignedRows(keys=rows.keys, mine=rows.mine, total=rows.total)


def _count(assignment: Assignment) -> int:
    """This rank's rows, of all sets."""
    return len(assignment.keys) + sum(len(rows.keys) for rows in assignment.others.values())
