"""Hidden columns: dataset columns whose names the engine uses for values of its own.

Owns: the warning that a reader is not given such a column. Does not own: what readers are given
(operators/kernels/scoring.py, engine/plan/passes/project.py), missing columns (columns.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from dataflow.errors import GraphWarning
from dataflow.operator import EVERY_COLUMN, list_columns
from dataflow.rules.context import Context, Wire, data_name, function_at, name_node
from dataflow.schema import Episode


def hidden_columns(context: Context) -> Iterator[GraphWarning]:
    """A column of the data that has the name of a value of the engine, which its reader gets."""
    warned: set[tuple[str, str]] = set()
    for node in context.graph.nodes:
        for wire in context.wires[id(node)]:
            for warning in _check_wire(context, wire):
                # Once for a source and a node: an evaluation reads the same columns again.
                if (warning.where, warning.problem) not in warned:
                    warned.add((warning.where, warning.problem))
                    yield warning


def _check_wire(context: Context, wire: Wire) -> Iterator[GraphWarning]:
    domain = context.domains.of(wire.port)
    if domain is None:
        return
    columns = context.dataset(wire.port)
    source = domain.source
    # What the source itself makes of a column, such as `prompt`, is the data's.
    hidden_names = _engine_names(wire).difference(source.schemas[0].columns)
    for name in columns:
        if name not in hidden_names:
            continue
        problem = (
            f"{data_name(source)} has a column {name!r}, which it is not given: the engine has"
            " values of its own under that name"
        )
        yield GraphWarning(
            rule="hidden_column",
            where=name_node(wire.node),
            problem=problem,
            fix=f"another name for that column, such as {_free_name(name, columns)!r}",
            origin=wire.origin,
        )


def _engine_names(wire: Wire) -> set[str]:
    """The names that the reader asks for, or is called with, and that mean the engine's values."""
    declared, columns = wire.input, set(wire.port.schema.columns)
    requested = {*declared.ancestors, *list_columns(wire.node.params, declared.ancestors_from)}
    names = columns & requested
    if EVERY_COLUMN in requested:
        names |= columns | set(Episode.columns)
    if declared.engine_names:
        names |= set(function_at(declared.engine_names)(wire.node.params))
    return names


def _free_name(name: str, columns: Collection[str]) -> str:
    """`data_completions`, or a longer name, that no column has."""
    free_name = f"data_{name}"
    while free_name in columns:
        free_name = f"data_{free_name}"
    return free_name
