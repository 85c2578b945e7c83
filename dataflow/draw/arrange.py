"""Where everything in a picture stands.

Owns: panels, places of boxes, the cut and the frames of Workers. Does not own: layers and their
order (layers.py), lines (routes.py), what is in a box (boxes.py), any syntax (svg.py).

Training's nodes are in one panel, the stream region above the cut and the step region below it;
evaluation has its own panel. A State stands beside its writer, else beside its first reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dataflow.draw.boxes import Line, Unit, node_unit, set_above, set_in, set_in_drum
from dataflow.draw.frames import HEADER, FrameColumns, columns_of, frames
from dataflow.draw.layers import Edge, Layers, assign, place
from dataflow.draw.links import Far, Links, data_label, links_of, state_label
from dataflow.draw.measure import sans
from dataflow.draw.overlay import Overlay
from dataflow.draw.picture import TITLES, Box, Picture, Taken
from dataflow.draw.routes import (
    TRACK,
    Arrival,
    Lane,
    Levels,
    down,
    far,
    lanes,
    levels,
    room,
    settle,
)
from dataflow.draw.scene import CutMark, EdgeMark, NodeMark, Panel, Point, Rect, StateMark, Words

LIMIT, LARGE = 1700.0, 17.0
"""Width that a panel's layers do not exceed, where they have several boxes; the same by box of a
large panel, which so is about as wide as it is tall.
"""
_PAD = 24.0
_TITLE = 36.0
_CUT, _CUT_LINE = 20.0, 18.0
_GAUGE = 260.0
"""Room beside the words of a cut for a page's figures."""


@dataclass(slots=True, kw_only=True)
class _Sheet:
    """A panel in the making: units and arrivals by id, the layers, then the places."""

    picture: Picture
    overlay: Overlay
    apart: bool
    links: Links
    units: dict[str, Unit]
    arrivals: dict[str, list[Arrival]]
    columns: FrameColumns
    layers: Layers
    cut: int = 0
    levels: Levels = field(default_factory=Levels)
    lanes: dict[int, Lane] = field(default_factory=dict)
    nodes: dict[str, Rect] = field(default_factory=dict)
    states: dict[int, Rect] = field(default_factory=dict)


def panels(picture: Picture, overlay: Overlay) -> list[Panel]:
    """Training's panel, and evaluation's if it reads nothing from training's nodes."""
    evaluated = picture.within("evaluation")
    apart = {box.index for box in evaluated}
    if not apart.issuperset(wire.source for box in evaluated for wire in box.wires):
        apart = set()
    rest = [box for box in picture.boxes if box.index not in apart]
    found = [_panel(picture, rest, overlay, apart=False)] if rest or not apart else []
    if apart:
        found.append(_panel(picture, evaluated, overlay, apart=True))
    return found


def _panel(picture: Picture, boxes: Sequence[Box], overlay: Overlay, *, apart: bool) -> Panel:
    sheet = _sheet(picture, boxes, overlay, apart=apart)
    _heights(sheet)
    _places(sheet)
    cuts = list(_cuts(sheet))
    right = max([_PAD + sheet.layers.width, *(_end(cut) for cut in cuts)])
    right += _PAD / 2 if sheet.columns.groups else 0.0  # beside the frames
    beyond = _lanes(sheet, right)
    title = _title(sheet)
    panel = Panel(
        width=max(right + beyond + _PAD, title.rect.right + 14.0),
        height=sheet.levels.end + _PAD,
        title=title,
        cuts=cuts,
    )
    if cuts:
        y = _cut_at(sheet)
        panel.cuts[0] = _with_line(cuts[0], ((0.0, y), (panel.width, y)))
    panel.workers = frames(
        sheet.columns, sheet.layers, overlay, _PAD, _TITLE, sheet.levels.end + 12.0
    )
    panel.nodes = [_node(sheet, item, unit) for item, unit in sheet.units.items() if unit.box]
    panel.states = list(_states(sheet))
    panel.edges = [*_data(sheet), *_beside(sheet), *_far(sheet)]
    return panel


