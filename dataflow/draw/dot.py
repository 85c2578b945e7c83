"""A graph in Graphviz's language.

Owns: DOT's syntax. Does not own: what is worth showing (picture.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import product

from dataflow.draw.colours import FILLS, STATE, WIRE, fill_of
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
from dataflow.draw.text import lag_words, wrap

_HEAD = (
    (
        'graph [rankdir=TB, newrank=true, fontname="Helvetica", fontsize=12, labeljust=l,'
        " nodesep=0.35, ranksep=0.45];"
    ),
    (
        'node [shape=box, style="rounded,filled", fontname="Helvetica", fontsize=11,'
        ' margin="0.15,0.08"];'
    ),
    f'edge [color="{WIRE}", fontname="Helvetica", fontsize=9];',
)
_CALL_WIDTH = 34
"""Letters of a line of a call."""


def draw_dot(picture: Picture, overlay: Overlay | None = None) -> str:
    """Draw clusters for the regions, cylinders for States, weight edges dashed with their lag."""
    return _write_digraph(picture.name, _write_body(picture, "", overlay or Overlay()))


def draw_program_dot(program: ProgramPicture, overlays: Sequence[Overlay] = ()) -> str:
    """Draw a cluster for each phase; thick edges for the weights that a later phase begins with."""
    lines: list[str] = []
    overlays = overlays or [Overlay()] * len(program.phases)
    for phase, overlay in zip(program.phases, overlays, strict=True):
        lines.append(f"  subgraph cluster_phase_{phase.number} {{")
        lines.append(f"    label={_quote(phase.title)}; style=rounded; fontsize=14;")
        lines += [f"  {line}" for line in _write_body(phase.picture, phase.prefix, overlay)]
        lines.append("  }")
    for arrow in program.carried:
        (source_phase, source), (target_phase, target) = arrow.source, arrow.target
        ends = f"p{source_phase}_s{source} -> p{target_phase}_s{target}"
        lines.append(f'  {ends} [label=weights, penwidth=2, color="{STATE[1]}"];')
    return _write_digraph(program.name, lines)


def _write_digraph(name: str, lines: Iterable[str]) -> str:
    head = [f"  {line}" for line in _HEAD]
    return "\n".join([f"digraph {_quote(name)} {{", *head, *lines, "}"]) + "\n"


def _write_body(picture: Picture, prefix: str, overlay: Overlay) -> list[str]:
    """Regions, States and edges; prefix: of every name."""
    lines: list[str] = []
    for region in REGIONS:
        if not picture.within(region):
            continue
        lines.append(f"  subgraph cluster_{prefix}{region} {{")
        title = _quote(title_region(picture, region))
        lines.append(f'    label={title}; style="rounded,dashed";')
        lines.append(f'    color="{WIRE}"; fontcolor="{WIRE}";')
        lines += _write_region(picture, region, prefix, overlay)
        lines.append("  }")
    lines += [f"  {_write_state(state, prefix, overlay)}" for state in picture.states]
    lines += [f"  {edge}" for edge in _write_wires(picture, prefix, overlay)]
    lines += [f"  {edge}" for edge in _write_weights(picture, prefix, overlay)]
    lines += [f"  {edge}" for edge in _hold_below_cut(picture, prefix)]
    return lines


def _write_region(picture: Picture, region: Region, prefix: str, overlay: Overlay) -> Iterator[str]:
    """The nodes of a region, those of the same Workers in a cluster of theirs."""
    boxes = picture.within(region)
    for number, workers in enumerate(overlay.columns(boxes), start=1):
        inside = [box for box in boxes if overlay.workers_of(box) == workers]
        if not workers:
            yield from (f"    {_write_box(box, prefix, overlay)}" for box in inside)
            continue
        yield f"    subgraph cluster_{prefix}{region}_{number} {{"
        yield f"      label={_quote(overlay.title(workers))}; style=rounded;"
        yield from (f"      {_write_box(box, prefix, overlay)}" for box in inside)
        yield "    }"


def _write_box(box: Box, prefix: str, overlay: Overlay) -> str:
    fill, line = FILLS[fill_of(box.work)]
    lines = wrap(box.call, _CALL_WIDTH)
    lines += [describe_output(box), overlay.describe_place(box)]
    lines += overlay.notes_about_box(box)
    label = _write_html_label(box.name, lines)
    return f'{prefix}n{box.index} [label={label}, fillcolor="{fill}", color="{line}"];'


def _write_state(state: StateBox, prefix: str, overlay: Overlay) -> str:
    facts = wrap(f"{state.kind} {state.facts}", _CALL_WIDTH)
    label = _write_html_label(state.name, facts + overlay.notes_about(state.name))
    fill, line = STATE
    style = f'shape=cylinder, style="filled,dashed", fillcolor="{fill}", color="{line}"'
    return f"{prefix}s{state.index} [label={label}, {style}];"


def _write_wires(picture: Picture, prefix: str, overlay: Overlay) -> Iterator[str]:
    for box in picture.boxes:
        for edge in merge_wires(picture, box):
            ends = f"{prefix}n{edge.source} -> {prefix}n{box.index}"
            notes = overlay.notes_about(f"{edge.producer}->{edge.consumer}")
            label = _write_label([", ".join(edge.ports), *notes])
            yield f"{ends} [label={label}];" if label else f"{ends};"


def _write_label(lines: Sequence[str]) -> str:
    """Lines of an edge's label; empty without any."""
    escaped_lines = [_quote(line)[1:-1] for line in lines if line]
    if not escaped_lines:
        return ""
    words = "\\n".join(escaped_lines)
    return f'"{words}"'


