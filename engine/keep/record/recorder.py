"""Rows that a Worker made, into Parquet files, while it goes on.

Owns: which batches are recorded, what each row says of its making, the thread that writes. Does not
own: the names of the files (place.py), what becomes of rows that are made again (stored_rows.py).

A file has whole chunks of one node, and takes its name when it is complete and on the disk. Chunks
that end while one is written go into the next one together.

    key.position  key.sample  key.attempt    the row's key
    made.life  made.chunk  made.worker       which chunk, where
    made.step      the Step that the chunk was told for; null above the cut, where none is
    made.version   of the trained weights that the chunk began with; null without any
    made.joined    whether rows of other chunks were written with it; older files lack it
    ...            the node's own columns; those on a device as ordinary ones
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from itertools import chain
from typing import BinaryIO

import pyarrow as pa

from dataflow.batch import KEYS, Batch
from dataflow.column import is_measured
from dataflow.errors import DataError
from dataflow.storage import replacing, writing
from engine.keep.background_job import BackgroundJob
from engine.keep.record.place import RecordPlace, node_folder, row_file
from engine.plan.plan import Plan, PlannedNode
from engine.protocol.messages import RunChunk

JOINED = "made.joined"
MADE = ("made.life", "made.chunk", "made.worker", "made.step", "made.version", JOINED)
_TYPES = (pa.int32(), pa.int64(), pa.utf8(), pa.int64(), pa.int32(), pa.bool_())
ROOM = 256 << 20
"""Bytes of ended chunks that may wait for the disk; with more, the Worker waits."""
LARGEST = 64 << 20
"""Bytes after which a file gets no further chunk."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EndedChunk:
    """The rows of a chunk, as they are written."""

    node: str
    id: int
    rows: tuple[pa.RecordBatch, ...]

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for rows in self.rows)


class RowRecorder:
    """Records the rows of one Worker. What goes wrong in its thread is raised by the next call."""

    def __init__(self, place: RecordPlace, worker: str, plan: Plan) -> None:
        self._place, self._worker, self._first = place, worker, plan.first
        self._nodes = {n.name: n for n in plan.nodes if n.name in place.nodes}
        worker_nodes = [name for name, node in self._nodes.items() if worker in node.workers]
        for name in worker_nodes:
            folder = node_folder(place.folder, name)
            with writing("the folder of recorded rows", folder):
                folder.mkdir(parents=True, exist_ok=True)
        self._rows: dict[int, list[pa.RecordBatch]] = {}
        """Of each chunk that has not ended."""
        self._lock = threading.Lock()
        self._ended: list[EndedChunk] = []
        self._waiting = 0
        self._job = BackgroundJob("record")

    def add(self, chunk: RunChunk, batch: Batch, version: int | None) -> None:
        """Rows that a chunk has made, which must not change any more. version: of the trained
        weights that it began with.
        """
        node = self._nodes.get(chunk.node)
        if node is not None:
            rows = self._rows.setdefault(chunk.id, [])
            rows.append(self._row_group(node, chunk, batch, version))

    def _row_group(
        self, node: PlannedNode, chunk: RunChunk, batch: Batch, version: int | None
    ) -> pa.RecordBatch:
        known = chunk.step > 0 or node.region == "evaluation"
        if known:
            step = self._first + chunk.step
        else:
            step = None
        origins = (self._place.life, chunk.id, self._worker, step, version, False)
        keyed = batch.on_host().with_keys()
        made_columns = [
            pa.repeat(pa.scalar(origin, kind), len(batch))
            for origin, kind in zip(origins, _TYPES, strict=True)
        ]
        at, fields = len(KEYS), [pa.field(n, t) for n, t in zip(MADE, _TYPES, strict=True)]
        schema = pa.schema([*list(keyed.schema)[:at], *fields, *list(keyed.schema)[at:]])
        arrays = [*keyed.columns[:at], *made_columns, *keyed.columns[at:]]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def end(self, chunk: RunChunk, *, joined: bool = False) -> None:
        """The chunk has ended: begin to write its rows. A chunk that does not end is not kept.
        joined: whether rows of other chunks were written with it.
        """
        rows = tuple(self._rows.pop(chunk.id, ()))
        if not rows:
            return
        if joined:
            rows = _note_joined(rows)
        ended = EndedChunk(node=chunk.node, id=chunk.id, rows=rows)
        with self._lock:
            self._ended.append(ended)
            self._waiting += ended.nbytes
            full = self._waiting > ROOM
        if full or self._job.is_idle():
            self._job.begin(self._write_ended)

    def drop(self) -> None:
        """Forget the rows of chunks that did not end."""
        self._rows.clear()

    def flush(self) -> None:
        """Wait until all ended chunks are on the disk; from any thread."""
        self._job.settle()
        self._write_ended()

    def close(self) -> None:
        """Flush, and end the thread."""
        try:
            self.flush()
        finally:
            self._job.end()

    def _write_ended(self) -> None:
        while chunks := self._next():
            _write(self._place, self._worker, chunks)

    def _next(self) -> list[EndedChunk]:
        """Ended chunks of one node, in order, as many as make a file."""
        with self._lock:
            file_chunks: list[EndedChunk] = []
            size = 0
            for chunk in [c for c in self._ended if c.node == self._ended[0].node]:
                if file_chunks and size + chunk.nbytes > LARGEST:
                    break
                file_chunks.append(chunk)
                size += chunk.nbytes
            self._ended = [c for c in self._ended if c not in file_chunks]
            self._waiting -= size
            return file_chunks


def _note_joined(row_groups: tuple[pa.RecordBatch, ...]) -> tuple[pa.RecordBatch, ...]:
    """The same rows, of a chunk that was joined."""
    noted: list[pa.RecordBatch] = []
    for rows in row_groups:
        at = rows.schema.get_field_index(JOINED)
        field = rows.schema.field(at)
        joined = pa.repeat(pa.scalar(True), len(rows))
        noted.append(rows.set_column(at, field, joined))
    return tuple(noted)


def _write(place: RecordPlace, worker: str, chunks: list[EndedChunk]) -> None:
    """Write one file of these chunks of one node."""
    node, ids = chunks[0].node, [chunk.id for chunk in chunks]
    first, last = min(ids), max(ids)
    path = row_file(place.folder, node, life=place.life, first=first, last=last, worker=worker)
    size = sum(chunk.nbytes for chunk in chunks)
    try:
        all_rows = chain.from_iterable(chunk.rows for chunk in chunks)
        tables = [pa.Table.from_batches([rows]) for rows in all_rows]
        table = pa.concat_tables(tables, promote_options="permissive")
        with replacing(f"recorded rows of {node}", path, size) as file:
            write_recorded_rows(table, file)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        problem = f"a column that Parquet has no form for: {error}"
        raise DataError(f"--record {node}: {problem}. Fix: leave {node} out.") from error


def write_recorded_rows(table: pa.Table, file: BinaryIO) -> None:
    """Recorded rows as Parquet. Nested fields keep their names."""
    import pyarrow.parquet as pq  # here: a Worker that records nothing needs none of it

    pq.write_table(table, file, compression="zstd", use_compliant_nested_type=False)


def own_columns(schema: pa.Schema) -> list[str]:
    """The node's own columns of recorded rows."""
    return [name for name in schema.names if name not in KEYS and name not in MADE]


def compared_columns(schema: pa.Schema) -> list[str]:
    """The same without what is measured, which differs from run to run."""
    return [name for name in own_columns(schema) if not is_measured(schema.field(name))]
