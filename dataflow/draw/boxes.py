"""What stands in the boxes of a picture: a node's and a State's lines, and the room that they need.

Owns: lines, sizes of boxes, which State stands beside which node. Does not own: places
(arrange.py), what is worth showing (picture.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dataflow.draw.layers import Size
from dataflow.draw.measure import lines_of, mono, sans
from dataflow.draw.overlay import Overlay
from dataflow.draw.picture import Box, StateBox, out_of
from dataflow.draw.scene import Rect, Words

LINE = 14.0
"""From a line of small words to the next."""
LIFE = 28.0
"""Height of the strip that stays free for a page."""
_NAME, _SMALL = 13.0, 11.0
_NAME_LINE = 17.0
_INSIDE, _ABOVE = 12.0, 7.0
_LEAST, _LEAST_ALIVE = 104.0, 152.0
_CALL, _NAME_LETTERS = 28, 26
"""Letters of a line."""
_MOST, _MOST_OF_MANY, _MANY = 7, 3, 25
"""Lines of a call, and in pictures of more nodes than the last number."""
_RIM = 6.0
BEHIND = 4.0
"""How far the sheet behind a folded chain shows."""

Line = tuple[str, str]
"""A line's class and text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drum:
    """A State beside a node. link: what is written on the short edge between them."""

    state: StateBox
    lines: tuple[Line, ...]
    width: float
    height: float
    writes: bool = False
    link: tuple[Line, ...] = ()


@dataclass(slots=True, kw_only=True)
class Unit:
    """What is laid out as one: a node with the States beside it, or a State alone."""

    box: Box | None
    lines: tuple[Line, ...] = ()
    width: float = 0.0
    height: float = 0.0
    drums: list[Drum] = field(default_factory=list)

    @property
    def gap(self) -> float:
        """Between the node and its States."""
        if self.box is None or not self.drums:
            return 0.0
        return max(30.0, *(label_width(drum.link) + 16 for drum in self.drums))

    @property
    def size(self) -> Size:
        """With its States; edges are at the node's middle."""
        stack = max((drum.width for drum in self.drums), default=0.0)
        beside = 14.0 if len(self.drums) > 1 else 0.0
        whole = self.width + self.gap + stack + beside
        tall = max(self.height, self.stack)
        behind = BEHIND if self.box is not None and self.box.members else 0.0
        return Size(
            width=whole + behind,
            height=tall + behind,
            port=(self.width - whole - behind) / 2 if self.box is not None else 0.0,
        )

    @property
    def stack(self) -> float:
        """The height of its States, one below the other."""
        gaps = 10.0 * max(0, len(self.drums) - 1)
        return gaps + sum(drum.height for drum in self.drums)


def node_unit(box: Box, overlay: Overlay, many: int, least: float) -> Unit:
    """A node's lines, and its box at least so wide. many: the nodes of the picture."""
    lines = tuple(_node_lines(box, overlay, _MOST_OF_MANY if many > _MANY else _MOST))
    low = max(least, _LEAST_ALIVE if overlay.life else _LEAST)
    height = _height(lines) + (LIFE + 8.0 if overlay.life else 0.0)
    return Unit(box=box, lines=lines, width=max(low, _width(lines)), height=height)


def _node_lines(box: Box, overlay: Overlay, most: int) -> list[Line]:
    if box.members:
        names = ", ".join(member.name for member in box.members)
        lines = [("name", line) for line in lines_of(names, _NAME_LETTERS, 99, "")]
        lines.append(("call", f"{len(box.members)} nodes in a chain"))
    else:
        lines = [("name", line) for line in lines_of(box.name, _NAME_LETTERS, 4, "")]
        lines += [("call", line) for line in lines_of(box.call, _CALL, most)]
    lines += [("facts", line) for line in lines_of(out_of(box), _CALL, most)]
    lines += [("facts", line) for line in lines_of(overlay.place(box), _CALL, 4)]
    return lines + [("note", line) for line in overlay.of_box(box)]


def notes_of(overlay: Overlay, name: str) -> list[Line]:
    """The lines about an edge or a State."""
    return [("note", line) for line in overlay.noted(name)]


def drum_of(state: StateBox, overlay: Overlay) -> Drum:
    """A State's lines and size."""
    facts = lines_of(f"{state.kind} {state.facts}".strip(), _CALL, _MOST, "")
    names = [("name", line) for line in lines_of(state.name, _NAME_LETTERS, 4, "")]
    lines = (*names, *(("facts", line) for line in facts), *notes_of(overlay, state.name))
    return Drum(
        state=state,
        lines=lines,
        width=max(_LEAST, _width(lines)),
        height=_height(lines) + _RIM + 4.0,
    )


def _width(lines: Sequence[Line]) -> float:
    return 2 * _INSIDE + max((line_width(line) for line in lines), default=0.0)


def line_width(line: Line) -> float:
    """Pixels of one line in its class's font."""
    kind, words = line
    if kind == "name":
        return sans(words, _NAME, bold=True)
    return sans(words, _SMALL) if kind == "ports" else mono(words, _SMALL)


def label_width(lines: Sequence[Line]) -> float:
    """Pixels of the widest line."""
    return max((line_width(line) for line in lines), default=0.0)


def _height(lines: Sequence[Line]) -> float:
    return 2 * _ABOVE + sum(_NAME_LINE if kind == "name" else LINE for kind, _ in lines)


def set_in(rect: Rect, lines: Sequence[Line], down: float = 0.0) -> tuple[Words, ...]:
    """A box's lines, one below the other from its upper left corner on."""
    found, y = [], rect.y + _ABOVE + down
    for kind, words in lines:
        step, size = (_NAME_LINE, _NAME) if kind == "name" else (LINE, _SMALL)
        y += step
        width = line_width((kind, words))
        x = rect.x + _INSIDE
        found.append(Words(x=x, y=y - 4.0, text=words, kind=kind, width=width, size=size))
    return tuple(found)


def set_in_drum(rect: Rect, lines: Sequence[Line]) -> tuple[Words, ...]:
    """A drum's lines, below its lid."""
    return set_in(rect, lines, down=_RIM + 2.0)


def set_above(x: float, bottom: float, lines: Sequence[Line]) -> tuple[Words, ...]:
    """A label's lines, the last one just above `bottom`."""
    found = []
    for up, line in enumerate(reversed(lines)):
        kind, words = line
        y = bottom - 13.0 * up
        found.append(Words(x=x, y=y, text=words, kind=kind, width=line_width(line)))
    return tuple(reversed(found))
