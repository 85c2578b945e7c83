"""Where everything in a picture stands.

Owns: panels, heights of layers, places of boxes. Does not own: layers and their order (layers.py),
what is in a box (boxes.py), the cut (cut_marks.py), edges (edge_marks.py), the frames of Workers
(worker_columns.py), any syntax (svg.py).

Training's nodes are in one panel, the stream region above the cut and the step region below it;
evaluation has its own panel. A State stands beside its writer, else beside its first reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dataflow.draw.boxes import Unit, node_unit, set_in, set_in_drum
from dataflow.draw.cut_marks import cut_room, draw_line, mark_cut, right_end
from dataflow.draw.edge_marks import make_lanes, mark_edges
from dataflow.draw.layers import Layers, assign_layers, lay_out_boxes
from dataflow.draw.links import Links, link_boxes, state_label
from dataflow.draw.measure import measure_sans
from dataflow.draw.overlay import Overlay
from dataflow.draw.panel_sheet import PAD, PanelSheet
from dataflow.draw.picture import TITLES, Box, Picture, Region
from dataflow.draw.routes import Arrival, LayerRoom, measure_room, settle, stack_layers
from dataflow.draw.scene import NodeMark, Panel, Rect, StateMark, Words
from dataflow.draw.worker_columns import HEADER, FrameColumns, assign_columns, frame_columns

LIMIT, LARGE = 1700.0, 17.0
"""Width that a panel's layers do not exceed, where they have several boxes; the same by box of a
large panel, which so is about as wide as it is tall.
"""
_TITLE = 36.0


def arrange_panels(picture: Picture, overlay: Overlay) -> list[Panel]:
    """Arrange training's panel, and evaluation's if it reads nothing from training's nodes."""
    evaluated = picture.within("evaluation")
    apart = {box.index for box in evaluated}
    for box in evaluated:
        if not apart.issuperset(wire.source for wire in box.wires):
            # It reads rows of training: one panel has both.
            return [_arrange(picture, picture.boxes, overlay, apart=False)]
    panels: list[Panel] = []
    others = [box for box in picture.boxes if box.index not in apart]
    if others or not apart:
        panels.append(_arrange(picture, others, overlay, apart=False))
    if apart:
        panels.append(_arrange(picture, evaluated, overlay, apart=True))
    return panels


def _arrange(picture: Picture, boxes: Sequence[Box], overlay: Overlay, *, apart: bool) -> Panel:
    sheet = _make_sheet(picture, boxes, overlay, apart=apart)
    _decide_heights(sheet)
    _place_boxes(sheet)
    cuts = list(mark_cut(sheet))
    right = max([PAD + sheet.layers.width, *map(right_end, cuts)])
    if sheet.columns.groups:
        right += PAD / 2  # beside the frames
    lanes_width = make_lanes(sheet, right)
    title = _set_title(sheet)
    panel = Panel(
        width=max(right + lanes_width + PAD, title.rect.right + 14.0),
        height=sheet.levels.end + PAD,
        title=title,
        cuts=cuts,
    )
    if cuts:
        panel.cuts[0] = draw_line(sheet, cuts[0], panel.width)
    bottom = sheet.levels.end + 12.0
    panel.workers = frame_columns(sheet.columns, sheet.layers, overlay, PAD, _TITLE, bottom)
    panel.nodes = list(_mark_nodes(sheet))
    panel.states = list(_mark_states(sheet))
    panel.edges = mark_edges(sheet)
    return panel


# --- what is laid out -----------------------------------------------------------------------------


def _make_sheet(
    picture: Picture, boxes: Sequence[Box], overlay: Overlay, *, apart: bool
) -> PanelSheet:
    links = link_boxes(picture, boxes, overlay, apart=apart)
    arrivals = _list_arrivals(links)
    units: dict[str, Unit] = {}
    for box in boxes:
        item = f"n{box.index}"
        least = measure_room(arrivals.get(item, []))
        unit = node_unit(box, overlay, len(picture.boxes), least)
        unit.drums = links.beside.get(box.index, [])
        unit.height = max(unit.height, _measure_drums(unit))
        units[item] = unit
    for drum in links.alone:
        units[f"s{drum.state.index}"] = Unit(box=None, drums=[drum])
    columns = assign_columns(units, overlay)
    layers, cut = _lay_out_units(units, links, columns, apart=apart)
    return PanelSheet(
        picture=picture,
        overlay=overlay,
        apart=apart,
        links=links,
        units=units,
        arrivals=arrivals,
        columns=columns,
        layers=layers,
        cut=cut,
    )


def _measure_drums(unit: Unit) -> float:
    """The height that a node's box needs for the States beside it."""
    if len(unit.drums) > 1:
        return unit.stack
    # The words of a short edge are above it, so that half the box is for them.
    heights = [13.0 * len(drum.link) + 10.0 for drum in unit.drums]
    return 2 * max(heights, default=0.0)


def _list_arrivals(links: Links) -> dict[str, list[Arrival]]:
    """What ends on each box, weights last."""
    arrivals: dict[str, list[Arrival]] = {}
    for edge, lines in links.edges.items():
        arrivals.setdefault(edge[1], []).append(Arrival(edge=edge, lines=lines))
    for far in links.far:
        if far.target.startswith("n"):
            edge = (f"s{far.state}", far.target)
            arrivals.setdefault(far.target, []).append(Arrival(edge=edge, lines=far.label))
    return arrivals


