"""Reduction: unreduced terms to one number, however an update is cut into micro-batches.

Owns: the denominators, counted once over a whole update before its first backward, and the
sums of metrics. Does not own: any formula, the backward pass.

A row without a trained token is left out of a mean over rows (verl, OpenRLHF) or counts in it as 0
(TRL): `masked_rows` says which. A mask that a loss computes itself changes its terms, never the
denominator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from dataflow.errors import KernelError
from dataflow.loss import LossScope, Now, Terms
from dataflow.training_parts import Divisor
from operators.kernels.tensors import widen

AGGREGATES = ("token_mean", "sequence_mean", "sequence_sum", "constant")
MASKED_ROWS = ("skip", "count")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCounts:
    """What the sums of an update's rows of one set are divided by.

    tokens: trained ones. rows, groups: those with one, or all of them (masked_rows="count").
    """

    tokens: int = 0
    rows: int = 0
    groups: int = 0

    def __add__(self, other: UpdateCounts) -> UpdateCounts:
        return UpdateCounts(
            tokens=self.tokens + other.tokens,
            rows=self.rows + other.rows,
            groups=self.groups + other.groups,
        )

    def of(self, divisor: Divisor) -> int:
        """The count by this name; at least 1."""
        if divisor == "constant":
            return 1  # each row's weight has it
        counts = {"tokens": self.tokens, "rows": self.rows, "groups": self.groups}
        return max(1, counts[divisor])


UNDIVIDED = UpdateCounts(tokens=1, rows=1, groups=1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weights:
    """The weight of each token, row and group of an update; 0 for rows without a trained token.

    token float64 [rows of the Step]: the weight of each trained token of that row in a token-scope
    term; row float64 [rows]: of the row; group: of each group. live bool [rows]: rows of the update
    with a trained token. tokens: trained tokens of the update.
    """

    token: np.ndarray
    row: np.ndarray
    group: float
    live: np.ndarray
    tokens: int

    def of(self, mine: np.ndarray) -> Weights:
        """Take those of one rank's rows (indices `mine` in the Step), in the rank's order."""
        return replace(self, token=self.token[mine], row=self.row[mine], live=self.live[mine])


def count_weights(
    trained: np.ndarray,
    groups: np.ndarray,
    rows: np.ndarray,
    *,
    aggregate: str,
    masked_rows: str = "skip",
    constant: float = 1.0,
) -> Weights:
    """Count the denominators of one update.

    trained int64 [rows]: trained tokens of each row of the Step; groups int64 [rows]: its group;
    rows: the indices of the update's. masked_rows: `skip` or `count` rows without a trained token.
    constant: the divisor of aggregate="constant".
    """
    is_chosen = np.isin(np.arange(len(trained)), rows)
    counts = count_update(trained, groups, is_chosen, masked_rows)
    return weigh_rows(trained, is_chosen, counts, aggregate=aggregate, constant=constant)


def count_update(
    trained: np.ndarray, groups: np.ndarray, is_chosen: np.ndarray, masked_rows: str
) -> UpdateCounts:
    """Count the chosen rows' tokens, rows and groups. is_chosen: bool [rows]; the rest as in
    `count_weights`.
    """
    live = is_chosen & (trained > 0)
    counted = is_chosen if masked_rows == "count" else live
    return UpdateCounts(
        tokens=int(trained[live].sum()),
        rows=int(counted.sum()),
        groups=len(np.unique(groups[counted])),
    )


def weigh_rows(
    trained: np.ndarray,
    is_chosen: np.ndarray,
    counts: UpdateCounts,
    *,
    aggregate: str,
    constant: float = 1.0,
) -> Weights:
    """Weigh each row, divided by these counts; UNDIVIDED: by what the row itself knows alone."""
    live = is_chosen & (trained > 0)
    row_weights = live / counts.of("rows")
    token_weights = {
        "token_mean": live / counts.of("tokens"),
        "sequence_mean": row_weights / np.maximum(1, trained),
        "sequence_sum": row_weights,
        "constant": live / constant,
    }
    return Weights(
        token=token_weights[aggregate],
        row=row_weights,
        group=1.0 / counts.of("groups"),
        live=live,
        tokens=int(trained[live].sum()),
    )


def reduce_term(
    terms: Terms, scope: LossScope, name: str, now: Now, weights: Weights, rows: np.ndarray
) -> Tensor:
    """Reduce a term to one micro-batch's part of its number.

    rows: the indices of the micro-batch's rows in the Step. Raises KernelError if the loss does not
    have the length of its scope.
    """
    lengths = {"token": len(now.mask), "sequence": now.rows, "group": now.groups}
    length = lengths[scope]
    if tuple(terms.loss.shape) != (length,):
        raise KernelError(
            f"loss {name}: expected Terms.loss of shape [{length}], one number a {scope}, found "
            f"{list(terms.loss.shape)}. Fix: return unreduced terms, or declare another scope."
        )
    loss = widen(terms.loss)
    weight = _spread_weights(scope, now, weights, rows, loss.dtype)
    # Filled, not multiplied: the loss at a token that does not count may be infinite.
    return (loss.masked_fill(weight == 0, 0.0) * weight).sum()


def _spread_weights(
    scope: LossScope, now: Now, weights: Weights, rows: np.ndarray, dtype: torch.dtype
) -> Tensor:
    """Lay the weights out as the scope's numbers: [tokens], [rows] or [groups]."""
    step_weights = weights.token if scope == "token" else weights.row
    row_weights = torch.from_numpy(step_weights[rows])
    by_row = row_weights.to(dtype).to(now.mask.device)
    if scope == "token":
        return now.mask * by_row[now.row]
    if scope == "sequence":
        return by_row
    # A group counts if one of its rows does.
    return (now.group_sum(by_row) > 0).to(dtype) * weights.group


