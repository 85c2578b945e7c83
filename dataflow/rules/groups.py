"""Groups: complete before their baseline, of the right size, never split between updates.

Owns: group-scope operators and losses, and minibatches. Does not own: which rows stay (select may
keep any), how a kernel finds a row's group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dataflow.errors import Fault, Origin
from dataflow.loss_terms import row_sets
from dataflow.node import Node
from dataflow.rows import Domain
from dataflow.rules.context import Context, fault_at, line_of, loss_terms, name_node
from dataflow.rules.segments import find_segment_maker
from dataflow.schema import Advantage, Preference

_BASELINE = "a group baseline"


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupReader:
    """What sees a group at once: a node, or a term of its loss. key: the input with its rows;
    where, origin: how a fault names it; need: what it needs groups for.
    """

    key: str
    where: str
    need: str
    origin: Origin | None

    def fault(self, problem: str, fix: str) -> Fault:
        return Fault(rule="groups", where=self.where, problem=problem, fix=fix, origin=self.origin)


def check_whole_groups(context: Context) -> Iterator[Fault]:
    """Groups of one row, ragged groups, groups that are no pairs, minibatches that do not divide
    the batch.
    """
    for node in context.graph.nodes:
        if id(node) in context.doubtful:
            continue
        for reader in _find_group_readers(node):
            domain = _domain_of_input(context, node, reader.key)
            if domain is not None:
                yield from _check_size(reader, domain)
                yield from _check_ragged(node, reader, domain)
        yield from _check_pairs(context, node)
        for name in row_sets(node):
            domain = _domain_of_input(context, node, name)
            if domain is not None:
                yield from _check_minibatches(node, domain)


def _domain_of_input(context: Context, node: Node, key: str) -> Domain | None:
    port = node.inputs.get(key)
    return context.domains.of(port) if port is not None else None


def _find_group_readers(node: Node) -> Iterator[_GroupReader]:
    if node.operator.scope == "group":
        makes_advantages = any(issubclass(schema, Advantage) for schema in node.schemas)
        need = _BASELINE if makes_advantages else "group scope"
        key, where = next(iter(node.inputs), ""), name_node(node)
        yield _GroupReader(key=key, where=where, need=need, origin=node.origin)
    for term in loss_terms(node):
        if term.function.scope == "group":
            where, origin = term.function.name, term.origin or node.origin
            yield _GroupReader(key=term.on, where=where, need="a loss over groups", origin=origin)


def _check_size(reader: _GroupReader, domain: Domain) -> Iterator[Fault]:
    maker = domain.rows_before_selection.node
    segment_maker = find_segment_maker(domain)
    is_lone_episode = segment_maker is maker and maker.params.get("n") == 1
    if domain.group_size >= 2 and not is_lone_episode:
        return
    if maker.operator.traits.generates:
        if maker.params.get("n", 1) != 1:
            return  # not a valid number of answers: parameters.py reports it
        cause = f" ({maker.operator.name} n=1, {line_of(maker, reader.origin)})"
        fix = "n=8, or returns() / gae()" if reader.need == _BASELINE else "n=8"
    else:
        cause, fix = "", "rows of generate(n=8), or of preferences()"
    yield reader.fault(f"groups have 1 row{cause}; {reader.need} needs n >= 2", fix)


def _check_ragged(node: Node, reader: _GroupReader, domain: Domain) -> Iterator[Fault]:
    selection = domain.ragged
    if selection is None or node.params.get("ragged"):
        return
    problem = (
        f"groups may have lost rows: {selection.name!r} ({line_of(selection, reader.origin)})"
        " keeps single rows"
    )
    fix = f"ragged=True, or put it before {selection.name!r}"
    if "ragged" not in node.params:
        fix = f"put it before {selection.name!r}, or keep whole groups there (mixed_groups)"
    criterion = selection.inputs["where"].node.operator
    if criterion.keeps is None and criterion.scope != "row":
        fix += (
            f", or @operator(keeps='groups') on {criterion.name!r} where it keeps or drops whole"
            " groups"
        )
    yield reader.fault(problem, fix)


def _check_pairs(context: Context, node: Node) -> Iterator[Fault]:
    """A loss over pairs reads groups of two rows: those that nobody chose or rejected are gone."""
    if node.operator.work != "train":
        return
    for wire in context.wires[id(node)]:
        domain = context.domains.of(wire.port)
        if not issubclass(wire.input.schema, Preference) or domain is None or domain.paired:
            continue
        if domain.ragged is not None:
            continue  # _check_ragged has named the selection
        label = wire.port.label
        problem = (
            f"expected groups of two rows, one chosen and one rejected, found {domain.describe()},"
            " with all rows of each group"
        )
        fix = f"rollout, {label} = select(rollout, {label}, where={label}, refill=True)"
        yield wire.fault("groups", problem, fix)


def _check_minibatches(node: Node, domain: Domain) -> Iterator[Fault]:
    parts, batch = node.params.get("minibatches"), domain.source.params.get("batch")
    if not isinstance(parts, int) or not isinstance(batch, int) or min(parts, batch) < 1:
        return  # parameters.py and clocks.py report these
    if batch % parts == 0:
        return
    if any(not selection.node.params.get("refill") for selection in domain.selections()):
        return  # the number of groups in a Step is unknown here; the kernel divides them itself
    problem = (
        f"minibatches={parts} does not divide the {batch} prompts of a Step, whose groups stay"
        " whole"
    )
    nearest_parts = min(parts, batch)
    while batch % nearest_parts:
        nearest_parts -= 1
    yield fault_at(node, "groups", problem, f"minibatches={nearest_parts}")
