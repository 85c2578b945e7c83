"""Recorded rows, read back; and the cut, after which each row is there once.

Owns: looking rows up by key, dropping rows that the run makes again. Does not own: writing them
(recorder.py), which chunk made a row (stored_assignments.py).

A row counts if an assignment's file says that its chunk made it (stored_assignments.py): what a
killed run wrote behind its last closed Step does not. Of a row that was made again the first one on
the disk counts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dataflow.batch import KEYS, Batch, Keys
from dataflow.errors import DataError
from dataflow.storage import replacing, writing
from engine.keep.record.place import RowFile, nodes_in, row_files
from engine.keep.record.recorder import JOINED, own_columns, write_recorded_rows
from engine.keep.record.stored_assignments import (
    RecordedTask,
    TaskHistory,
    TaskId,
    assignment_files,
)
from engine.plan.plan import Decisions
from engine.protocol.refs import Key

_log = logging.getLogger(__name__)

Identity = tuple[int, Key, int]
_OF_ROW = (*KEYS, "made.chunk")


class StoredRows:
    """The recorded rows of a run folder, by node and key."""

    def __init__(self, recorded: Path, tasks: TaskHistory) -> None:
        self.nodes = frozenset(nodes_in(recorded))
        self._recorded, self._told = recorded, tasks
        self._files: dict[str, list[RowFile]] = {}
        self._of: dict[tuple[str, TaskId], tuple[pa.Table, dict[Key, int]] | None] = {}

    def find(self, node: str, keys: Keys, step: int) -> tuple[pa.Table | None, list[Key]]:
        """The rows of these keys, in order, with all that is recorded of them; or None, and the
        keys that are not there. step: of an evaluation's rows, the version.
        """
        tables: list[pa.Table] = []
        places: dict[int, int] = {}
        row_numbers, missing, total = [], [], 0
        for key in keys.rows():
            at = self._place(node, key, step)
            if at is None:
                missing.append(key)
                continue
            table, row = at
            if id(table) not in places:
                places[id(table)] = total
                tables.append(table)
                total += len(table)
            row_numbers.append(places[id(table)] + row)
        if missing or not tables:
            return None, missing
        if len(tables) == 1:
            whole = tables[0]
        else:
            whole = join_tables(tables)
        return whole.take(pa.array(row_numbers)), []

    def forget(self) -> None:
        """Drop what was read, and read it again when it is wanted."""
        self._of.clear()

    def absent(self, node: str, keys: Sequence[Key], step: int) -> bool:
        """Whether one of these rows is not there."""
        return any(self._place(node, key, step) is None for key in keys)

    def of_task(self, node: str, task: RecordedTask) -> pa.Table | None:
        """Read all rows of what a chunk made that are on the disk; None if there are none."""
        table_and_rows = self._read(node, task)
        if table_and_rows is None:
            return None
        return table_and_rows[0]

    def _place(self, node: str, key: Key, step: int) -> tuple[pa.Table, int] | None:
        for task in self._told.makers(node, key, step):
            table_and_rows = self._read(node, task)
            if table_and_rows is not None and key in table_and_rows[1]:
                return table_and_rows[0], table_and_rows[1][key]
        return None

    def _read(self, node: str, task: RecordedTask) -> tuple[pa.Table, dict[Key, int]] | None:
        at = (node, task.name)
        if at not in self._of:
            self._of[at] = self._from_disk(node, task)
        return self._of[at]

    def _from_disk(self, node: str, task: RecordedTask) -> tuple[pa.Table, dict[Key, int]] | None:
        if node not in self._files:
            self._files[node] = row_files(self._recorded, node)
        for file in self._files[node]:
            if not file.has(task.life, task.id, task.worker):
                continue
            table = read_file(file.path)
            table = table.filter(pc.field("made.chunk") == task.id)
            if len(table):
                rows = {key: row for row, key in enumerate(keys_of(table).rows())}
                return table.combine_chunks(), rows
        return None


def read_file(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """A file of recorded rows. Raises DataError for a damaged one."""
    try:
        table = pq.ParquetFile(path).read(columns=columns)
        for name in _OF_ROW:
            if name not in table.schema.names or not pa.types.is_integer(
                table.schema.field(name).type
            ):
                raise pa.ArrowInvalid(f"no whole numbers {name}")
        return table
    except (pa.ArrowException, OSError) as error:
        problem = f"expected recorded rows, found a damaged file ({error})"
        raise DataError(f"{path}: {problem}. Fix: restore it, or record again.") from error


def join_tables(tables: Sequence[pa.Table]) -> pa.Table:
    """Tables of one node as one."""
    return pa.concat_tables(tables, promote_options="permissive").combine_chunks()


def keys_of(table: pa.Table) -> Keys:
    """The keys of recorded rows."""
    return Keys(*(table.column(name).to_numpy() for name in KEYS))


def was_joined(table: pa.Table) -> bool:
    """Whether the chunk that made these rows was written with rows of others."""
    if JOINED not in table.schema.names:
        return False
    are_joined = table.column(JOINED).to_pylist()
    return any(are_joined)


def recorded_batch(table: pa.Table) -> Batch:
    """Recorded rows as the batch that they were, on the host."""
    names = own_columns(table.schema)
    arrays = [table.column(name).combine_chunks() for name in names]
    schema = pa.schema([table.schema.field(name) for name in names])
    return Batch(keys_of(table), pa.RecordBatch.from_arrays(arrays, schema=schema))


def cut_after(recorded: Path, plan: Decisions, step: int) -> None:
    """Drop what belongs to later Steps, which the run makes again, and whatever no Step has.
    Raises StorageError.
    """
    with writing(f"what is recorded up to step {step}", recorded):
        for file_step, path in assignment_files(recorded):
            if file_step > step:
                path.unlink()
    settle_rows(recorded, plan)


def settle_rows(recorded: Path, plan: Decisions, *, told_before: bool = False) -> None:
    """Leave every row once, and none that no file of assignments has; and nothing torn.

    A damaged file stays as it is, and the run goes on, which does not need it. Rows that no file
    of assignments has stay where one of those is damaged: they do not count when they are read.
    told_before: of damaged files, as the run began.
    """
    if not recorded.is_dir():
        return
    for torn in recorded.glob("*/.*.tmp"):
        with writing("recorded rows", torn):
            torn.unlink()
    try:
        tasks = TaskHistory.read(recorded, plan)
    except DataError as error:
        _tell_damaged(error, told_before=told_before)
        return
    for node in nodes_in(recorded):
        counted: set[Identity] = set()
        identities: dict[tuple[int, int, Key], Identity] = {}
        for task in tasks.of(node):
            for key in task.made_rows():
                identities[task.life, task.id, key] = tasks.identity(task, key)
        for file in row_files(recorded, node):
            try:
                _settle_file(file, identities, counted)
            except DataError as error:
                _tell_damaged(error, told_before=told_before)


def _tell_damaged(error: DataError, *, told_before: bool) -> None:
    if told_before:
        level = logging.INFO
    else:
        level = logging.WARNING
    _log.log(level, "the run goes on without it, and `dataflow rerun` cannot use it: %s", error)


def _settle_file(
    file: RowFile, identities: dict[tuple[int, int, Key], Identity], counted: set[Identity]
) -> None:
    row_keys = read_file(file.path, _OF_ROW)
    chunks = row_keys.column("made.chunk").to_pylist()
    keep = np.zeros(len(row_keys), dtype=bool)
    for row, (chunk, key) in enumerate(zip(chunks, keys_of(row_keys).rows(), strict=True)):
        identity = identities.get((file.life, chunk, key))
        if identity is not None and identity not in counted:
            counted.add(identity)
            keep[row] = True
    if keep.all():
        return
    with writing("recorded rows", file.path):
        if not keep.any():
            file.path.unlink()
            return
    whole = read_file(file.path)
    with replacing("recorded rows", file.path, whole.nbytes) as out:
        write_recorded_rows(whole.filter(pa.array(keep)), out)
