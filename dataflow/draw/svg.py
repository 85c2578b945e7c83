"""A graph as an SVG picture.

Owns: the choice between an installed `dot` and our own drawing, and that drawing's panels, boxes
and edges. Does not own: the layout (layers.py), what is worth showing (picture.py).

Training's nodes are in one panel, the stream region above the cut and the step region below it;
evaluation has its own panel. A Model's weights flow down dashed edges; what `train` writes goes
back up along the margin: the loop of reinforcement learning.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from dataflow.draw import shapes
from dataflow.draw.colours import CUT, FILLS, SOFT, STATE, WIRE, fill_of
from dataflow.draw.dot import dot, dot_of_program, svg_by_dot
from dataflow.draw.layers import Edge, Placed, Size, assign, place
from dataflow.draw.mermaid import out_of
from dataflow.draw.phases import ProgramPicture
from dataflow.draw.picture import TITLES, Box, Picture, StateBox
from dataflow.draw.text import lag_words, wrapped

_CALL_WIDTH = 34
_PAD = 26.0
_LANE = 14.0
_TITLE = 34.0
_NOTE = 16.0


def svg(picture: Picture) -> str:
    """Valid XML, by an installed `dot -Tsvg` or our own layout. A comment says which."""
    return _by_dot(dot(picture)) if shutil.which("dot") else drawn(picture)


def svg_of_program(program: ProgramPicture) -> str:
    """The same, for each phase."""
    return _by_dot(dot_of_program(program)) if shutil.which("dot") else drawn_program(program)


def _by_dot(source: str) -> str:
    made = svg_by_dot(source)
    head, mark, rest = made.partition("<svg")
    return f"{head}<!-- layout: Graphviz dot -->\n{mark}{rest}"


def drawn(picture: Picture) -> str:
    """The picture by our own layered layout."""
    width, height, parts = _titled(picture.name, picture, _PAD)
    return shapes.document(width, height + _PAD, picture.name, parts)


def drawn_program(program: ProgramPicture) -> str:
    """Each phase below the one before, with what it begins with under its heading."""
    y, width, parts = _PAD, 0.0, []
    for phase in program.phases:
        wide, y, found = _titled(phase.title, phase.picture, y, phase.begins)
        width, y, parts = max(width, wide), y + _PAD, parts + found
    return shapes.document(width, y, program.name, parts)


def _titled(
    title: str, picture: Picture, top: float, notes: Sequence[str] = ()
) -> tuple[float, float, list[str]]:
    """A title, lines below it, and the panels side by side: width, lower end, parts."""
    parts = [shapes.words(_PAD, top + 12, title, size=19, bold=True)]
    for note in notes:
        top += _NOTE
        parts.append(shapes.words(_PAD, top + 16, note, size=11, fill=SOFT))
    x, height = _PAD, 0.0
    for panel in _panels(picture):
        parts += [f'<g transform="translate({x:.1f},{top + _TITLE:.1f})">', *panel.parts, "</g>"]
        x += panel.width + _PAD
        height = max(height, panel.height)
    return x, top + _TITLE + height, parts


def _panels(picture: Picture) -> list[_Panel]:
    """Training's panel, and evaluation's if it reads nothing from training's nodes."""
    evaluated = picture.within("evaluation")
    apart = {box.index for box in evaluated}
    if not apart.issuperset(wire.source for box in evaluated for wire in box.wires):
        apart = set()
    panels = [_panel(picture, [b for b in picture.boxes if b.index not in apart], ghosts=False)]
    if apart:
        panels.append(_panel(picture, evaluated, ghosts=True))
    return panels


