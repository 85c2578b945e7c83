"""What a kernel may be able to do beside its work, as it declares by inheriting from these.

Owns: the abilities that the engine asks a kernel about. Does not own: what every kernel of a work
kind does (kernel.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np

from dataflow.batch import Ragged
from dataflow.kernel import Assignment, Chunk
from dataflow.memory_limits import MemoryLimits, MemoryNeed


class Interruptible(ABC):
    """A row kernel whose running rows can continue under new weights."""

    @property
    def interruptible(self) -> bool:
        """Whether its node's parameters allow it; if not, weights are loaded between chunks."""
        return True

    @abstractmethod
    def interrupt(self) -> None:
        """Make `run` yield soon, an empty batch if no row is finished; called from another thread
        while it is active. The engine then calls `load` and continues the iterator; rows keep their
        tokens.
        """
        ...


class Joinable(Interruptible):
    """A row kernel that takes the rows of further chunks into a `run` that goes on."""

    @property
    def joinable(self) -> bool:
        """Whether its node's parameters allow it; if not, chunks are run one after another."""
        return True

    @abstractmethod
    def join(self, chunk: Chunk) -> None:
        """Take in a further chunk of the node. The engine calls it as it calls `load`: after
        `interrupt`, between two batches of `run`, in the thread that runs it. `run` then yields
        until all rows of all chunks have left, in batches that each have rows of one chunk alone;
        metrics of a chunk are reported before its last rows.
        """
        ...


class PartTrainer(ABC):
    """A train kernel that can be given the rows of a Step part by part, each of whole groups, with
    one update at the end: what `step` makes of all rows at once, but for rounding. Only for a node
    of which `why_not_in_parts` (training_parts.py) says nothing; KernelError for others.

    Several ranks with whole weights compute a part each by itself, and meet in `finish_parts`;
    ranks with a part of the weights or of the tokens (Layout.in_step) also compute parts in
    lock-step. A rank without a row in a part is given it, too.
    """

    @abstractmethod
    def train_part(self, assignment: Assignment) -> None:
        """Compute the gradients of a part of a Step's rows, whole groups, and add them to those of
        the parts before; no update. A failed part ends the Step.
        """
        ...

    @abstractmethod
    def finish_parts(self, step: int) -> Mapping[str, float]:
        """Divide the sums by the update's counts, clip, do the one update of the Step, and return
        its metrics.
        """
        ...

    @abstractmethod
    def forget_parts(self) -> None:
        """Drop the sums of a Step that begins again; does nothing if there are none."""
        ...


class Limited(ABC):
    """A kernel whose memory at work follows from limits: where it runs out, an error leaves `run`,
    `step` or `train_part`, and the kernel can be called again, with lower ones.
    """

    @abstractmethod
    def limit(self, limits: MemoryLimits) -> None:
        """Take no more at once from the next chunk or Step on; called between two."""
        ...

    @abstractmethod
    def give_back(self) -> MemoryNeed:
        """It has run out: drop all that is held of what failed, and say what that was. What it had
        done of a Step is kept: `step` with the same rows goes on behind it.
        """
        ...


class Sleeper(ABC):
    """A kernel that can free its devices between its turns."""

    @abstractmethod
    def sleep(self) -> None:
        """Free the devices' memory; state moves to the host."""
        ...

    @abstractmethod
    def wake(self) -> None:
        """Move back; afterwards everything is as it was."""
        ...


class Probeable(ABC):
    """A writer or reader of a Model that can report what it computes with its weights, so that the
    engine can probe a weight edge; an edge is probed if both ends are Probeable.
    """

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """How many token ids its Model knows."""
        ...

    @abstractmethod
    def probe(self, ids: Ragged) -> np.ndarray:
        """Compute, as float32, for each token of these rows but a row's first, its log-prob at
        temperature 1 given those before it; with a scalar head the value before it. Changes
        nothing; all ranks must call.
        """
        ...
