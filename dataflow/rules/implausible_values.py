"""Implausible: values that parameters take and that hardly mean what they say. Warnings.

Owns: values that look like those of another meaning, or that make their operator do nothing. Does
not own: ranges (parameters.py), settings that nothing reads (unused_settings.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dataflow.errors import GraphWarning
from dataflow.loss_terms import LossTerm
from dataflow.model import Model
from dataflow.node import Node
from dataflow.rules.context import Context, line_of, loss_terms, warning_at
from dataflow.schema import Reward

_GREEDY_BELOW = 0.01
"""At such a temperature a token whose logit is 0.1 less is drawn once in e^10 times; vLLM does not
go below it.
"""


def followers_that_stand_still(context: Context) -> Iterator[GraphWarning]:
    """A follower that moves by small parts in bfloat16, which has 8 bits."""
    for state in context.graph.states:
        if not isinstance(state, Model) or state.follows is None or state.rate == 1.0:
            continue
        if state.dtype != "bfloat16":
            continue
        problem = (
            f"it moves {state.rate:g} of the way to {state.follows.name!r} in bfloat16, which has"
            " nothing left of a part below 1/256 of a weight: most weights stand still"
        )
        yield GraphWarning(
            rule="standing_follower",
            where=f"Model {state.name!r}",
            problem=problem,
            fix="no dtype=, so that it is in float32",
            origin=state.origin,
        )


def bounds_for_distances(context: Context) -> Iterator[GraphWarning]:
    """clip=(0.8, 1.2), the bounds of a ratio, where distances from 1 are expected."""
    for node in context.graph.nodes:
        for term in loss_terms(node):
            limits = dict(term.function.limits)
            for name, clip in term.params:
                limit = limits.get(name)
                if limit is not None and limit.pair and _look_like_bounds(clip):
                    yield _bounds_warning(node, term, name, clip)


def _look_like_bounds(clip: Any) -> bool:
    """Whether 1 lies between two numbers, or just below a single one."""
    low, high = clip if isinstance(clip, tuple) else (0.0, clip)
    if not isinstance(low, (int, float)) or not isinstance(high, (int, float)):
        return False  # a schedule
    return low < 1 < high < 2


def _bounds_warning(node: Node, term: LossTerm, name: str, clip: Any) -> GraphWarning:
    if isinstance(clip, tuple):
        low, high = clip
        likely_clip: Any = (abs(round(1 - low, 9)), round(high - 1, 9))
    else:
        low = high = clip
        likely_clip = round(high - 1, 9)
    least, most = max(0.0, 1 - low), 1 + high
    problem = (
        f"{name} says how far a ratio may be from 1, so that {name}={clip} lets it be"
        f" from {least:.3g} to {most:.3g}"
    )
    return GraphWarning(
        rule="clip_bounds",
        where=term.function.name,
        problem=problem,
        fix=f"{name}={likely_clip}",
        origin=term.origin or node.origin,
    )


def tiny_temperatures(context: Context) -> Iterator[GraphWarning]:
    """A temperature at which sampling is greedy, and log-probs are 0 or far below."""
    for node in context.graph.nodes:
        temperature = node.params.get("temperature")
        if not isinstance(temperature, (int, float)) or not 0 < temperature < _GREEDY_BELOW:
            continue
        if node.operator.traits.generates:
            effect, fix = "it is greedy", "temperature=0.0, if it is to be greedy, or 1.0"
        else:
            effect, fix = "one token has all of the probability", "temperature=1.0"
        factor = 1 / temperature
        problem = f"temperature={temperature:g} multiplies logits by {factor:,.0f}: {effect}"
        yield warning_at(node, "tiny_temperature", problem, fix)


def zero_weights(context: Context) -> Iterator[GraphWarning]:
    """A sum of rewards each of which counts 0."""
    for node in context.graph.nodes:
        weights = node.params.get("weights")
        makes_rewards = any(issubclass(schema, Reward) for schema in node.schemas)
        if makes_rewards and isinstance(weights, tuple) and weights and not any(weights):
            problem = f"weights={list(weights)} make the reward of every row 0, whatever it did"
            yield warning_at(node, "zero_weights", problem, "a weight other than 0")


def repeated_settings(context: Context) -> Iterator[GraphWarning]:
    """A parameter that repeats one of its rows' generation, with another value."""
    for node in context.graph.nodes:
        for name in node.operator.repeats:
            samples = context.samplers.of(next(iter(node.inputs.values())))
            if not samples or any(len(makers) != 1 for makers in samples):
                continue
            settings = {makers[0].params.get(name) for makers in samples}
            if node.params.get(name) in settings or None in settings:
                continue
            maker = samples[0][0]
            setting = f"{name}={maker.params.get(name)}"
            problem = (
                f"{name}={node.params.get(name)}, and {maker.name!r}"
                f" ({line_of(maker, node.origin)}), which writes its rows, has {setting}"
            )
            yield warning_at(node, f"other_{name}", problem, setting)
