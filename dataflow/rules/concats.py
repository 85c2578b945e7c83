"""Concats: what `concat` joins is of one source and of one kind.

Owns: its inputs' rows, their common schema, and columns that a reader would lose unseen. Does not
own: which rows come out (dataflow/rows.py), the common schema itself (dataflow/schema.py), columns
that a reader requires (columns.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from dataflow.errors import Fault
from dataflow.node import Node
from dataflow.operator import Concat
from dataflow.rows import Domain, physical_port
from dataflow.rules.context import Context, Wire, fault_at, line_of


def check_concat_inputs(context: Context) -> Iterator[Fault]:
    """Inputs of two sources, the same port twice, schemas with nothing in common, device columns,
    readers of columns that only some inputs have.
    """
    for node in context.graph.nodes:
        if isinstance(node.operator.rows, Concat) and id(node) not in context.doubtful:
            wires = context.wires[id(node)]
            yield from _check_repeated(wires)
            yield from _check_sources(context, node, wires)
            yield from _check_kinds(node, wires)
        for wire in context.wires[id(node)]:
            yield from _check_lost_columns(wire)


def _check_repeated(wires: tuple[Wire, ...]) -> Iterator[Fault]:
    """The same rows twice would count twice in every baseline and gradient."""
    first_wires: dict[tuple[int, int], Wire] = {}
    for wire in wires:
        port = physical_port(wire.port)
        first = first_wires.setdefault((id(port.node), port.index), wire)
        # A selection may have other rows than the port that it selects from.
        if first is not wire and first.port == wire.port:
            problem = f"expected every port once, found {wire.port.label!r} twice"
            yield wire.fault("rows", problem, "each port once; generate(n=...) for more rows")


def _check_sources(context: Context, node: Node, wires: tuple[Wire, ...]) -> Iterator[Fault]:
    domains: list[Domain] = []
    for wire in wires:
        domain = context.domains.of(wire.port)
        if domain is None:
            return  # lineage.py has reported what they come from
        domains.append(domain)
    first_wire, first = wires[0], domains[0]
    start = f"{first_wire.port.label!r} stands on {first.describe()}"
    for wire, domain in zip(wires, domains, strict=True):
        if domain.source is not first.source:
            problem = f"{start}, {wire.port.label!r} on {domain.describe()}"
            fix = (
                f"ports that come from one source; {first.source.name!r} and"
                f" {domain.source.name!r} are two"
            )
            yield wire.fault("rows", problem, fix)
            return
    if context.domains.of_node(node) is None:
        top = list(first.ancestors())[-1]
        problem = f"{start}, and {top.node.operator.name} makes {top.width} rows a prompt"
        yield fault_at(node, "rows", problem, "rows that come from prompts")


def _check_kinds(node: Node, wires: tuple[Wire, ...]) -> Iterator[Fault]:
    common_schema = node.schemas[0]
    if not common_schema.columns:
        kinds = " and ".join(f"{w.port.label!r} is {w.port.schema.__name__}" for w in wires)
        problem = f"expected ports of one kind, found {kinds}, with no column in common"
        yield fault_at(node, "columns", problem, "a concat of each: concat(a, b), concat(c, d)")
    for column in common_schema.columns.values():
        if column.device:
            problem = f"has {column.name!r} on a device, and rows are joined on the host"
            yield fault_at(node, "columns", problem, f"{column.name!r} without device=True")


def _check_lost_columns(wire: Wire) -> Iterator[Fault]:
    """A reader that takes another column where this one is missing, without a word."""
    joined = physical_port(wire.port).node
    reads = wire.input.columns
    if not isinstance(joined.operator.rows, Concat) or isinstance(wire.node.operator.rows, Concat):
        return
    for part in joined.inputs.values():
        for column in part.schema.columns.values():
            is_lost = column.name not in joined.schemas[0].columns
            if is_lost and column.instead_of and (reads is None or column.name in reads):
                problem = (
                    f"reads {column.name!r} where there is one, and {joined.name!r}"
                    f" ({line_of(joined, wire.origin)}) has it of {part.label!r} alone"
                )
                kind = part.schema.__name__
                yield wire.fault("columns", problem, f"a {kind} in every input of {joined.name!r}")
                return
