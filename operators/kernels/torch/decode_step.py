"""One more token for each live row: what the decode loops ask of whoever keeps the rows' keys.

Owns: the protocols between the loops (decode.py, turns.py) and their implementations. Does not own:
these.

    SharedStep  shared_step.py  keys once for all rows that share them, in memory that grows; every
                                operation is launched by itself. On a CPU, and where a GPU cannot
                                capture the module.
    StaticStep  static_step.py  each row's keys by themselves at fixed places, so that one CUDA
                                graph computes a step.

    SharedTurns, StaticTurns    shared_turns.py, static_turns.py: the same, for rows that stop and
                                go on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from operators.kernels.decoding import DecodeTask


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens:
    """One new token of each of some rows, in host memory. All [rows]: rows int64, tokens int64 or
    int32, log-probs float32, mass float32 if the sampler truncates.
    """

    rows: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    mass: np.ndarray | None = None


class DecodeStep(Protocol):
    """Keeps the keys of live rows and draws their tokens; the loop records these.

    rows: int64 [live], the rows in slots. They are read and dropped in this order. slots: how many
    rows may be live.
    """

    slots: int

    @property
    def rows(self) -> np.ndarray: ...

    def join(self, task: DecodeTask) -> np.ndarray:
        """Take in the rows of a further task, which do not begin yet. Returns their numbers, int64
        in the task's order: those of rows that were released, and new ones.
        """
        ...

    def release(self, rows: np.ndarray) -> None:
        """What these dropped rows wrote has been read: their numbers are free."""
        ...

    def admit(self, rows: np.ndarray) -> StepTokens:
        """Give the next rows slots, feed their prompts, and draw the first token of each. Those of
        a prompt are side by side, and come before all others where some of them have begun.
        """
        ...

    def advance(self) -> StepTokens:
        """Feed each live row its last recorded token, and draw one more."""
        ...

    def drop(self, ended_rows: np.ndarray) -> None:
        """Free the slots of these live rows."""
        ...

    def renew(self) -> int:
        """Compute all keys again, with the weights that are there now. Returns how many tokens were
        fed.
        """
        ...


class TurnStep(DecodeStep, Protocol):
    """A step whose rows are written in turns: parked ones keep their keys in memory of their own
    (parked_keys.py), so that they cost a step nothing.
    """

    def park(self, rows: np.ndarray) -> None:
        """Free the slots of these live rows, and keep their keys as far as these have room."""
        ...

    def go_on(self, rows: np.ndarray) -> StepTokens:
        """Give parked rows slots, feed what was recorded of them and has no keys, and draw the next
        token of each. Counts keys that were computed before in `again`.
        """
        ...

    def forget(self, rows: np.ndarray) -> None:
        """Free the keys of rows that are parked; those that have not begun never will."""
        ...
