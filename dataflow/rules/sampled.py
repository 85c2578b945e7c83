"""Sampled: log-probs are taken, and rows trained, at the temperature at which their tokens were sampled.

Owns: rows whose tokens are of several generations, which have no temperature and no max_tokens of their own, and
log-probs of another temperature than their ratio's. Does not own: which temperature a node gets where it is one
generation's (a pass of the planner), whose version log-probs are (versions.py), nor vocabularies (vocabulary.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from dataflow.errors import Fault
from dataflow.loss import Loss, LossFunction
from dataflow.node import Node
from dataflow.rows import generations, physical
from dataflow.rules.context import Context, Wire, line_of, place
from dataflow.rules.versions import RECOMPUTED


def check(context: Context) -> Iterator[Fault]:
    """Rows of two generations without a stated temperature, ratios of two temperatures."""
    for node in context.graph.nodes:
        if node.operator.work == "forward" and "temperature" in node.params:
            yield from _joined(node)
        elif node.operator.work == "train":
            yield from _joined(node)
            yield from _constant(node)
            for wire in context.wires[id(node)]:
                yield from _ratio(node, wire)


def at_sampling_temperature(function: LossFunction) -> bool:
    """Whether a loss speaks of the distribution that its rows were sampled from: one that compares log-probs or weighs
    them by an advantage does, and one of the rows' own tokens alone (supervised, entropy) does not.
    """
    return function.head == "lm" and bool(function.ports)


def _joined(node: Node) -> Iterator[Fault]:
    rows = node.inputs.get("rows")
    makers = generations(rows) if rows is not None and rows.schema.vocabulary else ()
    if len(makers) < 2 or node.params.get("temperature") is not None:
        return
    loss = node.params.get("loss")
    if isinstance(loss, Loss) and not any(at_sampling_temperature(t.function) for t in loss.terms):
        return
    shown = " and ".join(
        f"{m.name!r} ({line_of(m, node.origin)}, temperature={m.params.get('temperature')})" for m in makers
    )
    problem = f"expected tokens of one generation, or temperature=, found those of {shown} in {_label(node)}"
    fix = f"temperature={makers[0].params.get('temperature') or 1.0} in {node.operator.name}"
    yield Fault(rule="sampled", where=place(node), problem=problem, fix=fix, origin=node.origin)


def _constant(node: Node) -> Iterator[Fault]:
    rows = node.inputs.get("rows")
    makers = generations(rows) if rows is not None else ()
    if len(makers) < 2 or node.params.get("aggregate") != "constant" or node.params.get("max_tokens") is not None:
        return
    shown = " and ".join(f"{m.name!r} (max_tokens={m.params.get('max_tokens')})" for m in makers)
    problem = f"aggregate='constant' divides by max_tokens, and {_label(node)} has tokens of {shown}"
    fix = "aggregate='token_mean'"
    yield Fault(rule="sampled", where=place(node), problem=problem, fix=fix, origin=node.origin)


def _label(node: Node) -> str:
    return repr(node.inputs["rows"].label)


def _ratio(node: Node, wire: Wire) -> Iterator[Fault]:
    maker = physical(wire.port).node
    own = maker.params.get("temperature")
    if wire.name not in RECOMPUTED or maker.operator.work != "forward" or not isinstance(own, (int, float)):
        return
    trained, whose = _trained_at(node)
    if trained is None or own == trained:
        return
    problem = f"{maker.name!r} ({line_of(maker, wire.origin)}) has log-probs at temperature={own}, and {whose} is at "
    problem += f"{trained}: their ratio is of two distributions"
    fix = f"leave temperature= out of {maker.name!r}, or temperature={trained}"
    yield Fault(rule="sampled", where=wire.where, problem=problem, fix=fix, origin=wire.origin)


def _trained_at(node: Node) -> tuple[float | None, str]:
    """The temperature of the log-probs that a train node computes, and whose that is; None where it is nobody's."""
    stated = node.params.get("temperature")
    if isinstance(stated, (int, float)):
        return float(stated), node.name
    makers = generations(node.inputs["rows"])
    if len(makers) != 1:
        return (None, "") if makers else (1.0, node.name)
    sampled = makers[0].params.get("temperature")
    return (float(sampled) or 1.0, repr(makers[0].name)) if isinstance(sampled, (int, float)) else (None, "")