def _sheet(picture: Picture, boxes: Sequence[Box], overlay: Overlay, *, apart: bool) -> _Sheet:
    links = links_of(picture, boxes, overlay, apart=apart)
    arrivals = _arrivals(links)
    units: dict[str, Unit] = {}
    for box in boxes:
        item = f"n{box.index}"
        least = room(arrivals.get(item, []))
        units[item] = node_unit(box, overlay, len(picture.boxes), least)
        units[item].drums = links.beside.get(box.index, [])
    for drum in links.alone:
        units[f"s{drum.state.index}"] = Unit(box=None, drums=[drum])
    for unit in units.values():
        tallest = max([0.0, *(13.0 * len(d.link) + 10.0 for d in unit.drums)])
        stack = unit.stack if len(unit.drums) > 1 else 2 * tallest
        unit.height = max(unit.height, stack) if unit.box else 0.0
    columns = columns_of(units, overlay)
    layers, cut = _layered(units, links, columns, apart=apart)
    return _Sheet(
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


def _arrivals(links: Links) -> dict[str, list[Arrival]]:
    """What ends on each box, weights last."""
    found: dict[str, list[Arrival]] = {}
    for edge, label in links.data.items():
        found.setdefault(edge[1], []).append(Arrival(edge=edge, lines=label))
    for each in links.far:
        if each.target.startswith("n"):
            edge = (f"s{each.state}", each.target)
            found.setdefault(each.target, []).append(Arrival(edge=edge, lines=each.label))
    return found


def _layered(
    units: Mapping[str, Unit], links: Links, columns: FrameColumns, *, apart: bool
) -> tuple[Layers, int]:
    """The layers, and the one below the cut: 0 if the panel has none."""
    sizes = {item: unit.size for item, unit in units.items()}
    boxes = {item: unit.box for item, unit in units.items()}
    step = [item for item, box in boxes.items() if box and box.region != "stream" and not apart]
    upper = {item: size for item, size in sizes.items() if item not in step}
    edges = list(links.data)
    above = assign(upper, [e for e in edges if e[0] in upper and e[1] in upper], {})
    cut = 1 + max((above[item] for item in upper if boxes[item]), default=-1) if step else 0
    layers = place(
        sizes,
        edges,
        least=dict.fromkeys(step, cut),
        limit=max(LIMIT, LARGE * len(sizes)),
        columns=columns.of if columns.groups else None,
        widths=columns.widths,
    )
    return layers, min((layers.layer[item] for item in step), default=0) if cut else 0


def _heights(sheet: _Sheet) -> None:
    """Decide the heights of all layers."""
    layers, rows = sheet.layers, len(sheet.layers.rows)
    tall, said, tracks = [0.0] * rows, [0] * rows, [0] * rows
    for item, unit in sheet.units.items():
        row = layers.layer[item]
        tall[row] = max(tall[row], unit.size.height)
        lines = [len(arrival.lines) for arrival in sheet.arrivals.get(item, ())]
        said[row] = max([said[row], *lines])
    for each in sheet.links.far:
        row = layers.layer[_holder(sheet, each.target)]
        said[row] = max(said[row], len(each.label))
    for row, found in _tracks(sheet).items():
        tracks[row] = len(found)
    first = _TITLE + (HEADER if sheet.columns.groups else 0.0)
    extra = {sheet.cut - 1: _CUT + _CUT_LINE * len(_taken(sheet))} if sheet.cut else {}
    alive = sheet.overlay.life
    sheet.levels = levels(layers, tall, said, tracks, extra, first=first, life=alive)


def _holder(sheet: _Sheet, target: str) -> str:
    """The unit in which a node or a State is."""
    return target if target in sheet.units else f"n{sheet.links.holder[int(target[1:])]}"


def _tracks(sheet: _Sheet) -> dict[int, list[int]]:
    """The States that have a line above each layer, the uppermost first."""
    found: dict[int, dict[int, None]] = {}
    for each in sheet.links.far:
        own = sheet.layers.layer[_holder(sheet, f"s{each.state}")]
        row = sheet.layers.layer[_holder(sheet, each.target)]
        found.setdefault(row, {})[each.state] = None
        if row != own and not _last(sheet, each.state):
            found.setdefault(own, {})[each.state] = None
    return {row: list(states) for row, states in found.items()}


def _last(sheet: _Sheet, state: int) -> bool:
    """Whether only lines are between a State and the right margin."""
    holder = _holder(sheet, f"s{state}")
    row = [item for item in sheet.layers.rows[sheet.layers.layer[holder]] if item in sheet.units]
    return row[-1] == holder


def _places(sheet: _Sheet) -> None:
    """Decide the rectangles of nodes and States, and where edges end."""
    for item, unit in sheet.units.items():
        row = sheet.layers.layer[item]
        middle = (sheet.levels.top[row] + sheet.levels.bottom[row]) / 2
        x = sheet.layers.x[item] + _PAD
        if unit.box is not None:
            rect = Rect(
                x=x - unit.width / 2,
                y=middle - unit.height / 2,
                width=unit.width,
                height=unit.height,
            )
            sheet.nodes[item] = rect
            _settle(sheet, item, rect)
            left = rect.right + unit.gap
        else:
            left = x - unit.size.width / 2
        y = middle - unit.stack / 2
        for drum in unit.drums:
            size = {"width": drum.width, "height": drum.height}
            sheet.states[drum.state.index] = Rect(x=left, y=y, **size)
            y += drum.height + 10.0


def _settle(sheet: _Sheet, item: str, rect: Rect) -> None:
    """Order what ends on a box as it comes, weights last."""
    arrivals = sheet.arrivals.get(item, [])

    def order(arrival: Arrival) -> tuple[bool, float]:
        if arrival.edge not in sheet.links.data:
            return True, 0.0
        chain = [arrival.edge[0], *sheet.layers.paths[arrival.edge]]
        return False, sheet.layers.x[chain[-1]]

    arrivals.sort(key=order)
    settle(arrivals, rect)


def _taken(sheet: _Sheet) -> tuple[Taken, ...]:
    return sheet.picture.taken or (Taken(source="", words=""),)


def _cut_at(sheet: _Sheet) -> float:
    return sheet.levels.bottom[sheet.cut - 1] + 14.0


def _cuts(sheet: _Sheet) -> Iterator[CutMark]:
    """The words of each source at the cut, where no edge crosses them."""
    if not sheet.cut:
        return
    texts = []
    for i, taken in enumerate(_taken(sheet)):
        lead = "and " if i else "the cut: "
        texts.append(lead + (taken.words or taken.source or "what"))
    texts[-1] += " make a Step" if any(t.words for t in _taken(sheet)) else " makes a Step"
    wide = max(sans(text, 11.0) for text in texts)
    x = _free(sheet, wide + (_GAUGE if sheet.overlay.life else 0.0))
    for i, (taken, text) in enumerate(zip(_taken(sheet), texts, strict=True)):
        y = _cut_at(sheet) + 16.0 + _CUT_LINE * i
        words = Words(x=x, y=y, text=text, kind="words", width=sans(text, 11.0))
        life = Rect(x=x + wide + 10, y=y - 12, width=_GAUGE - 20, height=15)
        alive = life if sheet.overlay.life else None
        yield CutMark(source=taken.source, words=words, life=alive)


def _free(sheet: _Sheet, wide: float) -> float:
    """The leftmost x at which words of a width are crossed by no edge below the cut's line."""
    layers, row = sheet.layers, sheet.cut - 1
    lines = set()
    for (a, b), path in layers.paths.items():
        if layers.layer[a] <= row < layers.layer[b]:
            lines.add(layers.x[[a, *path][row - layers.layer[a]]] + _PAD)
    start = 14.0
    for line in sorted(lines):
        if start + wide < line - 10.0:
            break
        start = line + 10.0
    return start


def _end(cut: CutMark) -> float:
    return (cut.life.right if cut.life else cut.words.rect.right) + 6.0


def _with_line(cut: CutMark, line: tuple[Point, Point]) -> CutMark:
    return CutMark(source=cut.source, words=cut.words, line=line, life=cut.life)


def _lanes(sheet: _Sheet, right: float) -> float:
    """Give each State that goes far its lane beyond `right`; the width of all of them."""
    tracks = _tracks(sheet)
    spans: dict[str, tuple[int, int]] = {}
    for each in sheet.links.far:
        rows = [sheet.layers.layer[_holder(sheet, t)] for t in (f"s{each.state}", each.target)]
        low, high = spans.get(str(each.state), (rows[0], rows[0]))
        spans[str(each.state)] = (min(low, *rows), max(high, *rows))
    number = lanes({name: span for name, span in spans.items() if _leaves(sheet, name)})
    for name in spans:
        state = int(name)
        holder = _holder(sheet, f"s{name}")
        lines = {
            row: sheet.levels.tracks[row] + TRACK * states.index(state)
            for row, states in tracks.items()
            if state in states
        }
        unit = sheet.units[holder]
        sheet.lanes[state] = Lane(
            x=right + 12.0 + TRACK * number.get(name, 0),
            tracks=lines,
            straight=_last(sheet, state),
            side=unit.drums[0].state.index != state,
            layer=sheet.layers.layer[holder],
        )
    return 12.0 + TRACK * (max(number.values()) + 1) if number else 0.0


def _leaves(sheet: _Sheet, name: str) -> bool:
    """Whether some reader of a State is in another layer."""
    own = sheet.layers.layer[_holder(sheet, f"s{name}")]
    targets = [each.target for each in sheet.links.far if str(each.state) == name]
    return any(sheet.layers.layer[_holder(sheet, target)] != own for target in targets)


def _title(sheet: _Sheet) -> Words:
    kind = "evaluation" if sheet.apart else "stream" if sheet.cut else "step"
    text = TITLES[kind]
    return Words(x=14.0, y=22.0, text=text, kind="region", width=sans(text, 11.0))


def _node(sheet: _Sheet, item: str, unit: Unit) -> NodeMark:
    assert unit.box is not None
    rect = sheet.nodes[item]
    strip = None
    if sheet.overlay.life:
        strip = Rect(x=rect.x + 8.0, y=rect.bottom - 34.0, width=rect.width - 16.0, height=28.0)
    words = set_in(rect, unit.lines)
    label = sheet.links.labels[unit.box.index]
    return NodeMark(box=unit.box, rect=rect, words=words, life=strip, label=label)


def _states(sheet: _Sheet) -> Iterator[StateMark]:
    for unit in sheet.units.values():
        for drum in unit.drums:
            rect = sheet.states[drum.state.index]
            words = set_in_drum(rect, drum.lines)
            yield StateMark(state=drum.state, rect=rect, words=words, label=state_label(drum.state))


def _arrival(sheet: _Sheet, edge: Edge) -> Arrival:
    return next(a for a in sheet.arrivals[edge[1]] if a.edge == edge)


def _data(sheet: _Sheet) -> Iterator[EdgeMark]:
    for edge, _ in sheet.links.data.items():
        above, rect = sheet.nodes[edge[0]], sheet.nodes[edge[1]]
        arrival = _arrival(sheet, edge)
        start, end = (above.middle[0], above.bottom), (arrival.x, rect.y)
        points = down(sheet.layers, sheet.levels, edge, start, end, _PAD)
        (x0, y0), (x1, y1) = points[-3], points[-2]
        source, target = sheet.links.ends[edge]
        yield EdgeMark(
            kind="data",
            source=source,
            target=target,
            points=tuple(points),
            words=set_above(arrival.x + 6.0, rect.y - 9.0, arrival.lines),
            queue=((x0 + x1) / 2, (y0 + y1) / 2) if sheet.overlay.life else None,
            label=data_label(source, target, sheet.links.carried[edge]),
        )


def _beside(sheet: _Sheet) -> Iterator[EdgeMark]:
    """Short edges between nodes and the States beside them."""
    for item, unit in sheet.units.items():
        for drum in unit.drums if unit.box else ():
            assert unit.box is not None
            rect, y = sheet.states[drum.state.index], sheet.states[drum.state.index].middle[1]
            ends = ((sheet.nodes[item].right, y), (rect.x, y))
            words = _between(ends[0][0], unit.gap, y, drum.link)
            yield EdgeMark(
                kind="writes" if drum.writes else "reads",
                source=unit.box.name if drum.writes else drum.state.name,
                target=drum.state.name if drum.writes else unit.box.name,
                points=ends if drum.writes else ends[::-1],
                words=words,
                label=_said(drum.state.name, unit.box.name, drum.link, writes=drum.writes),
            )


def _between(x: float, gap: float, y: float, lines: Sequence[Line]) -> tuple[Words, ...]:
    found = set_above(x, y - 6.0, lines)
    return tuple(
        Words(x=x + (gap - w.width) / 2, y=w.y, text=w.text, kind=w.kind, width=w.width)
        for w in found
    )


def _said(state: str, node: str, link: Sequence[Line], *, writes: bool) -> str:
    if writes:
        return f"{node} writes {state}"
    return ", ".join([f"weights of {state} to {node}", *(text for _, text in link)])


def _far(sheet: _Sheet) -> Iterator[EdgeMark]:
    """Edges from States to readers and followers that are elsewhere."""
    for each in sheet.links.far:
        lane = sheet.lanes[each.state]
        end, lines = _far_end(sheet, each)
        row = sheet.layers.layer[_holder(sheet, each.target)]
        points = tuple(far(lane, sheet.states[each.state], row, end))
        name = sheet.picture.states[each.state].name
        words = set_above(end[0] + 6.0, end[1] - 9.0, lines)
        yield EdgeMark(
            kind=each.kind,
            source=each.name if each.kind == "writes" else name,
            target=name if each.kind == "writes" else each.name,
            points=points[::-1] if each.kind == "writes" else points,
            round=True,
            words=words,
            label=_said(name, each.name, lines, writes=each.kind == "writes"),
        )


def _far_end(sheet: _Sheet, each: Far) -> tuple[Point, Sequence[Line]]:
    """Where a far edge ends, and what is written there."""
    if each.target.startswith("s"):
        rect = sheet.states[int(each.target[1:])]
        return (rect.x + 18.0, rect.y), each.label
    arrival = _arrival(sheet, (f"s{each.state}", each.target))
    return (arrival.x, sheet.nodes[each.target].y), arrival.lines
