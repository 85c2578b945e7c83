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
from operators.kernels.vllm.engine import Engine, Token
from operators.kernels.vllm.sampling_processor import (
    from_logit,
    make_keyed_params,
    make_vllm_params,
)


class RowRequests:
    """Rows of a DecodeTask as requests of an engine: a request writes one turn of its row."""

    def __init__(self, engine: Engine, task: DecodeTask, version: int) -> None:
        rows = len(task.prompts) * task.n
        self._engine = engine
        self._task = task
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

    def _count_tokens(self, rows: np.ndarray) -> np.ndarray:
        """Count each row's tokens so far, with its prompt's: int64 [rows]."""
        prompt_lengths = self._task.prompts.lengths[rows // self._task.n]
        return prompt_lengths.astype(np.int64) + self.written.length[rows]

    def _begin_turn(self, row: int) -> None:
        """Ask for a row's next tokens, with all that it has so far as the prompt."""
        prompt = self._task.prompts[row // self._task.n]
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
            int(task.seeds[row]),
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
    """Runs one DecodeTask: one request a row, in order, so that groups run together."""

    def write_rows(self, interrupted: Callable[[], bool]) -> Iterator[np.ndarray]:
        """Write all rows; yields those that ended, or none after an interruption."""
        self._begin()
        try:
            while self._live:
                if interrupted():
                    yield np.zeros(0, np.int64)
                done = self._append(self._engine.step())
                if len(done):
                    yield done
        finally:
            self._abort()

    def _begin(self) -> None:
        for row in range(len(self.written.length)):
            self._begin_turn(row)
