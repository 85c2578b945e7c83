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
from dataflow.draw.picture import REGIONS, TITLES, Box, Picture, Region, StateBox, merged, out_of
from dataflow.draw.text import lag_words, wrapped

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


def dot(picture: Picture, overlay: Overlay | None = None) -> str:
    """Clusters for the regions, cylinders for States, weight edges dashed with their lag."""
    return _digraph(picture.name, _body(picture, "", overlay or Overlay()))


def dot_of_program(program: ProgramPicture, overlays: Sequence[Overlay] = ()) -> str:
    """A cluster for each phase; thick edges for the weights that a later phase begins with."""
    lines = []
    overlays = overlays or [Overlay()] * len(program.phases)
    for phase, overlay in zip(program.phases, overlays, strict=True):
        lines += [
            f"  subgraph cluster_phase_{phase.number} {{",
            f"    label={_quoted(phase.title)}; style=rounded; fontsize=14;",
            *(f"  {line}" for line in _body(phase.picture, phase.prefix, overlay)),
            "  }",
        ]
    for each in program.carried:
        (a, source), (b, target) = each.source, each.target
        lines += [
            f'  p{a}_s{source} -> p{b}_s{target} [label=weights, penwidth=2, color="{STATE[1]}"];'
        ]
    return _digraph(program.name, lines)


def _digraph(name: str, lines: Iterable[str]) -> str:
    head = [f"digraph {_quoted(name)} {{", *(f"  {line}" for line in _HEAD)]
    return "\n".join([*head, *lines, "}"]) + "\n"


def _body(picture: Picture, p: str, overlay: Overlay) -> list[str]:
    """Regions, States and edges; p: the prefix of every name."""
    lines = []
    for region in REGIONS:
        if picture.within(region):
            title = f"step: {picture.step}" if region == "step" and picture.step else TITLES[region]
            lines += [
                f"  subgraph cluster_{p}{region} {{",
                f'    label={_quoted(title)}; style="rounded,dashed";',
                f'    color="{WIRE}"; fontcolor="{WIRE}";',
                *_region(picture, region, p, overlay),
                "  }",
            ]
    lines += [f"  {_state(state, p, overlay)}" for state in picture.states]
    edges = (*_wires(picture, p, overlay), *_weights(picture, p, overlay), *_below(picture, p))
    return lines + [f"  {edge}" for edge in edges]


def _region(picture: Picture, region: Region, p: str, overlay: Overlay) -> Iterator[str]:
    """The nodes of a region, those of the same Workers in a cluster of theirs."""
    boxes = picture.within(region)
    for number, workers in enumerate(overlay.columns(boxes), start=1):
        inside = [box for box in boxes if overlay.workers_of(box) == workers]
        if not workers:
            yield from (f"    {_box(box, p, overlay)}" for box in inside)
            continue
        title = _quoted(overlay.title(workers))
        yield f"    subgraph cluster_{p}{region}_{number} {{"
        yield f"      label={title}; style=rounded;"
        yield from (f"      {_box(box, p, overlay)}" for box in inside)
        yield "    }"


def _box(box: Box, p: str, overlay: Overlay) -> str:
    fill, line = FILLS[fill_of(box.work)]
    more = (out_of(box), overlay.place(box), *overlay.of_box(box))
    label = _lines(box.name, *wrapped(box.call, _CALL_WIDTH), *more)
    return f'{p}n{box.index} [label={label}, fillcolor="{fill}", color="{line}"];'


def _state(state: StateBox, p: str, overlay: Overlay) -> str:
    facts = wrapped(f"{state.kind} {state.facts}", _CALL_WIDTH)
    label = _lines(state.name, *facts, *overlay.noted(state.name))
    style = f'shape=cylinder, style="filled,dashed", fillcolor="{STATE[0]}", color="{STATE[1]}"'
    return f"{p}s{state.index} [label={label}, {style}];"


def _wires(picture: Picture, p: str, overlay: Overlay) -> Iterator[str]:
    for box in picture.boxes:
        for edge in merged(picture, box):
            lines = [", ".join(edge.ports), *overlay.noted(f"{edge.producer}->{edge.consumer}")]
            label = _label(lines)
            yield f"{p}n{edge.source} -> {p}n{box.index}" + (f" [label={label}];" if label else ";")


def _label(lines: Sequence[str]) -> str:
    """Lines of an edge's label; empty without any."""
    found = [_quoted(line)[1:-1] for line in lines if line]
    words = "\\n".join(found)
    return f'"{words}"' if found else ""


def _weights(picture: Picture, p: str, overlay: Overlay) -> Iterator[str]:
    at = {state.name: state.index for state in picture.states}
    style = f'style=dashed, color="{STATE[1]}", fontcolor="{STATE[1]}"'
    for state in picture.states:
        for reader in state.readers:
            lag = lag_words(reader.lag, trained=state.trained).strip(" ()")
            lines = [lag, *overlay.noted(f"{state.name}->{picture.boxes[reader.box].name}")]
            label = _label(lines) or '""'
            yield f"{p}s{state.index} -> {p}n{reader.box} [label={label}, {style}];"
        for writer in state.writers:  # the way back: it must not turn the picture's layers over
            yield f"{p}n{writer} -> {p}s{state.index} [label=writes, constraint=false, {style}];"
        if state.leader:
            yield f"{p}s{at[state.leader]} -> {p}s{state.index} [label=follows, {style}];"


def _below(picture: Picture, p: str) -> Iterator[str]:
    """Invisible edges that keep every node of the step region below the cut."""
    stream, step = picture.within("stream"), picture.within("step")
    read = {wire.source for box in stream for wire in box.wires}
    inside = {box.index for box in step}
    last = [box.index for box in stream if box.index not in read]
    first = [box.index for box in step if inside.isdisjoint(wire.source for wire in box.wires)]
    for above, below in product(last, first):
        yield f"{p}n{above} -> {p}n{below} [style=invis];"


def _quoted(words: str) -> str:
    return '"' + words.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ") + '"'


def _lines(name: str, *lines: str) -> str:
    """A label in Graphviz's HTML: the name bold, the rest below it."""
    return (
        "<"
        + "<br/>".join([f"<b>{escape(name)}</b>", *(escape(line) for line in lines if line)])
        + ">"
    )
