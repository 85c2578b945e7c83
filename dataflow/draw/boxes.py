"""What stands in the boxes of a picture: a node's and a State's lines, and the room that they need.

Owns: lines, sizes of boxes, which State stands beside which node. Does not own: places
(arrange.py), what is worth showing (picture.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dataflow.draw.layer_draft import Size
from dataflow.draw.measure import break_lines, measure_mono, measure_sans
from dataflow.draw.overlay import Overlay
from dataflow.draw.picture import Box, StateBox, describe_output
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
_NO_LIMIT = 99
"""Lines of a chain's names: all of them are shown."""
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
        drum_width = max((drum.width for drum in self.drums), default=0.0)
        beside = 14.0 if len(self.drums) > 1 else 0.0
        width = self.width + self.gap + drum_width + beside
        height = max(self.height, self.stack)
        if self.box is None:
            return Size(width=width, height=height)
        behind = BEHIND if self.box.members else 0.0
        port = (self.width - width - behind) / 2
        return Size(width=width + behind, height=height + behind, port=port)

    @property
    def stack(self) -> float:
        """The height of its States, one below the other."""
        gaps = 10.0 * max(0, len(self.drums) - 1)
        return gaps + sum(drum.height for drum in self.drums)


def node_unit(box: Box, overlay: Overlay, node_count: int, least: float) -> Unit:
    """A node's lines, and its box at least so wide. node_count: the nodes of the picture."""
    most = _MOST if node_count <= _MANY else _MOST_OF_MANY
    lines = tuple(_set_node(box, overlay, most))
    width = max(least, _LEAST, _measure_width(lines))
    height = _measure_height(lines)
    if overlay.life:
        width = max(width, _LEAST_ALIVE)
        height += LIFE + 8.0
    return Unit(box=box, lines=lines, width=width, height=height)


def _set_node(box: Box, overlay: Overlay, most: int) -> list[Line]:
    """A node's name, call and facts. most: lines of each."""
    if box.members:
        names = ", ".join(member.name for member in box.members)
        lines = _set_lines("name", break_lines(names, _NAME_LETTERS, _NO_LIMIT, ""))
        lines.append(("call", f"{len(box.members)} nodes in a chain"))
    else:
        lines = _set_lines("name", break_lines(box.name, _NAME_LETTERS, 4, ""))
        lines += _set_lines("call", break_lines(box.call, _CALL, most))
    lines += _set_lines("facts", break_lines(describe_output(box), _CALL, most))
    lines += _set_lines("facts", break_lines(overlay.describe_place(box), _CALL, 4))
    return lines + _set_lines("note", overlay.notes_about_box(box))


def _set_lines(kind: str, lines: Sequence[str]) -> list[Line]:
    return [(kind, line) for line in lines]


def notes_of(overlay: Overlay, name: str) -> list[Line]:
    """The lines about an edge or a State."""
    return _set_lines("note", overlay.notes_about(name))


def drum_of(state: StateBox, overlay: Overlay) -> Drum:
    """A State's lines and size."""
    facts = f"{state.kind} {state.facts}".strip()
    lines = _set_lines("name", break_lines(state.name, _NAME_LETTERS, 4, ""))
    lines += _set_lines("facts", break_lines(facts, _CALL, _MOST, ""))
    lines += notes_of(overlay, state.name)
    return Drum(
        state=state,
        lines=tuple(lines),
        width=max(_LEAST, _measure_width(lines)),
        height=_measure_height(lines) + _RIM + 4.0,
    )


def _measure_width(lines: Sequence[Line]) -> float:
    return 2 * _INSIDE + label_width(lines)


def line_width(line: Line) -> float:
    """Pixels of one line in its class's font."""
    kind, words = line
    if kind == "name":
        return measure_sans(words, _NAME, bold=True)
    if kind == "ports":
        return measure_sans(words, _SMALL)
    return measure_mono(words, _SMALL)


def label_width(lines: Sequence[Line]) -> float:
    """Pixels of the widest line."""
    return max((line_width(line) for line in lines), default=0.0)


def _measure_height(lines: Sequence[Line]) -> float:
    heights = [_NAME_LINE if kind == "name" else LINE for kind, _ in lines]
    return 2 * _ABOVE + sum(heights)


def set_in(rect: Rect, lines: Sequence[Line], down: float = 0.0) -> tuple[Words, ...]:
    """Set a box's lines, one below the other from its upper left corner on."""
    x, y = rect.x + _INSIDE, rect.y + _ABOVE + down
    set_words: list[Words] = []
    for line in lines:
        kind, text = line
        step, size = (_NAME_LINE, _NAME) if kind == "name" else (LINE, _SMALL)
        y += step
        words = Words(x=x, y=y - 4.0, text=text, kind=kind, width=line_width(line), size=size)
        set_words.append(words)
    return tuple(set_words)


def set_in_drum(rect: Rect, lines: Sequence[Line]) -> tuple[Words, ...]:
    """Set a drum's lines below its lid."""
    return set_in(rect, lines, down=_RIM + 2.0)


def set_above(x: float, bottom: float, lines: Sequence[Line]) -> tuple[Words, ...]:
    """Set a label's lines, the last one just above `bottom`."""
    set_words: list[Words] = []
    for lines_below, line in enumerate(reversed(lines)):
        kind, text = line
        y = bottom - 13.0 * lines_below
        set_words.append(Words(x=x, y=y, text=text, kind=kind, width=line_width(line)))
    return tuple(reversed(set_words))
