"""A layered layout of boxes and edges, after Sugiyama, Tagawa and Toda (1981).

Owns: layers, the order within each, and places from left to right. Does not own: what the boxes
are, heights and how lines run (arrange.py, routes.py).

An edge over several layers gets a waypoint in each one between, which takes part in the ordering
like a box; so long edges run beside boxes and not behind them. The edges of one box share their
waypoints: they leave it as one trunk. A layer that is wider than the limit becomes several.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

Edge = tuple[str, str]
_SWEEPS, _EXCHANGES = 12, 4
_GAP, _TRUNKS, _BESIDE = 28.0, 10.0, 18.0
"""Pixels between two boxes, two waypoints, and a box and a waypoint."""
_POINT = 2.0
_WITHIN = 18.0
"""Pixels between what is in a column and its frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Width and height of a box in pixels. port: how far right of its middle its edges are."""

    width: float
    height: float
    port: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """The result. rows: boxes and waypoints from left to right; x: of their ports. paths: for each
    edge the waypoints between its two boxes. columns: left and right end of each, by number.
    """

    rows: Sequence[Sequence[str]]
    layer: Mapping[str, int]
    x: Mapping[str, float]
    paths: Mapping[Edge, Sequence[str]]
    width: float
    columns: Mapping[int, tuple[float, float]]


@dataclass(slots=True, kw_only=True)
class _Draft:
    """What is to be laid out, waypoints too."""

    boxes: dict[str, Size]
    column: dict[str, int]
    layer: dict[str, int]
    above: dict[str, list[str]]
    below: dict[str, list[str]]
    links: list[Edge]

    def gap(self, a: str, b: str) -> float:
        """Between two neighbours of a row."""
        points = (self.boxes[a].height == 0.0) + (self.boxes[b].height == 0.0)
        return (_GAP, _BESIDE, _TRUNKS)[points]


def place(
    sizes: Mapping[str, Size],
    edges: Sequence[Edge],
    *,
    least: Mapping[str, int],
    limit: float = math.inf,
    columns: Mapping[str, int] | None = None,
    widths: Mapping[int, float] | None = None,
) -> Layers:
    """Lay out an acyclic graph, top to bottom.

    least: the first layer that a box may stand in (0 where it is not named), before wide ones are
    split. limit: width that a layer of several boxes does not exceed. columns: of boxes that stand
    in columns side by side, all in order; widths: the least of a column.
    """
    column = dict(columns or dict.fromkeys(sizes, 0))
    edges = list(dict.fromkeys(edges))
    layer = _split(assign(sizes, edges, least), sizes, edges, column, limit)
    draft = _Draft(boxes=dict(sizes), column=column, layer=layer, above={}, below={}, links=[])
    paths = {edge: _waypoints(draft, edge) for edge in edges}
    draft.links = list(dict.fromkeys(draft.links))
    draft.above = {box: [] for box in draft.boxes}
    draft.below = {box: [] for box in draft.boxes}
    for a, b in draft.links:
        draft.below[a].append(b)
        draft.above[b].append(a)
    rows = _order(draft)
    bounds = _columns(draft, rows, limit, widths or {}, framed=columns is not None)
    x = _across(draft, rows, bounds)
    left = min((low for low, _ in bounds.values()), default=0.0)
    if columns is None:
        left = min((_left(draft, x, box) for box in x), default=0.0)
    right = max((_left(draft, x, box) + draft.boxes[box].width for box in x), default=0.0)
    if columns is not None:
        right = max((high for _, high in bounds.values()), default=0.0)
    return Layers(
        rows=rows,
        layer=draft.layer,
        x={box: value - left for box, value in x.items()},
        paths=paths,
        width=right - left,
        columns={c: (low - left, high - left) for c, (low, high) in bounds.items()},
    )


def _left(draft: _Draft, x: Mapping[str, float], box: str) -> float:
    size = draft.boxes[box]
    return x[box] - size.port - size.width / 2


def assign(
    sizes: Mapping[str, Size], edges: Sequence[Edge], least: Mapping[str, int]
) -> dict[str, int]:
    """Longest path from the top; then boxes with nothing above them sink to just above their first
    user.
    """
    into: dict[str, list[str]] = {box: [] for box in sizes}
    out: dict[str, list[str]] = {box: [] for box in sizes}
    for a, b in edges:
        into[b].append(a)
        out[a].append(b)
    layer = _longest_paths(into, out, least)
    for box in sizes:
        if not into[box] and out[box]:
            layer[box] = max(least.get(box, 0), min(layer[user] for user in out[box]) - 1)
    return layer


def _longest_paths(
    into: Mapping[str, list[str]], out: Mapping[str, list[str]], least: Mapping[str, int]
) -> dict[str, int]:
    layer = {box: least.get(box, 0) for box in into}
    waiting = {box: len(above) for box, above in into.items()}
    ready = [box for box in into if not waiting[box]]
    for box in ready:  # grows while it is walked
        for user in out[box]:
            layer[user] = max(layer[user], layer[box] + 1)
            waiting[user] -= 1
            if not waiting[user]:
                ready.append(user)
    return layer


def _split(
    wished: Mapping[str, int],
    sizes: Mapping[str, Size],
    edges: Sequence[Edge],
    column: Mapping[str, int],
    limit: float,
) -> dict[str, int]:
    """Layers without a gap, none wider than the limit with the trunks that pass it, unless it has
    one box only.
    """
    users: dict[str, set[str]] = {}
    for a, b in edges:
        users.setdefault(a, set()).add(b)
    share = limit / max(1, len(set(column.values())))
    members: dict[int, list[str]] = {}
    for box in sizes:
        members.setdefault(wished[box], []).append(box)
    layer: dict[str, int] = {}
    last: dict[str, int] = {}
    for _, rest in sorted(members.items()):
        while rest:
            passing = _passing(users, layer, column)
            row, rest = _fitting(rest, sizes, column, share, passing)
            now = max(last.values(), default=-1) + 1
            layer.update(dict.fromkeys(row, now))
            last[row[0]] = now
    return layer


def _passing(
    users: Mapping[str, set[str]], layer: Mapping[str, int], column: Mapping[str, int]
) -> dict[int, float]:
    """The width of the trunks, by column, of what is still read below."""
    found: dict[int, float] = {}
    for box in layer:
        if not layer.keys() >= users.get(box, set()):
            found[column[box]] = found.get(column[box], 0.0) + _POINT + _TRUNKS
    return found


def _fitting(
    boxes: Sequence[str],
    sizes: Mapping[str, Size],
    column: Mapping[str, int],
    room: float,
    taken: Mapping[int, float],
) -> tuple[list[str], list[str]]:
    """Those that fit beside each other, at least one, and the rest; their order stays."""
    row: list[str] = []
    rest: list[str] = []
    used = dict(taken)
    for box in boxes:
        wide = used.get(column[box], 0.0) + sizes[box].width + _GAP
        if row and (wide > room or (rest and column[rest[-1]] == column[box])):
            rest.append(box)
        else:
            row.append(box)
            used[column[box]] = wide
    return row, rest


def _waypoints(draft: _Draft, edge: Edge) -> list[str]:
    """The waypoints of an edge; notes them and the links between them."""
    a, b = edge
    between = range(draft.layer[a] + 1, draft.layer[b])
    points = [f"\x00{a}\x00{at}" for at in between]
    draft.layer.update(zip(points, between, strict=True))
    draft.column.update(dict.fromkeys(points, draft.column[a]))
    draft.boxes.update(dict.fromkeys(points, Size(width=_POINT, height=0.0)))
    draft.links += pairwise([a, *points, b])
    return points


def _order(draft: _Draft) -> list[list[str]]:
    """Barycentre sweeps down and up, with exchanges of neighbours; the order with the fewest
    crossings wins.
    """
    rows: list[list[str]] = [[] for _ in range(max(draft.layer.values(), default=-1) + 1)]
    for box, at in draft.layer.items():
        rows[at].append(box)
    for row in rows:
        row.sort(key=draft.column.__getitem__)
    best, fewest = [list(row) for row in rows], crossings(rows, draft.links)
    for sweep in range(_SWEEPS):
        if not fewest:
            break
        down = sweep % 2 == 0
        near = draft.above if down else draft.below
        for at in range(1, len(rows)) if down else range(len(rows) - 2, -1, -1):
            _sort_by(rows[at - 1 if down else at + 1], rows[at], near, draft.column)
        for _ in range(_EXCHANGES):
            if not _exchange(rows, draft):
                break
        found = crossings(rows, draft.links)
        if found < fewest:
            best, fewest = [list(row) for row in rows], found
    return best


def _exchange(rows: Sequence[list[str]], draft: _Draft) -> bool:
    """Exchange neighbours of a column wherever that leaves fewer crossings; whether any was."""
    changed = False
    places = [{box: i for i, box in enumerate(row)} for row in rows]
    for at, row in enumerate(rows):
        # Beyond the first and the last row there is nobody, so any places will do.
        over = _near(row, draft.above, places[at - 1])
        under = _near(row, draft.below, places[(at + 1) % len(rows)])
        moved = False
        for i in range(len(row) - 1):
            a, b = row[i], row[i + 1]
            if draft.column[a] != draft.column[b]:
                continue
            if _saved(over[a], over[b]) + _saved(under[a], under[b]) > 0:
                row[i], row[i + 1], moved = b, a, True
        if moved:
            places[at], changed = {box: i for i, box in enumerate(row)}, True
    return changed


def _near(
    row: Sequence[str], near: Mapping[str, list[str]], place: Mapping[str, int]
) -> dict[str, list[int]]:
    """The sorted places of each box's neighbours on one side."""
    return {box: sorted([place[other] for other in near[box]]) for box in row}


