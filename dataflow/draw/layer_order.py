"""The order of boxes within their layers, such that few links cross.

Owns: the sweeps, the exchanges, and counting crossings. Does not own: which layer a box is in
(layers.py), its place (layer_places.py).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence

from dataflow.draw.layer_draft import Edge, LayerDraft, Neighbours, Numbers

SWEEPS = 12
_EXCHANGES = 4
"""Rounds of exchanges behind each sweep."""

Rows = Sequence[list[str]]


def order_layers(draft: LayerDraft) -> list[list[str]]:
    """Order each layer by barycentre sweeps down and up, with exchanges of neighbours; the order
    with the fewest crossings wins.
    """
    rows: list[list[str]] = []
    for box, layer in draft.layer.items():
        while len(rows) <= layer:
            rows.append([])
        rows[layer].append(box)
    for row in rows:
        row.sort(key=draft.column.__getitem__)
    best = _copy_rows(rows)
    fewest = count_crossings(rows, draft.links)
    for sweep in range(SWEEPS):
        if not fewest:
            break
        if sweep % 2 == 0:
            _sweep_down(rows, draft)
        else:
            _sweep_up(rows, draft)
        for _ in range(_EXCHANGES):
            if not _exchange(rows, draft):
                break
        crossings = count_crossings(rows, draft.links)
        if crossings < fewest:
            best = _copy_rows(rows)
            fewest = crossings
    return best


def _copy_rows(rows: Rows) -> list[list[str]]:
    return [list(row) for row in rows]


def _sweep_down(rows: Rows, draft: LayerDraft) -> None:
    """Sort each row by its neighbours in the one above."""
    for number in range(1, len(rows)):
        _sort_by(rows[number - 1], rows[number], draft.above, draft.column)


def _sweep_up(rows: Rows, draft: LayerDraft) -> None:
    """Sort each row by its neighbours in the one below."""
    for number in range(len(rows) - 2, -1, -1):
        _sort_by(rows[number + 1], rows[number], draft.below, draft.column)


def _sort_by(
    fixed: Sequence[str],
    row: list[str],
    neighbours: Neighbours,
    column: Numbers,
) -> None:
    """Sort a row by the mean place of each box's neighbours in the fixed row, within columns."""
    places = {box: float(place) for place, box in enumerate(fixed)}
    means: dict[str, float] = {}
    for place, box in enumerate(row):
        means[box] = find_mean(neighbours[box], places, float(place))
    row.sort(key=lambda box: (column[box], means[box]))


def find_mean(boxes: Sequence[str], places: Mapping[str, float], otherwise: float) -> float:
    """The mean place of boxes; `otherwise` of none."""
    if len(boxes) == 1:
        return places[boxes[0]]
    if not boxes:
        return otherwise
    # Not `sum`, which adds up differently since Python 3.12: drawings are the same in any.
    return math.fsum([places[box] for box in boxes]) / len(boxes)


def _exchange(rows: Rows, draft: LayerDraft) -> bool:
    """Exchange neighbours of a column wherever that leaves fewer crossings; whether any was."""
    has_changed = False
    places = [_number_boxes(row) for row in rows]
    for number, row in enumerate(rows):
        # Beyond the first and the last row there is nobody, so any places will do.
        above = _place_neighbours(row, draft.above, places[number - 1])
        below = _place_neighbours(row, draft.below, places[(number + 1) % len(rows)])
        if _exchange_in_row(row, draft.column, above, below):
            places[number] = _number_boxes(row)
            has_changed = True
    return has_changed


def _number_boxes(row: Sequence[str]) -> dict[str, int]:
    return {box: place for place, box in enumerate(row)}


def _exchange_in_row(
    row: list[str],
    column: Numbers,
    above: Mapping[str, list[int]],
    below: Mapping[str, list[int]],
) -> bool:
    """The same in one row. above, below: the sorted places of each box's neighbours."""
    has_changed = False
    for i in range(len(row) - 1):
        left, right = row[i], row[i + 1]
        if column[left] != column[right]:
            continue
        saved_above = _count_saved(above[left], above[right])
        saved_below = _count_saved(below[left], below[right])
        if saved_above + saved_below > 0:
            row[i], row[i + 1] = right, left
            has_changed = True
    return has_changed


def _place_neighbours(
    row: Sequence[str], neighbours: Neighbours, places: Numbers
) -> dict[str, list[int]]:
    """The sorted places of each box's neighbours on one side."""
    neighbour_places: dict[str, list[int]] = {}
    for box in row:
        neighbour_places[box] = sorted([places[other] for other in neighbours[box]])
    return neighbour_places


def _count_saved(left: Sequence[int], right: Sequence[int]) -> int:
    """Crossings that go if two neighbours are exchanged, by the sorted places at the other ends of
    their links.
    """
    if len(left) == len(right) == 1:  # two lines that pass, as most are
        return (left[0] > right[0]) - (left[0] < right[0])
    saved = 0
    for place in right:
        crossing = len(left) - bisect_right(left, place)
        crossing_then = bisect_left(left, place)
        saved += crossing - crossing_then
    return saved


def count_crossings(rows: Sequence[Sequence[str]], links: Sequence[Edge]) -> int:
    """Count the pairs of links between neighbouring layers that cross: inversions, by a tree of
    sums (Barth, Juenger and Mutzel 2002).
    """
    places: dict[str, tuple[int, int]] = {}
    for layer, row in enumerate(rows):
        for place, box in enumerate(row):
            places[box] = (layer, place)
    ends_by_layer: dict[int, list[tuple[int, int]]] = {}
    for upper, lower in links:
        layer, upper_place = places[upper]
        _, lower_place = places[lower]
        ends_by_layer.setdefault(layer, []).append((upper_place, lower_place))
    crossings = 0
    for layer, ends in ends_by_layer.items():
        lower_places = [lower_place for _, lower_place in sorted(ends)]
        crossings += _count_inversions(lower_places, len(rows[layer + 1]))
    return crossings


def _count_inversions(places: Sequence[int], size: int) -> int:
    """Pairs of which the first is greater. size: more than any place.

    sums is a Fenwick tree: how many places came so far, by ranges whose lengths are powers of two.
    """
    sums = [0] * (size + 1)
    inversions = 0
    for seen_count, place in enumerate(places):
        not_greater, i = 0, place + 1
        while i:
            not_greater += sums[i]
            i &= i - 1  # drops the lowest bit
        inversions += seen_count - not_greater
        i = place + 1
        while i <= size:
            sums[i] += 1
            i += i & -i
    return inversions
