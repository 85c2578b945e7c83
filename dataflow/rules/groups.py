"""Groups: complete before their baseline, of the right size, never split between updates.

Owns: group-scope operators and losses, and minibatches. Does not own: which rows stay (select may
keep any), how a kernel finds a row's group.
"""

from __future__ import annotations

from collections.abc import Iterator

from dataflow.errors import Fault, Origin
from dataflow.loss import Loss
from dataflow.loss_terms import row_sets
from dataflow.node import Node
from dataflow.rows import Domain
from dataflow.rules.context import Context, fault_at, line_of, place
from dataflow.schema import Advantage, Preference


def check(context: Context) -> Iterator[Fault]:
    """Groups of one row, ragged groups, groups that are no pairs, minibatches that do not divide
    the batch.
    """
    for node in context.graph.nodes:
        if id(node) in context.doubtful:
            continue
        for key, where, what, origin in _needs_groups(node):
            domain = _domain(context, node, key)
            if domain is not None:
                yield from _one_row(_decoder(domain), domain, where, what, origin)
                yield from _ragged(node, domain, where, origin)
        yield from _unpaired(context, node)
        for name in row_sets(node):
            domain = _domain(context, node, name)
            if domain is not None:
                yield from _minibatches(node, domain)


def _domain(context: Context, node: Node, key: str) -> Domain | None:
    port = node.inputs.get(key)
    return context.domains.of(port) if port is not None else None


def _needs_groups(node: Node) -> Iterator[tuple[str, str, str, Origin | None]]:
    """Everything that sees a group at once: the input with its rows, its place, what is needed, and
    the line.
    """
    if node.operator.scope == "group":
        baseline = any(issubclass(s, Advantage) for s in node.schemas)
        what, first = "a group baseline" if baseline else "group scope", next(iter(node.inputs), "")
        yield first, place(node), what, node.origin
    loss = node.params.get("loss")
    for term in loss.terms if isinstance(loss, Loss) else ():
        if term.function.scope == "group":
            yield term.on, term.function.name, "a loss over groups", term.origin or node.origin


def _one_row(
    made: Node | None, domain: Domain, where: str, what: str, origin: Origin | None
) -> Iterator[Fault]:
    if domain.group_size >= 2:
        return
    if made is not None and made.params.get("n", 1) != 1:
        return  # not a valid number of answers: parameters.py reports it
    by = f" ({made.operator.name} n=1, {line_of(made, origin)})" if made else ""
    fix = "n=8" if made else "rows of generate(n=8), or of preferences()"
    if made and what == "a group baseline":
        fix = "n=8, or returns() / gae()"
    problem = f"groups have 1 row{by}; {what} needs n >= 2"
    yield Fault(rule="groups", where=where, problem=problem, fix=fix, origin=origin)


def _decoder(domain: Domain) -> Node | None:
    """The generation that made these rows and could have made several of each."""
    made = domain.unselected.node
    return made if made.operator.traits.generates else None


def _ragged(node: Node, domain: Domain, where: str, origin: Origin | None) -> Iterator[Fault]:
    if domain.ragged is None or node.params.get("ragged"):
        return
    problem = (
        f"groups may have lost rows: {domain.ragged.name!r} ({line_of(domain.ragged, origin)})"
        " keeps single rows"
    )
    fix = f"ragged=True, or put it before {domain.ragged.name!r}"
    if "ragged" not in node.params:
        fix = f"put it before {domain.ragged.name!r}, or keep whole groups there (mixed_groups)"
    by = domain.ragged.inputs["where"].node.operator
    if by.keeps is None and by.scope != "row":
        fix += f", or @operator(keeps='groups') on {by.name!r} where it keeps or drops whole groups"
    yield Fault(rule="groups", where=where, problem=problem, fix=fix, origin=origin)


def _unpaired(context: Context, node: Node) -> Iterator[Fault]:
    """A loss over pairs reads groups of two rows: those that nobody chose or rejected are gone."""
    for wire in context.wires[id(node)] if node.operator.work == "train" else ():
        domain = context.domains.of(wire.port)
        if not issubclass(wire.input.schema, Preference) or domain is None or domain.paired:
            continue
        shown, label = domain.describe(), wire.port.label
        problem = (
            f"expected groups of two rows, one chosen and one rejected, found {shown}, with all"
            " rows of each group"
        )
        fix = f"rollout, {label} = select(rollout, {label}, where={label}, refill=True)"
        if domain.ragged is not None:
            continue  # _ragged has named the selection
        yield wire.fault("groups", problem, fix)


def _minibatches(node: Node, domain: Domain) -> Iterator[Fault]:
    parts, batch = node.params.get("minibatches"), domain.source.params.get("batch")
    if (
        not isinstance(parts, int)
        or not isinstance(batch, int)
        or min(parts, batch) < 1
        or batch % parts == 0
    ):
        return
    if any(not d.node.params.get("refill") for d in domain.selections()):
        return  # the number of groups in a Step is unknown here; the kernel divides them itself
    problem = (
        f"minibatches={parts} does not divide the {batch} prompts of a Step, whose groups stay"
        " whole"
    )
    near = max(d for d in range(1, min(parts, batch) + 1) if batch % d == 0)
    yield fault_at(node, "groups", problem, f"minibatches={near}")
