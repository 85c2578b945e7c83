"""The decode loop of a task on an engine.

Owns: which request is which row, and when rows leave. Does not own: the engine (engine.py), rows
that go on after their turn (turns.py), in which batches rows go on (generating.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import compress
from typing import Any

import numpy as np

from dataflow.errors import KernelError
from operators.kernels.decoding import Counts, DecodeTask, Written
from operators.kernels.row_queue import RowQueue
from operators.kernels.task_rows import TaskRows
from operators.kernels.vllm.engine import Engine, Token
from operators.kernels.vllm.sampling_processor import (
    from_logit,
    make_keyed_params,
    make_vllm_params,
)


class RowRequests:
    """Rows of a DecodeTask as requests of an engine: a request writes one turn of its row."""

    def __init__(self, engine: Engine, task: DecodeTask, version: int) -> None:
        rows = int(task.row_counts.sum())
        self._engine = engine
        self._task = task
        self._rows = TaskRows(task)
        self.version = version
        self.written = Written.empty(rows, limit=task.max_tokens, truncates=task.how.truncates)
        self.counts = Counts()
        self._slots = min(task.slots, rows)
        self._live: dict[str, int] = {}
        # Tokens whose keys a row had when its last turn ended, until its next one has begun.
        self._computed = np.zeros(rows, np.int64)

    def renew(self, version: int) -> None:
        """The engine forgot all keys when it loaded; from here on rows compute theirs again."""
        self.version = version
        rows = np.array(list(self._live.values()), np.int64)
        has_begun = self.written.length[rows] > self.written.begin[rows]
        self.counts.again += int(self._count_tokens(rows[has_begun]).sum())
        # Of the others vLLM says what it found when it first looked: it may have forgotten that.
        self.counts.again += int(self._computed[rows[~has_begun]].sum())
        self._computed[rows] = 0

    def release(self, rows: np.ndarray) -> None:
        """These rows have ended, and left: their numbers are free for others."""
        self._rows.release(rows)

    def _join(self, task: DecodeTask) -> np.ndarray:
        """Take in the rows of a further task; returns their numbers, int64 in its order."""
        rows = self._rows.join(task, np.zeros(len(self._rows.lengths), bool))
        self.written.reserve_rows(len(self._rows))
        self.written.clear(rows, task.max_tokens)
        self._computed = np.pad(self._computed, (0, len(self._rows) - len(self._computed)))
        self._computed[rows] = 0
        self._slots = min(task.slots, max(self._slots, self._rows.count()))
        return rows

    def _count_tokens(self, rows: np.ndarray) -> np.ndarray:
        """Count each row's tokens so far, with its prompt's: int64 [rows]."""
        prompt_lengths = self._rows.lengths[self._rows.prompt_of_row[rows]]
        return prompt_lengths + self.written.length[rows]

    def _begin_turn(self, row: int) -> None:
        """Ask for a row's next tokens, with all that it has so far as the prompt."""
        prompt = self._rows.prompt(int(self._rows.prompt_of_row[row]))
        start = int(self.written.length[row])
        limit = int(self.written.limit[row])
        longest = self._engine.size.length
        if len(prompt) + limit > longest:  # vLLM would end it before, and nobody would know
            raise KernelError(
                f"Model {self._engine.name!r}: expected rows of at most {longest} tokens, for which"
                f" its engine has room, found one of up to {len(prompt) + limit}. Fix: a smaller"
                " max_tokens, or max_context, which bounds a row."
            )
        ids = prompt.tolist() + self.written.tokens[row, :start].tolist()
        request = self._engine.add(ids, self._make_params(row, start, limit - start))
        self._live[request] = row

    def _make_params(self, row: int, place: int, max_tokens: int) -> Any:
        task = self._task
        make_params = make_vllm_params if task.sampler == "vllm" else make_keyed_params
        return make_params(
            int(self._rows.seeds[row]),
            task.how,
            place=place,
            max_tokens=max_tokens,
            stop_token_ids=task.ends.tolist(),
        )

    def _append(self, tokens: list[Token]) -> np.ndarray:
        """Record these tokens; returns the rows that ended with theirs. Tokens of other tasks on
        the engine are not looked at.
        """
        task_tokens = [token for token in tokens if token.request in self._live]
        if not task_tokens:
            return np.zeros(0, np.int64)
        rows = np.array([self._live[token.request] for token in task_tokens])
        self._count(rows, task_tokens)
        mass = None
        if self.written.mass is not None:
            mass = from_logit(np.array([token.mass for token in task_tokens], np.float32))
        self.written.append(
            rows,
            tokens=np.array([token.token for token in task_tokens], np.int32),
            logprobs=np.array([token.logprob for token in task_tokens], np.float32),
            mass=mass,
            version=np.array([token.version for token in task_tokens], np.int32),
        )
        is_ended = self._task.find_ended(self.written, rows)
        requests = [token.request for token in task_tokens]
        self._end_requests(list(compress(requests, is_ended)))
        ended_rows = np.sort(rows[is_ended])
        self._computed[ended_rows] = self._count_tokens(ended_rows) - 1  # not of the last one
        return ended_rows

    def _count(self, rows: np.ndarray, tokens: list[Token]) -> None:
        """Count what a step computed for these rows, before its tokens are appended."""
        # A turn's first token comes from the prefill, which is no decode forward.
        is_first = self.written.length[rows] == self.written.begin[rows]
        self.counts.rows += int((~is_first).sum())
        if not is_first.all():
            self.counts.slots += self._slots
        for row, token in zip(rows.tolist(), tokens, strict=True):
            if token.cached is not None:
                self.counts.again += max(0, int(self._computed[row]) - token.cached)

    def _end_requests(self, requests: list[str]) -> None:
        """Forget these requests. vLLM ends rows by their ids and lengths; of those with a stop
        string it must be told.
        """
        for request in requests:
            del self._live[request]
        if self._task.stopped is not None:
            self._engine.abort(requests)

    def _abort(self) -> None:
        """End all requests."""
        self._engine.abort(list(self._live))
        self._live.clear()


class VllmDecoder(RowRequests):
    """Runs a DecodeTask, and those that join it: one request a row, in the order of row_queue.py,
    so that groups run together. What waits for room waits in vLLM, in the order in which it came.
    """

    def __init__(self, engine: Engine, task: DecodeTask, version: int) -> None:
        super().__init__(engine, task, version)
        self._queue = RowQueue()
        self._wait(np.arange(len(self.written.length)), task)

    def write_rows(self, interrupted: Callable[[], bool]) -> Iterator[np.ndarray]:
        """Write all rows that are there; yields those that ended, or none after an interruption."""
        try:
            self._begin()
            while self._live:
                if interrupted():
                    yield np.zeros(0, np.int64)
                self._begin()
                done = self._append(self._engine.step())
                if len(done):
                    yield done
                    self._begin()
        finally:
            self._abort()

    def join(self, task: DecodeTask) -> np.ndarray:
        """Take in the rows of a further task between two steps; returns their numbers, int64 in its
        order. All but its rows is as in the first task.
        """
        rows = self._join(task)
        self._wait(rows, task)
        return rows

    def _wait(self, rows: np.ndarray, task: DecodeTask) -> None:
        prompt_of_row = np.repeat(np.arange(len(task.prompts)), task.row_counts)
        self._queue.add(rows, prompt_of_row, task.row_weights)

    def _begin(self) -> None:
        """Ask for the rows that wait."""
        for row in self._queue.take(self._queue.count).tolist():
            self._begin_turn(row)
