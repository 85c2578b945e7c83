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
from collections.abc import Iterator, Mapping, Sequence

from dataflow.draw.overlay import Overlay
from dataflow.draw.phases import ProgramPicture
from dataflow.draw.picture import REGIONS, TITLES, Box, Picture, StateBox
from dataflow.safe_text import one_line
from dataflow.width import fold_lines

WIDTH = 118
_PITCH, _CLOSE_PITCH = 4, 3
"""Columns from a rail to the next; where many stand on a narrow screen."""
_MARGIN = "  "
_NARROWEST = 34
"""Columns that a call gets at least."""
_ROOM, _LEAST_ROOM = 24, 12
"""Columns that words to the right of the rails should have, and that they always get."""
_JOINED = "\x00"
"""A space that may not break."""
_SCOPES = {"row": "", "group": "  [a group at once]", "batch": "  [a Step at once]"}
_RULES = {"stream": "-", "step": "=", "evaluation": "~"}


def draw_text(picture: Picture, width: int = WIDTH, overlay: Overlay | None = None) -> str:
    """Draw in ASCII only, ending in a newline. width: of its lines, as far as rails and words
    allow. Places and notes are lists below it.
    """
    table = _Table(picture, width)
    if table.narrow:
        lines = fold_lines(picture.name, width).split("\n")
    else:
        lines = [_write_head(picture, table)]
    for region in REGIONS:
        boxes = picture.within(region)
        if not boxes:
            continue
        lines += _write_heading(picture, table, boxes[0])
        for box in boxes:
            lines += _write_narrow_entry(table, box) if table.narrow else _write_entry(table, box)
    sections = [_list_states(picture, table)] if picture.states else []
    sections += _list_overlay(picture, overlay or Overlay(), width)
    for section in sections:
        # A line of rails alone is as good as an empty one.
        if lines[-1].strip():
            lines.append("")
        lines += section
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _write_head(picture: Picture, table: _Table) -> str:
    """The name, and the titles of the columns."""
    titles = "output".ljust(table.schema) + "rows".ljust(table.rows) + "call"
    head = _MARGIN + " " * table.drawing + titles
    return picture.name + head[len(picture.name) :]


def draw_program_text(
    program: ProgramPicture, width: int = WIDTH, overlays: Sequence[Overlay] = ()
) -> str:
    """Draw each phase below its heading, with what it begins with."""
    parts: list[str] = []
    overlays = overlays or [Overlay()] * len(program.phases)
    for phase, overlay in zip(program.phases, overlays, strict=True):
        begins = "".join(f"    {line}\n" for line in phase.begins)
        head = f"{phase.title}\n{begins}"
        if width < WIDTH:
            head = fold_lines(head, width)
        parts.append(f"{head}\n{draw_text(phase.picture, width, overlay)}")
    return "\n".join(parts)


class _Table:
    """Where each rail is, how long it runs, and how wide the columns next to the drawing are.

    last: by box the last one that reads it. columns: of the rails, by box, counted from the left.
    narrow: what stands beside a name stands below it.
    """

    def __init__(self, picture: Picture, screen: int) -> None:
        boxes = picture.boxes
        self.last: dict[int, int] = {}
        for box in boxes:
            for wire in box.wires:
                self.last[wire.source] = box.index
        self.columns = self._assign_columns(boxes)
        self.pitch = _PITCH
        ends = [self.columns[box.index] * _PITCH + len(box.name) for box in boxes]
        self.drawing = max(ends, default=0) + 3
        schemas = [", ".join(box.schemas) for box in boxes]
        self.schema = max(map(len, schemas), default=0) + 2
        rows = [box.rows for box in boxes]
        self.rows = max(map(len, rows), default=0) + 2
        self.screen = screen
        least_width = len(_MARGIN) + self.drawing + self.schema + self.rows + _NARROWEST
        self.narrow = least_width > screen and screen < WIDTH
        if self.narrow:
            # Only rails: names may reach beyond it.
            rails = max(self.columns.values(), default=0) + 1
            if len(_MARGIN) + rails * _PITCH + _ROOM > screen:
                self.pitch = _CLOSE_PITCH
            self.drawing = rails * self.pitch

    def _assign_columns(self, boxes: Sequence[Box]) -> dict[int, int]:
        """Each box's rail: to the right of those still in use there."""
        columns: dict[int, int] = {}
        for box in boxes:
            rails = [columns[i] for i in self._list_alive(box.index, columns)]
            columns[box.index] = max(rails, default=-1) + 1
        return columns

    def _list_alive(self, index: int, columns: Mapping[int, int]) -> list[int]:
        """Boxes above `index` whose rails reach it."""
        return [i for i, end in self.last.items() if i in columns and i < index <= end]

    def list_rails(self, index: int) -> list[int]:
        """The boxes whose rails pass box `index` or end there."""
        return self._list_alive(index, self.columns)

    def draw_rails(self, index: int, fill: str = " ") -> str:
        """The rails just below box `index`."""
        line = [fill] * self.drawing
        for i in self.list_rails(index + 1):
            line[self.columns[i] * self.pitch] = "|"
        return "".join(line)

    @property
    def width(self) -> int:
        """What is left for the call, the last column."""
        used = len(_MARGIN) + self.drawing + self.schema + self.rows
        return max(_NARROWEST, self.screen - used)


