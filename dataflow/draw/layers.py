"""A layered layout of boxes and edges, after Sugiyama, Tagawa and Toda (1981).

Owns: layers, the order within each, and the coordinates. Does not own: what the boxes are,
nor how they are drawn (svg.py).

An edge over several layers gets a waypoint in each one between, which takes part in the
ordering like a box; so long edges run beside boxes and not behind them. The edges of one
box share their waypoints: they leave it as one trunk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

Edge = tuple[str, str]
_SWEEPS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Width and height of a box in pixels."""

    width: float
    height: float


@dataclass(slots=True, kw_only=True)
class Placed:
    """The result. x and y are centres; `paths` holds, for each edge, the waypoints between its two
    boxes.
    """

    x: dict[str, float]
    y: dict[str, float]
    width: float
    height: float
    layer: dict[str, int]
    tops: list[float]
    """Upper end of each layer."""
    bottoms: list[float]
    """Lower end of each layer."""
    paths: dict[Edge, list[str]] = field(default_factory=dict)


def place(
    sizes: Mapping[str, Size],
    edges: Sequence[Edge],
    *,
    least: Mapping[str, int],
    gap_x: float = 28.0,
    gap_y: float = 46.0,
    extra: Mapping[int, float] | None = None,
) -> Placed:
    """Lay out an acyclic graph, top to bottom.

    least: the first layer that a box may stand in (0 where it is not named). extra: additional
    space above a layer. Edges go from a lower to a higher layer; the caller leaves the ways back
    out.
    """
    layer = assign(sizes, edges, least)
    boxes = dict(sizes)
    paths: dict[Edge, list[str]] = {}
    links: list[Edge] = []
    for edge in dict.fromkeys(edges):
        between = range(layer[edge[0]] + 1, layer[edge[1]])
        points = [f"\x00{edge[0]}\x00{at}" for at in between]
        layer.update(zip(points, between, strict=True))
        boxes.update(dict.fromkeys(points, Size(width=2.0, height=0.0)))
        paths[edge] = points
        chain = [edge[0], *points, edge[1]]
        links += list(pairwise(chain))
    links = list(dict.fromkeys(links))
    rows = _order(layer, links)
    x = _across(rows, links, boxes, gap_x)
    y, tops, bottoms = _down(rows, boxes, gap_y, extra or {})
    width = max((x[b] + boxes[b].width / 2 for b in boxes), default=0.0)
    height = bottoms[-1] if bottoms else 0.0
    return Placed(
        x=x, y=y, width=width, height=height, layer=layer, tops=tops, bottoms=bottoms, paths=paths
    )


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


def _order(layer: Mapping[str, int], links: Sequence[Edge]) -> list[list[str]]:
    """Barycentre sweeps down and up; the order with the fewest crossings wins."""
    rows: list[list[str]] = [[] for _ in range(max(layer.values(), default=-1) + 1)]
    for box, at in layer.items():
        rows[at].append(box)
    near = _neighbours(links)
    best, fewest = [list(row) for row in rows], crossings(rows, links)
    for sweep in range(_SWEEPS):
        downwards = sweep % 2 == 0
        for at in range(1, len(rows)) if downwards else range(len(rows) - 2, -1, -1):
            _sort_by(rows[at - 1 if downwards else at + 1], rows[at], near)
        found = crossings(rows, links)
        if found < fewest:
            best, fewest = [list(row) for row in rows], found
    return best


def _sort_by(fixed: Sequence[str], row: list[str], near: Mapping[str, list[str]]) -> None:
    """Sort a row by the mean place of each box's neighbours in the fixed row."""
    place = {box: i for i, box in enumerate(fixed)}
    now = {box: i for i, box in enumerate(row)}
    row.sort(key=lambda box: _mean(near[box], place, now[box]))


def _neighbours(links: Sequence[Edge]) -> dict[str, list[str]]:
    near: dict[str, list[str]] = {}
    for a, b in links:
        near.setdefault(a, []).append(b)
        near.setdefault(b, []).append(a)
    return _Default(near)


class _Default(dict[str, list[str]]):
    def __missing__(self, key: str) -> list[str]:
        return []


def _mean(near: Sequence[str], place: Mapping[str, float], otherwise: float) -> float:
    known = [place[box] for box in near if box in place]
    return math.fsum(known) / len(known) if known else otherwise  # the same in any Python


def crossings(rows: Sequence[Sequence[str]], links: Sequence[Edge]) -> int:
    """How many pairs of links between neighbouring layers cross."""
    at = {box: (i, k) for i, row in enumerate(rows) for k, box in enumerate(row)}
    between: dict[int, list[tuple[int, int]]] = {}
    for a, b in links:
        between.setdefault(at[a][0], []).append((at[a][1], at[b][1]))
    return sum(
        (a - c) * (b - d) < 0
        for pairs in between.values()
        for (a, b), (c, d) in combinations(pairs, 2)
    )


def _across(
    rows: Sequence[Sequence[str]], links: Sequence[Edge], boxes: Mapping[str, Size], gap: float
) -> dict[str, float]:
    """Centres: each box near the mean of its neighbours, none overlapping, the order kept; the
    least is half a box.
    """
    near = _neighbours(links)
    x: dict[str, float] = {}
    for row in rows:
        x.update(_packed(row, dict.fromkeys(row, 0.0), boxes, gap))
    for sweep in range(_SWEEPS * 2):
        for at in range(len(rows)) if sweep % 2 == 0 else range(len(rows) - 1, -1, -1):
            others = set(rows[at])
            wish = {b: _mean([n for n in near[b] if n not in others], x, x[b]) for b in rows[at]}
            x.update(_packed(rows[at], wish, boxes, gap))
    left = min((x[b] - boxes[b].width / 2 for b in x), default=0.0)
    return {box: value - left for box, value in x.items()}


def _packed(
    row: Sequence[str], wish: Mapping[str, float], boxes: Mapping[str, Size], gap: float
) -> dict[str, float]:
    """The positions nearest to the wishes (least squares) that keep order and gaps: pooled adjacent
    violators.
    """
    offset, total = {}, 0.0
    for i, box in enumerate(row):
        total += 0.0 if i == 0 else boxes[row[i - 1]].width / 2 + gap + boxes[box].width / 2
        offset[box] = total
    pools: list[tuple[float, float, list[str]]] = []
    for box in row:
        # Waypoints pull harder, so that long edges come out straight.
        weight = 1.0 if boxes[box].height else 2.0
        pool = ((wish[box] - offset[box]) * weight, weight, [box])
        while pools and pools[-1][0] / pools[-1][1] > pool[0] / pool[1]:
            above = pools.pop()
            pool = (above[0] + pool[0], above[1] + pool[1], above[2] + pool[2])
        pools.append(pool)
    return {
        box: total / weight + offset[box] for total, weight, members in pools for box in members
    }


def _down(
    rows: Sequence[Sequence[str]], boxes: Mapping[str, Size], gap: float, extra: Mapping[int, float]
) -> tuple[dict[str, float], list[float], list[float]]:
    y: dict[str, float] = {}
    tops, bottoms, at = [], [], 0.0
    for i, row in enumerate(rows):
        at += extra.get(i, 0.0)
        tall = max((boxes[box].height for box in row), default=0.0)
        tops.append(at)
        y.update(dict.fromkeys(row, at + tall / 2))
        bottoms.append(at + tall)
        at += tall + gap
    return y, tops, bottoms
