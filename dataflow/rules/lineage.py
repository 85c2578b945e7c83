"""Rows: the inputs of a node have the same rows, or an ancestor's where that is declared (L3).

Owns: the comparison of domains and its messages. Does not own: their derivation
(dataflow/rows.py), what may be joined (concats.py), groups (groups.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dataflow.errors import Fault, Origin
from dataflow.loss import Loss
from dataflow.loss_terms import ROWS
from dataflow.node import Node
from dataflow.operator import Concat, Reduce
from dataflow.rows import Domain, physical
from dataflow.rules.context import Context, Wire, fault_at, line_of, place


def check(context: Context) -> Iterator[Fault]:
    """Inputs with other rows than the first, wrong parents and descendants, nodes without rows."""
    for node in context.graph.nodes:
        wires = context.wires[id(node)]
        if not wires and node.operator.work != "source":
            problem = "expected at least one port, found none"
            fix = f"{node.operator.name}(port, ...)"
            yield fault_at(node, "rows", problem, fix)
        if isinstance(node.operator.rows, Reduce):
            yield from _reduced(context, {w.name: w for w in wires}, node.operator.rows)
            continue
        if isinstance(node.operator.rows, Concat):
            continue  # concats.py
        for first in (wire for wire in wires if wire.key == wire.row_set):
            same = [wire for wire in wires if wire.row_set == first.key and wire is not first]
            for wire in _distinct(context, same):
                yield from _compare(context, first, wire)
        yield from _of_its_own(context, node, wires)


def _of_its_own(context: Context, node: Node, wires: tuple[Wire, ...]) -> Iterator[Fault]:
    """A term with rows of its own that the node trains anyway; rows on which no term stands."""
    loss = node.params.get("loss")
    if not isinstance(loss, Loss) or ROWS not in node.inputs:
        return
    main = node.inputs[ROWS]
    for wire in (wire for wire in wires if wire.key == wire.row_set != ROWS):
        one = context.domains.of(wire.port) is context.domains.of(main)
        if one and physical(wire.port) == physical(main):
            problem = f"rows={wire.port.label} are the rows that {node.name!r} trains anyway"
            yield wire.fault("rows", problem, "leave rows= out")
    if loss.terms and not loss.on(ROWS).terms:
        own = node.inputs[loss.terms[0].on].label
        problem = f"every term of the loss has rows of its own, and none trains {main.label!r}"
        fix = f"train(model, {own}, ...), and no rows= in {loss.terms[0].function.name}"
        yield fault_at(node, "rows", problem, fix)


def _distinct(context: Context, wires: Iterable[Wire]) -> Iterator[Wire]:
    """The wires on other rows; of several on the same wrong rows only one."""
    seen: set[int] = set()
    for wire in wires:
        domain = context.domains.of(wire.port)
        if id(domain) not in seen:
            seen.add(id(domain))
            yield wire


def _compare(context: Context, first: Wire, other: Wire) -> Iterator[Fault]:
    here, there = context.domains.of(first.port), context.domains.of(other.port)
    if here is None or there is None or here is there or _doubtful(context, first, other):
        return
    if other.input.rows == "parent" and here.descends_from(there):
        return
    where = place(other.node) if other.key == other.name else other.where.rpartition(".")[0]
    problem = (
        f"{first.name!r} stands on {_shown(here, there)}, {other.name!r} on {_shown(there, here)}"
    )
    if other.input.rows == "parent":
        problem += f", which {first.name!r} does not come from"
    fix = _fix(first, here, other, there)
    yield Fault(rule="rows", where=where, problem=problem, fix=fix, origin=other.origin)


def _doubtful(context: Context, first: Wire, other: Wire) -> bool:
    """Whether columns.py has reported a wrong wire that these rows come from."""
    wrong = bool({id(first.port.node), id(other.port.node)} & context.doubtful)
    return wrong or not (first.fits and other.fits)


def _reduced(context: Context, wires: dict[str, Wire], rows: Reduce) -> Iterator[Fault]:
    """Rewards that go up must come from generations on the rows that they go up to."""
    low, high = wires[rows.of], wires[rows.to]
    below, above = context.domains.of(low.port), context.domains.of(high.port)
    if below is None or above is None or _doubtful(context, low, high):
        return
    descends = below.descends_from(above)
    if descends and below.unselected is not above.unselected:
        return
    if descends:
        problem = (
            f"{low.name!r} stands on {_shown(below, above)}: of each row of {high.name!r} there is"
            " at most one"
        )
        fix = (
            f"{low.port.label!r} as it is"
            if below is above
            else f"select({high.port.label}, where=...)"
        )
    else:
        problem = (
            f"{low.name!r} stands on {_shown(below, above)}, which does not come from"
            f" {high.name!r}: "
        )
        problem += _shown(above, below)
        fix = f"{high.name}= a port that {low.port.label!r} comes from{_ancestors(below)}"
    yield Fault(rule="rows", where=place(low.node), problem=problem, fix=fix, origin=low.origin)


def _ancestors(domain: Domain) -> str:
    """`: prompts or rollout`, the nodes that made the ancestors of these rows."""
    own = domain.unselected
    names = [d.node.name for d in domain.ancestors() if d.kind != "subset" and d is not own]
    return f": {' or '.join(reversed(names))}" if names else ""


def _shown(domain: Domain, other: Domain) -> str:
    text = domain.describe()
    if text != other.describe():
        return text
    return f"{text} made by {_named(domain, other.node.origin)}"


def _named(domain: Domain, origin: Origin | None) -> str:
    """`'rollout' (line 9)`: what made these rows, ignoring selections."""
    made = domain.unselected.node
    return f"{made.name!r} ({line_of(made, origin)})"


def _fix(first: Wire, here: Domain, other: Wire, there: Domain) -> str:
    a, b = first.name, other.name
    if here.source is not there.source:
        if other.key != other.name and first.key == ROWS:
            loss = other.where.rpartition(".")[0]
            return f"{loss}(..., rows=...): rows of {there.source.name!r}, as this term's own"
        return (
            f"ports that come from one source; {here.source.name!r} and {there.source.name!r}"
            " are two"
        )
    if here.unselected is there.unselected:
        return f"{a}, {b} = select({a}, {b}, where=...)"
    if here.unselected.kind == there.unselected.kind == "concat":
        return "the same rows in the same order in both"
    mine, theirs = _named(here, other.origin), _named(there, other.origin)
    if other.input.rows == "parent":
        onto = _common(here, there).node.name
        return (
            f"{b}=mean_over({other.port.label}, {onto}): {mine} and {theirs} both come from"
            f" {onto!r}"
        )
    if there.unselected.descends_from(here.unselected):
        up = (
            f"mean_over(reward, {here.unselected.node.name}) for a reward, which {theirs} has for"
            f" each row of {mine}"
        )
        return up if here is here.unselected else f"{up}; then select"
    if here.unselected.descends_from(there.unselected):
        way = f"make {b!r} from {mine}, not from {theirs}, which is above it"
        return f"{way}; only mean_over(reward, rows) moves numbers, and only up"
    onto = _common(here, there).node.name
    return f"make {b!r} from {mine}, not from {theirs}; a baseline is mean_over(reward, {onto})"


def _common(here: Domain, there: Domain) -> Domain:
    """The nearest rows that both come from; they have one source."""
    return next(d for d in here.ancestors() if there.descends_from(d))
