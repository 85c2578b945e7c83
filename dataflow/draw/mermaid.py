"""A graph as a Mermaid flowchart, which README files and pull requests show as a picture.

Owns: Mermaid's syntax and its escapes. Does not own: what is worth showing (picture.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from dataflow.draw.colours import FILLS, STATE, fill_of
from dataflow.draw.phases import ProgramPicture
from dataflow.draw.picture import REGIONS, TITLES, Box, Picture, StateBox
from dataflow.draw.text import lag_words


def mermaid(picture: Picture) -> str:
    """Subgraphs for the regions, data edges drawn through, weight edges dashed with their lag."""
    return "\n".join([*_head(picture.name), *_body(picture, ""), *_styles(picture, "")]) + "\n"


def mermaid_of_program(program: ProgramPicture) -> str:
    """A subgraph for each phase; thick edges for the weights that a later phase begins with."""
    lines = _head(program.name)
    for phase in program.phases:
        lines += [f'  subgraph phase_{phase.number}["{_escaped(phase.title)}"]']
        lines += [f"  {line}" for line in _body(phase.picture, phase.prefix)]
        lines += ["  end"]
    for each in program.carried:
        (a, source), (b, target) = each.source, each.target
        lines += [f"  p{a}_s{source} ==>|weights| p{b}_s{target}"]
    for phase in program.phases:
        lines += _styles(phase.picture, phase.prefix)
    return "\n".join(lines) + "\n"


def _head(name: str) -> list[str]:
    return ["---", f"title: {_title(name)}", "---", "flowchart TB"]


def _body(picture: Picture, prefix: str) -> list[str]:
    """Regions, States and edges; prefix: of every name."""
    lines = []
    for region in REGIONS:
        boxes = picture.within(region)
        if boxes:
            title = f"step: {picture.step}" if region == "step" and picture.step else TITLES[region]
            lines += [f'  subgraph {prefix}{region}["{_escaped(title)}"]']
            lines += [f"    {_box(box, prefix)}" for box in boxes]
            lines += ["  end"]
    lines += [f"  {_state(state, prefix)}" for state in picture.states]
    return lines + [f"  {edge}" for edge in (*_wires(picture, prefix), *_weights(picture, prefix))]


def _box(box: Box, prefix: str) -> str:
    facts = [f"<b>{_escaped(box.name)}</b>", _escaped(box.call), _escaped(out_of(box))]
    return f'{prefix}n{box.index}["{"<br/>".join(fact for fact in facts if fact)}"]'


def out_of(box: Box) -> str:
    """`Rollout, prompts x8`: what comes out of a node."""
    return (
        f"{', '.join(box.schemas)} on {box.rows}"
        if box.schemas and box.rows
        else ", ".join(box.schemas)
    )


def _state(state: StateBox, prefix: str) -> str:
    facts = _escaped(f"{state.kind} {state.facts}")
    return f'{prefix}s{state.index}[("<b>{_escaped(state.name)}</b><br/>{facts}")]'


def _wires(picture: Picture, p: str) -> Iterator[str]:
    for box in picture.boxes:
        seen = set()
        for wire in box.wires:
            if (wire.source, wire.output) not in seen:
                seen.add((wire.source, wire.output))
                label = "" if wire.output is None else f"|{wire.output}|"
                yield f"{p}n{wire.source} -->{label} {p}n{box.index}"


def _weights(picture: Picture, p: str) -> Iterator[str]:
    at = {state.name: state.index for state in picture.states}
    for state in picture.states:
        for reader in state.readers:
            lag = lag_words(reader.lag, trained=state.trained).strip(" ()")
            shown = f"|{_escaped(lag)}|" if lag else ""
            yield f"{p}s{state.index} -.->{shown} {p}n{reader.box}"
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