def _lay_out_units(
    units: Mapping[str, Unit], links: Links, columns: FrameColumns, *, apart: bool
) -> tuple[Layers, int]:
    """The layers, and the first one below the cut: 0 if the panel has none."""
    step_items = [] if apart else [item for item, unit in units.items() if _is_below_cut(unit)]
    cut = _find_cut(units, links, step_items)
    sizes = {item: unit.size for item, unit in units.items()}
    layers = lay_out_boxes(
        sizes,
        list(links.edges),
        least=dict.fromkeys(step_items, cut),
        limit=max(LIMIT, LARGE * len(sizes)),
        columns=columns.of if columns.groups else None,
        widths=columns.widths,
    )
    if not cut:
        return layers, 0
    # Not the cut from before: wide layers above it may have become several.
    return layers, min(layers.layer[item] for item in step_items)


def _is_below_cut(unit: Unit) -> bool:
    return unit.box is not None and unit.box.region != "stream"


def _find_cut(units: Mapping[str, Unit], links: Links, step_items: Sequence[str]) -> int:
    """The layer behind all nodes of the stream; 0 without such nodes, or with none below."""
    if not step_items:
        return 0
    upper = {item: unit.size for item, unit in units.items() if item not in step_items}
    edges = [edge for edge in links.edges if upper.keys() >= set(edge)]
    layer = assign_layers(upper, edges, {})
    stream_layers = [layer[item] for item in upper if units[item].box]
    return 1 + max(stream_layers, default=-1)


# --- places ---------------------------------------------------------------------------------------


def _decide_heights(sheet: PanelSheet) -> None:
    """Decide the heights of all layers."""
    rows = len(sheet.layers.rows)
    heights = [0.0] * rows
    label_lines = [0] * rows
    tracks = [0] * rows
    for item, unit in sheet.units.items():
        row = sheet.layers.layer[item]
        heights[row] = max(heights[row], unit.size.height)
        for arrival in sheet.arrivals.get(item, ()):
            label_lines[row] = max(label_lines[row], len(arrival.lines))
    for edge in sheet.links.far:
        row = sheet.row(edge.target)
        label_lines[row] = max(label_lines[row], len(edge.label))
    for row, states in sheet.tracks().items():
        tracks[row] = len(states)
    first = _TITLE + (HEADER if sheet.columns.groups else 0.0)
    extra = {sheet.cut - 1: cut_room(sheet)} if sheet.cut else {}
    needed = LayerRoom(heights=heights, label_lines=label_lines, tracks=tracks, extra=extra)
    sheet.levels = stack_layers(sheet.layers, needed, first=first, life=sheet.overlay.life)


def _place_boxes(sheet: PanelSheet) -> None:
    """Decide the rectangles of nodes and States, and where edges end."""
    for item, unit in sheet.units.items():
        row = sheet.layers.layer[item]
        middle = (sheet.levels.top[row] + sheet.levels.bottom[row]) / 2
        x = sheet.layers.x[item] + PAD
        left = x - unit.size.width / 2
        if unit.box is not None:
            rect = Rect(
                x=x - unit.width / 2,
                y=middle - unit.height / 2,
                width=unit.width,
                height=unit.height,
            )
            sheet.nodes[item] = rect
            _settle_arrivals(sheet, item, rect)
            left = rect.right + unit.gap
        y = middle - unit.stack / 2
        for drum in unit.drums:
            rect = Rect(x=left, y=y, width=drum.width, height=drum.height)
            sheet.states[drum.state.index] = rect
            y += drum.height + 10.0


def _settle_arrivals(sheet: PanelSheet, item: str, rect: Rect) -> None:
    """Order what ends on a box as it comes, weights last."""
    arrivals = sheet.arrivals.get(item, [])

    def order(arrival: Arrival) -> tuple[bool, float]:
        if arrival.edge not in sheet.links.edges:
            return True, 0.0
        above = [arrival.edge[0], *sheet.layers.paths[arrival.edge]]
        return False, sheet.layers.x[above[-1]]

    arrivals.sort(key=order)
    settle(arrivals, rect)


# --- marks ----------------------------------------------------------------------------------------


def _set_title(sheet: PanelSheet) -> Words:
    text = TITLES[_find_kind(sheet)]
    return Words(x=14.0, y=22.0, text=text, kind="region", width=measure_sans(text, 11.0))


def _find_kind(sheet: PanelSheet) -> Region:
    """The region at a panel's upper end."""
    if sheet.apart:
        return "evaluation"
    return "stream" if sheet.cut else "step"


def _mark_nodes(sheet: PanelSheet) -> Iterator[NodeMark]:
    for item, unit in sheet.units.items():
        if unit.box is None:
            continue
        rect = sheet.nodes[item]
        strip = None
        if sheet.overlay.life:
            strip = Rect(x=rect.x + 8.0, y=rect.bottom - 34.0, width=rect.width - 16.0, height=28.0)
        words = set_in(rect, unit.lines)
        label = sheet.links.labels[unit.box.index]
        yield NodeMark(box=unit.box, rect=rect, words=words, life=strip, label=label)


def _mark_states(sheet: PanelSheet) -> Iterator[StateMark]:
    for unit in sheet.units.values():
        for drum in unit.drums:
            rect = sheet.states[drum.state.index]
            words = set_in_drum(rect, drum.lines)
            yield StateMark(state=drum.state, rect=rect, words=words, label=state_label(drum.state))
