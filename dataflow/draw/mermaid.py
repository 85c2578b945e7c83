"""A graph as a Mermaid flowchart, which README files and pull requests show as a picture.

Owns: Mermaid's syntax and its escapes. Does not own: what is worth showing (picture.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dataflow.draw.colours import FILLS, STATE, fill_of
from dataflow.draw.overlay import Overlay
from dataflow.draw.phases import ProgramPicture
from dataflow.draw.picture import REGIONS, TITLES, Box, Picture, Region, StateBox, merged, out_of
from dataflow.draw.text import lag_words


def mermaid(picture: Picture, overlay: Overlay | None = None) -> str:
    """Subgraphs for the regions, data edges drawn through, weight edges dashed with their lag."""
    body = _body(picture, "", overlay or Overlay())
    return "\n".join([*_head(picture.name), *body, *_styles(picture, "")]) + "\n"


def mermaid_of_program(program: ProgramPicture, overlays: Sequence[Overlay] = ()) -> str:
    """A subgraph for each phase; thick edges for the weights that a later phase begins with."""
    lines = _head(program.name)
    overlays = overlays or [Overlay()] * len(program.phases)
    for phase, overlay in zip(program.phases, overlays, strict=True):
        lines += [f'  subgraph phase_{phase.number}["{_escaped(phase.title)}"]']
        lines += [f"  {line}" for line in _body(phase.picture, phase.prefix, overlay)]
        lines += ["  end"]
    for each in program.carried:
        (a, source), (b, target) = each.source, each.target
        lines += [f"  p{a}_s{source} ==>|weights| p{b}_s{target}"]
    for phase in program.phases:
        lines += _styles(phase.picture, phase.prefix)
    return "\n".join(lines) + "\n"


def _head(name: str) -> list[str]:
    return ["---", f"title: {_title(name)}", "---", "flowchart TB"]


def _body(picture: Picture, prefix: str, overlay: Overlay) -> list[str]:
    """Regions, States and edges; prefix: of every name."""
    lines = []
    for region in REGIONS:
        if picture.within(region):
            title = f"step: {picture.step}" if region == "step" and picture.step else TITLES[region]
            lines += [f'  subgraph {prefix}{region}["{_escaped(title)}"]']
            lines += _region(picture, region, prefix, overlay)
            lines += ["  end"]
    lines += [f"  {_state(state, prefix, overlay)}" for state in picture.states]
    lines += [f"  {edge}" for edge in _wires(picture, prefix, overlay)]
    return lines + [f"  {edge}" for edge in _weights(picture, prefix, overlay)]


def _region(picture: Picture, region: Region, prefix: str, overlay: Overlay) -> Iterator[str]:
    """The nodes of a region, those of the same Workers in a subgraph of theirs."""
    boxes = picture.within(region)
    for number, workers in enumerate(overlay.columns(boxes), start=1):
        inside = [box for box in boxes if overlay.workers_of(box) == workers]
        if not workers:
            yield from (f"    {_box(box, prefix, overlay)}" for box in inside)
            continue
        yield f'    subgraph {prefix}{region}_{number}["{_escaped(overlay.title(workers))}"]'
        yield from (f"      {_box(box, prefix, overlay)}" for box in inside)
        yield "    end"


def _box(box: Box, prefix: str, overlay: Overlay) -> str:
    words = [box.call, out_of(box), overlay.place(box), *overlay.of_box(box)]
    facts = [f"<b>{_escaped(box.name)}</b>", *(_escaped(fact) for fact in words)]
    return f'{prefix}n{box.index}["{"<br/>".join(fact for fact in facts if fact)}"]'


def _state(state: StateBox, prefix: str, overlay: Overlay) -> str:
    lines = [f"{state.kind} {state.facts}", *overlay.noted(state.name)]
    facts = "<br/>".join(map(_escaped, lines))
    return f'{prefix}s{state.index}[("<b>{_escaped(state.name)}</b><br/>{facts}")]'


def _wires(picture: Picture, p: str, overlay: Overlay) -> Iterator[str]:
    for box in picture.boxes:
        for edge in merged(picture, box):
            lines = [", ".join(edge.ports), *overlay.noted(f"{edge.producer}->{edge.consumer}")]
            yield f"{p}n{edge.source} -->{_label(lines)} {p}n{box.index}"


def _label(lines: Sequence[str]) -> str:
    words = "<br/>".join(_escaped(line) for line in lines if line)
    return f'|"{words}"|' if words else ""


def _weights(picture: Picture, p: str, overlay: Overlay) -> Iterator[str]:
    at = {state.name: state.index for state in picture.states}
    for state in picture.states:
        for reader in state.readers:
            lag = lag_words(reader.lag, trained=state.trained).strip(" ()")
            lines = [lag, *overlay.noted(f"{state.name}->{picture.boxes[reader.box].name}")]
            yield f"{p}s{state.index} -.->{_label(lines)} {p}n{reader.box}"
        for writer in state.writers:
            yield f"{p}n{writer} -.->|writes| {p}s{state.index}"
        if state.leader:
            yield f"{p}s{at[state.leader]} -.->|follows| {p}s{state.index}"


def _styles(picture: Picture, p: str) -> Iterator[str]:
    for kind, (fill, line) in FILLS.items():
        members = [f"{p}n{box.index}" for box in picture.boxes if fill_of(box.work) == kind]
        if members:
            yield f"  classDef {kind} fill:{fill},stroke:{line},color:#1f2430"
            yield f"  class {','.join(members)} {kind}"
    if picture.states:
        members = [f"{p}s{state.index}" for state in picture.states]
        fill, line = STATE
        yield f"  classDef state fill:{fill},stroke:{line},color:#1f2430,stroke-dasharray:4 3"
        yield f"  class {','.join(members)} state"


def _title(words: str) -> str:
    """A YAML string in double quotes."""
    return '"' + words.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ") + '"'


def _escaped(words: str) -> str:
    """With Mermaid's entity codes: `#` begins one, and quotes, HTML brackets and bars would end the
    label.
    """
    for mark, code in (
        ("#", "#35;"),
        ('"', "#quot;"),
        ("<", "#lt;"),
        (">", "#gt;"),
        ("|", "#124;"),
        ("\n", " "),
    ):
        words = words.replace(mark, code)
    return words
