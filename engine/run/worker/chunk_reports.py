"""What a Worker tells of its chunks beside rows: watermarks, rows given up, metrics, ends.

Owns: these events, and that a chunk ends with its last row. Does not own: the rows that are made
(chunk_runs.py), which of them have not come (chunk_rows.py). Of several ranks the lead alone tells;
the others say that they have ended.
"""

from __future__ import annotations

from collections.abc import Iterator

from dataflow.batch import Batch
from engine.keep.record.recorder import RowRecorder
from engine.plan.plan import PlannedNode
from engine.protocol import messages as m
from engine.run.worker.chunk_rows import ChunksUnderWay, ChunkUnderWay
from engine.run.worker.kernel_loader import OpenKernels
from engine.run.worker.replica_rows import ReplicaRows
from engine.run.worker.rows import WorkerRows


class ChunkReports:
    """Of one Worker. recorder: of the chunks that end here, if the run records any."""

    def __init__(
        self,
        worker: str,
        kernels: OpenKernels,
        rows: WorkerRows,
        recorder: RowRecorder | None,
        replica_rows: ReplicaRows,
    ) -> None:
        self._worker, self._kernels, self._rows = worker, kernels, rows
        self._recorder, self._replica_rows = recorder, replica_rows

    def tell_watermark(self, chunk: m.RunChunk, batch: Batch) -> Iterator[m.Event]:
        """Tell how long the rows of a chunk are at least, with a batch without rows."""
        watermark = self._kernels.sessions[chunk.node].take_least_tokens()
        if watermark and not self._replica_rows.is_taken(chunk):
            ref = self._rows.keep(chunk.node, batch)
            yield m.Produced(id=chunk.id, node=chunk.node, ref=ref, watermark=watermark)

    def report_tombstones(self, chunks: ChunksUnderWay) -> Iterator[m.Event]:
        """Report the rows that were given up since the last call, and chunks that end by that."""
        node = chunks.oldest().message.node
        for row in self._kernels.sessions[node].tombstones():
            chunk = chunks.find_given_up(row.key, row_only=row.row_only)
            chunk.give_up(row.key, row_only=row.row_only)
            if self._replica_rows.is_taken(chunk.message):
                continue
            yield m.Tombstoned(
                id=chunk.message.id,
                node=node,
                key=row.key,
                error=row.error,
                failed=row.failed,
                row_only=row.row_only,
            )

    def report_metrics(self, chunk: m.RunChunk) -> Iterator[m.Reported]:
        """Report the chunk's metrics since the last call, unless it is a rerun."""
        reports = self._kernels.sessions[chunk.node].reports()
        if self._replica_rows.is_taken(chunk):
            return
        if self._kernels.nodes[chunk.node].region == "evaluation":
            # Else they would be averaged with those of other nodes under the same names.
            reports = [
                (f"evaluation/{chunk.node}/{name}", number, count)
                for name, number, count in reports
            ]
        if reports and not chunk.again:
            yield m.Reported(id=chunk.id, worker=self._worker, metrics=tuple(reports))

    def end_all(self, chunks: ChunksUnderWay, node: PlannedNode) -> Iterator[m.Event]:
        """The run has ended, and with it all chunks."""
        for chunk in chunks:
            yield from self.report_metrics(chunk.message)
            yield from self.report_tombstones(chunks)
            yield from self._end(chunks, chunk)

    def end_over(self, chunks: ChunksUnderWay) -> Iterator[m.Event]:
        """End the chunks of which all rows have come or were given up."""
        for chunk in chunks:
            if chunk.is_over:
                yield from self._end(chunks, chunk)

    def _end(self, chunks: ChunksUnderWay, chunk: ChunkUnderWay) -> Iterator[m.Event]:
        chunks.remove(chunk)
        if self._recorder is not None and not self._replica_rows.is_taken(chunk.message):
            self._recorder.end(chunk.message, joined=chunk.joined)
        yield self.make_end(chunk.message, chunk.seconds_alone)

    def make_end(self, chunk: m.RunChunk, seconds: float = 0.0) -> m.ChunkDone | m.RankDone:
        """What is told at the end of a chunk. seconds: in which its node computed it alone."""
        if self._replica_rows.is_taken(chunk):
            return m.RankDone(id=chunk.id, node=chunk.node, worker=self._worker)
        return m.ChunkDone(id=chunk.id, node=chunk.node, seconds=seconds)
