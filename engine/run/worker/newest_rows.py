"""The newest rows that nodes have made, for whoever looks into an edge while the run goes on.

Owns: `events/newest/<node>.arrow`, an Arrow file of a few rows: their keys, then the columns.
Replaced as a whole every few seconds. Does not own: the rows (rows.py), nor recording all of them.
A file that cannot be written is told once; then there are none.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pyarrow as pa

from dataflow.batch import Batch
from dataflow.errors import StorageError
from dataflow.storage import replacing, writing

NEWEST = Path("events") / "newest"
"""Below the run folder."""
ROWS = 16
_EVERY = 3.0
"""Seconds between two files of a node."""
_MOST_BYTES = 1 << 20
"""Of a file, roughly: of long rows there are fewer."""

_log = logging.getLogger(__name__)


class NewestRows:
    """Of the nodes of one Worker."""

    def __init__(self, folder: Path) -> None:
        """folder: the run's. Raises nothing where it cannot be written."""
        self._folder = folder / NEWEST
        self._due: dict[str, float] = {}
        self._failed = False
        self._there = False
        """Whether the folder is."""

    def offer(self, node: str, batch: Batch) -> None:
        """Write the first rows of a batch, unless the node's file is fresh."""
        now = time.monotonic()
        if self._failed or now < self._due.get(node, now):
            return
        self._due[node] = now + _EVERY
        try:
            self._write(self._folder / f"{node}.arrow", _first_rows(batch))
        except StorageError as error:
            self._failed = True
            _log.warning("%s The run goes on without the newest rows.", error)

    def _write(self, path: Path, rows: pa.RecordBatch) -> None:
        """Not synced to the disk: nothing depends on it."""
        what = "the newest rows"
        with writing(what, path):
            if not self._there:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._there = True
        with (
            replacing(what, path, durable=False) as file,
            pa.ipc.new_file(file, rows.schema) as writer,
        ):
            writer.write_batch(rows)


def _first_rows(batch: Batch) -> pa.RecordBatch:
    """Return keys and columns of the first rows; values on a device are left out."""
    each = batch.nbytes // max(1, len(batch))
    count = max(1, min(ROWS, len(batch), _MOST_BYTES // max(1, each)))
    rows, keys = batch.records.slice(0, count), batch.keys
    key_columns = {
        "position": pa.array(keys.position[:count], pa.int64()),
        "sample": pa.array(keys.sample[:count], pa.int32()),
        "attempt": pa.array(keys.attempt[:count], pa.int32()),
    }
    names = [n for n in rows.schema.names if n not in key_columns and n not in batch.device]
    columns = key_columns | {name: rows.column(name) for name in names}
    return pa.RecordBatch.from_pydict(columns)
