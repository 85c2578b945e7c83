"""Training part by part: gradients of parts of a Step's rows, and the one update at their end.

Owns: when sums begin, end and are dropped, and the update of them. Does not own: the sums
(part_sums.py), micro-batches and the metrics of an update (training_loop.py).

All is divided once, by the counts of the whole Step: what a group or row knows of itself, such as
its length, has its weight already. So a part is computed without a word of the others, and ranks
with whole weights meet once a Step.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

import torch

from dataflow.errors import KernelError
from dataflow.kernel import Assignment
from dataflow.model import value_at
from dataflow.training_parts import divisor_of
from operators.kernels.torch.mismatch import add_sampled_entropy
from operators.kernels.torch.part_sums import PartSums
from operators.kernels.torch.reduce import UpdateCounts
from operators.kernels.torch.training_loop import TrainingLoop, start_sums
from operators.kernels.torch.updates import StepUpdate, weigh_part
from operators.kernels.torch.weight_sample import WeightSample


class PartTraining:
    """Of one train node and rank. why_not: why it needs all rows of a Step at once; empty if it
    does not. in_step: whether ranks compute a part in lock-step.
    """

    def __init__(self, loop: TrainingLoop, *, why_not: str, in_step: bool) -> None:
        self._loop, self._why_not, self._in_step = loop, why_not, in_step
        self._part_sums: PartSums | None = None

    def train_part(self, assignment: Assignment) -> None:
        """As in PartTrainer. Raises KernelError if a loss is not finite, or if the node needs all
        rows of a Step at once.
        """
        if self._why_not:
            raise KernelError(
                f"{self._loop.node}: expected a node that can be trained part by part, found"
                f" {self._why_not}."
            )
        with ExitStack() as where_it_fails:
            where_it_fails.callback(self.forget_parts)
            sums = self._sums_of(assignment.step)
            if self._loop.settings.trains_at(assignment.step):
                self._add_part(assignment, sums)
            where_it_fails.pop_all()

    def _sums_of(self, step: int) -> PartSums:
        """The sums of the parts before, or new ones for the first part of a Step."""
        if self._part_sums is None:
            self._part_sums = PartSums(
                self._loop.node, step, self._loop.optimizer.masters, start_sums()
            )
        if self._part_sums.step != step:
            raise KernelError(
                f"{self._loop.node}: expected a part of step {self._part_sums.step}, found one of"
                f" step {step}. Fix: finish_parts or forget_parts before the first part of a Step."
            )
        return self._part_sums

    def _add_part(self, assignment: Assignment, part_sums: PartSums) -> None:
        """Add this rank's rows of a part."""
        settings = self._loop.settings
        # Ranks with whole weights meet when all parts have come.
        with self._loop.ranks.together(meets=self._in_step):
            row_sets = self._loop.row_sets_of(assignment)
            step_sets = [self._loop.read(assignment, row_set) for row_set in row_sets]
            for step_set in step_sets:
                part_sums.note_rows(step_set, settings)
        for step_set in step_sets:
            add_sampled_entropy(step_set.row_set, step_set.rows, part_sums.sums)
            update = StepUpdate(
                parts=(weigh_part(step_set, settings),),
                keys=step_set.rows.keys,
                step=assignment.step,
                lr=0.0,
                first=True,
                sums=part_sums.sums,
                losses=part_sums.losses,
            )
            with part_sums.adding_to(step_set.row_set.name):
                self._loop.add_gradients(update, meets=self._in_step)

    def finish_parts(self, step: int) -> Mapping[str, float]:
        """As in PartTrainer. Raises KernelError, on all ranks, if a gradient is not finite."""
        with ExitStack() as at_the_end:
            at_the_end.callback(self.forget_parts)
            part_sums = self._sums_of(step)
            lr = value_at(self._loop.settings.lr, step)
            counts = part_sums.count_all(self._loop.ranks)
            if counts:  # none before the first Step that is trained
                self._update_from(part_sums, counts, lr)
            return self._loop.report(lr, part_sums.sums)

    def _update_from(
        self, part_sums: PartSums, counts: Mapping[str, UpdateCounts], lr: float
    ) -> None:
        """Make the update of the sums, and add its metrics. counts: of each row set."""
        sums = part_sums.sums
        tokens = sum(count.tokens for count in counts.values())
        if not tokens:
            sums.count("optim/skipped", self._loop.ranks.lead)
            return
        row_sets = [each for each in self._loop.settings.row_sets if each.name in counts]
        divisors: dict[str, int] = {}
        for row_set in row_sets:
            divisor = divisor_of(row_set.loss.terms[0], self._loop.settings.aggregate)
            divisors[row_set.name] = counts[row_set.name].of(divisor)
        sample = WeightSample(self._loop.optimizer.stored_masters)
        part_sums.divide(divisors)
        norm = self._loop.sum_gradients(step=part_sums.step, keys=part_sums.first_row)
        self._loop.optimizer.step(lr, norm)
        self._loop.count_update(sums, norm, tokens)
        for row_set in row_sets:
            if not counts[row_set.name].tokens:
                continue
            for term in row_set.loss.terms:
                total = part_sums.losses.sums.get(f"loss/{term.label}", 0.0)
                share = total / divisors[row_set.name]
                sums.add(f"loss/{term.label}", share, self._loop.ranks.lead)
        sums.add("optim/changed", sample.count_changed(), len(sample))

    def forget_parts(self) -> None:
        """As in PartTrainer."""
        if self._part_sums is not None:
            self._loop.optimizer.clear()
        self._part_sums = None

    def move(self, device: torch.device) -> None:
        """Move the sums, if there are some."""
        if self._part_sums is not None:
            self._part_sums.move(device)
