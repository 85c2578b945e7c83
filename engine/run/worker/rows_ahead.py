"""Rows of the next Step, fetched while this one is trained.

    FetchAhead   waits for                          left by
    queued       the thread                         its turn, or the task that needs its rows:
                                                    that fetches them itself
    under way    the Workers that keep the rows     their answers; it fails without a word
    here         the task that needs the rows       that task, or a later FetchAhead of its node

Owns: the thread, the rows that are here, which of them a request can be answered with. Does not
own: which rows these are (the coordinator's guess), joining them (input_batches.py).

What is here is never more than the rows of one Step. A guess that was wrong, or came to nothing,
costs bytes alone: the task fetches what is not here, and hears then if a Worker is gone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain

import msgspec
import numpy as np
import pyarrow as pa

from dataflow.errors import RunError
from engine.channels.contract import BlockRequest, Channel, Requests
from engine.channels.projection import select_rows
from engine.protocol import messages as m
from engine.protocol.reports import Report
from engine.run.worker.input_batches import requests as list_requests

_log = logging.getLogger(__name__)

TellSpan = Callable[[str, str, float, float, str], None]
"""Lane, name, start, end, particulars: see Timing.tell_fetch_beside."""
_Place = tuple[str, int, tuple[str, ...]]
"""Worker, block and columns of a request."""


class FetchedRows(msgspec.Struct, frozen=True, eq=False):
    """Rows of one block: their numbers there (None: all), and the batch."""

    rows: np.ndarray | None
    records: pa.RecordBatch

    def select(self, rows: np.ndarray | None) -> pa.RecordBatch | None:
        """These rows of the block, in this order; None unless all are here."""
        if self.rows is None:
            return select_rows(self.records, rows)
        if rows is None:
            return None
        if np.array_equal(rows, self.rows):
            return self.records
        order = np.argsort(self.rows)
        at = np.searchsorted(self.rows, rows, sorter=order)
        if not len(order) or int(at.max(initial=0)) == len(order):
            return None
        places = order[at]
        if not np.array_equal(self.rows[places], rows):
            return None
        return select_rows(self.records, places)


class _Ahead(msgspec.Struct, frozen=True, eq=False):
    """A FetchAhead that was begun."""

    step: int
    future: Future[Mapping[_Place, FetchedRows]]


class RowsAhead:
    """Of one Worker. `begin` from any thread, all else from the main one. tell_span: called with
    each fetch that has ended.
    """

    def __init__(self, worker: str, channel: Channel, tell_span: TellSpan | None = None) -> None:
        self._worker = worker
        self._channel = channel
        self._tell_span = tell_span
        self._thread: ThreadPoolExecutor | None = None
        self._begun: dict[str, _Ahead] = {}
        """By node."""
        self._dropped: list[Future[Mapping[_Place, FetchedRows]]] = []
        """Fetches of rows that nobody wants any more, which may be under way still."""
        self._lock = threading.Lock()
        self._bytes_here = 0
        """Of rows that were here when they were asked for, since the last report."""

    def begin(self, message: m.FetchAhead) -> None:
        """Fetch the rows that others keep; those of an earlier message for its node go."""
        gathers = chain.from_iterable(message.inputs.values())
        all_requests = chain.from_iterable(map(list_requests, gathers))
        requests = [request for request in all_requests if request.worker != self._worker]
        with self._lock:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="rows ahead")
            earlier = self._begun.pop(message.node, None)
            if earlier is not None and not earlier.future.cancel():
                self._dropped.append(earlier.future)
            future = self._thread.submit(self._fetch_ahead, message, requests)
            self._begun[message.node] = _Ahead(message.step, future)

    def _fetch_ahead(
        self, message: m.FetchAhead, requests: Requests
    ) -> Mapping[_Place, FetchedRows]:
        """On the thread. Nothing, if a Worker is gone or a block was released."""
        start = time.monotonic()
        try:
            batches = self._channel.fetch_beside(requests)
        except (RunError, KeyError) as error:
            # The task that needs the rows asks once more, and says what is wrong with them.
            _log.info("rows of step %d for %s: %s", message.step, message.node, error)
            return {}
        if self._tell_span is not None:
            name, what = f"fetch for {message.node}", f"rows of step {message.step}"
            self._tell_span("fetches rows", name, start, time.monotonic(), what)
        pairs = zip(requests, batches, strict=True)
        return {_place(request): FetchedRows(request.rows, batch) for request, batch in pairs}

    def fetch(self, reader: str, requests: Requests) -> list[pa.RecordBatch]:
        """As `Pull.fetch`, for a node: what is here is not fetched again. Raises as that does."""
        here = self._take_rows(reader)
        batches: dict[int, pa.RecordBatch] = {}
        for number, request in enumerate(requests):
            fetched = here.get(_place(request))
            batch = None if fetched is None else fetched.select(request.rows)
            if batch is not None:
                batches[number] = batch
                self._bytes_here += batch.nbytes
        missing = [number for number in range(len(requests)) if number not in batches]
        if missing:
            rest = self._channel.fetch([requests[number] for number in missing])
            batches.update(zip(missing, rest, strict=True))
        return [batches[number] for number in range(len(requests))]

    def reports(self) -> list[Report]:
        """The bytes that had been fetched ahead when they were asked for, since the last call."""
        bytes_here, self._bytes_here = self._bytes_here, 0
        return [("edge/ahead/bytes", float(bytes_here), 1.0)] if bytes_here else []

    def _take_rows(self, node: str) -> Mapping[_Place, FetchedRows]:
        """What is here for a node, once its fetch has ended; one that has not begun is dropped."""
        with self._lock:
            ahead = self._begun.get(node)
        if ahead is None or ahead.future.cancel():
            return {}
        return ahead.future.result()

    def end_step(self, node: str, step: int) -> None:
        """A train node has all of its rows of a Step: drop those for it, and those for earlier
        Steps, of which none is fetched any more.
        """
        with self._lock:
            over = [
                name
                for name, ahead in self._begun.items()
                if ahead.step < step or (name == node and ahead.step == step)
            ]
            futures = [self._begun.pop(name).future for name in over] + self._dropped
            self._dropped = []
        for future in futures:
            if not future.cancel() and (error := future.exception()) is not None:
                # Whoever took its rows has heard of it, and nobody else wants them.
                _log.warning("rows of step %d or before: %s", step, error)


class AheadPull:
    """A pull for the rows of one node."""

    def __init__(self, ahead: RowsAhead, reader: str) -> None:
        self.fetch = partial(ahead.fetch, reader)


def _place(request: BlockRequest) -> _Place:
    return request.worker, request.block, tuple(request.columns)
