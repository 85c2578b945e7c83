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
from dataflow.rows import Domain, physical_port
from dataflow.rules.context import Context, Wire, fault_at, line_of, name_node


def check_same_rows(context: Context) -> Iterator[Fault]:
    """Inputs with other rows than the first, wrong parents and descendants, nodes without rows."""
    for node in context.graph.nodes:
        wires = context.wires[id(node)]
        if not wires and node.operator.work != "source":
            problem = "expected at least one port, found none"
            fix = f"{node.operator.name}(port, ...)"
            yield fault_at(node, "rows", problem, fix)
        if isinstance(node.operator.rows, Reduce):
            wires_by_name = {wire.name: wire for wire in wires}
            yield from _check_reduction(context, wires_by_name, node.operator.rows)
            continue
        if isinstance(node.operator.rows, Concat):
            continue  # concats.py
        for first in wires:
            if first.key != first.row_set:
                continue
            others = [w for w in wires if w.row_set == first.key and w is not first]
            for other in _distinct(context, others):
                yield from _compare(context, first, other)
        yield from _check_row_sets(context, node, wires)


def _check_row_sets(context: Context, node: Node, wires: tuple[Wire, ...]) -> Iterator[Fault]:
    """A term with rows of its own that the node trains anyway; rows on which no term stands."""
    loss = node.params.get("loss")
    if not isinstance(loss, Loss) or ROWS not in node.inputs:
        return
    main_port = node.inputs[ROWS]
    for wire in wires:
        if wire.key != wire.row_set or wire.key == ROWS:
            continue
        has_same_rows = context.domains.of(wire.port) is context.domains.of(main_port)
        if has_same_rows and physical_port(wire.port) == physical_port(main_port):
            problem = f"rows={wire.port.label} are the rows that {node.name!r} trains anyway"
            yield wire.fault("rows", problem, "leave rows= out")
    if loss.terms and not loss.on(ROWS).terms:
        term = loss.terms[0]
        label = node.inputs[term.on].label
        problem = f"every term of the loss has rows of its own, and none trains {main_port.label!r}"
        fix = f"train(model, {label}, ...), and no rows= in {term.function.name}"
        yield fault_at(node, "rows", problem, fix)


def _distinct(context: Context, wires: Iterable[Wire]) -> Iterator[Wire]:
    """The wires on other rows; of several on the same wrong rows only one."""
    domains: set[int] = set()
    for wire in wires:
        domain = context.domains.of(wire.port)
        if id(domain) not in domains:
            domains.add(id(domain))
            yield wire


def _compare(context: Context, first: Wire, other: Wire) -> Iterator[Fault]:
    domain, other_domain = context.domains.of(first.port), context.domains.of(other.port)
    if domain is None or other_domain is None or domain is other_domain:
        return
    if _is_doubtful(context, first, other):
        return
    may_be_parent = other.input.rows == "parent"
    if may_be_parent and domain.descends_from(other_domain):
        return
    is_of_term = other.key != other.name
    where = other.where.rpartition(".")[0] if is_of_term else name_node(other.node)
    rows, other_rows = _describe(domain, other_domain), _describe(other_domain, domain)
    problem = f"{first.name!r} stands on {rows}, {other.name!r} on {other_rows}"
    if may_be_parent:
        problem += f", which {first.name!r} does not come from"
    fix = _choose_fix(first, domain, other, other_domain)
    yield Fault(rule="rows", where=where, problem=problem, fix=fix, origin=other.origin)


def _is_doubtful(context: Context, first: Wire, other: Wire) -> bool:
    """Whether columns.py has reported a wrong wire that these rows come from."""
    if not first.fits or not other.fits:
        return True
    return not context.doubtful.isdisjoint([id(first.port.node), id(other.port.node)])


