"""The contracts that channels implement.

    pull        rows and offered weights: the consumer asks at any time
    scheduled   collectives: both ends are instructed, with one sequence number for each pair

Owns: these, requests, errors of a lost peer and a refused message, byte counts. Does not own: any
transport (shm/, zmq/, tensors/, inproc.py), which rows to pull (the coordinator's Gathers).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import pyarrow as pa

from dataflow.batch import Batch
from dataflow.errors import RunError


class BlockRequest(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Rows of one block. columns: names, none for all; `a/*` stands for all names that begin with
    `a/`. rows: int indices in the order wanted, None for the whole block.
    """

    worker: str
    block: int
    columns: tuple[str, ...] = ()
    rows: np.ndarray | None = None


Requests = Sequence[BlockRequest]


class PeerLost(RunError):
    """The Worker `peer`, which holds the rows, is gone."""

    def __init__(self, peer: str, problem: str) -> None:
        super().__init__(f"{peer}: {problem}")
        self.peer = peer


def make_refusal(peer: str, problem: object, what: str = "") -> RunError:
    """The error for an invalid message of a peer, or for the part `what` of one."""
    return RunError(f"{peer}: refused{what}: {problem}. Fix: one build of the engine at both ends.")


class MovedBytes:
    """Received payload bytes by route; usable from any thread."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, route: str, nbytes: int) -> None:
        """Count `nbytes` more."""
        with self._lock:
            self._counts[route] += nbytes

    def take_counts(self) -> dict[str, int]:
        """Return the bytes since the last call."""
        with self._lock:
            counts, self._counts = dict(self._counts), Counter()
            return counts


class Pull(Protocol):
    """Rows straight from the Workers that made them."""

    def fetch(self, requests: Requests) -> list[pa.RecordBatch]:
        """One record batch for each request, in their order; several peers are asked at once.

        Columns are views where the transport allows it, valid until their block is released: the
        coordinator does that after the assignment that reads them. Never waits for a row that does
        not exist yet. Raises KeyError for a block that was released or never kept, DataError for a
        missing column, PeerLost if a peer is gone or silent, RunError for an invalid answer.
        """
        ...


class Outbox(Protocol):
    """Where a Worker keeps its batches until the coordinator releases them."""

    def keep(self, batch: Batch) -> int:
        """Keep a batch; returns its block number, which never repeats, even after a respawn. Raises
        DataError for a column type that cannot leave the process, if rows have to.
        """
        ...

    def allocate(self, nbytes: int, /) -> np.ndarray:
        """uint8 [nbytes] of the outbox's memory, not initialized. Arrow arrays over it (at 8-byte
        boundaries) are kept without a copy and must not change afterwards.
        """
        ...

    def release(self, block: int) -> None:
        """Forget a block. Raises KeyError for one that is not kept."""
        ...


class Channel(Pull, Outbox, Protocol):
    """Both ends of one Worker."""

    def fetch_beside(self, requests: Requests) -> list[pa.RecordBatch]:
        """The same as `fetch`, for what may take long: it holds up no other fetch where peers are
        on other hosts.
        """
        ...

    def close(self) -> None:
        """Release all resources."""
        ...


class Scheduled(Protocol):
    """Tensors between the members of one world, both ends instructed. sequence: counts a pair's
    transfers from 0. Raises RunError on both ends for any number but the next, PeerLost for a peer
    that is gone or late; the world cannot be used after that.
    """

    def send(self, peer: int, sequence: int, tensors: Sequence[Any]) -> None:
        """Send tensors to a rank; returns once they may be changed."""
        ...

    def receive(self, peer: int, sequence: int, tensors: Sequence[Any]) -> None:
        """Receive into tensors of the sender's shapes and dtypes."""
        ...

    def broadcast(self, source: int, sequence: int, tensors: Sequence[Any]) -> None:
        """Called by every rank; all get the tensors of `source`. sequence counts broadcasts."""
        ...

    def close(self) -> None:
        """Leave the world."""
        ...
