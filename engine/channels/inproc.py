"""The channel within one process: a dictionary of blocks, without copies."""

from __future__ import annotations

from functools import partial

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch
from engine.channels.contract import Requests
from engine.channels.projection import select_records


class InprocChannel:
    """Outbox and pull channel of the one Worker of a process."""

    def __init__(self, epoch: int = 0) -> None:
        self._blocks: dict[int, Batch] = {}
        self._next = epoch << 32

    def keep(self, batch: Batch) -> int:
        """Keep a batch under the next number."""
        block = self._next
        self._next += 1
        self._blocks[block] = batch
        return block

    allocate = staticmethod(partial(np.empty, dtype=np.uint8))
    """Ordinary memory: nothing that is kept here is copied."""

    def fetch(self, requests: Requests) -> list[pa.RecordBatch]:
        """Rows of the blocks; raises KeyError, DataError."""
        return [select_records(self._blocks[r.block].records, r.columns, r.rows) for r in requests]

    def fetch_beside(self, requests: Requests) -> list[pa.RecordBatch]:
        """The same."""
        return self.fetch(requests)

    def release(self, block: int) -> None:
        """Forget a block. Raises KeyError."""
        del self._blocks[block]

    def close(self) -> None:
        """Forget everything."""
        self._blocks.clear()

    def __len__(self) -> int:
        return len(self._blocks)
