"""Units: of each input row of a node, the samples that are given to a replica together.

    spread 1     a row's samples stay together: one unit a row
    spread s     the samples of a row are cut into s spans, equal but for one, contiguous

Owns: which rows are of which unit, and how units are cut into chunks of equal weight. Does not own:
which units are ready (readiness.py), nor who gets them (dispatch.py).

All of it follows from the plan, the rows and their weights: equal cuts on any number of replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np

from engine.coordinator.balance import split_by_load, split_evenly
from engine.plan.plan import PlannedNode
from engine.protocol.grouping import group_indices

_STEPS = 1 << 20
"""The heaviest unit in whole numbers, which a balance compares exactly."""


class NodeUnits:
    """Of one node: `per_row` units for each input row, numbered through a prompt.

    sizes: int64 [per_row], the output rows of each. of_rows: int64 [rows], the unit of each output
    row of a prompt.
    """

    def __init__(self, node: PlannedNode) -> None:
        factor = node.rows // node.inner
        samples = factor // node.segments
        self.per_row = 1
        if node.relation == "expand" and samples:
            self.per_row = min(max(1, node.layout.spread), samples)
        self.count = node.inner * self.per_row
        # On whole episodes, as one kernel writes all rows of an episode.
        edges = np.arange(self.per_row + 1) * samples // self.per_row * node.segments
        if self.per_row == 1:
            edges = np.array([0, factor])
        self._spans = np.stack([edges[:-1], edges[1:]], axis=1).astype(np.int32)
        self.sizes = np.diff(edges)
        spans = np.repeat(np.arange(self.per_row), self.sizes)
        first = np.arange(node.inner) * self.per_row
        self.of_rows = (first[:, None] + spans[None, :]).reshape(-1)
        """Rows below each other, as samples are numbered."""

    def widen(self, of_inputs: np.ndarray) -> np.ndarray:
        """What is known of each input row, for its units: [slots, inner] -> [slots, units]."""
        return of_inputs if self.per_row == 1 else np.repeat(of_inputs, self.per_row, axis=1)

    def sizes_of(self, units: np.ndarray) -> np.ndarray:
        """int64: the output rows of each unit."""
        return self.sizes[units % self.per_row]

    def inputs_of(self, units: np.ndarray) -> np.ndarray:
        """The input row of each unit."""
        return units if self.per_row == 1 else units // self.per_row

    def join(self, at: np.ndarray, units: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Rows of a chunk with these units of these prompts: the index of each one's first unit,
        and its span, None where all are whole. Spans that follow one another are one row.
        """
        if self.per_row == 1:
            return np.arange(len(units)), None
        row = units // self.per_row
        follows = (at[1:] == at[:-1]) & (row[1:] == row[:-1]) & (units[1:] == units[:-1] + 1)
        first = np.flatnonzero(np.concatenate([[True], ~follows]))
        last = np.append(first[1:], len(units)) - 1
        begins = self._spans[units[first] % self.per_row, 0]
        ends = self._spans[units[last] % self.per_row, 1]
        if not begins.any() and bool((ends == self._spans[-1, 1]).all()):
            return first, None
        return first, np.stack([begins, ends], axis=1)


def whole_weights(weights: np.ndarray) -> np.ndarray:
    """int64: weights in any unit as whole numbers from 0, in their proportions; where some are
    negative, as a score may be, above the least.
    """
    lifted = weights.astype(np.float64) - min(0.0, float(weights.min(initial=0.0)))
    heaviest = float(lifted.max(initial=0.0))
    if not heaviest:
        return np.ones(len(weights), dtype=np.int64)
    return np.rint(lifted / heaviest * _STEPS).astype(np.int64)


def cut_by_weight(
    weights: np.ndarray, row: np.ndarray, parts: int, tail: float, tail_parts: int = 0
) -> list[np.ndarray]:
    """Indices of units, ascending, in at most so many parts of about equal weight; the part with
    the heaviest unit first.

    weights: int64, each 0 or more. row: of each unit a number of its input row, ascending. tail:
    the share of the heaviest units that have parts of their own. tail_parts: how many; 0: so that
    all parts have as much weight.
    """
    order = np.argsort(-weights, kind="stable")
    heavy = order[: ceil(tail * len(order))]
    part = np.zeros(len(weights), dtype=np.int64)
    if parts == 1 or not 0 < len(heavy) < len(order):
        part = split_evenly(weights, parts)
    else:
        light = order[len(heavy) :]
        share = weights[heavy].sum() / max(1, weights.sum())
        apart = min(max(1, tail_parts or round(parts * share)), parts - 1)
        part[heavy] = split_evenly(weights[heavy], apart)
        part[light] = apart + split_evenly(weights[light], parts - apart)
    part = _join_spans(part, row)
    full_parts = (units for units in group_indices(part, parts) if len(units))
    return sorted(full_parts, key=lambda units: (-int(weights[units].max()), int(units[0])))


def cut_by_loads(weights: np.ndarray, row: np.ndarray, loads: Sequence[int]) -> list[np.ndarray]:
    """The same in the proportion of loads: the units of each part, which may be none."""
    part = _join_spans(split_by_load(weights, loads), row)
    return group_indices(part, len(loads))


def _join_spans(part: np.ndarray, row: np.ndarray) -> np.ndarray:
    """The parts of the same rows' units, so that a row is in a part once: which of its row's spans
    a part has makes no difference, so those that follow one another.
    """
    return part[np.lexsort((part, row))]
