"""The sums of a Step whose rows come part by part: gradients, counts, losses and metrics.

Owns: one sum of gradients for each set of rows, in the dtype of the optimizer's masters (float32,
wherever the weights are narrower), what it is divided by, and which groups it has. Does not own:
the backward pass (loss_backward.py), sums over ranks (parallel.py), the update (train.py).

Between two parts no weight has a gradient: the sums are here, so that the module may generate, or
go to the host, meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from dataflow.batch import Keys
from dataflow.errors import KernelError
from operators.kernels.torch.parallel import Ranks
from operators.kernels.torch.reduce import MetricSums, UpdateCounts, count_update
from operators.kernels.torch.train_settings import TrainSettings
from operators.kernels.torch.updates import StepSet

_KINDS = ("tokens", "rows", "groups")


class PartSums:
    """Of one Step and one rank. masters: the tensors that gradients are added to. sums: metrics."""

    def __init__(
        self, node: str, step: int, masters: Sequence[nn.Parameter], sums: MetricSums
    ) -> None:
        self.step = step
        self.sums = sums
        self.losses = MetricSums()
        """Of each term of the loss, not divided yet."""
        self.first_row = Keys.of([])
        """The first row that came."""
        self._node = node
        self._masters = masters
        self._gradients: dict[str, list[Tensor | None]] = {}
        self._counts: dict[str, UpdateCounts] = {}
        self._groups: dict[str, set[int]] = {}
        self._rows: dict[str, tuple[int, int]] = {}
        """Of each set: rows that this rank had, and rows that all ranks had."""

    def note_rows(self, read: StepSet, settings: TrainSettings) -> None:
        """Count this rank's rows of a part. Raises KernelError for a group that came before."""
        name, keys = read.row_set.name, read.rows.keys
        groups = self._groups.setdefault(name, set())
        positions = np.unique(keys.position).tolist()
        if again := sorted(groups.intersection(positions)):
            raise KernelError(
                f"{self._node}: step {self.step}: expected parts of whole groups, each once, found"
                f" position {again[0]} in two of them. Fix: all rows of a group in one part."
            )
        groups.update(positions)
        every_row = np.ones(len(keys), dtype=bool)
        trained, numbers = read.rows.trained, read.rows.groups
        counts = count_update(trained, numbers, every_row, settings.masked_rows)
        self._counts[name] = self._counts.get(name, UpdateCounts()) + counts
        mine, total = self._rows.get(name, (0, 0))
        self._rows[name] = mine + len(keys), total + read.assigned.count
        if not len(self.first_row):
            self.first_row = keys.take(np.arange(min(1, len(keys))))

    @contextmanager
    def adding_to(self, row_set: str) -> Iterator[None]:
        """Inside it, what is added to the masters' gradients is added to the sum of this set."""
        sums = self._gradients.get(row_set, [None] * len(self._masters))
        for master, gradient in zip(self._masters, sums, strict=True):
            master.grad = gradient
        yield
        self._gradients[row_set] = [master.grad for master in self._masters]
        for master in self._masters:
            master.grad = None

    def count_all(self, ranks: Ranks) -> dict[str, UpdateCounts]:
        """Count the rows of each set that all ranks had. Raises KernelError, on every rank, if some
        row of a part was on no rank, or on several.
        """
        numbers: dict[str, float] = {}
        totals: dict[str, float] = {}
        for name, counts in self._counts.items():
            numbers |= {f"{name} {kind}": float(getattr(counts, kind)) for kind in _KINDS}
            mine, total = self._rows[name]
            numbers[f"{name} mine"] = float(mine)
            totals[name] = float(total)
        added, totals = ranks.add_up(numbers), ranks.greatest(totals)
        every: dict[str, UpdateCounts] = {}
        for name, total in totals.items():
            came = added[f"{name} mine"]
            if came != total:
                raise KernelError(
                    f"{self._node}: step {self.step}: expected {total:.0f} rows of {name} in all"
                    f" parts on all ranks, found {came:.0f}. Fix: each row of a part on one rank."
                )
            tokens, rows, groups = (int(added[f"{name} {kind}"]) for kind in _KINDS)
            every[name] = UpdateCounts(tokens=tokens, rows=rows, groups=groups)
        return every

    @torch.no_grad()
    def divide(self, divisors: Mapping[str, int]) -> None:
        """Give the masters the gradients of the update: each set's sum, divided. They are here no
        more. divisors: by set.
        """
        for name, gradients in self._gradients.items():
            for master, gradient in zip(self._masters, gradients, strict=True):
                if gradient is None:
                    continue
                gradient.div_(divisors[name])
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        self._gradients.clear()

    def move(self, device: torch.device) -> None:
        """Move the sums of gradients."""
        for gradients in self._gradients.values():
            for index, gradient in enumerate(gradients):
                if gradient is not None:
                    gradients[index] = gradient.to(device)
