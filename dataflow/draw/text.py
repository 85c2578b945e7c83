"""A graph as text for a terminal.

Owns: the staircase. Each node is to the right of the rails still in use; below its first letter
runs a rail that carries its rows down to the last node that reads them. Does not own: what is worth
showing (picture.py).

    prompts                    a rail starts below a name
    |
    +-> rollout                `+` takes rows off a rail; a digit if a node has several outputs
        |
        +-> score
        |   |
    ====|===|==== the cut      rails that cross it are what a Step is made of
        +---+-> train_policy

In fewer columns than WIDTH, where that leaves no room for them, what stands beside a name stands
below it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dataflow.draw.overlay import Overlay
from dataflow.draw.phases import ProgramPicture
from dataflow.draw.picture import REGIONS, TITLES, Box, Picture, StateBox
from dataflow.safe_text import one_line
from dataflow.width import folded

WIDTH = 118
_PITCH, _CLOSE_PITCH = 4, 3
"""Columns from a rail to the next; where many stand on a narrow screen."""
_MARGIN = "  "
_NARROWEST = 34
_ROOM, _LEAST_ROOM = 24, 12
"""Columns that words to the right of the rails should have, and that they always get."""
_JOINED = "\x00"
_SCOPES = {"row": "", "group": "  [a group at once]", "batch": "  [a Step at once]"}


def text(picture: Picture, width: int = WIDTH, overlay: Overlay | None = None) -> str:
    """The drawing, ASCII only, ending in a newline. width: of its lines, as far as rails and words
    allow. Places and notes are lists below it.
    """
    table = _Table(picture, width)
    lines = folded(picture.name, width).split("\n") if table.narrow else [_head(picture, table)]
    for region in REGIONS:
        boxes = picture.within(region)
        if not boxes:
            continue
        lines += _heading(picture, table, boxes[0])
        for box in boxes:
            lines += _narrow_entry(table, box) if table.narrow else _entry(table, box)
    if picture.states:
        states = _states(picture, table)
        lines += ["", *states] if lines[-1].strip() else states
    for section in _beyond(picture, overlay or Overlay(), width):
        lines += ["", *section] if lines[-1].strip() else section
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _head(picture: Picture, table: _Table) -> str:
    """The name, and the titles of the columns."""
    head = (
        _MARGIN
        + " " * table.drawing
        + "output".ljust(table.schema)
        + "rows".ljust(table.rows)
        + "call"
    )
    return picture.name + head[len(picture.name) :]


def text_of_program(
    program: ProgramPicture, width: int = WIDTH, overlays: Sequence[Overlay] = ()
) -> str:
    """Each phase below its heading, with what it begins with."""
    parts = []
    overlays = overlays or [Overlay()] * len(program.phases)
    for phase, overlay in zip(program.phases, overlays, strict=True):
        begins = "".join(f"    {line}\n" for line in phase.begins)
        head = f"{phase.title}\n{begins}"
        head = head if width >= WIDTH else folded(head, width)
        parts.append(f"{head}\n{text(phase.picture, width, overlay)}")
    return "\n".join(parts)


@dataclass(slots=True)
class _Table:
    """Where each rail is, how long it runs, and how wide the columns next to the drawing are."""

    last: dict[int, int]
    columns: dict[int, int]
    pitch: int
    drawing: int
    schema: int
    rows: int
    screen: int
    narrow: bool

    def __init__(self, picture: Picture, screen: int) -> None:
        self.last = {w.source: box.index for box in picture.boxes for w in box.wires}
        self.columns, self.pitch = {}, _PITCH
        for box in picture.boxes:
            rails = [self.columns[i] for i in self.alive(box.index)]
            self.columns[box.index] = max(rails, default=-1) + 1
        self.drawing = (
            max((self.columns[b.index] * _PITCH + len(b.name) for b in picture.boxes), default=0)
            + 3
        )
        self.schema = max((len(", ".join(b.schemas)) for b in picture.boxes), default=0) + 2
        self.rows = max((len(b.rows) for b in picture.boxes), default=0) + 2
        self.screen = screen
        wide = len(_MARGIN) + self.drawing + self.schema + self.rows + _NARROWEST
        self.narrow = wide > screen < WIDTH
        if self.narrow:  # only rails: names may reach beyond it
            rails = max(self.columns.values(), default=0) + 1
            many = len(_MARGIN) + rails * _PITCH + _ROOM > screen
            self.pitch = _CLOSE_PITCH if many else _PITCH
            self.drawing = rails * self.pitch

    def alive(self, index: int, *, after: bool = False) -> list[int]:
        """The boxes whose rails pass box `index` or (unless `after`) end there."""
        first = index + 1 if after else index
        return [
            i for i, end in self.last.items() if i in self.columns and i < first and end >= first
        ]

    def rails(self, index: int, fill: str = " ") -> str:
        """The rails just below box `index`."""
        line = [fill] * self.drawing
        for i in self.alive(index, after=True):
            line[self.columns[i] * self.pitch] = "|"
        return "".join(line)

    @property
    def width(self) -> int:
        """What is left for the call, the last column."""
        used = len(_MARGIN) + self.drawing + self.schema + self.rows
        return max(_NARROWEST, self.screen - used)


def _heading(picture: Picture, table: _Table, first: Box) -> list[str]:
    """The line above a region; rails run through it."""
    mark = {"stream": "-", "step": "=", "evaluation": "~"}[first.region]
    words = TITLES[first.region]
    if first.region == "step":
        words = (
            f"the cut: {picture.step} make a Step" if picture.step else "the cut: what makes a Step"
        )
    rails = table.rails(first.index - 1, mark)
    room = table.screen - len(_MARGIN)
    line = f"{rails[:-1]} {words} "
    if table.narrow and len(line) > room:  # the words below the line
        below = table.rails(first.index - 1).rstrip()
        below += "   " if below else ""
        parts = wrapped(words, max(_LEAST_ROOM, room - len(below)), "")
        line = "\n".join([rails, *(f"{_MARGIN}{below}{part}" for part in parts)])
    else:
        line = line.ljust(room, mark)
    line = _MARGIN + line
    space = _MARGIN + table.rails(first.index - 1)
    return (
        [line, space]
        if first.index == 0
        else [space, line, space]
        if first.region == "evaluation"
        else [line, space]
    )


def _entry(table: _Table, box: Box) -> list[str]:
    """A node, and below it the rails with what did not fit on its line."""
    calls = wrapped(box.call + _SCOPES[box.scope] * bool(box.schemas), table.width)
    facts = ", ".join(box.schemas).ljust(table.schema) + box.rows.ljust(table.rows)
    lines = [_MARGIN + _branch(table, box) + facts + calls[0]]
    gap = table.rails(box.index)
    for more in calls[1:]:
        lines.append(_MARGIN + gap + " " * len(facts) + more)
    return [*lines, _MARGIN + gap] if len(calls) == 1 else lines


def _narrow_entry(table: _Table, box: Box) -> list[str]:
    """A node, and below it, beside the rails, what it makes and its call."""
    indent = (table.columns[box.index] + 1) * table.pitch
    room = max(_LEAST_ROOM, table.screen - len(_MARGIN) - indent)
    facts = "  ".join(filter(None, [", ".join(box.schemas), box.rows]))
    call = box.call + _SCOPES[box.scope] * bool(box.schemas)
    gap = table.rails(box.index)
    below = [line for words in (facts, call) if words for line in wrapped(words, room)]
    lines = [_MARGIN + _branch(table, box), *(_MARGIN + gap[:indent] + line for line in below)]
    return [*lines, _MARGIN + gap]


def wrapped(words: str, width: int, indent: str = "  ") -> list[str]:
    """Lines of at most `width` characters, or of one long word; `_JOINED` is a space that may not
    break.
    """
    lines = textwrap.wrap(
        words, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace(_JOINED, " ") for line in lines] or [""]


def _branch(table: _Table, box: Box) -> str:
    """`+---+-> advantage`: the rails that it takes from, and those that it passes."""
    line = [" "] * table.drawing
    at = table.columns[box.index] * table.pitch
    taps = {table.columns[source] * table.pitch: mark for source, mark in _taps(box)}
    if taps:
        line[min(taps) : at - 1] = "-" * (at - 1 - min(taps))
        line[at - 2] = ">"
    for i in table.alive(box.index):
        line[table.columns[i] * table.pitch] = "|"
    for x, mark in taps.items():
        line[x] = mark
    line[at : at + len(box.name)] = box.name
    return "".join(line)


def _taps(box: Box) -> Iterator[tuple[int, str]]:
    """For each source, `+`, the number of its output that is read, or `*` for several of them."""
    for source in {w.source for w in box.wires}:
        outputs = {w.output for w in box.wires if w.source == source}
        only = next(iter(outputs))
        yield source, "*" if len(outputs) > 1 else "+" if only is None else str(only)[-1]


def _states(picture: Picture, table: _Table) -> list[str]:
    """`policy  Model base, trainable  written by train_policy, read by rollout (lag 0)`."""
    wide = max(len(s.name) for s in picture.states) + 2
    facts = max(len(f"{s.kind} {s.facts}") for s in picture.states) + 2
    lines = [f"{_MARGIN}States"]
    for state in picture.states:
        kind, said = f"{state.kind} {state.facts}", _uses(picture, state)
        if table.narrow:
            whole = folded(f"    {state.name}  {kind}  {said}", table.screen)
            lines += whole.replace(_JOINED, " ").split("\n")
            continue
        uses = wrapped(said, max(_NARROWEST, table.screen - 4 - wide - facts))
        lines.append(f"    {state.name.ljust(wide)}{kind.ljust(facts)}{uses[0]}")
        lines += [" " * (4 + wide + facts) + more for more in uses[1:]]
    return lines


def _uses(picture: Picture, state: StateBox) -> str:
    names = [picture.boxes[i].name for i in state.writers]
    parts = [f"written by {', '.join(names)}"] if names else []
    if state.readers:
        reads = (
            picture.boxes[r.box].name + _joined(lag_words(r.lag, trained=state.trained))
            for r in state.readers
        )
        parts.append(f"read by {', '.join(reads)}")
    return "; ".join(parts)


def _beyond(picture: Picture, overlay: Overlay, width: int) -> Iterator[list[str]]:
    """The Workers with their nodes, and the notes."""
    if overlay.placed is not None:
        lines = [f"{_MARGIN}Workers"]
        for workers in overlay.columns(picture.boxes):
            inside = [b for b in picture.boxes if overlay.workers_of(b) == workers]
            title = overlay.title(workers) if workers else "left out"
            place = f" {overlay.place(inside[0])}".rstrip()
            names = ", ".join(box.name for box in inside)
            lines += folded(f"    {title}:  {names}{place}", width).split("\n")
        yield lines
    known = {**overlay.notes}
    if known:
        wide = max(len(one_line(name)) for name in known) + 2
        lines = [f"{_MARGIN}Figures"]
        for name in known:
            said = ", ".join(overlay.noted(name))
            lines += folded(f"    {one_line(name).ljust(wide)}{said}", width).split("\n")
        yield lines


def lag_words(lag: int | None, *, trained: bool) -> str:
    """` (lag <= 2)` after the reader of a State that changes; empty for one that never does."""
    if lag is None or not trained:
        return ""
    return " (lag 0)" if lag == 0 else f" (lag <= {lag})"


def _joined(words: str) -> str:
    return words.replace(" ", _JOINED)