@dataclass(slots=True, kw_only=True)
class _Panel:
    width: float
    height: float
    parts: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _Sheet:
    """What is laid out together: boxes and States by id (`n3`, `s0`), edges by kind, and the
    resulting places.
    """

    boxes: dict[str, Box]
    states: dict[str, StateBox]
    wires: dict[Edge, str]
    sizes: dict[str, Size]
    weights: dict[Edge, str] = field(default_factory=dict)
    backs: list[Edge] = field(default_factory=list)
    at: Placed | None = None
    left: float = 0.0
    """Space for the ways back on the left margin."""

    @property
    def edges(self) -> list[Edge]:
        return [*self.wires, *self.weights]

    @property
    def placed(self) -> Placed:
        assert self.at is not None
        return self.at

    def x(self, item: str) -> float:
        return self.placed.x[item] + self.left


def _panel(picture: Picture, boxes: Sequence[Box], *, ghosts: bool) -> _Panel:
    sheet = _sheet(picture, boxes, ghosts=ghosts)
    cut = _lay_out(sheet, ghosts=ghosts)
    lanes = _lanes(sheet)
    sheet.left = _PAD + _LANE * sum(side < 0 for side, _ in lanes.values())
    right = _PAD + _LANE * sum(side > 0 for side, _ in lanes.values())
    least = _least_width(picture, ghosts=ghosts)
    width = max(sheet.left + sheet.placed.width + right, least)
    height = sheet.placed.height + _PAD + (_LANE if lanes else 0.0)
    panel = _Panel(width=width, height=height)
    panel.parts += _background(sheet, panel, cut)
    panel.parts += _edges(sheet, lanes)
    panel.parts += _titles(picture, sheet, cut, ghosts=ghosts)
    panel.parts += [_box(sheet, item, box) for item, box in sheet.boxes.items()]
    panel.parts += [_state(sheet, item, state) for item, state in sheet.states.items()]
    return panel


def _lay_out(sheet: _Sheet, *, ghosts: bool) -> int:
    """Place everything; returns the layer below the cut, 0 if the panel has none."""
    step = [item for item, box in sheet.boxes.items() if box.region != "stream" and not ghosts]
    cut = _cut_layer(sheet, step) if step else 0
    above = {0: _TITLE + (_LANE if sheet.backs else 0.0)} | ({cut: _TITLE + 6.0} if cut else {})
    sheet.at = place(sheet.sizes, sheet.edges, least=dict.fromkeys(step, cut), extra=above)
    return cut


def _cut_layer(sheet: _Sheet, step: Sequence[str]) -> int:
    """The layer below all boxes of the stream region."""
    upper = {item: size for item, size in sheet.sizes.items() if item not in step}
    layer = assign(upper, [e for e in sheet.edges if e[0] in upper and e[1] in upper], {})
    return 1 + max((layer[item] for item in upper if item in sheet.boxes), default=-1)


def _least_width(picture: Picture, *, ghosts: bool) -> float:
    longest = TITLES["evaluation"] if ghosts else _cut_words(picture)
    return len(longest) * 6.6 + 2 * 14


def _sheet(picture: Picture, boxes: Sequence[Box], *, ghosts: bool) -> _Sheet:
    inside = {box.index: f"n{box.index}" for box in boxes}
    used = [s for s in picture.states if ghosts is False or any(r.box in inside for r in s.readers)]
    sizes = {inside[b.index]: _box_size(b) for b in boxes}
    sizes |= {f"s{s.index}": _state_size(s) for s in used}
    sheet = _Sheet(
        boxes={inside[b.index]: b for b in boxes},
        states={f"s{s.index}": s for s in used},
        wires=_wires(boxes, inside),
        sizes=sizes,
    )
    _add_weights(sheet, inside)
    return sheet


def _wires(boxes: Sequence[Box], inside: Mapping[int, str]) -> dict[Edge, str]:
    """Data edges, labelled with the outputs that they carry."""
    outputs: dict[Edge, set[str]] = {}
    for box in boxes:
        for wire in box.wires:
            carried = outputs.setdefault((inside[wire.source], inside[box.index]), set())
            if wire.output is not None:
                carried.add(str(wire.output))
    return {edge: ", ".join(sorted(carried)) for edge, carried in outputs.items()}


