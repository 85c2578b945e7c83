"""Rows: the inputs of a node stand on the same rows, or on an ancestor's where that is declared (L3).

Owns: the comparison of domains and what a message says of two. Does not own: their
derivation (dataflow/rows.py), groups (groups.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from dataflow.errors import Fault
from dataflow.rows import Domain
from dataflow.rules.context import Context, Wire, line_of, place


def check(context: Context) -> Iterator[Fault]:
    """Inputs on other rows than the first, parents that are none, nodes without rows."""
    for node in context.graph.nodes:
        wires = context.wires[id(node)]
        if not wires and node.operator.work != "source":
            problem = "expected at least one port, found none"
            fix = f"{node.operator.name}(port, ...)"
            yield Fault(rule="rows", where=place(node), problem=problem, fix=fix, origin=node.origin)
        for wire in _distinct(context, wires):
            yield from _compare(context, wires[0], wire)


def _distinct(context: Context, wires: tuple[Wire, ...]) -> Iterator[Wire]:
    """The wires after the first; of several on the same wrong rows only one."""
    seen: set[int] = set()
    for wire in wires[1:]:
        domain = context.domains.of(wire.port)
        if id(domain) not in seen:
            seen.add(id(domain))
            yield wire


def _compare(context: Context, first: Wire, other: Wire) -> Iterator[Fault]:
    here, there = context.domains.of(first.port), context.domains.of(other.port)
    if here is None or there is None or here is there:
        return
    if not (first.fits and other.fits) or {id(first.port.node), id(other.port.node)} & context.doubtful:
        return  # columns.py has named the wrong wire, of which these rows come
    if other.input.rows == "parent" and here.descends_from(there):
        return
    where = place(other.node) if other.key == other.name else other.where.rpartition(".")[0]
    problem = f"{first.name!r} stands on {_shown(here, there)}, {other.name!r} on {_shown(there, here)}"
    if other.input.rows == "parent":
        problem += f", which {first.name!r} does not come from"
    fix = _fix(first, here, other, there)
    yield Fault(rule="rows", where=where, problem=problem, fix=fix, origin=other.origin)


def _shown(domain: Domain, other: Domain) -> str:
    text = domain.describe()
    if text != other.describe():
        return text
    return f"{text} made by {domain.node.name!r} ({line_of(domain.node, other.node.origin)})"


def _fix(first: Wire, here: Domain, other: Wire, there: Domain) -> str:
    a, b = first.name, other.name
    if here.source is not there.source:
        return f"ports that come from one source; {here.source.name!r} and {there.source.name!r} are two"
    if here.kind == "subset" or there.kind == "subset":
        return f"{a}, {b} = select({a}, {b}, where=...)"
    if here.descends_from(there):
        return f"make {b!r} from the rows of {a!r}, or n=1 in {here.node.name!r}"
    if there.descends_from(here):
        return f"make {a!r} from the rows of {b!r}, or n=1 in {there.node.name!r}"
    return f"make {b!r} from the rows of {a!r}"