def _saved(left: Sequence[int], right: Sequence[int]) -> int:
    """Crossings that go if two neighbours are exchanged, by the sorted places at the other ends of
    their links.
    """
    if len(left) == len(right) == 1:  # two lines that pass, as most are
        return (left[0] > right[0]) - (left[0] < right[0])
    return sum(len(left) - bisect_right(left, p) - bisect_left(left, p) for p in right)


def _sort_by(
    fixed: Sequence[str], row: list[str], near: Mapping[str, list[str]], column: Mapping[str, int]
) -> None:
    """Sort a row by the mean place of each box's neighbours in the fixed row, within columns."""
    place = {box: float(i) for i, box in enumerate(fixed)}
    means = {box: _mean(near[box], place, float(i)) for i, box in enumerate(row)}
    row.sort(key=lambda box: (column[box], means[box]))


def _mean(near: Sequence[str], place: Mapping[str, float], otherwise: float) -> float:
    if len(near) == 1:
        return place[near[0]]
    found = [place[box] for box in near]
    return math.fsum(found) / len(found) if found else otherwise  # the same in any Python


def crossings(rows: Sequence[Sequence[str]], links: Sequence[Edge]) -> int:
    """How many pairs of links between neighbouring layers cross: inversions, by a tree of sums
    (Barth, Juenger and Mutzel 2002).
    """
    at = {box: (i, k) for i, row in enumerate(rows) for k, box in enumerate(row)}
    between: dict[int, list[tuple[int, int]]] = {}
    for a, b in links:
        between.setdefault(at[a][0], []).append((at[a][1], at[b][1]))
    return sum(
        _inversions([b for _, b in sorted(pairs)], len(rows[above + 1]))
        for above, pairs in between.items()
    )