def _add_weights(sheet: _Sheet, inside: Mapping[int, str]) -> None:
    """Edges of States: down to their readers and followers, and back from their writers. A writer's
    edge also leads down if nothing is below the State.
    """
    names = {state.name: item for item, state in sheet.states.items()}
    followed = {state.leader for state in sheet.states.values()}
    for item, state in sheet.states.items():
        reads = _reads(item, state, inside)
        sheet.weights |= reads
        if state.leader in names:
            sheet.weights[names[state.leader], item] = "follows"
        written = [(inside[w], item) for w in state.writers if w in inside]
        if reads or state.name in followed:
            sheet.backs += written
        else:
            sheet.weights |= dict.fromkeys(written, "writes")


def _reads(item: str, state: StateBox, inside: Mapping[int, str]) -> dict[Edge, str]:
    """The edges from a State to its readers, labelled with their lags."""
    return {
        (item, inside[reader.box]): lag_words(reader.lag, trained=state.trained).strip(" ()")
        for reader in state.readers
        if reader.box in inside
    }


def _box_lines(box: Box) -> list[str]:
    return [*wrapped(box.call, _CALL_WIDTH), *filter(None, [out_of(box)])]


def _state_lines(state: StateBox) -> list[str]:
    return wrapped(f"{state.kind} {state.facts}", _CALL_WIDTH, indent="")


def _box_size(box: Box) -> Size:
    return shapes.size(box.name, _box_lines(box))


def _state_size(state: StateBox) -> Size:
    plain = shapes.size(state.name, _state_lines(state))
    return Size(width=plain.width, height=plain.height + 12.0)


def _cut_words(picture: Picture) -> str:
    return f"the cut: {picture.step} make a Step" if picture.step else "the cut: what makes a Step"


def _background(sheet: _Sheet, panel: _Panel, cut: int) -> Iterator[str]:
    """The panel, and the cut as a line across it."""
    yield shapes.rectangle(
        0, 0, panel.width, panel.height, fill="#fbfcfe", line="#dde2ea", radius=10
    )
    if cut:
        y = _cut_at(sheet, cut)
        yield (
            f'<line x1="0" y1="{y:.1f}" x2="{panel.width:.1f}" y2="{y:.1f}" stroke="{CUT}"'
            ' stroke-dasharray="7 5"/>'
        )


def _cut_at(sheet: _Sheet, cut: int) -> float:
    return sheet.placed.tops[cut] - _TITLE - 6.0


def _titles(picture: Picture, sheet: _Sheet, cut: int, *, ghosts: bool) -> Iterator[str]:
    """Each region's title, above the edges that pass there."""
    title = TITLES["evaluation"] if ghosts else TITLES["stream"] if cut else TITLES["step"]
    yield shapes.words(14, 20, title, size=11, fill=SOFT)
    if cut:
        yield shapes.words(14, _cut_at(sheet, cut) + 16, _cut_words(picture), size=11, fill=CUT)


def _edges(sheet: _Sheet, lanes: dict[Edge, tuple[int, int]]) -> Iterator[str]:
    """Data edges, weight edges, then the ways back from writers to their States."""
    ends = _ends(sheet)
    for edge, label in (*sheet.wires.items(), *sheet.weights.items()):
        weight = edge in sheet.weights
        points = _points(sheet, edge, ends[edge])
        yield shapes.curve(points, colour=STATE[1] if weight else WIRE, dashed=weight)
        if label:
            x, y = points[-1]
            yield shapes.words(x + 6, y - 9, label, size=10, fill=STATE[1] if weight else SOFT)
    for edge in sheet.backs:
        yield from _way_back(sheet, edge, *lanes[edge])


