"""The channel within one process: a dictionary; nothing is copied.

Owns: blocks by number. Does not own: when they may go (the coordinator's Release).
"""

from __future__ import annotations

from dataflow.batch import Batch


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

    def fetch(self, worker: str, block: int) -> Batch:
        """The block itself."""
        del worker
        return self._blocks[block]

    def release(self, block: int) -> None:
        """Forget it."""
        del self._blocks[block]

    def __len__(self) -> int:
        return len(self._blocks)
