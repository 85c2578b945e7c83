"""The rows that a Worker keeps for others, and those that it fetches.

Owns: from a kernel's batch to a Ref, from Gathers to a kernel's batches. Does not own: the outbox
and transport (engine/channels), joining columns (input_batches.py), device columns
(device_columns.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa

from dataflow.arrays import any_true
from dataflow.batch import Batch, Keys
from dataflow.errors import KernelError
from engine.channels.contract import Channel
from engine.channels.tensors.pairs import TensorPairs
from engine.keep.checkpoint.cut import read_waiting_rows
from engine.plan.plan import Plan
from engine.protocol.refs import Gather, Ref
from engine.protocol.staleness import NO_VERSION, ages
from engine.run.worker.counters import FlowCounts
from engine.run.worker.device_columns import DeviceColumns
from engine.run.worker.input_batches import assemble, collect
from engine.run.worker.row_digest import row_digests
from engine.run.worker.rows_ahead import AheadPull, RowsAhead
from engine.run.worker.timing import Timing

Inputs = Mapping[str, tuple[Gather, ...]]


class WorkerRows:
    """Of one Worker. pairs: its worlds with other Workers, if any. counts: of the bytes taken.
    timing: of its fetches. ahead: rows of the next Step.
    """

    def __init__(
        self,
        worker: str,
        plan: Plan,
        channel: Channel,
        pairs: TensorPairs | None = None,
        counts: FlowCounts | None = None,
        timing: Timing | None = None,
    ) -> None:
        self._worker = worker
        self._timing = timing
        tell_span = None if timing is None else timing.tell_fetch_beside
        self.ahead = RowsAhead(worker, channel, tell_span)
        self._plan = plan
        self._channel = channel
        self._counts = counts or FlowCounts(worker)
        self.device = DeviceColumns(worker, plan, pairs)
        # Rows of a stateful Worker are not made again, and nothing is compared.
        self._with_digests = len(plan.workers) > 1 and worker not in plan.stateful

    def keep(self, node: str, batch: Batch) -> Ref:
        """Put rows that a node made into the outbox. What is on a device stays there."""
        self.device.require(node, batch)
        planned = self._plan.node(node)
        lengths = np.zeros(len(batch), np.int64)
        if planned.tokens in batch.names:
            lengths = batch.lengths(planned.tokens)
        digest = np.zeros(0, dtype=np.uint64)
        if self._with_digests:
            digest = row_digests(batch)
        weight = _read_weights(node, planned.weight, batch)
        version = ages(self._plan, node, _oldest(batch))
        worker, keys, block = self._worker, batch.keys, self._channel.keep(batch)
        if batch.device:
            self.device.keep(block, batch)
        return Ref(
            worker=worker,
            block=block,
            keys=keys,
            lengths=lengths,
            version=version,
            digest=digest,
            weight=weight,
        )

    def keep_file(self, file: Path) -> Ref:
        """Put rows from a file, which is named for their node, into the outbox."""
        return self.keep(file.stem, self.device.restore_batch(file.stem, read_waiting_rows(file)))

    def of(self, node: str, ref: Ref) -> Batch:
        """Rows of a node that this Worker keeps, with all columns."""
        row = np.arange(len(ref.keys))
        block, refs = np.zeros_like(row), ((ref.worker, ref.block),)
        here = Gather(producer=node, columns=(), refs=refs, block=block, row=row)
        return self.assemble_inputs(ref.keys, {"rows": (here,)})["rows"]

    def assemble_inputs(self, keys: Keys, inputs: Inputs, reader: str = "") -> dict[str, Batch]:
        """Fetch the batch of each input. reader: the node that takes them. Raises PeerLost."""

        if not reader:
            return assemble(keys, inputs, self._channel, self.device)
        start = time.monotonic()
        pull, count = AheadPull(self.ahead, reader), partial(self._count, reader)
        batches = assemble(keys, inputs, pull, self.device, count)
        if self._timing is not None and self._reads_others(inputs):
            self._timing.note_fetch(reader, start, time.monotonic())
        return batches

    def assemble_beside(self, keys: Keys, inputs: Inputs, reader: str) -> dict[str, Batch]:
        """Fetch them on a thread beside the kernels, none of which waits meanwhile. Raises
        PeerLost.
        """
        start = time.monotonic()
        batches = assemble(keys, inputs, self._channel, self.device, partial(self._count, reader))
        if self._timing is not None and self._reads_others(inputs):
            lane, name, what = "fetches inputs", f"fetch for {reader}", f"{len(keys)} rows"
            self._timing.tell_fetch_beside(lane, name, start, time.monotonic(), what)
        return batches

    def _count(self, reader: str, gather: Gather, rows: pa.RecordBatch) -> None:
        self._counts.count_row_bytes(gather.producer, reader, rows.nbytes)

    def _reads_others(self, inputs: Inputs) -> bool:
        """Whether another Worker keeps some of these rows."""
        gathers = chain.from_iterable(inputs.values())
        refs = chain.from_iterable(gather.refs for gather in gathers)
        return any(worker != self._worker for worker, _ in refs)

    def collect_rows(self, keys: Keys, gather: Gather) -> Batch:
        """Fetch the rows of one gather, on the host. Raises PeerLost."""
        rows = collect([gather], self._channel, self.device)[0]
        return Batch(keys, rows.records, rows.device).on_host()

    def release(self, blocks: Iterable[int]) -> None:
        """Forget blocks; from any thread."""
        for block in blocks:
            self._channel.release(block)
        self.device.release(blocks)


def _read_weights(node: str, column: str, batch: Batch) -> np.ndarray:
    """float32 [rows]: how much a generation of each row is expected to take; none without a column.

    Raises KernelError for a weight that is no finite number.
    """
    if not column:
        return np.zeros(0, dtype=np.float32)
    weights = batch.array(column).to_numpy(zero_copy_only=False).astype(np.float32)
    is_finite = np.isfinite(weights)
    if not is_finite.all():
        row = int(np.argmin(is_finite))
        raise KernelError(
            f"{node}: row {batch.keys.rows()[row]}: expected a finite weight, found"
            f" {weights[row]}. Fix: a number for every row, such as 0 where nothing is known."
        )
    return weights


def _oldest(batch: Batch) -> np.ndarray:
    """int32 [rows]: the oldest version of each row's tokens; NO_VERSION where there is none."""
    oldest = np.full(len(batch), NO_VERSION, dtype=np.int32)
    if "version" in batch.names:
        versions = batch.ragged("version")
        full = versions.lengths > 0
        if any_true(full):
            oldest[full] = np.minimum.reduceat(versions.values, versions.offsets[:-1][full])
    return oldest