def _ends(sheet: _Sheet) -> dict[Edge, float]:
    """Where on the upper side of its box each edge ends: side by side, in order of arrival."""
    found: dict[Edge, float] = {}
    into: dict[str, list[Edge]] = {}
    for edge in (*sheet.wires, *sheet.weights):
        into.setdefault(edge[1], []).append(edge)
    for item, edges in into.items():
        edges.sort(key=lambda e: sheet.placed.x[(sheet.placed.paths[e] or [e[0]])[-1]])
        pitch = min(46.0, sheet.sizes[item].width / (len(edges) + 1))
        for i, edge in enumerate(edges):
            found[edge] = sheet.x(item) + pitch * (i - (len(edges) - 1) / 2)
    return found


def _points(sheet: _Sheet, edge: Edge, end: float) -> list[tuple[float, float]]:
    """From the lower side of one box, straight through each layer between, to the upper side of the
    other.
    """
    placed, (a, b) = sheet.placed, edge
    points = [(sheet.x(a), placed.y[a] + sheet.sizes[a].height / 2)]
    below = placed.bottoms[placed.layer[a]]
    if points[0][1] < below - 1:
        points.append((sheet.x(a), below))
    for point in placed.paths[edge]:
        at = placed.layer[point]
        points += [(sheet.x(point), placed.tops[at]), (sheet.x(point), placed.bottoms[at])]
    above = placed.tops[placed.layer[b]]
    top = placed.y[b] - sheet.sizes[b].height / 2
    return [*points, (end, above), (end, top)] if top > above + 1 else [*points, (end, top)]


def _lanes(sheet: _Sheet) -> dict[Edge, tuple[int, int]]:
    """For each way back its margin (-1 left, 1 right: the State's side) and its number there."""
    lanes: dict[Edge, tuple[int, int]] = {}
    for edge in sheet.backs:
        side = -1 if sheet.placed.x[edge[1]] < sheet.placed.width / 2 else 1
        lanes[edge] = (side, sum(1 for other in lanes.values() if other[0] == side))
    return lanes


def _way_back(sheet: _Sheet, edge: Edge, side: int, lane: int) -> Iterator[str]:
    placed, (writer, state) = sheet.placed, edge
    x = (
        sheet.left - 14 - lane * _LANE
        if side < 0
        else sheet.left + placed.width + 14 + lane * _LANE
    )
    low = placed.bottoms[placed.layer[writer]] + 12 + lane * 4
    start = (sheet.x(writer), placed.y[writer] + sheet.sizes[writer].height / 2)
    top = placed.y[state] - sheet.sizes[state].height / 2
    high = placed.tops[placed.layer[state]] - 12
    end = sheet.x(state) + side * min(40.0, sheet.sizes[state].width / 4)
    corners = [start, (start[0], low), (x, low), (x, high), (end, high), (end, top)]
    yield shapes.elbow(corners, colour=STATE[1])
    yield shapes.words(start[0] + 6, start[1] + 11, "writes", size=10, fill=STATE[1])


def _box(sheet: _Sheet, item: str, box: Box) -> str:
    fill, line = FILLS[fill_of(box.work)]
    size, x, y = sheet.sizes[item], sheet.x(item), sheet.placed.y[item]
    frame = shapes.rectangle(
        x - size.width / 2,
        y - size.height / 2,
        size.width,
        size.height,
        fill=fill,
        line=line,
        radius=7,
    )
    calls = len(_box_lines(box)) - bool(out_of(box))
    tip = f"<title>{escape(box.name)}: {escape(box.call)}</title>"
    return f"<g>{tip}{frame}{shapes.label(x, y, box.name, _box_lines(box), calls)}</g>"


def _state(sheet: _Sheet, item: str, state: StateBox) -> str:
    size, x, y = sheet.sizes[item], sheet.x(item), sheet.placed.y[item]
    frame = shapes.cylinder(
        x - size.width / 2, y - size.height / 2, size.width, size.height, *STATE
    )
    return f"<g>{frame}{shapes.label(x, y + 4, state.name, _state_lines(state), 0)}</g>"
