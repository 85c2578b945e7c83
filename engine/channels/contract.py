"""What every channel promises.

Owns: the two contracts, pull and scheduled, what a pull asks for, a lost peer, what is refused and
what is counted of it all. Does not own: any transport (shm/, zmq/, tensors/, inproc.py), nor which
rows to pull (the coordinator's Gathers say so).

    pull        rows and offered weights: the consumer asks, whenever it likes
    scheduled   both ends are instructed, with one sequence number for each pair: collectives
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch
from dataflow.errors import RunError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockRequest:
    """Rows of one block. columns: their names, none for all; a name ending in /* stands for all
    that begin so. rows: int indices in the order wanted, None for the whole block.
    """

    worker: str
    block: int
    columns: tuple[str, ...] = ()
    rows: np.ndarray | None = None


class PeerLost(RunError):
    """The Worker that keeps the rows is gone. `peer`: its name."""

    def __init__(self, peer: str, problem: str) -> None:
        super().__init__(f"{peer}: {problem}")
        self.peer = peer


def refusal(peer: str, found: object, what: str = "") -> RunError:
    """The error of what a peer says (`what`: of which part of it) and cannot be right."""
    return RunError(
        f"{peer}: refused{what}: {found}. Fix: both ends have to be of one build of the engine."
    )


class MovedBytes:
    """Payload bytes that came, by route; from any thread."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, route: str, nbytes: int) -> None:
        """So many more."""
        with self._lock:
            self._counts[route] += nbytes

    def taken(self) -> dict[str, int]:
        """How many since the last call."""
        with self._lock:
            found, self._counts = dict(self._counts), Counter()
            return found


class Pull(Protocol):
    """Rows straight from the Workers that made them."""

    def fetch(self, requests: Sequence[BlockRequest]) -> list[pa.RecordBatch]:
        """One record batch for each request, in their order; several peers are asked at once.

        Columns are shared and not copied where the transport allows that; such views are valid
        until the blocks are released, which the coordinator does once the assignment that reads
        them has ended. Never blocks on a row that is not made yet. Raises KeyError for a block that
        was released or never kept, DataError for a column that the block lacks (with those that it
        has), PeerLost where the peer is gone or no longer answers, RunError for an answer that was
        refused, since it cannot be right.
        """
        ...


class Outbox(Protocol):
    """Where a Worker keeps what it made until the coordinator releases it."""

    def keep(self, batch: Batch) -> int:
        """Keep a batch; returns its block number, which never repeats, also not after a respawn.

        Raises DataError for a column of a type that does not travel, where rows leave the process.
        """
        ...

    def allocate(self, nbytes: int) -> np.ndarray:
        """uint8 [nbytes] in the outbox's own memory: Arrow arrays over parts of it (on 8-byte
        boundaries) are kept without a copy. Its contents are whatever was there; it must not be
        changed once a batch with it is kept.
        """
        ...

    def release(self, block: int) -> None:
        """Forget a block. Releasing twice, or what was never kept, raises KeyError."""
        ...


class Channel(Pull, Outbox, Protocol):
    """Both ends of one Worker."""

    def close(self) -> None:
        """Let everything go."""
        ...


class Scheduled(Protocol):
    """Tensors between the members of one world, both ends instructed.

    sequence counts the transfers of a pair, from 0; another number than the next one is a RunError
    on both ends. A peer that is gone or late fails the transfer with PeerLost, and the world is of
    no use any more.
    """

    def send(self, peer: int, sequence: int, tensors: Sequence[Any]) -> None:
        """Send tensors to a rank; returns once they may be changed."""
        ...

    def receive(self, peer: int, sequence: int, tensors: Sequence[Any]) -> None:
        """Receive into tensors of the sender's shapes and dtypes."""
        ...

    def broadcast(self, source: int, sequence: int, tensors: Sequence[Any]) -> None:
        """Every rank calls it: `source` gives its tensors to all. sequence counts broadcasts."""
        ...

    def close(self) -> None:
        """Leave the world."""
        ...
