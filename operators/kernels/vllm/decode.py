"""The decode loop of a task on an engine.

Owns: which request is which row, and when rows leave. Does not own: the engine (engine.py), in
which batches rows go on (generating.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import compress
from typing import Any

import numpy as np

from operators.kernels.decoding import Counts, DecodeTask, Written
from operators.kernels.vllm.engine import Engine, Token
from operators.kernels.vllm.sampling_processor import (
    from_logit,
    make_keyed_params,
    make_vllm_params,
)


class VllmDecoder:
    """Runs one DecodeTask: one request a row, in order, so that groups run together."""

    def __init__(self, engine: Engine, task: DecodeTask, version: int) -> None:
        rows = len(task.prompts) * task.n
        self._engine = engine
        self._task = task
        self.version = version
        self.written = Written.empty(rows, limit=task.max_tokens, truncates=task.how.truncates)
        self.counts = Counts()
        self._slots = min(task.slots, rows)
        self._live: dict[str, int] = {}

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
            self._engine.abort(list(self._live))

    def renew(self, version: int) -> None:
        """The engine forgot all keys when it loaded; from here on rows compute theirs again."""
        self.version = version
        rows = np.array(list(self._live.values()), np.int64)
        begun_rows = rows[self.written.length[rows] > 0]
        prompt_lengths = self._task.prompts.lengths[begun_rows // self._task.n]
        written_lengths = self.written.length[begun_rows]
        self.counts.again += int(written_lengths.sum() + prompt_lengths.sum())

    def _begin(self) -> None:
        task = self._task
        for row, seed in enumerate(task.seeds.tolist()):
            ids = task.prompts[row // task.n].tolist()
            request = self._engine.add(ids, self._make_params(seed))
            self._live[request] = row

    def _make_params(self, seed: int) -> Any:
        task = self._task
        make_params = make_vllm_params if task.sampler == "vllm" else make_keyed_params
        return make_params(
            seed, task.how, max_tokens=task.max_tokens, stop_token_ids=task.ends.tolist()
        )

    def _append(self, tokens: list[Token]) -> np.ndarray:
        """Record these tokens; returns the rows that ended with theirs. Tokens of other tasks on
        the engine are not looked at.
        """
        task_tokens = [token for token in tokens if token.request in self._live]
        if not task_tokens:
            return np.zeros(0, np.int64)
        rows = np.array([self._live[token.request] for token in task_tokens])
        # A row's first token comes from the prefill, which is no decode forward.
        is_first = self.written.length[rows] == 0
        self.counts.rows += int((~is_first).sum())
        if not is_first.all():
            self.counts.slots += self._slots
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
        return np.sort(rows[is_ended])

    def _end_requests(self, requests: list[str]) -> None:
        """Forget these requests. vLLM ends rows by their ids and lengths; of those with a stop
        string it must be told.
        """
        for request in requests:
            del self._live[request]
        if self._task.stopped is not None:
            self._engine.abort(requests)
