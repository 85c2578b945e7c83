"""A channel's connections to the peers whose blocks it reads.

Owns: asking several peers at once with one deadline, counts of refused messages, reconnecting.
Does not own: a connection (each transport's reader), the channel's own blocks.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Generic, TypeVar

import pyarrow as pa

from dataflow.errors import RunError
from engine.channels.contract import BlockRequest, PeerLost, Requests, make_refusal

_log = logging.getLogger(__name__)

PATIENCE = 60.0
"""Seconds to wait for an answer; a dead process is noticed at once."""


class PeerReader(ABC):
    """The reading end of a connection to one peer; each transport has its own."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.broken = False
        """The peer is gone, or sent something invalid."""
        self._last = 0
        """The number of the last request."""

    def hear(self) -> None:
        """Handle messages that nobody asked for, without waiting."""
        return

    def look(self, request: BlockRequest) -> pa.RecordBatch | None:
        """The rows, if they can be read without asking. Raises DataError, RunError."""
        return None

    @abstractmethod
    def ask(self, requests: Requests) -> int:
        """Ask for blocks; returns the request's number. Raises PeerLost."""

    @abstractmethod
    def answer(self, number: int, requests: Requests, deadline: float) -> list[pa.RecordBatch]:
        """The rows of request `number`, before a monotonic time. Raises as Pull.fetch does."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""

    def mark_lost(self, problem: str) -> PeerLost:
        """Mark the connection broken. Returns the error of a peer that is gone."""
        self.broken = True
        return PeerLost(self.peer, problem)

    def mark_invalid(self, problem: object) -> RunError:
        """Mark the connection broken. Returns the error of an invalid answer."""
        self.broken = True
        return make_refusal(self.peer, problem)


R = TypeVar("R", bound=PeerReader)
T = TypeVar("T")


class PeerReaders(Generic[R]):
    """The peers of the Worker `name`. connect: makes a connection, or raises PeerLost. refused:
    messages of each peer that were refused. patience: seconds for an answer.
    """

    def __init__(self, name: str, connect: Callable[[str], R], *, patience: float) -> None:
        self.readers: dict[str, R] = {}
        self.refused: Counter[str] = Counter()
        self._name = name
        self._connect = connect
        self._patience = patience
        self._asking = threading.RLock()

    def fetch(
        self, requests: Requests, read_own: Callable[[BlockRequest], pa.RecordBatch]
    ) -> list[pa.RecordBatch]:
        """See engine/channels/contract.py. own: rows of this Worker's own blocks."""
        rows: dict[int, pa.RecordBatch] = {}
        asked: dict[str, dict[int, BlockRequest]] = {}
        for i, request in enumerate(requests):
            if request.worker == self._name:
                rows[i] = read_own(request)
            else:
                asked.setdefault(request.worker, {})[i] = request
        if asked:
            with self._asking:
                self._hear()
                for peer, mine in asked.items():
                    self.use(peer, partial(_look_up, mine, rows))
                if left := {peer: mine for peer, mine in asked.items() if mine}:
                    rows |= self._answers(left)
        return [rows[i] for i in range(len(requests))]

    def use(self, peer: str, what: Callable[[R], T]) -> T:
        """Call `what` with a peer's connection; drop a connection that breaks."""
        with self._asking:
            reader = self.readers.get(peer)
            if reader is None:
                reader = self.readers[peer] = self._connect(peer)
            try:
                return what(reader)
            except RunError as error:
                if not isinstance(error, PeerLost):
                    self.refused[peer] += 1
                    _log.warning("%s", error)
                if reader.broken:
                    self.readers.pop(peer).close()
                raise

    def deadline(self) -> float:
        """The monotonic time by which a peer that is asked now has to answer."""
        return time.monotonic() + self._patience

    def close(self) -> None:
        """Close every connection."""
        for reader in self.readers.values():
            reader.close()
        self.readers.clear()

    def _hear(self) -> None:
        """Handle what peers sent unasked; a peer that is gone is noticed when it is asked."""
        for peer in list(self.readers):
            with suppress(PeerLost):
                self.use(peer, lambda reader: reader.hear())

    def _answers(self, asked: dict[str, dict[int, BlockRequest]]) -> dict[int, pa.RecordBatch]:
        """Ask every peer, then take the answers."""
        many = {peer: list(requests.values()) for peer, requests in asked.items()}
        numbers = {p: self.use(p, lambda reader, p=p: reader.ask(many[p])) for p in asked}
        deadline = self.deadline()
        rows: dict[int, pa.RecordBatch] = {}
        for p, requests in asked.items():
            answer = self.use(p, lambda reader, p=p: reader.answer(numbers[p], many[p], deadline))
            rows.update(zip(requests, answer, strict=True))
        return rows


def _look_up(
    asked: dict[int, BlockRequest], rows: dict[int, pa.RecordBatch], reader: PeerReader
) -> None:
    """Read what can be read without asking; only the rest stays in `asked`."""
    for i, request in list(asked.items()):
        if (records := reader.look(request)) is not None:
            rows[i] = records
            del asked[i]