def find_bad_row(loss: Tensor, scope: LossScope, now: Now) -> int | None:
    """Find the first row of the micro-batch with a non-finite term that counts."""
    is_bad = ~torch.isfinite(loss)
    if scope == "token":
        is_bad &= now.mask > 0
    bad = torch.nonzero(is_bad).flatten().tolist()
    if not bad:
        return None
    if scope == "token":
        return int(now.row[bad[0]])
    if scope == "group":
        rows_of_group = torch.nonzero(now.row_group == bad[0])
        return int(rows_of_group[0, 0])
    return bad[0]


def _zero() -> Tensor:
    """float64, so that no sum loses what is far smaller than it, nor a count beyond 2 ** 24."""
    return torch.zeros((), dtype=torch.float64)


_SUM, _COUNT = "sum ", "count "
"""What the names of sums and counts begin with while they are added up together."""

_ByName = Callable[[Mapping[str, float]], Mapping[str, float]]


@dataclass(slots=True)
class MetricSums:
    """Metrics, kept on the device until the Step ends: reading one earlier would wait for it.

    A metric with a count is reported as sum / count; one without, as its sum; one of `greatest` as
    the greatest of its numbers. All are added up in float64.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, Tensor] = field(default_factory=dict)
    greatest: dict[str, Tensor] = field(default_factory=dict)

    def copy(self) -> MetricSums:
        """The same numbers, to which others are added by themselves."""
        return MetricSums(dict(self.sums), dict(self.counts), dict(self.greatest))

    def count(self, name: str, number: Tensor | float) -> None:
        """Add to a sum."""
        self.sums[name] = self.sums.get(name, _zero()) + number

    def add(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        """Add to a mean; both numbers are detached."""
        self.count(name, _detach(total))
        self.counts[name] = self.counts.get(name, _zero()) + _detach(count)

    def add_all(self, metrics: Mapping[str, tuple[Tensor, Tensor | float]]) -> None:
        """Add a formula's metrics."""
        for name, (total, count) in metrics.items():
            self.add(name, total, count)

    def most(self, name: str, number: Tensor) -> None:
        """Keep the greatest. name: ends in /max, by which reports of several Workers become one;
        number float64 []: -infinity says nothing.
        """
        known = self.greatest.get(name, number)
        self.greatest[name] = torch.maximum(known, number)

    def means(self, add_up: _ByName = dict, most: _ByName = dict) -> dict[str, float]:
        """Compute the metrics to report, without means and maxima of no numbers. add_up: sums over
        ranks, by name; most: maxima.
        """
        numbers = {_SUM + name: number for name, number in _read(self.sums).items()}
        numbers |= {_COUNT + name: number for name, number in _read(self.counts).items()}
        added = add_up(numbers)  # all at once: between ranks each call is a collective
        totals = {name[len(_SUM) :]: added[name] for name in added if name.startswith(_SUM)}
        metrics: dict[str, float] = {}
        for name, total in totals.items():
            count = added.get(_COUNT + name, 1.0)  # a sum has no count
            if count:
                metrics[name] = total / count
        peaks = most(_read(self.greatest))
        return metrics | {name: peak for name, peak in peaks.items() if peak != -math.inf}


def _detach(number: Tensor | float) -> Tensor | float:
    return number.detach() if isinstance(number, Tensor) else number


def _read(numbers: Mapping[str, Tensor]) -> dict[str, float]:
    """Read numbers from the device, which waits for it."""
    return {name: float(number) for name, number in numbers.items()}
