"""Misspelt: a column that a function takes if the data has it, and the data has one that is named
almost so. A warning: the function is called without it, and its default is used.

Owns: these names. Does not own: columns without which a node cannot work (columns.py).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence

from dataflow.errors import GraphWarning
from dataflow.node import Node
from dataflow.operator import Input, listed
from dataflow.rules.context import Context, Wire, data_name, place

_ALIKE = 0.81
"""Of two names, as difflib compares them: a letter of six, but prompt_id is no prompt."""


def optional_columns(context: Context) -> Iterator[GraphWarning]:
    """Optional columns that the data lacks, where it has a column nobody asks for like them."""
    for source in context.sources:
        data = context.data.get(id(source), {})
        lacking = [name for name in source.operator.data_optional if name not in data]
        yield from _like_others(source, source, lacking, data)
    for node in context.graph.nodes:
        for wire in context.wires[id(node)]:
            domain = context.domains.of(wire.port)
            if domain is not None:
                lacking = _optional(context, wire)
                yield from _like_others(node, domain.source, lacking, context.dataset(wire.port))


def _optional(context: Context, wire: Wire) -> list[str]:
    """The columns that a node takes where there are some, and that are not there."""
    asked = listed(wire.node.params, wire.input.ancestors_from)
    required = listed(wire.node.params, wire.input.required_from)
    data = context.dataset(wire.port)
    present = {*data, *wire.port.schema.columns, *wire.input.ancestors, *required}
    return [name for name in asked if name not in present]


def _like_others(
    node: Node, source: Node, lacking: Sequence[str], data: Mapping[str, object]
) -> Iterator[GraphWarning]:
    asked = {name for wire in node.operator.inputs for name in _asked(node, wire)}
    free = [column for column in data if column not in asked]
    for name in lacking:
        near = difflib.get_close_matches(name, free, n=1, cutoff=_ALIKE)
        if near:
            problem = (
                f"takes a column {name!r} if there is one, and {data_name(source)} has none, but"
                f" {near[0]!r}"
            )
            yield GraphWarning(
                rule="misspelt_column",
                where=place(node),
                problem=problem,
                fix=f"one name for both, {name!r} or {near[0]!r}",
                origin=node.origin,
            )


def _asked(node: Node, declared: Input) -> tuple[str, ...]:
    return listed(node.params, declared.ancestors_from)
