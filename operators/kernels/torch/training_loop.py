"""The loop of training: micro-batches, backward passes and updates of one Step.

Owns: the order of all that, sums over ranks, training metrics. Does not own: the backward pass
(loss_backward.py), which rows make an update (updates.py), Steps whose rows come part by part
(part_training.py), packing (packing.py), the optimizer (optimizer.py), collectives (parallel.py),
sampler against trainer (mismatch.py), which weights changed (weight_sample.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dataflow.batch import Keys
from dataflow.kernel import Assignment
from dataflow.memory_limits import MemoryNeed
from dataflow.model import value_at
from operators.kernels.overlong import require_positions
from operators.kernels.text import require_embedded_ids
from operators.kernels.torch.adapter_metrics import AdapterMetrics
from operators.kernels.torch.loss_backward import LossBackward, MicroBatch, not_finite
from operators.kernels.torch.mismatch import add_sampled_entropy
from operators.kernels.torch.model_numbers import require_ids
from operators.kernels.torch.optimizer import Optimizer
from operators.kernels.torch.packing import describe_need, micro_batches
from operators.kernels.torch.parallel import Ranks
from operators.kernels.torch.reduce import MetricSums
from operators.kernels.torch.step_progress import BegunStep, StepProgress
from operators.kernels.torch.steprows import step_rows
from operators.kernels.torch.train_settings import RowSet, TrainSettings
from operators.kernels.torch.updates import EveryRow, Part, StepSet, StepUpdate, draw_parts

COUNTS = (
    "optim/updates", "optim/skipped", "train/tokens", "train/fed_tokens", "train/micro_batches",
)  # fmt: skip
"""Metrics that add up over the updates of a Step."""


def start_sums() -> MetricSums:
    """Make the metrics of a Step of which nothing is counted yet."""
    sums = MetricSums()
    for name in COUNTS:
        sums.count(name, 0.0)
    return sums


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingLoop:
    """Of one train node and rank.

    model: the Model's name. progress: of the Step under way, with the tokens of a micro-batch.
    position_limit: how many positions the Model has; None for any. vocabulary: how many token ids
    it knows. is_split: whether FSDP splits its weights, so that every backward is a collective.
    """

    node: str
    model: str
    seed: int
    settings: TrainSettings
    backward: LossBackward
    optimizer: Optimizer
    ranks: Ranks
    adapter: AdapterMetrics
    progress: StepProgress
    position_limit: int | None
    vocabulary: int
    is_split: bool

    def step(self, assignment: Assignment) -> Mapping[str, float]:
        """Make all updates of one Step. Raises KernelError if a loss or gradient is not finite.

        A Step that fails is lost; it fails on all ranks, with the same message. But where memory
        ran out, and `progress` says that all is kept, the same rows go on behind its last update.
        """
        settings = self.settings
        lr = value_at(settings.lr, assignment.step)
        row_sets = self.row_sets_of(assignment)
        if not (settings.trains_at(assignment.step) and row_sets):
            return self.report(lr, start_sums())
        begun = self.progress.begin(assignment, self.optimizer, start_sums())
        for number, update in enumerate(self._updates(assignment, row_sets, lr, begun)):
            if number < begun.updates:
                continue
            begun.begin_update()
            self._update(update)
            begun.end_update(update.tokens)
        if begun.tokens:
            sample = begun.sample
            begun.sums.add("optim/changed", sample.count_changed(), len(sample))
        self.progress.end()
        return self.report(lr, begun.sums)

    def row_sets_of(self, assignment: Assignment) -> list[RowSet]:
        """A set without a row is on no rank, so all ranks leave it out alike."""
        row_sets = self.settings.row_sets
        return [each for each in row_sets if assignment.rows_of(each.name) is not None]

    def report(self, lr: float, sums: MetricSums) -> dict[str, float]:
        """The metrics of a Step on all ranks."""
        means = sums.means(self.ranks.add_up, self.ranks.greatest)
        return {"optim/lr": lr} | means | self.adapter.measure()

    def _updates(
        self, assignment: Assignment, row_sets: Sequence[RowSet], lr: float, begun: BegunStep
    ) -> Iterator[StepUpdate]:
        """Draw the updates from the rows of all ranks, of each set by itself; this rank's part of
        each.
        """
        with self.progress.keeping(True), self.ranks.together():
            step_sets = [self.read(assignment, row_set) for row_set in row_sets]
        for step_set in step_sets if not begun.has_read else ():
            add_sampled_entropy(step_set.row_set, step_set.rows, begun.sums)
        parts_by_set = [self._draw(assignment, step_set) for step_set in step_sets]
        first = True
        for update_parts in zip(*parts_by_set, strict=True):
            parts, keys = zip(*update_parts, strict=True)
            update = StepUpdate(
                parts=parts,
                keys=Keys.concat(keys),
                step=assignment.step,
                lr=lr,
                first=first,
                sums=begun.sums,
                losses=begun.sums,
            )
            yield update
            first = first and not update.tokens  # without a token it is skipped

    def read(self, assignment: Assignment, row_set: RowSet) -> StepSet:
        """Read this rank's rows of a set. Raises for rows that the Model cannot read."""
        rows = step_rows(assignment, self.settings.loss, self.node, row_set.name)
        name, limit = self.model, self.position_limit
        require_positions(self.node, name, limit, rows.keys, rows.prompts, rows.completions)
        for ids in (rows.prompts, rows.completions):
            require_embedded_ids(self.node, name, ids, rows.keys, self.vocabulary)
        if len(rows.keys):
            require_ids(self.node, name, rows, row_set.loss, self.vocabulary)
        assigned = assignment.rows_of(row_set.name)
        assert assigned is not None
        return StepSet(row_set, rows, assigned)

    def _draw(self, assignment: Assignment, step_set: StepSet) -> Iterator[tuple[Part, Keys]]:
        """Draw the rows of a set in each update."""
        every = EveryRow.of(step_set, self.ranks)
        settings, name, step = self.settings, self.node, assignment.step
        return draw_parts(step_set, every, settings, seed=self.seed, node=name, step=step)

    def _update(self, update: StepUpdate) -> None:
        """Make one optimizer step; skipped, and counted, if no row has a trained token."""
        sums, lead = update.sums, self.ranks.lead
        if not update.tokens:
            sums.count("optim/skipped", lead)
            return
        with ExitStack() as where_it_fails:
            where_it_fails.callback(self.optimizer.clear)
            self.add_gradients(update)
            norm = self.sum_gradients(update.step, update.keys)
            where_it_fails.pop_all()
        self.progress.note(MemoryNeed(doing="the update of the weights", is_divisible=False))
        with self.progress.keeping(False):
            self.optimizer.step(update.lr, norm)
        self.count_update(sums, norm, update.tokens)
        for part in update.parts:
            if not part.weights.tokens:
                continue
            for term in part.row_set.loss.terms:
                # The shares of micro-batches were added with a count of 0: one count an update.
                sums.add(f"loss/{term.label}", 0.0, lead)

    def count_update(self, sums: MetricSums, norm: Tensor, tokens: int) -> None:
        """All ranks have these numbers: the first alone reports them, so that sums count them
        once.
        """
        lead = self.ranks.lead
        sums.add("optim/grad_norm", norm, 1.0)
        sums.count("optim/updates", lead)
        sums.count("train/tokens", lead * tokens)

    def add_gradients(self, update: StepUpdate, *, meets: bool = True) -> None:
        """Run all micro-batches. meets: whether all ranks do so at once."""
        idle = self.backward.idle if self.is_split else None
        batches: list[MicroBatch] = []
        for part in update.parts:
            batches += self._micro_batches(part)
        turns = self.ranks.together(batches, idle, meets=meets)
        with ExitStack() as where_it_fails:
            where_it_fails.callback(self.progress.note_failure, turns)
            with turns:
                for part, rows in turns:
                    self._note_need(part, rows)
                    self.backward.run(update, part, rows, turns)
                self.progress.note(MemoryNeed())  # what fails now, fails on another rank
            where_it_fails.pop_all()

    def _note_need(self, part: Part, indices: np.ndarray) -> None:
        """Note which micro-batch is computed, should memory run out."""
        rows = part.rows
        units = rows.groups[indices] if part.row_set.atomic else indices
        need = describe_need(
            "a micro-batch",
            rows.keys,
            rows.prompts,
            rows.completions,
            indices,
            is_divisible=len(np.unique(units)) > 1,
        )
        self.progress.note(need)

    def sum_gradients(self, step: int, keys: Keys) -> Tensor:
        """Sum the gradients over all ranks' rows. Returns their norm; raises KernelError if it is
        not finite. keys: of the rows.
        """
        if not self.is_split:  # FSDP sums them within each backward
            self.ranks.sum_gradients(self.optimizer.masters)
        norm = self.optimizer.norm()
        # Waits for the device, once an update: weights must not be updated by what is no number.
        if not torch.isfinite(norm):
            raise not_finite(self.node, "a gradient norm", float(norm), step, keys)
        return norm

    def _micro_batches(self, part: Part) -> list[MicroBatch]:
        """Cut an update's rows of a set: the live ones, or whole groups for a loss over groups."""
        rows, picked, atomic = part.rows, part.picked, part.row_set.atomic
        if atomic:
            groups = rows.groups[picked]
        else:
            picked = picked[part.weights.live[picked]]
            groups = rows.prompt_groups[picked]
        index_sets = micro_batches(
            rows.prompts,
            rows.completions,
            picked,
            groups,
            tokens=self.progress.budget,
            atomic=atomic,
        )
        return [(part, indices) for indices in index_sets]
