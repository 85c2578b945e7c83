"""Where lines run: the ends of edges on their boxes, and the lanes of weights.

Owns: ends, lanes, points. Does not own: where boxes stand (arrange.py), what an edge says.

A data edge leaves the middle of its source's lower side, is vertical beside every layer that it
passes, and arrives from above in a place of its own. Weights leave their State for a lane along the
right margin, and come back above their readers; all that one State sends shares its lane.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from dataflow.draw.boxes import Line, label_width
from dataflow.draw.layers import Edge, Layers
from dataflow.draw.scene import Point, Rect

TRACK = 11.0
"""Between two lanes, and two lines above a layer."""
_SLOT, _BESIDE = 20.0, 14.0
_WIDEST = 440.0
"""Of a box that is widened for what is written on its edges; beyond it nothing is."""
_LEAVE = 6.0


@dataclass(slots=True, kw_only=True)
class Arrival:
    """The end of an edge on the upper side of its box. edge: its two ends; lines: what it says."""

    edge: Edge
    lines: tuple[Line, ...]
    x: float = 0.0

    @property
    def slot(self) -> float:
        """The room that it takes on its box."""
        return max(_SLOT, label_width(self.lines) + _BESIDE)


def room(arrivals: Sequence[Arrival]) -> float:
    """The width of a box on which these end, as far as it is widened for what they say."""
    wide = sum(arrival.slot for arrival in arrivals)
    if wide > _WIDEST:
        for arrival in arrivals:
            arrival.lines = ()
        wide = min(_WIDEST, _SLOT * len(arrivals) * 0.6)
    alone = len(arrivals) == 1 and bool(arrivals[0].lines)
    return 2 * wide if alone and wide < _WIDEST / 4 else wide + 8.0


def settle(arrivals: Sequence[Arrival], rect: Rect) -> None:
    """Give each of them, in order, its x on the box."""
    middle = rect.middle[0]
    if not any(arrival.lines for arrival in arrivals):
        pitch = min(46.0, rect.width / (len(arrivals) + 1))
        for i, arrival in enumerate(arrivals):
            arrival.x = middle + pitch * (i - (len(arrivals) - 1) / 2)
        return
    if len(arrivals) == 1:
        wide = label_width(arrivals[0].lines)
        arrivals[0].x = max(rect.x + 6, min(middle, rect.right - wide - 8.0))
        return
    wide = sum(arrival.slot for arrival in arrivals)
    spare = min(24.0, max(0.0, (rect.width - wide) / len(arrivals)))
    at = middle - (wide + spare * (len(arrivals) - 1)) / 2
    for arrival in arrivals:
        arrival.x = at + 6.0
        at += arrival.slot + spare


@dataclass(slots=True, kw_only=True)
class Levels:
    """Heights, by layer: its top and bottom, where edges come to run down to it, and where they
    may turn below it.
    """

    top: list[float] = field(default_factory=list)
    bottom: list[float] = field(default_factory=list)
    enter: list[float] = field(default_factory=list)
    leave: list[float] = field(default_factory=list)
    tracks: list[float] = field(default_factory=list)
    """The uppermost line above the layer."""
    end: float = 0.0


def levels(
    layers: Layers,
    tall: Sequence[float],
    said: Sequence[int],
    tracks: Sequence[int],
    extra: Mapping[int, float],
    *,
    first: float,
    life: bool,
) -> Levels:
    """tall: each layer's height; said: lines of what its edges say; tracks: lines of weights above
    it; extra: room below a layer.
    """
    found, at = Levels(), first
    turns = _turns(layers, len(tall), life=life)
    for row, height in enumerate(tall):
        if row:
            at += turns[row]
        found.enter.append(at)
        found.tracks.append(at + TRACK / 2)
        at += TRACK * tracks[row] + 12.0 + 13.0 * said[row]
        found.top.append(at)
        at += height
        found.bottom.append(at)
        at += _LEAVE + extra.get(row, 0.0)
        found.leave.append(at)
    found.end = found.bottom[-1] if found.bottom else first
    return found


def _turns(layers: Layers, rows: int, *, life: bool) -> list[float]:
    """Room above each layer for edges to turn: the more, the further they go sideways."""
    far = [0.0] * rows
    for (a, b), path in layers.paths.items():
        for above, below in pairwise([a, *path, b]):
            row = layers.layer[below]
            far[row] = max(far[row], abs(layers.x[above] - layers.x[below]))
    return [max(44.0 if life else 0.0, 26.0 + min(46.0, each / 14)) for each in far]


def down(
    layers: Layers, levels: Levels, edge: Edge, start: Point, end: Point, left: float
) -> list[Point]:
    """The points of a data edge: from the lower side of one box beside each layer between to the
    upper side of the other.
    """
    a, b = edge
    points = [start, (start[0], levels.leave[layers.layer[a]])]
    for point in layers.paths[edge]:
        at, x = layers.layer[point], layers.x[point] + left
        points += [(x, levels.enter[at]), (x, levels.leave[at])]
    return [*points, (end[0], levels.enter[layers.layer[b]]), end]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """How a State's weights go far: its lane, and its line above each layer where it has one."""

    x: float
    tracks: Mapping[int, float]
    straight: bool
    """Whether nothing stands between it and the margin."""
    side: bool
    """Whether it must be left by its side, as another State is above it."""
    layer: int


def far(lane: Lane, rect: Rect, layer: int, end: Point) -> list[Point]:
    """The points from a State to the upper side of something in a layer."""
    if lane.side:
        out = (rect.right + 8.0, rect.middle[1])
        leave = [(rect.right, rect.middle[1]), out]
    else:
        out = (rect.right - 14.0, rect.y)
        leave = [out]
    if layer == lane.layer:
        track = lane.tracks[layer]
        return [*leave, (out[0], track), (end[0], track), end]
    if lane.straight:
        leave = [(rect.right, rect.middle[1]), (lane.x, rect.middle[1])]
    else:
        track = lane.tracks[lane.layer]
        leave += [(out[0], track), (lane.x, track)]
    track = lane.tracks[layer]
    return [*leave, (lane.x, track), (end[0], track), end]


def lanes(spans: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """A number for each State that goes far, such that no two of one lane meet; the shortest are
    the innermost. spans: the first and the last layer that each of them reaches.
    """
    taken: list[list[tuple[int, int]]] = []
    found: dict[str, int] = {}
    for name, (low, high) in sorted(spans.items(), key=lambda s: (s[1][1] - s[1][0], s[1], s[0])):
        free = (
            i
            for i, spans in enumerate(taken)
            if all(high < first or last < low for first, last in spans)
        )
        lane = next(free, len(taken))
        if lane == len(taken):
            taken.append([])
        taken[lane].append((low, high))
        found[name] = lane
    return found