def _inversions(places: Sequence[int], size: int) -> int:
    """Pairs of which the first is greater."""
    sums, found = [0] * (size + 1), 0
    for seen, place in enumerate(places):
        upto, i = 0, place + 1
        while i:
            upto += sums[i]
            i &= i - 1
        found += seen - upto
        i = place + 1
        while i <= size:
            sums[i] += 1
            i += i & -i
    return found


def _columns(
    draft: _Draft,
    rows: Sequence[Sequence[str]],
    limit: float,
    least: Mapping[int, float],
    *,
    framed: bool,
) -> dict[int, tuple[float, float]]:
    """Left and right end of each column: as wide as its widest row."""
    wide: dict[int, float] = dict(least)
    for row in rows:
        for number, part in _parts(draft, row).items():
            wide[number] = max(wide.get(number, 0.0), _tight(draft, part))
    if not framed:
        most = max([*wide.values(), limit if limit < math.inf else 1e6])
        return {0: (-most / 2, most / 2)}
    found, at = {}, 0.0
    for number in sorted(wide):
        found[number] = (at + _WITHIN, at + _WITHIN + wide[number])
        at += wide[number] + 2 * _WITHIN + _BESIDE
    return found


def _parts(draft: _Draft, row: Sequence[str]) -> dict[int, list[str]]:
    """A row by its columns."""
    found: dict[int, list[str]] = {}
    for box in row:
        found.setdefault(draft.column[box], []).append(box)
    return found


def _tight(draft: _Draft, row: Sequence[str]) -> float:
    gaps = math.fsum(draft.gap(a, b) for a, b in pairwise(row))
    return gaps + math.fsum(draft.boxes[box].width for box in row)


def _across(
    draft: _Draft, rows: Sequence[Sequence[str]], bounds: Mapping[int, tuple[float, float]]
) -> dict[str, float]:
    """Ports: each box's near the mean of its neighbours', none overlapping, the order kept."""
    x: dict[str, float] = {}
    parts = [
        [(part, bounds[number]) for number, part in _parts(draft, row).items()] for row in rows
    ]
    for row in parts:
        for part, (low, high) in row:
            x.update(_packed(draft, part, dict.fromkeys(part, (low + high) / 2), low, high))
    near = {box: [*draft.above[box], *draft.below[box]] for box in draft.boxes}
    for sweep in range(_SWEEPS * 2):
        for row in parts if sweep % 2 == 0 else reversed(parts):
            for part, (low, high) in row:
                wish = {box: _mean(near[box], x, x[box]) for box in part}
                x.update(_packed(draft, part, wish, low, high))
    return x


def _packed(
    draft: _Draft, row: Sequence[str], wish: Mapping[str, float], low: float, high: float
) -> dict[str, float]:
    """The places nearest to the wishes (least squares) that keep order, gaps and bounds: pooled
    adjacent violators, clipped.
    """
    offset: dict[str, float] = {}
    at = 0.0
    for i, box in enumerate(row):
        size = draft.boxes[box]
        at += draft.gap(row[i - 1], box) if i else 0.0
        offset[box] = at + size.width / 2 + size.port
        at += size.width
    pools: list[tuple[float, float, list[str]]] = []
    for box in row:
        # Waypoints pull harder, so that long edges come out straight.
        weight = 1.0 if draft.boxes[box].height else 2.0
        pool = ((wish[box] - offset[box]) * weight, weight, [box])
        while pools and pools[-1][0] / pools[-1][1] > pool[0] / pool[1]:
            above = pools.pop()
            pool = (above[0] + pool[0], above[1] + pool[1], above[2] + pool[2])
        pools.append(pool)
    most = max(low, high - at)
    return {
        box: min(max(total / weight, low), most) + offset[box]
        for total, weight, members in pools
        for box in members
    }
