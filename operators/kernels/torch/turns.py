"""The decode loop of rows that stop and go on: see turn_loop.py, which it implements.

Owns: when waiting rows enter slots, and what is recorded. Does not own: their order
(turn_queue.py), keys of live and parked rows and how the next token is drawn (decode_step.py and
its implementations), what comes between two turns.

Slots bound live rows only; parked keys are bounded by `DecodeTask.parked`. Slots are refilled when
an eighth of them is free, or as many as rows wait; where no row is live, all are. Which row enters
when depends on the calls alone (turn_queue.py), and so does every bit.

A row's tokens are drawn with the numbers of its own random stream: the token at index i of its
completion with the i-th, whoever wrote those before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from dataflow.errors import KernelError
from operators.kernels.decoding import DecodeTask
from operators.kernels.torch.decode import RowWriter
from operators.kernels.torch.decode_step import StepTokens, TurnStep
from operators.kernels.torch.shared_turns import SharedTurns
from operators.kernels.torch.static_memory import StaticMemory
from operators.kernels.torch.static_turns import StaticTurns
from operators.kernels.torch.turn_queue import TurnQueue


class TurnDecoder(RowWriter):
    """Implements TurnLoop on one module.

    static: the memory of a kernel that decodes at fixed places; None: with SharedTurns.
    """

    _step: TurnStep

    def __init__(
        self,
        module: PreTrainedModel,
        task: DecodeTask,
        version: int = 0,
        static: StaticMemory | None = None,
    ) -> None:
        super().__init__(task, version)
        self._queue = TurnQueue()
        self._queue.add(np.arange(len(self.written.length)), task)
        if static is None:
            self._step = SharedTurns(module, task, self.written, self.counts)
        else:
            self._step = StaticTurns(module, task, self.written, self.counts, static)

    @property
    def is_idle(self) -> bool:
        """Whether no row is live or waiting."""
        return not self._queue.waiting and not len(self._step.rows)

    @torch.inference_mode()
    def step(self) -> np.ndarray:
        """Admit waiting rows, or write one token to each live row. Returns the rows, int64, whose
        turn ended with it, which are parked now.
        """
        if self.is_idle:
            return np.zeros(0, np.int64)
        free, waiting = self._slots - len(self._step.rows), self._queue.waiting
        if waiting and free >= self._count_enough(waiting):
            return self._admit(free)
        return self._record(self._step.advance())

    def extend(self, rows: np.ndarray, ids: Sequence[np.ndarray], limits: np.ndarray) -> None:
        """Give parked rows further tokens, at least one each; they wait to go on. Raises
        KernelError for rows that are not parked, no tokens, and limits that leave none to write.
        """
        lengths = np.array([len(row_ids) for row_ids in ids], np.int64)
        totals = self.written.length[rows] + lengths
        for row in rows[(lengths == 0) | (limits <= totals)].tolist():
            raise KernelError(
                f"turns of row {row}: expected at least one token to extend it by, and a limit"
                " above its length with these, found none, or a lower limit. Fix: drop a row that"
                " has nothing more to write."
            )
        self._queue.extend(rows)
        for row, row_ids, limit in zip(rows.tolist(), ids, limits.tolist(), strict=True):
            self.written.give(row, row_ids, limit)

    def join(self, task: DecodeTask) -> np.ndarray:
        """Take in the rows of a further task; returns their numbers, int64 in its order."""
        rows = self._join(task)
        self._queue.add(rows, task)
        return rows

    def close(self) -> None:
        """Nothing to give up: rows and keys are this loop's alone."""

    @torch.inference_mode()
    def drop(self, rows: np.ndarray) -> None:
        """Forget rows that are parked, and their keys. Raises KernelError for others."""
        self._queue.drop(rows)
        self._step.forget(rows)
        self.release(rows)

    def _admit(self, count: int) -> np.ndarray:
        """Let the next rows go on and begin, and record their first tokens."""
        extended, unbegun = self._queue.admit(count)
        ended_rows: list[np.ndarray] = []
        if len(extended):
            ended_rows.append(self._record(self._step.go_on(extended)))
        if len(unbegun):
            ended_rows.append(self._record(self._step.admit(unbegun)))
        return np.concatenate(ended_rows)

    def _record(self, drawn: StepTokens) -> np.ndarray:
        """Record the drawn tokens; returns the rows whose turn ended with theirs, now parked."""
        ended_rows = self._append(drawn)
        if len(ended_rows):
            self._queue.park(ended_rows)
            self._step.park(ended_rows)
        return ended_rows