# --- regions and nodes ----------------------------------------------------------------------------


def _write_heading(picture: Picture, table: _Table, first: Box) -> list[str]:
    """The line above a region; rails run through it."""
    mark = _RULES[first.region]
    words = TITLES[first.region]
    if first.region == "step":
        words = "the cut: what makes a Step"
        if picture.step:
            words = f"the cut: {picture.step} make a Step"
    rails = table.draw_rails(first.index - 1, mark)
    room = table.screen - len(_MARGIN)
    line = f"{rails[:-1]} {words} "
    if table.narrow and len(line) > room:
        lines = [rails, *_write_below_rails(table, first, words)]
    else:
        lines = [line.ljust(room, mark)]
    lines = [_MARGIN + line for line in lines]
    space = _MARGIN + table.draw_rails(first.index - 1)
    if first.region == "evaluation" and first.index > 0:
        lines.insert(0, space)
    return [*lines, space]


def _write_below_rails(table: _Table, first: Box, words: str) -> list[str]:
    """A heading's words where its line has no room for them."""
    rails = table.draw_rails(first.index - 1).rstrip()
    if rails:
        rails += "   "
    room = table.screen - len(_MARGIN) - len(rails)
    return [rails + part for part in wrap(words, max(_LEAST_ROOM, room), "")]


def _describe_call(box: Box) -> str:
    """The call, and how many rows it wants at once."""
    return box.call + _SCOPES[box.scope] if box.schemas else box.call


def _write_entry(table: _Table, box: Box) -> list[str]:
    """A node, and below it the rails with what did not fit on its line."""
    calls = wrap(_describe_call(box), table.width)
    schemas = ", ".join(box.schemas)
    facts = schemas.ljust(table.schema) + box.rows.ljust(table.rows)
    lines = [_MARGIN + _draw_branch(table, box) + facts + calls[0]]
    rails = _MARGIN + table.draw_rails(box.index)
    for call_line in calls[1:]:
        lines.append(rails + " " * len(facts) + call_line)
    if len(calls) == 1:
        lines.append(rails)
    return lines


def _write_narrow_entry(table: _Table, box: Box) -> list[str]:
    """A node, and below it, beside the rails, what it makes and its call."""
    indent = (table.columns[box.index] + 1) * table.pitch
    room = max(_LEAST_ROOM, table.screen - len(_MARGIN) - indent)
    facts = "  ".join(filter(None, [", ".join(box.schemas), box.rows]))
    rails = _MARGIN + table.draw_rails(box.index)
    beside_rails = _MARGIN + table.draw_rails(box.index)[:indent]
    lines = [_MARGIN + _draw_branch(table, box)]
    for words in filter(None, (facts, _describe_call(box))):
        lines += [beside_rails + line for line in wrap(words, room)]
    return [*lines, rails]


def wrap(words: str, width: int, indent: str = "  ") -> list[str]:
    """Wrap words to lines of at most `width` characters, or of one long word; at least one line."""
    lines = textwrap.wrap(
        words, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace(_JOINED, " ") for line in lines] or [""]


