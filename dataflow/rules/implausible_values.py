"""Implausible: values that parameters take and that hardly mean what they say. Warnings.

Owns: values that look like those of another meaning, or that make their operator do nothing. Does
not own: ranges (parameters.py), settings that nothing reads (unused_settings.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dataflow.errors import GraphWarning
from dataflow.loss import Loss
from dataflow.node import Node
from dataflow.rules.context import Context, line_of, place
from dataflow.schema import Reward

_GREEDY_BELOW = 0.01
"""At such a temperature a token whose logit is 0.1 less is drawn once in e^10 times; vLLM does not
go below it.
"""


def bounds_for_distances(context: Context) -> Iterator[GraphWarning]:
    """clip=(0.8, 1.2), the bounds of a ratio, where distances from 1 are expected."""
    for node in context.graph.nodes:
        loss = node.params.get("loss")
        for term in loss.terms if isinstance(loss, Loss) else ():
            limits = dict(term.function.limits)
            for name, value in term.params:
                limit = limits.get(name)
                if limit is None or not limit.pair or not _look_like_bounds(value):
                    continue
                low, high = value if isinstance(value, tuple) else (value, value)
                least, most = max(0.0, 1 - low), 1 + high
                problem = (
                    f"{name} says how far a ratio may be from 1, so that {name}={value} lets it be"
                    f" from {least:.3g} to {most:.3g}"
                )
                near = (abs(round(1 - low, 9)), round(high - 1, 9))
                fix = f"{name}={near if isinstance(value, tuple) else near[1]}"
                yield GraphWarning(
                    rule="clip_bounds",
                    where=term.function.name,
                    problem=problem,
                    fix=fix,
                    origin=term.origin or node.origin,
                )


def _look_like_bounds(value: Any) -> bool:
    """Whether 1 lies between two numbers, or just below a single one."""
    low, high = value if isinstance(value, tuple) else (0.0, value)
    if not isinstance(low, (int, float)) or not isinstance(high, (int, float)):
        return False  # a schedule
    return low < 1 < high < 2


def tiny_temperatures(context: Context) -> Iterator[GraphWarning]:
    """A temperature at which sampling is greedy, and log-probs are 0 or far below."""
    for node in context.graph.nodes:
        value = node.params.get("temperature")
        if not isinstance(value, (int, float)) or not 0 < value < _GREEDY_BELOW:
            continue
        samples = node.operator.traits.generates
        what = "it is greedy" if samples else "one token has all of the probability"
        problem = f"temperature={value:g} multiplies logits by {1 / value:,.0f}: {what}"
        fix = "temperature=0.0, if it is to be greedy, or 1.0" if samples else "temperature=1.0"
        yield _at(node, "tiny_temperature", problem, fix)


def zero_weights(context: Context) -> Iterator[GraphWarning]:
    """A sum of rewards each of which counts 0."""
    for node in context.graph.nodes:
        weights = node.params.get("weights")
        rewards = any(issubclass(schema, Reward) for schema in node.schemas)
        if rewards and isinstance(weights, tuple) and weights and not any(weights):
            problem = f"weights={list(weights)} make the reward of every row 0, whatever it did"
            yield _at(node, "zero_weights", problem, "a weight other than 0")


def repeated_settings(context: Context) -> Iterator[GraphWarning]:
    """A parameter that repeats one of its rows' generation, with another value."""
    for node in context.graph.nodes:
        for name in node.operator.repeats:
            samples = context.samplers.of(next(iter(node.inputs.values())))
            makers = {maker for each in samples for maker in each}
            single = bool(samples) and all(len(each) == 1 for each in samples)
            values = {maker.params.get(name) for maker in makers}
            if not single or node.params.get(name) in values:
                continue
            maker = samples[0][0]
            problem = (
                f"{name}={node.params.get(name)}, and {maker.name!r}"
                f" ({line_of(maker, node.origin)}), which writes its rows, has"
                f" {name}={maker.params.get(name)}"
            )
            yield _at(node, f"other_{name}", problem, f"{name}={maker.params.get(name)}")


def _at(node: Node, rule: str, problem: str, fix: str) -> GraphWarning:
    return GraphWarning(rule=rule, where=place(node), problem=problem, fix=fix, origin=node.origin)
