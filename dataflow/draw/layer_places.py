"""The places of boxes from left to right.

Owns: the widths of columns, and each box's place in its row. Does not own: the order in a row
(layer_order.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dataflow.draw.layer_draft import BESIDE, LayerDraft
from dataflow.draw.layer_order import SWEEPS, find_mean

_WITHIN = 18.0
"""Pixels between what is in a column and its frame."""
_ENDLESS = 1e6
"""Width of the only column where there is no limit."""

Bounds = tuple[float, float]
"""Left and right end."""
Places = Mapping[str, float]
"""Pixels from the left, by box."""


def place_left_end(draft: LayerDraft, x: Places, box: str) -> float:
    """The left end of a box. x: of its port."""
    size = draft.boxes[box]
    return x[box] - size.port - size.width / 2


def measure_columns(
    draft: LayerDraft,
    rows: Sequence[Sequence[str]],
    limit: float,
    least: Mapping[int, float],
    *,
    framed: bool,
) -> dict[int, Bounds]:
    """Left and right end of each column: as wide as its widest row."""
    widths: dict[int, float] = dict(least)
    for row in rows:
        for number, boxes in _part_by_column(draft, row).items():
            widths[number] = max(widths.get(number, 0.0), _measure_row(draft, boxes))
    if not framed:
        room = limit if limit < math.inf else _ENDLESS
        widest = max([*widths.values(), room])
        return {0: (-widest / 2, widest / 2)}
    bounds: dict[int, Bounds] = {}
    x = 0.0
    for number in sorted(widths):
        bounds[number] = (x + _WITHIN, x + _WITHIN + widths[number])
        x += widths[number] + 2 * _WITHIN + BESIDE
    return bounds


def _part_by_column(draft: LayerDraft, row: Sequence[str]) -> dict[int, list[str]]:
    """A row by its columns."""
    parts: dict[int, list[str]] = {}
    for box in row:
        parts.setdefault(draft.column[box], []).append(box)
    return parts


def _measure_row(draft: LayerDraft, row: Sequence[str]) -> float:
    """The width of a row whose boxes stand as close as they may."""
    gaps = [draft.gap(left, right) for left, right in pairwise(row)]
    widths = [draft.boxes[box].width for box in row]
    return math.fsum(gaps) + math.fsum(widths)


def place_across(
    draft: LayerDraft, rows: Sequence[Sequence[str]], bounds: Mapping[int, Bounds]
) -> dict[str, float]:
    """Place the port of each box near the mean of its neighbours', none overlapping, the order
    kept.
    """
    x: dict[str, float] = {}
    rows_in_parts: list[list[tuple[list[str], Bounds]]] = []
    for row in rows:
        parts = _part_by_column(draft, row)
        rows_in_parts.append([(boxes, bounds[number]) for number, boxes in parts.items()])
    for parts in rows_in_parts:
        for boxes, (low, high) in parts:
            middle = (low + high) / 2
            x.update(_pack(draft, boxes, dict.fromkeys(boxes, middle), (low, high)))
    neighbours = {box: draft.above[box] + draft.below[box] for box in draft.boxes}
    for sweep in range(SWEEPS * 2):
        for parts in rows_in_parts if sweep % 2 == 0 else reversed(rows_in_parts):
            for boxes, part_bounds in parts:
                wishes = {box: find_mean(neighbours[box], x, x[box]) for box in boxes}
                x.update(_pack(draft, boxes, wishes, part_bounds))
    return x


@dataclass(slots=True)
class _Pool:
    """Boxes that touch, and so move together. total: of the places that they wish the first one to
    have, each with its weight.
    """

    total: float
    weight: float
    boxes: list[str]

    @property
    def mean(self) -> float:
        """Where all their wishes together want the first one."""
        return self.total / self.weight


def _pack(
    draft: LayerDraft, row: Sequence[str], wishes: Places, bounds: Bounds
) -> dict[str, float]:
    """The places nearest to the wishes (least squares) that keep order, gaps and bounds: pooled
    adjacent violators, clipped.
    """
    low, high = bounds
    offsets: dict[str, float] = {}
    width = 0.0
    for i, box in enumerate(row):
        size = draft.boxes[box]
        if i > 0:
            width += draft.gap(row[i - 1], box)
        offsets[box] = width + size.width / 2 + size.port
        width += size.width
    highest = max(low, high - width)
    places: dict[str, float] = {}
    for pool in _pool_wishes(draft, row, wishes, offsets):
        start = min(max(pool.mean, low), highest)
        for box in pool.boxes:
            places[box] = start + offsets[box]
    return places


def _pool_wishes(
    draft: LayerDraft,
    row: Sequence[str],
    wishes: Places,
    offsets: Places,
) -> Iterator[_Pool]:
    """Pools from left to right, none of which wishes to be left of the one before. offsets: of each
    box from the first one, where all touch.
    """
    pools: list[_Pool] = []
    for box in row:
        # Waypoints pull harder, so that long edges come out straight.
        weight = 2.0 if draft.is_waypoint(box) else 1.0
        wished_start = wishes[box] - offsets[box]
        pool = _Pool(wished_start * weight, weight, [box])
        while pools and pools[-1].mean > pool.mean:
            before = pools.pop()
            total, weight = before.total + pool.total, before.weight + pool.weight
            pool = _Pool(total, weight, before.boxes + pool.boxes)
        pools.append(pool)
    return iter(pools)
