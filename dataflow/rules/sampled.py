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
from dataflow.loss_terms import ROWS, row_sets
from dataflow.node import Node
from dataflow.rows import generations
from dataflow.rules.context import Context, fault_at, line_of


def check(context: Context) -> Iterator[Fault]:
    """Rows of two generations without a stated temperature."""
    for node in context.graph.nodes:
        if node.operator.log_probs:
            yield from _joined(node, ROWS)
        elif node.operator.work == "train":
            for name in row_sets(node) or (ROWS,):
                yield from _joined(node, name)
            yield from _constant(node)


def _joined(node: Node, row_set: str) -> Iterator[Fault]:
    rows = node.inputs.get(row_set)
    makers = generations(rows) if rows is not None and rows.schema.vocabulary else ()
    stated = row_set == ROWS and node.params.get("temperature") is not None
    if rows is None or len(makers) < 2 or stated:
        return
    if _no_temperature(node.params.get("loss"), row_set):
        return
    shown = " and ".join(
        f"{m.name!r} ({line_of(m, node.origin)}, temperature={m.params.get('temperature')})"
        for m in makers
    )
    problem = (
        f"expected tokens of one generation, or temperature=, found those of {shown} in"
        f" {rows.label!r}"
    )
    fix = f"temperature={makers[0].params.get('temperature') or 1.0} in {node.operator.name}"
    if row_set != ROWS:  # the parameter is of the node's own rows
        fix = "rows of one generation, or a train node for these rows"
    yield fault_at(node, "sampled", problem, fix)


def _no_temperature(loss: object, row_set: str) -> bool:
    """Whether a loss trains these rows at temperature 1, or needs no log-probs at all."""
    if not isinstance(loss, Loss):
        return False
    loss = loss.on(row_set)
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
