"""A graph as a Mermaid flowchart, which README files and pull requests show as a picture.

Owns: Mermaid's syntax and its escapes. Does not own: what is worth showing (picture.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from dataflow.draw.colours import FILLS, STATE, fill_of
from dataflow.draw.picture import REGIONS, TITLES, Box, Picture, StateBox
from dataflow.draw.text import lag_words


def mermaid(picture: Picture) -> str:
    """Subgraphs for the regions, data edges drawn through, weight edges dashed with their lag."""
    lines = ["---", f"title: {_title(picture.name)}", "---", "flowchart TB"]
    for region in REGIONS:
        boxes = picture.within(region)
        if boxes:
            title = f"step: {picture.step}" if region == "step" and picture.step else TITLES[region]
            lines += [f'  subgraph {region}["{_escaped(title)}"]']
            lines += [f"    {_box(box)}" for box in boxes]
            lines += ["  end"]
    lines += [f"  {_state(state)}" for state in picture.states]
    lines += [f"  {edge}" for edge in (*_wires(picture), *_weights(picture))]
    lines += [f"  {style}" for style in _styles(picture)]
    return "\n".join(lines) + "\n"


def _box(box: Box) -> str:
    facts = [f"<b>{_escaped(box.name)}</b>", _escaped(box.call), _escaped(out_of(box))]
    return f'n{box.index}["{"<br/>".join(fact for fact in facts if fact)}"]'


def out_of(box: Box) -> str:
    """`Rollout, prompts x8`: what comes out of a node."""
    return (
        f"{', '.join(box.schemas)} on {box.rows}"
        if box.schemas and box.rows
        else ", ".join(box.schemas)
    )


def _state(state: StateBox) -> str:
    facts = _escaped(f"{state.kind} {state.facts}")
    return f's{state.index}[("<b>{_escaped(state.name)}</b><br/>{facts}")]'


def _wires(picture: Picture) -> Iterator[str]:
    for box in picture.boxes:
        seen = set()
        for wire in box.wires:
            if (wire.source, wire.output) not in seen:
                seen.add((wire.source, wire.output))
                label = "" if wire.output is None else f"|{wire.output}|"
                yield f"n{wire.source} -->{label} n{box.index}"


def _weights(picture: Picture) -> Iterator[str]:
    at = {state.name: state.index for state in picture.states}
    for state in picture.states:
        for reader in state.readers:
            lag = lag_words(reader.lag, trained=state.trained).strip(" ()")
            yield f"s{state.index} -.->{f'|{_escaped(lag)}|' if lag else ''} n{reader.box}"
        for writer in state.writers:
            yield f"n{writer} -.->|writes| s{state.index}"
        if state.leader:
            yield f"s{at[state.leader]} -.->|follows| s{state.index}"


def _styles(picture: Picture) -> Iterator[str]:
    for kind, (fill, line) in FILLS.items():
        members = [f"n{box.index}" for box in picture.boxes if fill_of(box.work) == kind]
        if members:
            yield f"classDef {kind} fill:{fill},stroke:{line},color:#1f2430"
            yield f"class {','.join(members)} {kind}"
    if picture.states:
        yield f"classDef state fill:{STATE[0]},stroke:{STATE[1]},color:#1f2430,stroke-dasharray:4 3"
        yield f"class {','.join(f's{state.index}' for state in picture.states)} state"


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
