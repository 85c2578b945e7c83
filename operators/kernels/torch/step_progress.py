"""How far a Step is, so that one whose memory ran out goes on behind the updates that are done.

Owns: the updates that are done, metrics as of the last of them, what is computed now, and whether a
failure leaves all as it was. Does not own: the updates (training_loop.py), what follows where
memory runs out (the engine).

An update counts from when the optimizer has made it. Until then nothing has changed but gradients,
which are dropped, so the same update is made again. The optimizer changes weights in place: where
its memory runs out, the Step is lost. So it is where a rank fails within a collective, as the
others wait there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from dataflow.errors import KernelError
from dataflow.kernel import Assignment
from dataflow.memory_limits import MemoryNeed
from operators.kernels.torch.optimizer import Optimizer
from operators.kernels.torch.parallel import Turns
from operators.kernels.torch.reduce import MetricSums
from operators.kernels.torch.weight_sample import WeightSample


@dataclass(slots=True, eq=False)
class BegunStep:
    """keys: of this rank's rows, by row set. sums: of the updates that are done; before: as they
    were before the one under way. tokens: trained in them.
    """

    step: int
    keys: dict[str, list[tuple[int, int, int]]]
    sums: MetricSums
    sample: WeightSample
    before: MetricSums = field(default_factory=MetricSums)
    updates: int = 0
    tokens: int = 0
    has_read: bool = False
    """Whether what is counted once for its rows is in the sums."""

    def begin_update(self) -> None:
        """The next update begins."""
        self.has_read = True
        self.before = self.sums.copy()

    def end_update(self, tokens: int) -> None:
        """It is done, or was skipped."""
        self.updates += 1
        self.tokens += tokens
        self.before = self.sums.copy()


class StepProgress:
    """Of one train node and rank. budget: tokens of a micro-batch. is_kept: whether a failure now
    leaves weights and optimizer as they are.
    """

    def __init__(self, node: str, budget: int, *, is_alone: bool) -> None:
        """is_alone: whether there is one rank."""
        self.budget = budget
        self.need = MemoryNeed()
        self.is_kept = self._is_alone = is_alone
        self._node = node
        self._begun: BegunStep | None = None
        self._in_parts = False
        """Whether what is computed is a part of a Step, or the update of its parts."""

    def begin(self, assignment: Assignment, optimizer: Optimizer, sums: MetricSums) -> BegunStep:
        """Begin a Step, or go on with the one that was short. Raises KernelError where updates of
        another one are done: they would stay in the weights.
        """
        keys = {"rows": assignment.keys.rows()}
        keys |= {name: rows.keys.rows() for name, rows in assignment.others.items()}
        begun = self._begun
        if begun is None or not begun.updates:
            sample = WeightSample(optimizer.stored_masters)
            self._begun = BegunStep(assignment.step, keys, sums, sample, before=sums.copy())
        elif (begun.step, begun.keys) != (assignment.step, keys):
            raise KernelError(
                f"{self._node}: expected the rest of step {begun.step}, of which"
                f" {begun.updates} updates are done, found other rows, of step {assignment.step}."
                " Fix: the same rows again, or an earlier checkpoint."
            )
        self.need, self.is_kept, self._in_parts = MemoryNeed(), self._is_alone, False
        assert self._begun is not None
        return self._begun

    def begin_part(self) -> None:
        """Begin a part of a Step, or the update of its parts: sums of gradients do not outlive a
        failure.
        """
        self.end()
        self._in_parts = True

    def end(self) -> None:
        """The Step is done, or what it has changed was restored."""
        self._begun = None
        self.need = MemoryNeed()

    @contextmanager
    def keeping(self, is_kept: bool) -> Iterator[None]:
        """A block that may run out of memory. is_kept: whether all stays as it was before then."""
        before = self.is_kept
        self.is_kept = is_kept
        yield
        self.is_kept = before  # not after a failure, of which `fail` tells

    def note_failure(self, turns: Turns[Any]) -> None:
        """Micro-batches have failed: all stays as it was, unless others wait in a collective."""
        self.is_kept = turns.is_left_together

    def note(self, need: MemoryNeed) -> None:
        """This is computed from now on."""
        self.need = need

    def fail(self) -> MemoryNeed:
        """Memory ran out: forget what has come of the update under way. Returns what it was at."""
        begun, updates = self._begun, 0
        if begun is not None:
            begun.sums, updates = begun.before.copy(), begun.updates
        is_kept = self.is_kept and not self._in_parts
        need = replace(self.need, is_kept=is_kept, updates=updates)
        self.need, self.is_kept = MemoryNeed(), self._is_alone
        return need
