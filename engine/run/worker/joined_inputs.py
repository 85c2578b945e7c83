"""The rows of chunks that will join one that runs, fetched while that goes on.

    thread              waits for                                unblocked by
    the control's       nothing                                  -
    `joined inputs`     the rows of one chunk after another      the channels of their Workers
    the Worker's        a chunk's rows, where it is begun next   the thread `joined inputs`

Owns: this thread, and the rows until their chunk takes them. Does not own: which chunks join
(chunk_runs.py), fetching (rows.py), rows of the next Step (rows_ahead.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from dataflow.batch import Batch
from engine.protocol.messages import RunChunk
from engine.run.worker.rows import WorkerRows

Inputs = Mapping[str, Batch]


class JoinedInputs:
    """Of one Worker. Any thread may call."""

    def __init__(self, rows: WorkerRows) -> None:
        self._rows = rows
        self._lock = threading.Lock()
        self._fetching: dict[int, Future[Inputs]] = {}
        self._threads: ThreadPoolExecutor | None = None

    def begin(self, chunk: RunChunk) -> None:
        """Begin to fetch the rows of a chunk, unless that has begun. Those on devices come by
        transfers in one order, and are fetched when the chunk begins.
        """
        if self._rows.device.has_columns_of(chunk.inputs):
            return
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(1, thread_name_prefix="joined inputs")
            if chunk.id not in self._fetching:
                self._fetching[chunk.id] = self._threads.submit(self._fetch_beside, chunk)

    def call_when_ready(self, chunk: RunChunk, callback: Callable[[], None]) -> None:
        """Call back, from some thread, once nothing of this chunk is on its way."""
        with self._lock:
            fetching = self._fetching.get(chunk.id)
        if fetching is None:
            callback()
        else:
            fetching.add_done_callback(lambda _: callback())

    def is_ready(self, chunk: RunChunk) -> bool:
        """Whether nothing of this chunk is on its way."""
        with self._lock:
            fetching = self._fetching.get(chunk.id)
        return fetching is None or fetching.done()

    def has_begun(self, chunk: RunChunk) -> bool:
        """Whether its rows are here or on their way."""
        with self._lock:
            return chunk.id in self._fetching

    def take(self, chunk: RunChunk) -> Inputs:
        """The rows of a chunk, fetched now where nobody began. Raises PeerLost."""
        with self._lock:
            fetching = self._fetching.pop(chunk.id, None)
        if fetching is None:
            return self._fetch(chunk)
        return fetching.result()

    def forget(self) -> None:
        """Drop all rows that nobody has taken, and fetch none of those whose turn has not come."""
        with self._lock:
            dropped = list(self._fetching.values())
            self._fetching.clear()
        for fetching in dropped:  # not under the lock: who waits for one is called back
            fetching.cancel()

    def close(self) -> None:
        """End the thread once it has the rows of one chunk, or knows that it does not get them."""
        self.forget()
        if self._threads is not None:
            self._threads.shutdown()

    def _fetch_beside(self, chunk: RunChunk) -> Inputs:
        """On the thread."""
        return self._rows.assemble_beside(chunk.keys, chunk.inputs, chunk.node)

    def _fetch(self, chunk: RunChunk) -> Inputs:
        return self._rows.assemble_inputs(chunk.keys, chunk.inputs, chunk.node)
