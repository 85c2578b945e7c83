"""The decode loop: rows enter slots, each step writes one token per row, finished rows leave at
once.

Owns: when waiting rows enter, what has been written, and when a row ends. Does not own: in which
order they enter (row_queue.py), where a live row's keys are and how its next token is drawn
(decode_step.py and its implementations), columns (generate.py).

Slots are refilled when an eighth of them is free (a prefill of one prompt costs nearly as much as
one of several). A row's tokens depend on its prompt, its random stream and the weights; on the rows
next to it only through the rounding of batched products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from transformers import PreTrainedModel

from operators.kernels.decoding import Counts, DecodeTask, Written
from operators.kernels.row_queue import RowQueue
from operators.kernels.torch.decode_step import DecodeStep, StepTokens
from operators.kernels.torch.rank_tokens import RankTokens
from operators.kernels.torch.shared_step import SharedStep
from operators.kernels.torch.static_memory import StaticMemory
from operators.kernels.torch.static_step import StaticStep


class RowWriter:
    """What a loop over steps has, whether rows end or stop: what has been written under which
    version, and what was counted.
    """

    _step: DecodeStep

    def __init__(self, task: DecodeTask, version: int) -> None:
        rows = int(task.row_counts.sum())
        self.task, self.version = task, version
        self.written = Written.empty(rows, limit=task.max_tokens, truncates=task.how.truncates)
        self.counts = Counts()
        self._slots = min(task.slots, rows)

    @torch.inference_mode()
    def renew(self, version: int) -> None:
        """Continue under new weights: live rows keep their tokens, and all keys and values are
        computed again, first those of the prompts, then those of what the rows have written (in
        parts that fit the budget).
        """
        self.version = version
        self.counts.again += self._step.renew()

    @torch.inference_mode()
    def _join(self, task: DecodeTask) -> np.ndarray:
        """Take in the rows of a further task; returns their numbers, int64 in its order."""
        rows = self._step.join(task)
        self._slots = self._step.slots
        return rows

    def release(self, rows: np.ndarray) -> None:
        """These rows have ended, and left: their numbers are free for others."""
        self._step.release(rows)

    def _count_enough(self, waiting: int) -> int:
        """How many slots are free before so many waiting rows enter them: an eighth of all, for a
        pass over one row costs nearly as much as one over several.
        """
        return min(max(1, self._slots // 8), waiting)

    def _append(self, drawn: StepTokens) -> np.ndarray:
        """Record the drawn tokens; returns the rows that ended with theirs."""
        rows = drawn.rows
        self.written.append(rows, drawn.tokens, drawn.logprobs, drawn.mass, self.version)
        return rows[self.task.find_ended(self.written, rows)]


class Decoder(RowWriter):
    """Runs one DecodeTask on one module; `write_rows` drives it, `written` holds the result.

    static: the memory of a kernel that decodes at fixed places; None: with SharedStep. ranks: as of
    that.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        task: DecodeTask,
        version: int = 0,
        static: StaticMemory | None = None,
        ranks: RankTokens | None = None,
    ) -> None:
        super().__init__(task, version)
        self._queue = RowQueue()
        if static is None:
            self._step = SharedStep(module, task, self.written, self.counts, ranks)
        else:
            self._step = StaticStep(module, task, self.written, self.counts, static)
        self._wait(np.arange(len(self.written.length)), task)

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

    def write_rows(self, interrupted: Callable[[], bool] | None = None) -> Iterator[np.ndarray]:
        """Write all rows that wait or are live; after each step in which rows ended, yields which
        ones.

        interrupted: asked before each step; if true, an empty array is yielded first, and the step
        is taken afterwards, with the weights and the rows that are there by then.
        """
        while self._queue.count or len(self._step.rows):
            if interrupted is not None and interrupted():
                yield np.zeros(0, np.int64)
            free = self._slots - len(self._step.rows)
            waiting = self._queue.count
            if waiting and free >= self._count_enough(waiting):
                drawn = self._admit(free)
            else:
                drawn = self._advance()
            ended_rows = self._record(drawn)
            if len(ended_rows):
                yield ended_rows

    @torch.inference_mode()
    def _admit(self, count: int) -> StepTokens:
        """Prefill the next rows' prompts, and draw their first tokens."""
        return self._step.admit(self._queue.take(count))

    @torch.inference_mode()
    def _advance(self) -> StepTokens:
        return self._step.advance()

    @torch.inference_mode()
    def _record(self, drawn: StepTokens) -> np.ndarray:
        """Record the drawn tokens; returns the rows that ended with theirs, which have left."""
        ended_rows = self._append(drawn)
        if len(ended_rows):
            self._step.drop(ended_rows)
        return ended_rows
