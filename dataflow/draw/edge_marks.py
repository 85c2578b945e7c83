"""The edges of a panel, each with its points and its words.

Owns: the lanes of weights, and where words stand on edges. Does not own: how a line runs
(routes.py), where boxes stand (arrange.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from dataflow.draw.boxes import Drum, Line, set_above
from dataflow.draw.layer_draft import Edge
from dataflow.draw.links import Far, data_label, weight_label
from dataflow.draw.panel_sheet import PAD, PanelSheet
from dataflow.draw.routes import TRACK, Arrival, Lane, assign_lanes, route_down, route_far
from dataflow.draw.scene import EdgeMark, Point, Words


def make_lanes(sheet: PanelSheet, right: float) -> float:
    """Give each State that goes far its lane beyond `right`; the width of all of them."""
    spans = _find_spans(sheet)
    leaving: dict[str, tuple[int, int]] = {}
    for name, span in spans.items():
        if _leaves_layer(sheet, int(name)):
            leaving[name] = span
    lane_numbers = assign_lanes(leaving)
    tracks = sheet.tracks()
    for name in spans:
        x = right + 12.0 + TRACK * lane_numbers.get(name, 0)
        sheet.lanes[int(name)] = _make_lane(sheet, int(name), x, tracks)
    if not lane_numbers:
        return 0.0
    return 12.0 + TRACK * (max(lane_numbers.values()) + 1)


def _make_lane(
    sheet: PanelSheet, state: int, x: float, tracks: Mapping[int, Sequence[int]]
) -> Lane:
    """A State's lane at x, and its lines above layers. tracks: the States that have one above each
    layer.
    """
    heights: dict[int, float] = {}
    for row, states in tracks.items():
        if state in states:
            heights[row] = sheet.levels.tracks[row] + TRACK * states.index(state)
    holder = sheet.holder(f"s{state}")
    first_drum = sheet.units[holder].drums[0]
    return Lane(
        x=x,
        tracks=heights,
        straight=sheet.is_last(state),
        side=first_drum.state.index != state,
        layer=sheet.layers.layer[holder],
    )


def _find_spans(sheet: PanelSheet) -> dict[str, tuple[int, int]]:
    """The first and the last layer that each State reaches, by its number as text: lanes of equal
    spans go by that.
    """
    spans: dict[str, tuple[int, int]] = {}
    for edge in sheet.links.far:
        name = str(edge.state)
        state_row = sheet.row(f"s{edge.state}")
        target_row = sheet.row(edge.target)
        low, high = spans.get(name, (state_row, state_row))
        spans[name] = (min(low, state_row, target_row), max(high, state_row, target_row))
    return spans


def _leaves_layer(sheet: PanelSheet, state: int) -> bool:
    """Whether some reader of a State is in another layer."""
    state_row = sheet.row(f"s{state}")
    targets = [edge.target for edge in sheet.links.far if edge.state == state]
    return any(sheet.row(target) != state_row for target in targets)


def mark_edges(sheet: PanelSheet) -> list[EdgeMark]:
    """Draw all edges: of data, of States beside their nodes, of States far from them."""
    return [*_mark_data(sheet), *_mark_beside(sheet), *_mark_far(sheet)]


def _find_arrival(sheet: PanelSheet, edge: Edge) -> Arrival:
    return next(arrival for arrival in sheet.arrivals[edge[1]] if arrival.edge == edge)


def _mark_data(sheet: PanelSheet) -> Iterator[EdgeMark]:
    for edge in sheet.links.edges:
        upper_item, lower_item = edge
        upper, lower = sheet.nodes[upper_item], sheet.nodes[lower_item]
        arrival = _find_arrival(sheet, edge)
        start = (upper.middle[0], upper.bottom)
        end = (arrival.x, lower.y)
        points = route_down(sheet.layers, sheet.levels, edge, start, end, PAD)
        queue = None
        if sheet.overlay.life:
            # In the middle of the last piece that runs sideways.
            (x0, y0), (x1, y1) = points[-3], points[-2]
            queue = ((x0 + x1) / 2, (y0 + y1) / 2)
        source, target = sheet.links.ends[edge]
        yield EdgeMark(
            kind="data",
            source=source,
            target=target,
            points=tuple(points),
            words=set_above(arrival.x + 6.0, lower.y - 9.0, arrival.lines),
            queue=queue,
            label=data_label(source, target, sheet.links.carried[edge]),
        )


def _mark_beside(sheet: PanelSheet) -> Iterator[EdgeMark]:
    """Short edges between nodes and the States beside them."""
    for item, unit in sheet.units.items():
        if unit.box is None:
            continue
        for drum in unit.drums:
            yield _mark_drum(sheet, sheet.nodes[item].right, unit.box.name, unit.gap, drum)


def _mark_drum(sheet: PanelSheet, right: float, node: str, gap: float, drum: Drum) -> EdgeMark:
    """The edge of one of them. right: end of the node's box. gap: from there to the State."""
    rect = sheet.states[drum.state.index]
    y = rect.middle[1]
    state = drum.state.name
    at_node = (right, y)
    at_state = (rect.x, y)
    words = _set_between(right, gap, y, drum.link)
    label = weight_label(state, node, drum.link, writes=drum.writes)
    if drum.writes:
        return EdgeMark(
            kind="writes",
            source=node,
            target=state,
            points=(at_node, at_state),
            words=words,
            label=label,
        )
    return EdgeMark(
        kind="reads",
        source=state,
        target=node,
        points=(at_state, at_node),
        words=words,
        label=label,
    )


def _set_between(x: float, gap: float, y: float, lines: Sequence[Line]) -> tuple[Words, ...]:
    """Set a short edge's lines above it, each in the middle of the gap."""
    set_words = set_above(x, y - 6.0, lines)
    return tuple(replace(words, x=x + (gap - words.width) / 2) for words in set_words)


def _mark_far(sheet: PanelSheet) -> Iterator[EdgeMark]:
    """Edges from States to readers and followers that are elsewhere, and from further writers."""
    for edge in sheet.links.far:
        end, lines = _find_far_end(sheet, edge)
        lane = sheet.lanes[edge.state]
        rect = sheet.states[edge.state]
        points = tuple(route_far(lane, rect, sheet.row(edge.target), end))
        source, target = sheet.picture.states[edge.state].name, edge.name
        writes = edge.kind == "writes"
        label = weight_label(source, target, lines, writes=writes)
        if writes:
            # Routed from the State like all others, and drawn the other way round.
            points = points[::-1]
            source, target = target, source
        yield EdgeMark(
            kind=edge.kind,
            source=source,
            target=target,
            points=points,
            round=True,
            words=set_above(end[0] + 6.0, end[1] - 9.0, lines),
            label=label,
        )


def _find_far_end(sheet: PanelSheet, edge: Far) -> tuple[Point, Sequence[Line]]:
    """Where a far edge ends, and what is written there."""
    if edge.target.startswith("s"):
        rect = sheet.states[int(edge.target[1:])]
        return (rect.x + 18.0, rect.y), edge.label
    arrival = _find_arrival(sheet, (f"s{edge.state}", edge.target))
    return (arrival.x, sheet.nodes[edge.target].y), arrival.lines
