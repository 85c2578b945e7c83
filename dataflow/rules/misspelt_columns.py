"""Misspelt: a column that a function takes if the data has it, and the data has one that is named
almost so. A warning: the function is called without it, and its default is used.

Owns: these names. Does not own: columns without which a node cannot work (columns.py).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence

from dataflow.errors import GraphWarning
from dataflow.node import Node
from dataflow.operator import list_columns
from dataflow.rules.context import Context, Wire, data_name, warning_at

_ALIKE = 0.81
"""Of two names, as difflib compares them: a letter of six, but prompt_id is no prompt."""


def optional_columns(context: Context) -> Iterator[GraphWarning]:
    """Optional columns that the data lacks, where it has a column nobody asks for like them."""
    for source in context.sources:
        columns = context.data.get(id(source), {})
        missing = [name for name in source.operator.data_optional if name not in columns]
        yield from _check_missing(source, source, missing, columns)
    for node in context.graph.nodes:
        for wire in context.wires[id(node)]:
            domain = context.domains.of(wire.port)
            if domain is not None:
                missing = _find_missing(context, wire)
                yield from _check_missing(node, domain.source, missing, context.dataset(wire.port))


def _find_missing(context: Context, wire: Wire) -> list[str]:
    """The columns that a node takes where there are some, and that are not there."""
    if wire.input.entries_of in wire.port.schema.columns:
        return []  # they may be entries, which only the run knows
    optional = list_columns(wire.node.params, wire.input.ancestors_from)
    required = list_columns(wire.node.params, wire.input.required_from)
    columns = context.dataset(wire.port)
    # Without a required one the node cannot work: columns.py reports it.
    present = {*columns, *wire.port.schema.columns, *wire.input.ancestors, *required}
    return [name for name in optional if name not in present]


def _check_missing(
    node: Node, source: Node, missing: Sequence[str], columns: Iterable[str]
) -> Iterator[GraphWarning]:
    """missing: columns that the node takes and the source's data lacks; columns: those it has."""
    requested: set[str] = set()
    for declared in node.operator.inputs:
        requested.update(list_columns(node.params, declared.ancestors_from))
    others = [column for column in columns if column not in requested]
    for name in missing:
        matches = difflib.get_close_matches(name, others, n=1, cutoff=_ALIKE)
        if matches:
            problem = (
                f"takes a column {name!r} if there is one, and {data_name(source)} has none, but"
                f" {matches[0]!r}"
            )
            fix = f"one name for both, {name!r} or {matches[0]!r}"
            yield warning_at(node, "misspelt_column", problem, fix)
