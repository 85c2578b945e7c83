"""What a decode loop is asked where rows stop and go on: one call a step, and rows that are parked.

Owns: the protocol. Does not own: any loop (torch/, vllm/), what comes between two turns
(interacting.py).

    waiting   admitted when a slot is free       after `extend` or `join`, or not begun yet
    live      writes a token with each step
    parked    its turn ended; holds its keys     until `extend` or `drop`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from operators.kernels.decoding import Counts, DecodeTask, Written
from operators.kernels.generating import Renewable


class TurnLoop(Renewable, Protocol):
    """A decode loop of a DecodeTask whose rows are written in several turns.

    written: of each row the tokens of its completion so far, its own and those that it was given;
    `written.limit` int32 [rows] is the length at which its turn ends in any case, the task's
    max_tokens until the row is extended; the caller may lower it before the row begins.
    """

    written: Written
    counts: Counts

    @property
    def is_idle(self) -> bool:
        """Whether no row is live or waiting: `step` would have nothing to do."""
        ...

    def step(self) -> np.ndarray:
        """Admit waiting rows or write one token to each live row. Returns the rows, int64, whose
        turn ended with it, which are parked now. `written.stop` says whether by an end.
        """
        ...

    def extend(self, rows: np.ndarray, ids: Sequence[np.ndarray], limits: np.ndarray) -> None:
        """Give parked rows further tokens, each at least one, which they did not write: log-prob
        0, the version of the token before. The rows wait to go on. limits int32 [rows]: the lengths
        of their completions at which their next turn ends in any case, above those that they then
        have.
        """
        ...

    def drop(self, rows: np.ndarray) -> None:
        """Forget parked rows: nothing more is written, their keys are freed, and their numbers may
        be given to rows that join.
        """
        ...

    def join(self, task: DecodeTask) -> np.ndarray:
        """Take in the rows of a further task, which is but for its rows as the first; returns their
        numbers, int64 in the order of the task. They wait behind those that wait.
        """
        ...

    def close(self) -> None:
        """Give up what is not over; closing twice does nothing."""
        ...

    def renew(self, version: int) -> None:
        """Continue under new weights: live rows' keys are computed again now, those of parked rows
        when they go on.
        """
        ...
