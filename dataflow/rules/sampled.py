"""Sampled: log-probs are computed, and rows trained, at the temperature of sampling.

Owns: rows with tokens from several generations, which have no temperature or max_tokens of their
own. Does not own: log-probs compared with those of another temperature (trained_at.py), a node's
default temperature (a pass of the planner), whose version log-probs have (versions.py),
vocabularies (vocabulary.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from dataflow.errors import Fault
from dataflow.loss import Loss
from dataflow.node import Node
from dataflow.rows import generations
from dataflow.rules.context import Context, fault_at, line_of


def check(context: Context) -> Iterator[Fault]:
    """Rows of two generations without a stated temperature."""
    for node in context.graph.nodes:
        if node.operator.log_probs:
            yield from _joined(node)
        elif node.operator.work == "train":
            yield from _joined(node)
            yield from _constant(node)


def _joined(node: Node) -> Iterator[Fault]:
    rows = node.inputs.get("rows")
    makers = generations(rows) if rows is not None and rows.schema.vocabulary else ()
    if len(makers) < 2 or node.params.get("temperature") is not None:
        return
    if _no_temperature(node.params.get("loss")):
        return
    shown = " and ".join(
        f"{m.name!r} ({line_of(m, node.origin)}, temperature={m.params.get('temperature')})"
        for m in makers
    )
    problem = (
        f"expected tokens of one generation, or temperature=, found those of {shown} in"
        f" {_label(node)}"
    )
    fix = f"temperature={makers[0].params.get('temperature') or 1.0} in {node.operator.name}"
    yield fault_at(node, "sampled", problem, fix)


def _no_temperature(loss: object) -> bool:
    """Whether a loss trains at temperature 1, or needs no log-probs at all."""
    if not isinstance(loss, Loss):
        return False
    return loss.supervised or all(term.function.head != "lm" for term in loss.terms)


def _constant(node: Node) -> Iterator[Fault]:
    rows = node.inputs.get("rows")
    makers = generations(rows) if rows is not None else ()
    if (
        len(makers) < 2
        or node.params.get("aggregate") != "constant"
        or node.params.get("max_tokens") is not None
    ):
        return
    shown = " and ".join(f"{m.name!r} (max_tokens={m.params.get('max_tokens')})" for m in makers)
    problem = (
        f"aggregate='constant' divides by max_tokens, and {_label(node)} has tokens of {shown}"
    )
    fix = "aggregate='token_mean'"
    yield fault_at(node, "sampled", problem, fix)


def _label(node: Node) -> str:
    return repr(node.inputs["rows"].label)
