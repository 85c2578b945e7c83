"""What every channel promises.

Owns: the pull contract. Does not own: any transport (one file each), nor which rows to
pull (the coordinator's Gathers say so).
"""

from __future__ import annotations

from typing import Protocol

from dataflow.batch import Batch


class Pull(Protocol):
    """Rows straight from the Worker that made them.

    A fetch answers with exactly the block that was kept under that number, or raises KeyError where it was released
    or never kept; it never blocks on a row that is not made yet.
    """

    def fetch(self, worker: str, block: int) -> Batch:
        """The whole block, its columns shared and not copied where the transport allows that."""
        ...


class Outbox(Protocol):
    """Where a Worker keeps what it made until the coordinator releases it."""

    def keep(self, batch: Batch) -> int:
        """Keep a batch; returns its block number, which never repeats."""
        ...

    def release(self, block: int) -> None:
        """Forget a block. Releasing twice, or what was never kept, raises KeyError."""
        ...
