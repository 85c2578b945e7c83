"""A graph as a Mermaid flowchart, which README files and pull requests show as a picture.

Owns: Mermaid's syntax and its escapes. Does not own: what is worth showing (picture.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dataflow.draw.colours import FILLS, STATE, fill_of
from dataflow.draw.overlay import Overlay
from dataflow.draw.phases import ProgramPicture
from dataflow.draw.picture import (
    REGIONS,
    Box,
    Picture,
    Region,
    StateBox,
    describe_output,
    merge_wires,
    title_region,
)
from dataflow.draw.text import lag_words

_CODES = (
    ("#", "#35;"),
    ('"', "#quot;"),
    ("<", "#lt;"),
    (">", "#gt;"),
    ("|", "#124;"),
    ("\n", " "),
)
"""Marks that would end a label, with Mermaid's entity codes; `#` first, as it begins one."""


def draw_mermaid(picture: Picture, overlay: Overlay | None = None) -> str:
    """Draw subgraphs for the regions, data edges drawn through, weight edges dashed with their
    lag.
    """
    lines = _write_head(picture.name)
    lines += _write_body(picture, "", overlay or Overlay())
    lines += _write_styles(picture, "")
    return "\n".join(lines) + "\n"


def draw_program_mermaid(program: ProgramPicture, overlays: Sequence[Overlay] = ()) -> str:
    """Draw a subgraph for each phase; thick edges for the weights that a later phase begins
    with.
    """
    lines = _write_head(program.name)
    overlays = overlays or [Overlay()] * len(program.phases)
    for phase, overlay in zip(program.phases, overlays, strict=True):
        lines.append(f'  subgraph phase_{phase.number}["{_escape(phase.title)}"]')
        lines += [f"  {line}" for line in _write_body(phase.picture, phase.prefix, overlay)]
        lines.append("  end")
    for arrow in program.carried:
        (source_phase, source), (target_phase, target) = arrow.source, arrow.target
        lines.append(f"  p{source_phase}_s{source} ==>|weights| p{target_phase}_s{target}")
    for phase in program.phases:
        lines += _write_styles(phase.picture, phase.prefix)
    return "\n".join(lines) + "\n"


def _write_head(name: str) -> list[str]:
    return ["---", f"title: {_quote(name)}", "---", "flowchart TB"]


def _write_body(picture: Picture, prefix: str, overlay: Overlay) -> list[str]:
    """Regions, States and edges; prefix: of every name."""
    lines: list[str] = []
    for region in REGIONS:
        if picture.within(region):
            title = _escape(title_region(picture, region))
            lines.append(f'  subgraph {prefix}{region}["{title}"]')
            lines += _write_region(picture, region, prefix, overlay)
            lines.append("  end")
    lines += [f"  {_write_state(state, prefix, overlay)}" for state in picture.states]
    lines += [f"  {edge}" for edge in _write_wires(picture, prefix, overlay)]
    lines += [f"  {edge}" for edge in _write_weights(picture, prefix, overlay)]
    return lines


def _write_region(picture: Picture, region: Region, prefix: str, overlay: Overlay) -> Iterator[str]:
    """The nodes of a region, those of the same Workers in a subgraph of theirs."""
    boxes = picture.within(region)
    for number, workers in enumerate(overlay.columns(boxes), start=1):
        inside = [box for box in boxes if overlay.workers_of(box) == workers]
        if not workers:
            yield from (f"    {_write_box(box, prefix, overlay)}" for box in inside)
            continue
        title = _escape(overlay.title(workers))
        yield f'    subgraph {prefix}{region}_{number}["{title}"]'
        yield from (f"      {_write_box(box, prefix, overlay)}" for box in inside)
        yield "    end"


def _write_box(box: Box, prefix: str, overlay: Overlay) -> str:
    facts = [box.call, describe_output(box), overlay.describe_place(box)]
    facts += overlay.notes_about_box(box)
    lines = [f"<b>{_escape(box.name)}</b>"]
    lines += [_escape(fact) for fact in facts if fact]
    return f'{prefix}n{box.index}["{"<br/>".join(lines)}"]'


def _write_state(state: StateBox, prefix: str, overlay: Overlay) -> str:
    facts = [f"{state.kind} {state.facts}", *overlay.notes_about(state.name)]
    lines = [f"<b>{_escape(state.name)}</b>", *map(_escape, facts)]
    return f'{prefix}s{state.index}[("{"<br/>".join(lines)}")]'


def _write_wires(picture: Picture, prefix: str, overlay: Overlay) -> Iterator[str]:
    for box in picture.boxes:
        for edge in merge_wires(picture, box):
            notes = overlay.notes_about(f"{edge.producer}->{edge.consumer}")
            label = _write_label([", ".join(edge.ports), *notes])
            yield f"{prefix}n{edge.source} -->{label} {prefix}n{box.index}"


def _write_label(lines: Sequence[str]) -> str:
    words = "<br/>".join(_escape(line) for line in lines if line)
    return f'|"{words}"|' if words else ""


def _write_weights(picture: Picture, prefix: str, overlay: Overlay) -> Iterator[str]:
    indices = {state.name: state.index for state in picture.states}
    for state in picture.states:
        drum = f"{prefix}s{state.index}"
        for reader in state.readers:
            lag = lag_words(reader.lag, trained=state.trained).strip(" ()")
            node = picture.boxes[reader.box].name
            label = _write_label([lag, *overlay.notes_about(f"{state.name}->{node}")])
            yield f"{drum} -.->{label} {prefix}n{reader.box}"
        for writer in state.writers:
            yield f"{prefix}n{writer} -.->|writes| {drum}"
        if state.leader:
            yield f"{prefix}s{indices[state.leader]} -.->|follows| {drum}"


def _write_styles(picture: Picture, prefix: str) -> Iterator[str]:
    for kind, (fill, line) in FILLS.items():
        boxes = [box for box in picture.boxes if fill_of(box.work) == kind]
        if boxes:
            members = ",".join(f"{prefix}n{box.index}" for box in boxes)
            yield f"  classDef {kind} fill:{fill},stroke:{line},color:#1f2430"
            yield f"  class {members} {kind}"
    if picture.states:
        members = ",".join(f"{prefix}s{state.index}" for state in picture.states)
        fill, line = STATE
        yield f"  classDef state fill:{fill},stroke:{line},color:#1f2430,stroke-dasharray:4 3"
        yield f"  class {members} state"


def _quote(words: str) -> str:
    """A YAML string in double quotes."""
    escaped = words.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
    return f'"{escaped}"'


def _escape(words: str) -> str:
    for mark, code in _CODES:
        words = words.replace(mark, code)
    return words
