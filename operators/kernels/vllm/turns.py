"""The decode loop of rows that are written in several turns, on an engine.

Owns: which rows wait, in which order they go on, which are parked. Does not own: a row's requests
(decode.py), what comes between two turns (interacting.py).

Each turn is a request of its own: its prompt is the row's whole sequence so far, ids only. Keys of
earlier turns are what vLLM's prefix cache still has, in whole blocks: it evicts those that were not
used for longest when live rows need the room. So nothing has to be kept for a parked row, and what
is missing when it goes on is computed again.

Which keys are cached depends on the calls and their order alone, never on time: the engine is
stepped by its caller and forgets its cache before a chunk. Equal calls on an engine that has
forgotten give equal bits. Keys that a row computed as it wrote differ from those of a prefill by
rounding, so another order of calls, or an eviction, may change last bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from dataflow.errors import KernelError
from operators.kernels.decoding import DecodeTask
from operators.kernels.row_queue import RowQueue
from operators.kernels.vllm.decode import RowRequests
from operators.kernels.vllm.engine import Engine


class VllmTurnDecoder(RowRequests):
    """A TurnLoop on an engine. At most `task.slots` rows are live; of those that wait, the ones
    with further tokens go first, in the order of `extend`, then those not begun, in their own.
    `task.parked` is not looked at: the engine's memory bounds what parked rows keep.

    counts.again: also tokens of earlier turns whose keys vLLM no longer had, be it for new weights
    or for room, or that filled no block: of each turn's last block at most.
    """

    def __init__(self, engine: Engine, task: DecodeTask, version: int) -> None:
        super().__init__(engine, task, version)
        self._extended: deque[int] = deque()
        self._parked: set[int] = set()
        self._not_begun = RowQueue()
        self._wait(np.arange(len(self.written.length)), task)

    @property
    def is_idle(self) -> bool:
        """Whether no row is live or waiting: `step` would have nothing to do."""
        return not (self._live or self._count_waiting())

    def step(self) -> np.ndarray:
        """Admit waiting rows to free slots, and take one step of the engine: a token of each live
        row whose tokens so far are computed. Returns the rows whose turn ended, ascending.
        """
        while len(self._live) < self._slots and self._count_waiting():
            self._begin_turn(self._next_waiting())
        if not self._live:
            return np.zeros(0, np.int64)
        ended_rows = self._append(self._engine.step())
        self._parked.update(ended_rows.tolist())
        return ended_rows

    def extend(self, rows: np.ndarray, ids: Sequence[np.ndarray], limits: np.ndarray) -> None:
        """Give parked rows further tokens, as TurnLoop says. Raises KernelError for other rows."""
        for row, row_ids, limit in zip(rows.tolist(), ids, limits.tolist(), strict=True):
            if row not in self._parked:
                raise _wrong_row_error(row, "a parked row to extend")
            self._parked.remove(row)
            self.written.give(row, row_ids, limit)
            self._extended.append(row)

    def drop(self, rows: np.ndarray) -> None:
        """Forget parked rows. Their keys stay in the engine's cache until it needs the room. Raises
        KernelError for other rows.
        """
        for row in rows.tolist():
            if row not in self._parked:
                raise _wrong_row_error(row, "a parked row to drop")
            self._parked.remove(row)
        self.release(rows)

    def join(self, task: DecodeTask) -> np.ndarray:
        """Take in the rows of a further task; returns their numbers, int64 in its order."""
        rows = self._join(task)
        self._wait(rows, task)
        return rows

    def close(self) -> None:
        """Leave the engine: what is live ends, nothing waits any more. For a task that is given up;
        closing twice does nothing.
        """
        self._abort()
        self._extended.clear()
        self._not_begun = RowQueue()
        self._parked.clear()

    def _wait(self, rows: np.ndarray, task: DecodeTask) -> None:
        prompt_of_row = np.repeat(np.arange(len(task.prompts)), task.row_counts)
        self._not_begun.add(rows, prompt_of_row, task.row_weights)

    def _count_waiting(self) -> int:
        return len(self._extended) + self._not_begun.count

    def _next_waiting(self) -> int:
        if self._extended:
            return self._extended.popleft()
        return int(self._not_begun.take(1)[0])


def _wrong_row_error(row: int, expected: str) -> KernelError:
    return KernelError(
        f"row {row} of a task: expected {expected}, found one that waits, writes or was dropped."
        " Fix: extend and drop rows that `step` returned."
    )
