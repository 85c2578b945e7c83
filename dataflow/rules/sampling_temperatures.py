"""Sampled: log-probs are computed, and rows trained, at the temperature of sampling.

Owns: rows with tokens from several generations, which have no temperature or max_tokens of their
own; each row of a concat has its sampler's; samplers that record too little. Does not own:
log-probs compared with those of another temperature (training_temperature.py), a node's default
temperature (a pass of the planner), whose version log-probs have (versions.py), vocabularies
(vocabulary.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dataflow.errors import Fault
from dataflow.loss import Loss
from dataflow.loss_terms import ROWS, row_sets
from dataflow.node import Node, Port
from dataflow.rows import writers
from dataflow.rules.context import Context, fault_at, line_of
from dataflow.schema import TruncatedRollout


def check_one_sampler(context: Context) -> Iterator[Fault]:
    """Rows of two generations without a stated temperature."""
    for node in context.graph.nodes:
        yield from _check_truncation(node)
        if node.operator.log_probs:
            yield from _check_temperature(context, node, ROWS)
        elif node.operator.work == "train":
            for name in row_sets(node) or (ROWS,):
                yield from _check_temperature(context, node, name)
            yield from _check_constant(context, node)


def _check_truncation(node: Node) -> Iterator[Fault]:
    """A kernel's own sampler does not tell what top-k and top-p kept."""
    sampler = node.params.get("sampler", "keyed")
    is_truncated = any(issubclass(schema, TruncatedRollout) for schema in node.schemas)
    if sampler == "keyed" or not is_truncated:
        return
    limits = f"top_p={node.params.get('top_p')}, top_k={node.params.get('top_k')}"
    problem = (
        f"sampler={sampler!r} does not record the probability that top_k and top_p keep,"
        f" found {limits}"
    )
    fix = "sampler='keyed', or top_p=1.0 and top_k=0"
    yield fault_at(node, "sampled", problem, fix)


def _find_mixed(context: Context, rows: Port[Any]) -> tuple[Node, ...]:
    """The generations of the first row that has several."""
    samples = context.samplers.of(rows)
    return next((makers for makers in samples if len(makers) > 1), ())


def _check_temperature(context: Context, node: Node, row_set: str) -> Iterator[Fault]:
    """Tokens of several generations, each at its own temperature."""
    rows = node.inputs.get(row_set)
    makers = _find_mixed(context, rows) if rows is not None else ()
    # The parameter is of the node's own rows, whatever row sets its loss has.
    is_stated = row_set == ROWS and node.params.get("temperature") is not None
    if rows is None or not makers or is_stated:
        return
    if _needs_no_temperature(node.params.get("loss"), row_set):
        return
    samplers: list[str] = []
    for maker in makers:
        line, temperature = line_of(maker, node.origin), maker.params.get("temperature")
        samplers.append(f"{maker.name!r} ({line}, temperature={temperature})")
    problem = (
        f"expected tokens of one generation, or temperature=, found those of"
        f" {' and '.join(samplers)} in {rows.label!r}"
    )
    if row_set == ROWS:
        temperature = makers[0].params.get("temperature") or 1.0
        fix = f"temperature={temperature} in {node.operator.name}"
    else:
        fix = "rows of one generation, or a train node for these rows"
    yield fault_at(node, "sampled", problem, fix)


def _needs_no_temperature(loss: object, row_set: str) -> bool:
    """Whether a loss trains these rows at temperature 1, or needs no log-probs at all."""
    if not isinstance(loss, Loss):
        return False
    loss = loss.on(row_set)
    return loss.supervised or all(term.function.head != "lm" for term in loss.terms)


def _check_constant(context: Context, node: Node) -> Iterator[Fault]:
    """An average over max_tokens, of rows that have several, or some of which have none."""
    rows = node.inputs.get(ROWS)
    if node.params.get("aggregate") != "constant" or rows is None:
        return
    makers, samples = _find_mixed(context, rows), context.samplers.of(rows)
    if makers:
        limits = [f"{m.name!r} (max_tokens={m.params.get('max_tokens')})" for m in makers]
        whose = " and ".join(limits)
    elif any(samples) and not all(samples):
        unsampled = [m.name for m in writers(rows) if not m.operator.traits.generates]
        whose = f"{unsampled[0]!r}, which has none" if unsampled else "rows that nothing sampled"
    else:
        return
    problem = (
        f"aggregate='constant' divides by max_tokens, and {rows.label!r} has tokens of {whose}"
    )
    yield fault_at(node, "sampled", problem, "aggregate='token_mean'")