def _draw_branch(table: _Table, box: Box) -> str:
    """`+---+-> advantage`: the rails that it takes from, and those that it passes."""
    line = [" "] * table.drawing
    start = table.columns[box.index] * table.pitch
    taps: dict[int, str] = {}
    for source, mark in _list_taps(box):
        taps[table.columns[source] * table.pitch] = mark
    if taps:
        first = min(taps)
        line[first : start - 1] = "-" * (start - 1 - first)
        line[start - 2] = ">"
    # Rails over the branch, and taps over the rails.
    for i in table.list_rails(box.index):
        line[table.columns[i] * table.pitch] = "|"
    for x, mark in taps.items():
        line[x] = mark
    line[start : start + len(box.name)] = box.name
    return "".join(line)


def _list_taps(box: Box) -> Iterator[tuple[int, str]]:
    """For each source, `+`, the number of its output that is read, or `*` for several of them."""
    outputs_by_source: dict[int, set[int | None]] = {}
    for wire in box.wires:
        outputs_by_source.setdefault(wire.source, set()).add(wire.output)
    for source, outputs in outputs_by_source.items():
        output = next(iter(outputs))
        if len(outputs) > 1:
            yield source, "*"
        elif output is None:
            yield source, "+"
        else:
            yield source, str(output)[-1]  # one column, whatever the number


# --- States and what else is known ----------------------------------------------------------------


def _list_states(picture: Picture, table: _Table) -> list[str]:
    """`policy  Model base, trainable  written by train_policy, read by rollout (lag 0)`."""
    names = [state.name for state in picture.states]
    name_width = max(map(len, names)) + 2
    facts_width = max(map(len, map(_describe_facts, picture.states))) + 2
    indent = 4 + name_width + facts_width
    lines = [f"{_MARGIN}States"]
    for state in picture.states:
        facts = _describe_facts(state)
        uses = _describe_uses(picture, state)
        if table.narrow:
            line = f"    {state.name}  {facts}  {uses}"
            whole = fold_lines(line, table.screen)
            lines += whole.replace(_JOINED, " ").split("\n")
            continue
        uses_lines = wrap(uses, max(_NARROWEST, table.screen - indent))
        head = f"    {state.name.ljust(name_width)}{facts.ljust(facts_width)}"
        lines.append(head + uses_lines[0])
        lines += [" " * indent + line for line in uses_lines[1:]]
    return lines


def _describe_facts(state: StateBox) -> str:
    return f"{state.kind} {state.facts}"


def _describe_uses(picture: Picture, state: StateBox) -> str:
    parts: list[str] = []
    if state.writers:
        writers = [picture.boxes[index].name for index in state.writers]
        parts.append(f"written by {', '.join(writers)}")
    if state.readers:
        readers: list[str] = []
        for reader in state.readers:
            lag = lag_words(reader.lag, trained=state.trained)
            readers.append(picture.boxes[reader.box].name + lag.replace(" ", _JOINED))
        parts.append(f"read by {', '.join(readers)}")
    return "; ".join(parts)


def _list_overlay(picture: Picture, overlay: Overlay, width: int) -> Iterator[list[str]]:
    """The Workers with their nodes, and the notes."""
    if overlay.placed is not None:
        yield _list_workers(picture, overlay, width)
    if overlay.notes:
        yield _list_notes(overlay, width)


def _list_workers(picture: Picture, overlay: Overlay, width: int) -> list[str]:
    lines = [f"{_MARGIN}Workers"]
    for workers in overlay.columns(picture.boxes):
        inside = [box for box in picture.boxes if overlay.workers_of(box) == workers]
        title = overlay.title(workers) if workers else "left out"
        names = ", ".join(box.name for box in inside)
        place = f" {overlay.describe_place(inside[0])}".rstrip()
        line = f"    {title}:  {names}{place}"
        lines += fold_lines(line, width).split("\n")
    return lines


def _list_notes(overlay: Overlay, width: int) -> list[str]:
    lines = [f"{_MARGIN}Figures"]
    names = {name: one_line(name) for name in overlay.notes}
    name_width = max(map(len, names.values())) + 2
    for name, shown_name in names.items():
        notes = ", ".join(overlay.notes_about(name))
        line = f"    {shown_name.ljust(name_width)}{notes}"
        lines += fold_lines(line, width).split("\n")
    return lines


def lag_words(lag: int | None, *, trained: bool) -> str:
    """` (lag <= 2)` after the reader of a State that changes; empty for one that never does."""
    if lag is None or not trained:
        return ""
    return " (lag 0)" if lag == 0 else f" (lag <= {lag})"
