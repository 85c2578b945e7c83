"""The channel within one process: a dictionary; nothing is copied.

Owns: blocks by number. Does not own: when they may go (the coordinator's Release).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch
from engine.channels.contract import Request


class InprocChannel:
    """Outbox and pull channel of the one Worker of a process."""

    def __init__(self) -> None:
        self._blocks: dict[int, Batch] = {}
        self._next = 0

    def keep(self, batch: Batch) -> int:
        """Keep a batch under the next number."""
        block = self._next
        self._next += 1
        self._blocks[block] = batch
        return block

    def fetch(self, requests: Sequence[Request]) -> list[pa.RecordBatch]:
        """The blocks' own columns."""
        return [picked(self._blocks[r.block], r) for r in requests]

    def release(self, block: int) -> None:
        """Forget it."""
        del self._blocks[block]

    def close(self) -> None:
        """Forget everything."""
        self._blocks.clear()

    def __len__(self) -> int:
        return len(self._blocks)


def picked(batch: Batch, request: Request) -> pa.RecordBatch:
    """The rows and columns that a request asks for. Raises DataError for a column that is not there."""
    records = batch.records if not request.columns else batch.records.select(_named(batch, request.columns))
    if request.rows is None or whole(request.rows, records.num_rows):
        return records
    return records.take(pa.array(request.rows))


def whole(rows: np.ndarray, count: int) -> bool:
    """Whether these are all rows, in order."""
    return len(rows) == count and bool((rows == np.arange(count, dtype=rows.dtype)).all())


def _named(batch: Batch, columns: Sequence[str]) -> list[str]:
    names: list[str] = []
    for name in columns:
        if name.endswith("/*"):
            names += [n for n in batch.names if n.startswith(name[:-1])]
        else:
            batch.array(name)  # raises DataError with the names that there are
            names.append(name)
    return names
