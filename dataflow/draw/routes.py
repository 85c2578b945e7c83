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
from dataflow.draw.layer_draft import Edge
from dataflow.draw.layers import Layers
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


def measure_room(arrivals: Sequence[Arrival]) -> float:
    """The width of a box on which these end, as far as it is widened for what they say. Drops what
    they say where it is too much.
    """
    width = sum(arrival.slot for arrival in arrivals)
    if width > _WIDEST:
        for arrival in arrivals:
            arrival.lines = ()
        width = min(_WIDEST, _SLOT * len(arrivals) * 0.6)
    has_one_label = len(arrivals) == 1 and bool(arrivals[0].lines)
    # A single edge ends at the middle, so that all that it says is right of that.
    if has_one_label and width < _WIDEST / 4:
        return 2 * width
    return width + 8.0


def settle(arrivals: Sequence[Arrival], rect: Rect) -> None:
    """Give each of them, in order, its x on the box."""
    middle = rect.middle[0]
    if not any(arrival.lines for arrival in arrivals):
        _spread(arrivals, rect)
        return
    if len(arrivals) == 1:
        width = label_width(arrivals[0].lines)
        arrivals[0].x = max(rect.x + 6, min(middle, rect.right - width - 8.0))
        return
    width = sum(arrival.slot for arrival in arrivals)
    spare = min(24.0, max(0.0, (rect.width - width) / len(arrivals)))
    x = middle - (width + spare * (len(arrivals) - 1)) / 2
    for arrival in arrivals:
        arrival.x = x + 6.0
        x += arrival.slot + spare


def _spread(arrivals: Sequence[Arrival], rect: Rect) -> None:
    """Spread edges that say nothing about the middle of the box."""
    middle = rect.middle[0]
    pitch = min(46.0, rect.width / (len(arrivals) + 1))
    for number, arrival in enumerate(arrivals):
        arrival.x = middle + pitch * (number - (len(arrivals) - 1) / 2)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRoom:
    """What each layer needs. heights: of its boxes. label_lines: lines that its edges say. tracks:
    lines of weights above it. extra: room below some layers.
    """

    heights: Sequence[float]
    label_lines: Sequence[int]
    tracks: Sequence[int]
    extra: Mapping[int, float]


def stack_layers(layers: Layers, needed: LayerRoom, *, first: float, life: bool) -> Levels:
    """Stack the layers one below the other. first: where the first one begins. life: with room for
    a page's figures on edges.
    """
    levels = Levels()
    y = first
    turns = _measure_turns(layers, len(needed.heights), life=life)
    for row, height in enumerate(needed.heights):
        if row:
            y += turns[row]
        levels.enter.append(y)
        levels.tracks.append(y + TRACK / 2)
        y += TRACK * needed.tracks[row] + 12.0 + 13.0 * needed.label_lines[row]
        levels.top.append(y)
        y += height
        levels.bottom.append(y)
        y += _LEAVE + needed.extra.get(row, 0.0)
        levels.leave.append(y)
    levels.end = levels.bottom[-1] if levels.bottom else first
    return levels


def _measure_turns(layers: Layers, rows: int, *, life: bool) -> list[float]:
    """Room above each layer for edges to turn: the more, the further they go sideways."""
    shifts = [0.0] * rows
    for (source, target), path in layers.paths.items():
        for above, below in pairwise([source, *path, target]):
            row = layers.layer[below]
            shift = abs(layers.x[above] - layers.x[below])
            shifts[row] = max(shifts[row], shift)
    least = 44.0 if life else 0.0
    return [max(least, 26.0 + min(46.0, shift / 14)) for shift in shifts]


def route_down(
    layers: Layers, levels: Levels, edge: Edge, start: Point, end: Point, left: float
) -> list[Point]:
    """The points of a data edge: from the lower side of one box beside each layer between to the
    upper side of the other.
    """
    source, target = edge
    points = [start, (start[0], levels.leave[layers.layer[source]])]
    for waypoint in layers.paths[edge]:
        row = layers.layer[waypoint]
        x = layers.x[waypoint] + left
        points += [(x, levels.enter[row]), (x, levels.leave[row])]
    return [*points, (end[0], levels.enter[layers.layer[target]]), end]


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


def route_far(lane: Lane, rect: Rect, layer: int, end: Point) -> list[Point]:
    """The points from a State to the upper side of something in a layer."""
    side = (rect.right, rect.middle[1])
    if lane.side:
        beside = (rect.right + 8.0, rect.middle[1])
        points = [side, beside]
    else:
        points = [(rect.right - 14.0, rect.y)]
    out_x = points[-1][0]
    track = lane.tracks[layer]
    if layer == lane.layer:
        return [*points, (out_x, track), (end[0], track), end]
    if lane.straight:
        points = [side, (lane.x, rect.middle[1])]
    else:
        out_track = lane.tracks[lane.layer]
        points += [(out_x, out_track), (lane.x, out_track)]
    return [*points, (lane.x, track), (end[0], track), end]


def assign_lanes(spans: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Give each State that goes far a lane, such that no two of one lane meet; the shortest are the
    innermost. spans: the first and the last layer that each of them reaches.
    """
    spans_by_lane: list[list[tuple[int, int]]] = []
    lanes: dict[str, int] = {}
    for name, span in sorted(spans.items(), key=_rank_span):
        lane = 0
        while lane < len(spans_by_lane) and _meets_any(span, spans_by_lane[lane]):
            lane += 1
        if lane == len(spans_by_lane):
            spans_by_lane.append([])
        spans_by_lane[lane].append(span)
        lanes[name] = lane
    return lanes


def _rank_span(named_span: tuple[str, tuple[int, int]]) -> tuple[int, tuple[int, int], str]:
    """Short ones first."""
    name, (low, high) = named_span
    return high - low, (low, high), name


def _meets_any(span: tuple[int, int], others: Sequence[tuple[int, int]]) -> bool:
    low, high = span
    return any(first <= high and low <= last for first, last in others)
