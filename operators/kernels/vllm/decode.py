"""The decode loop of a task on an engine.

Owns: which request is which row, and when rows leave. Does not own: the engine (engine.py), in
which batches rows go on (generating.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from operators.kernels.decoding import Counts, DecodeTask, Written
from operators.kernels.vllm.engine import Engine, Token
from operators.kernels.vllm.keyed import from_logit, keyed, own


class VllmDecoder:
    """Runs one DecodeTask: one request a row, in order, so that groups run together."""

    def __init__(self, engine: Engine, task: DecodeTask, version: int) -> None:
        rows = len(task.prompts) * task.n
        self._engine, self._task, self.version = engine, task, version
        self.written = Written.empty(rows, truncates=task.how.truncates)
        self.counts = Counts()
        self._slots = min(task.slots, rows)
        self._live: dict[str, int] = {}

    def finished(self, interrupted: Callable[[], bool]) -> Iterator[np.ndarray]:
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
        begun = rows[self.written.length[rows] > 0]
        prompts = self._task.prompts.lengths[begun // self._task.n]
        self.counts.again += int(self.written.length[begun].sum() + prompts.sum())

    def _begin(self) -> None:
        task = self._task
        for row, seed in enumerate(task.seeds.tolist()):
            ids = task.prompts[row // task.n].tolist()
            self._live[self._engine.add(ids, self._params(seed))] = row

    def _params(self, seed: int) -> Any:
        task = self._task
        limits = {"max_tokens": task.max_tokens, "stop_token_ids": task.ends.tolist()}
        return (own if task.sampler == "vllm" else keyed)(seed, task.how, **limits)

    def _append(self, said: list[Token]) -> np.ndarray:
        """Record these tokens; returns the rows that ended with theirs."""
        mine = [token for token in said if token.request in self._live]
        if not mine:
            return np.zeros(0, np.int64)
        rows = np.array([self._live[token.request] for token in mine])
        first = self.written.length[rows] == 0
        self.counts.rows += int((~first).sum())
        self.counts.slots += self._slots if not first.all() else 0
        mass = np.array([token.mass for token in mine], np.float32)
        self.written.append(
            rows,
            np.array([token.token for token in mine], np.int32),
            np.array([token.logprob for token in mine], np.float32),
            from_logit(mass) if self.written.mass is not None else None,
            np.array([token.version for token in mine], np.int32),
        )
        ended = self._task.ended(self.written, rows)
        self._leave([token.request for token, over in zip(mine, ended, strict=True) if over])
        return np.sort(rows[ended])

    def _leave(self, requests: list[str]) -> None:
        """vLLM ends rows by their ids and lengths; of those with a stop string it must be told."""
        for request in requests:
            del self._live[request]
        if self._task.stopped is not None:
            self._engine.abort(requests)
