"""A layered layout of boxes and edges, after Sugiyama, Tagawa and Toda (1981).

Owns: layers, waypoints, and the result. Does not own: the order within a layer (layer_order.py),
places from left to right (layer_places.py), what the boxes are, heights and how lines run
(arrange.py, routes.py), which column a Worker has (worker_columns.py).

An edge over several layers gets a waypoint in each one between, which takes part in the ordering
like a box; so long edges run beside boxes and not behind them. The edges of one box share their
waypoints: they leave it as one trunk. A layer that is wider than the limit becomes several.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dataflow.draw.layer_draft import (
    GAP,
    POINT,
    TRUNKS,
    Edge,
    LayerDraft,
    Neighbours,
    Numbers,
    Size,
)
from dataflow.draw.layer_order import order_layers
from dataflow.draw.layer_places import measure_columns, place_across, place_left_end


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


def lay_out_boxes(
    sizes: Mapping[str, Size],
    edges: Sequence[Edge],
    *,
    least: Numbers,
    limit: float = math.inf,
    columns: Numbers | None = None,
    widths: Mapping[int, float] | None = None,
) -> Layers:
    """Lay out an acyclic graph, top to bottom.

    least: the first layer that a box may stand in (0 where it is not named), before wide ones are
    split. limit: width that a layer of several boxes does not exceed. columns: of boxes that stand
    in columns side by side, all in order; widths: the least of a column.
    """
    column = dict(columns or dict.fromkeys(sizes, 0))
    edges = list(dict.fromkeys(edges))
    layer = _split_layers(assign_layers(sizes, edges, least), sizes, edges, column, limit)
    draft = LayerDraft(boxes=dict(sizes), column=column, layer=layer, above={}, below={}, links=[])
    paths = {edge: _add_waypoints(draft, edge) for edge in edges}
    _link_neighbours(draft)
    rows = order_layers(draft)
    bounds = measure_columns(draft, rows, limit, widths or {}, framed=columns is not None)
    x = place_across(draft, rows, bounds)
    if columns is not None:
        # Frames stand around whole columns, so that the ends are theirs.
        left = min((low for low, _ in bounds.values()), default=0.0)
        right = max((high for _, high in bounds.values()), default=0.0)
    else:
        left_ends = {box: place_left_end(draft, x, box) for box in x}
        right_ends = [end + draft.boxes[box].width for box, end in left_ends.items()]
        left = min(left_ends.values(), default=0.0)
        right = max(right_ends, default=0.0)
    columns_from_left = {n: (low - left, high - left) for n, (low, high) in bounds.items()}
    return Layers(
        rows=rows,
        layer=draft.layer,
        x={box: port - left for box, port in x.items()},
        paths=paths,
        width=right - left,
        columns=columns_from_left,
    )


def assign_layers(
    sizes: Mapping[str, Size], edges: Sequence[Edge], least: Numbers
) -> dict[str, int]:
    """Put each box below all that it reads: the longest path from the top. Then boxes with nothing
    above them sink to just above their first user.
    """
    sources: dict[str, list[str]] = {box: [] for box in sizes}
    users: dict[str, list[str]] = {box: [] for box in sizes}
    for source, user in edges:
        sources[user].append(source)
        users[source].append(user)
    layer = _measure_paths(sources, users, least)
    for box in sizes:
        if not sources[box] and users[box]:
            first_user = min(layer[user] for user in users[box])
            layer[box] = max(least.get(box, 0), first_user - 1)
    return layer


def _measure_paths(sources: Neighbours, users: Neighbours, least: Numbers) -> dict[str, int]:
    """The length of the longest path to each box."""
    layer = {box: least.get(box, 0) for box in sources}
    missing = {box: len(above) for box, above in sources.items()}
    ready = [box for box in sources if not missing[box]]
    for box in ready:  # grows while it is walked
        for user in users[box]:
            layer[user] = max(layer[user], layer[box] + 1)
            missing[user] -= 1
            if not missing[user]:
                ready.append(user)
    return layer


def _split_layers(
    wished_layer: Numbers,
    sizes: Mapping[str, Size],
    edges: Sequence[Edge],
    column: Numbers,
    limit: float,
) -> dict[str, int]:
    """Layers without a gap, none wider than the limit with the trunks that pass it, unless it has
    one box only.
    """
    users: dict[str, set[str]] = {}
    for source, user in edges:
        users.setdefault(source, set()).add(user)
    columns = set(column.values())
    room = limit / max(1, len(columns))
    boxes_by_wish: dict[int, list[str]] = {}
    for box in sizes:
        boxes_by_wish.setdefault(wished_layer[box], []).append(box)
    layer: dict[str, int] = {}
    count = 0
    for _, boxes in sorted(boxes_by_wish.items()):
        remaining = boxes
        while remaining:
            passing = _measure_passing(users, layer, column)
            row, remaining = _fill_row(remaining, sizes, column, room, passing)
            layer.update(dict.fromkeys(row, count))
            count += 1
    return layer


def _measure_passing(
    users: Mapping[str, set[str]], layer: Numbers, column: Numbers
) -> dict[int, float]:
    """The width of the trunks, by column, of what is still read below."""
    widths: dict[int, float] = {}
    for box in layer:
        is_read_below = not layer.keys() >= users.get(box, set())
        if is_read_below:
            number = column[box]
            widths[number] = widths.get(number, 0.0) + POINT + TRUNKS
    return widths


def _fill_row(
    boxes: Sequence[str],
    sizes: Mapping[str, Size],
    column: Numbers,
    room: float,
    passing: Mapping[int, float],
) -> tuple[list[str], list[str]]:
    """Those that fit beside each other, at least one, and the rest; their order stays."""
    row: list[str] = []
    rest: list[str] = []
    used = dict(passing)
    for box in boxes:
        number = column[box]
        width = used.get(number, 0.0) + sizes[box].width + GAP
        # Behind one of its column that did not fit, a smaller one must not slip in.
        is_behind = bool(rest) and column[rest[-1]] == number
        if row and (width > room or is_behind):
            rest.append(box)
        else:
            row.append(box)
            used[number] = width
    return row, rest


def _add_waypoints(draft: LayerDraft, edge: Edge) -> list[str]:
    """Add the waypoints of an edge, and the links between them, to the draft."""
    source, target = edge
    layers_between = range(draft.layer[source] + 1, draft.layer[target])
    # Named by the source alone: its edges share them. No box's id has a NUL.
    waypoints = [f"\x00{source}\x00{layer}" for layer in layers_between]
    draft.layer.update(zip(waypoints, layers_between, strict=True))
    draft.column.update(dict.fromkeys(waypoints, draft.column[source]))
    draft.boxes.update(dict.fromkeys(waypoints, Size(width=POINT, height=0.0)))
    draft.links += pairwise([source, *waypoints, target])
    return waypoints


def _link_neighbours(draft: LayerDraft) -> None:
    """Note each box's neighbours above and below."""
    draft.links = list(dict.fromkeys(draft.links))
    draft.above = {box: [] for box in draft.boxes}
    draft.below = {box: [] for box in draft.boxes}
    for upper, lower in draft.links:
        draft.below[upper].append(lower)
        draft.above[lower].append(upper)
