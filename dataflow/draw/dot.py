"""A graph in Graphviz's language.

Owns: DOT's syntax, and asking an installed `dot` for a picture. Does not own: what is worth
showing (picture.py).
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator
from html import escape
from itertools import product

from dataflow.draw.colours import FILLS, STATE, WIRE, fill_of
from dataflow.draw.mermaid import out_of
from dataflow.draw.phases import ProgramPicture
from dataflow.draw.picture import REGIONS, TITLES, Box, Picture, StateBox
from dataflow.draw.text import lag_words, wrapped
from dataflow.errors import DataflowError

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


def dot(picture: Picture) -> str:
    """Clusters for the regions, cylinders for States, weight edges dashed with their lag."""
    return _digraph(picture.name, _body(picture, ""))


def dot_of_program(program: ProgramPicture) -> str:
    """A cluster for each phase; thick edges for the weights that a later phase begins with."""
    lines = []
    for phase in program.phases:
        lines += [
            f"  subgraph cluster_phase_{phase.number} {{",
            f"    label={_quoted(phase.title)}; style=rounded; fontsize=14;",
            *(f"  {line}" for line in _body(phase.picture, phase.prefix)),
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


def _body(picture: Picture, p: str) -> list[str]:
    """Regions, States and edges; p: the prefix of every name."""
    lines = []
    for region in REGIONS:
        boxes = picture.within(region)
        if boxes:
            title = f"step: {picture.step}" if region == "step" and picture.step else TITLES[region]
            lines += [
                f"  subgraph cluster_{p}{region} {{",
                f'    label={_quoted(title)}; style="rounded,dashed";',
            ]
            lines += [
                f'    color="{WIRE}"; fontcolor="{WIRE}";',
                *(f"    {_box(box, p)}" for box in boxes),
                "  }",
            ]
    lines += [f"  {_state(state, p)}" for state in picture.states]
    edges = (*_wires(picture, p), *_weights(picture, p), *_below(picture, p))
    return lines + [f"  {edge}" for edge in edges]


def svg_by_dot(source: str) -> str:
    """The picture from the installed `dot`. Raises DataflowError with its message if it fails."""
    made = subprocess.run(
        ["dot", "-Tsvg"], input=source, capture_output=True, text=True, timeout=60, check=False
    )
    if made.returncode != 0:
        raise DataflowError(
            f"draw: dot -Tsvg failed: {made.stderr.strip()}. Fix: draw(graph, form='dot')."
        )
    return made.stdout


def _box(box: Box, p: str) -> str:
    fill, line = FILLS[fill_of(box.work)]
    label = _lines(box.name, *wrapped(box.call, _CALL_WIDTH), out_of(box))
    return f'{p}n{box.index} [label={label}, fillcolor="{fill}", color="{line}"];'


def _state(state: StateBox, p: str) -> str:
    label = _lines(state.name, *wrapped(f"{state.kind} {state.facts}", _CALL_WIDTH))
    style = f'shape=cylinder, style="filled,dashed", fillcolor="{STATE[0]}", color="{STATE[1]}"'
    return f"{p}s{state.index} [label={label}, {style}];"


def _wires(picture: Picture, p: str) -> Iterator[str]:
    for box in picture.boxes:
        for source, output in dict.fromkeys((w.source, w.output) for w in box.wires):
            label = "" if output is None else f' [label="{output}"]'
            yield f"{p}n{source} -> {p}n{box.index}{label};"


def _weights(picture: Picture, p: str) -> Iterator[str]:
    at = {state.name: state.index for state in picture.states}
    style = f'style=dashed, color="{STATE[1]}", fontcolor="{STATE[1]}"'
    for state in picture.states:
        for reader in state.readers:
            lag = lag_words(reader.lag, trained=state.trained).strip(" ()")
            yield f"{p}s{state.index} -> {p}n{reader.box} [label={_quoted(lag)}, {style}];"
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