def _check_reduction(context: Context, wires: dict[str, Wire], rows: Reduce) -> Iterator[Fault]:
    """Rewards that go up must come from generations on the rows that they go up to."""
    low, high = wires[rows.of], wires[rows.to]
    below, above = context.domains.of(low.port), context.domains.of(high.port)
    if below is None or above is None or _is_doubtful(context, low, high):
        return
    start = f"{low.name!r} stands on {_describe(below, above)}"
    if not below.descends_from(above):
        rows_above = _describe(above, below)
        problem = f"{start}, which does not come from {high.name!r}: {rows_above}"
        fix = f"{high.name}= a port that {low.port.label!r} comes from{_list_ancestors(below)}"
    elif below.rows_before_selection is above.rows_before_selection:
        problem = f"{start}: of each row of {high.name!r} there is at most one"
        fix = f"select({high.port.label}, where=...)"
        if below is above:
            fix = f"{low.port.label!r} as it is"
    else:
        return
    where = name_node(low.node)
    yield Fault(rule="rows", where=where, problem=problem, fix=fix, origin=low.origin)


def _list_ancestors(domain: Domain) -> str:
    """`: prompts or rollout`, the nodes that made the ancestors of these rows."""
    names: list[str] = []
    for ancestor in domain.ancestors():
        if ancestor.kind != "subset" and ancestor is not domain.rows_before_selection:
            names.append(ancestor.node.name)
    return f": {' or '.join(reversed(names))}" if names else ""


def _describe(domain: Domain, other: Domain) -> str:
    """The rows in words, with who made them where the other's words are the same."""
    text = domain.describe()
    if text != other.describe():
        return text
    return f"{text} made by {_name_maker(domain, other.node.origin)}"


def _name_maker(domain: Domain, origin: Origin | None) -> str:
    """`'rollout' (line 9)`: what made these rows, ignoring selections."""
    maker = domain.rows_before_selection.node
    return f"{maker.name!r} ({line_of(maker, origin)})"


def _choose_fix(first: Wire, domain: Domain, other: Wire, other_domain: Domain) -> str:
    """How `other` could be on the rows of `first`, by where the two part."""
    if domain.source is not other_domain.source:
        return _fix_sources(first, domain, other, other_domain)
    origin, other_origin = domain.rows_before_selection, other_domain.rows_before_selection
    if origin is other_origin:
        return f"{first.name}, {other.name} = select({first.name}, {other.name}, where=...)"
    if origin.kind == other_origin.kind == "concat":
        return "the same rows in the same order in both"
    maker = _name_maker(domain, other.origin)
    other_maker = _name_maker(other_domain, other.origin)
    if other.input.rows == "parent":
        onto = _nearest_common(domain, other_domain).node.name
        return (
            f"{other.name}=mean_over({other.port.label}, {onto}): {maker} and {other_maker} both"
            f" come from {onto!r}"
        )
    if other_origin.descends_from(origin):
        way_up = (
            f"mean_over(reward, {origin.node.name}) for a reward, which {other_maker} has for"
            f" each row of {maker}"
        )
        return way_up if domain is origin else f"{way_up}; then select"
    instead = f"make {other.name!r} from {maker}, not from {other_maker}"
    if origin.descends_from(other_origin):
        only = "only mean_over(reward, rows) moves numbers, and only up"
        return f"{instead}, which is above it; {only}"
    onto = _nearest_common(domain, other_domain).node.name
    return f"{instead}; a baseline is mean_over(reward, {onto})"


def _fix_sources(first: Wire, domain: Domain, other: Wire, other_domain: Domain) -> str:
    source, other_source = domain.source.name, other_domain.source.name
    if other.key != other.name and first.key == ROWS:
        loss = other.where.rpartition(".")[0]
        return f"{loss}(..., rows=...): rows of {other_source!r}, as this term's own"
    return f"ports that come from one source; {source!r} and {other_source!r} are two"


def _nearest_common(domain: Domain, other: Domain) -> Domain:
    """The nearest rows that both come from; they have one source."""
    return next(each for each in domain.ancestors() if other.descends_from(each))
