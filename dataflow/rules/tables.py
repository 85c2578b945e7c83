"""Tables: one that is looked up is recorded, of numbers, on rows of the same data.

Owns: who writes and who reads a Table, and the rows of the data by which both know a row. Does not
own: two writers of one State, a State of another kind (state.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePath

import pyarrow as pa

from dataflow.errors import Fault
from dataflow.model import Table
from dataflow.node import Node, Port
from dataflow.operator import list_columns
from dataflow.rules.context import Context, fault_at, line_of
from dataflow.rules.state import OF_MODELS


def check_tables(context: Context) -> Iterator[Fault]:
    """Tables that nobody writes or reads, rows of no data or of other data, columns of texts."""
    tables = {s.name: s for s in reversed(context.graph.states) if isinstance(s, Table)}
    for table in tables.values():
        writers = _users_of_tables(context.writers, table)
        readers = _users_of_tables(context.readers, table)
        if readers and not writers:
            yield _unwritten(table, readers[0])
        for writer in writers:
            if not readers:
                yield _unread(table, writer)
            yield from _check_column(context, writer)
        unplaced = [node for node in (*writers, *readers) if _data_of(context, node) is None]
        for node in unplaced:
            yield _without_data(node)
        for reader in readers:
            if writers and not unplaced:
                yield from _check_same_data(context, writers[0], reader)


def _users_of_tables(users: Mapping[str, tuple[Node, ...]], table: Table) -> list[Node]:
    """Those that take Tables: of others state.py reports that they need a Model."""
    nodes = users.get(table.name, ())
    return [node for node in nodes if node.operator.work not in OF_MODELS]


def _unwritten(table: Table, reader: Node) -> Fault:
    where = f"Table {table.name!r} is looked up but no record node writes it"
    problem = f"read by {reader.name!r} ({line_of(reader, reader.origin)})"
    fix = f"sink record({table.name}, rollout)"
    return Fault(rule="state", where=where, problem=problem, fix=fix, origin=reader.origin)


def _unread(table: Table, writer: Node) -> Fault:
    where = f"Table {table.name!r} is recorded but nothing looks it up"
    problem = f"written by {writer.name!r} ({line_of(writer, writer.origin)})"
    fix = f"lookup({table.name}, prompt), or no record"
    return Fault(rule="state", where=where, problem=problem, fix=fix, origin=writer.origin)


def _data_of(context: Context, node: Node) -> tuple[str, str | None] | None:
    """The data and split whose rows a node's rows stand on; None if they stand on none."""
    domain = context.domains.of(_rows_of(node))
    if domain is None or not domain.source.operator.data_rows:
        return None
    params = domain.source.params
    return str(params.get("data")), params.get("split")


def _rows_of(node: Node) -> Port:
    return next(iter(node.inputs.values()))


def _without_data(node: Node) -> Fault:
    problem = f"expected rows that stand on rows of data, found {_rows_of(node).label!r}"
    return fault_at(node, "state", problem, "rows below prompts(...) or demonstrations(...)")


def _check_same_data(context: Context, writer: Node, reader: Node) -> Iterator[Fault]:
    recorded, looked_up = _data_of(context, writer), _data_of(context, reader)
    if recorded is None or looked_up is None or recorded == looked_up:
        return
    problem = (
        f"{writer.name!r} ({line_of(writer, reader.origin)}) records rows of"
        f" {_describe_data(*recorded)}, and these are of {_describe_data(*looked_up)}, which have"
        " other numbers"
    )
    yield fault_at(reader, "state", problem, "a Table for each data")


def _describe_data(path: str, split: str | None) -> str:
    place = repr(PurePath(path).name)
    return f"{place} (split {split!r})" if split else place


def _check_column(context: Context, writer: Node) -> Iterator[Fault]:
    """A column of texts has no mean; an unknown one is reported by columns.py."""
    port = _rows_of(writer)
    for name in list_columns(writer.params, "column"):
        declared = port.schema.columns.get(name)
        kind = declared.whole.type if declared else context.dataset(port).get(name)
        if kind is not None and not _has_mean(kind):
            problem = f"expected numbers or lists in column {name!r}, found {kind}"
            yield fault_at(writer, "columns", problem, 'column="completion_ids", for its length')


def _has_mean(kind: pa.DataType) -> bool:
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return is_number or is_list or pa.types.is_fixed_size_list(kind) or pa.types.is_boolean(kind)