def _write_weights(picture: Picture, prefix: str, overlay: Overlay) -> Iterator[str]:
    indices = {state.name: state.index for state in picture.states}
    style = f'style=dashed, color="{STATE[1]}", fontcolor="{STATE[1]}"'
    for state in picture.states:
        drum = f"{prefix}s{state.index}"
        for reader in state.readers:
            lag = lag_words(reader.lag, trained=state.trained).strip(" ()")
            node = picture.boxes[reader.box].name
            notes = overlay.notes_about(f"{state.name}->{node}")
            label = _write_label([lag, *notes]) or '""'
            yield f"{drum} -> {prefix}n{reader.box} [label={label}, {style}];"
        for writer in state.writers:  # the way back: it must not turn the picture's layers over
            yield f"{prefix}n{writer} -> {drum} [label=writes, constraint=false, {style}];"
        if state.leader:
            leader = f"{prefix}s{indices[state.leader]}"
            yield f"{leader} -> {drum} [label=follows, {style}];"


def _hold_below_cut(picture: Picture, prefix: str) -> Iterator[str]:
    """Invisible edges that keep every node of the step region below the cut."""
    stream, step = picture.within("stream"), picture.within("step")
    read_in_stream: set[int] = set()
    for box in stream:
        read_in_stream.update(wire.source for wire in box.wires)
    lowest = [box.index for box in stream if box.index not in read_in_stream]
    step_indices = {box.index for box in step}
    uppermost: list[int] = []
    for box in step:
        if step_indices.isdisjoint(wire.source for wire in box.wires):
            uppermost.append(box.index)
    for above, below in product(lowest, uppermost):
        yield f"{prefix}n{above} -> {prefix}n{below} [style=invis];"


def _quote(words: str) -> str:
    escaped = words.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
    return f'"{escaped}"'


def _write_html_label(name: str, lines: Iterable[str]) -> str:
    """A label in Graphviz's HTML: the name bold, the rest below it."""
    parts = [f"<b>{escape(name)}</b>"]
    parts += [escape(line) for line in lines if line]
    return f"<{'<br/>'.join(parts)}>"
