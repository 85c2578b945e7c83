"""The engines of a plan: which Worker each is in, and how much it has room for.

Owns: the Workers of nodes whose kernel runs an engine, and their sizes. Does not own: which kernel
that is (kernels.py), all other Workers (place.py).

An engine changes the process that it is in (its threads can no longer be set), so no other node
that computes shares its Worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dataflow.errors import PlanError
from dataflow.model import Model
from engine.cost.lengths import of_rollout
from engine.cost.memory import WIDTHS
from engine.cost.models import model_cost
from engine.plan.draft import Draft
from engine.plan.plan import PlannedNode

BLOCK = 32
"""Tokens of a block of keys and values; a row may end within one."""

CACHE = 4 << 30
"""The most bytes of keys and values, unless one row needs more: the other rows wait."""


def apart(draft: Draft, bases: Mapping[str, str], rollout: str) -> dict[str, str]:
    """The default Workers with those of engines: one for each Model, `rollout` for the first. What
    else would compute there gets a Worker of its own.
    """
    models = dict.fromkeys(n.models[0].model for n in draft.nodes if n.engine)
    if not models or draft.placing.workers == "apart":
        return dict(bases)
    names = [rollout, *(f"{rollout}-{model}" for model in list(models)[1:])]
    homes, found = dict(zip(models, names, strict=True)), dict(bases)
    for node in draft.nodes:
        if node.engine:
            found[node.name] = homes[node.models[0].model]
        elif node.traits.computes and found[node.name] == rollout:
            found[node.name] = node.name
    return found


def require_apart(nodes: tuple[PlannedNode, ...]) -> None:
    """Raise PlanError where another node computes in an engine's Worker."""
    for engine in (n for n in nodes if n.engine):
        for other in (n for n in nodes if n.traits.computes and n is not engine):
            both = set(engine.workers) & set(other.workers)
            same = other.engine and other.models[0].model == engine.models[0].model
            if both and not same:
                raise PlanError(
                    f"place: {other.name} is in Worker {min(both)!r}, which runs the engine of"
                    f" {engine.name} and can compute nothing else. Fix: another Worker for"
                    f" {other.name}."
                )


def sized(draft: Draft) -> Draft:
    """Tell all nodes of an engine its longest row and the bytes of its keys and values."""
    longest: dict[str, int] = {}
    for node in (n for n in draft.nodes if n.engine):
        model = node.models[0].model
        longest[model] = max(longest.get(model, 0), _longest(draft, node))
    nodes = tuple(_sized(draft, n, longest) if n.engine else n for n in draft.nodes)
    return replace(draft, nodes=nodes)


def _longest(draft: Draft, node: PlannedNode) -> int:
    params = draft.graph.node(node.name).params
    assumed = max(4096, of_rollout(0, None).prompt)
    row = (params.get("max_prompt_tokens") or assumed) + params["max_tokens"]
    shape = model_cost(_model(draft, node).base, "lm").shape
    return min(row, shape.context) if shape is not None else row


def _sized(draft: Draft, node: PlannedNode, longest: Mapping[str, int]) -> PlannedNode:
    model, row = _model(draft, node), longest[node.models[0].model]
    shape, layout = model_cost(model.base, "lm").shape, node.layout
    cache = 0
    if shape is not None:
        blocks = -(-row // BLOCK) + 1
        one = blocks * BLOCK * 2 * shape.layers * shape.kv * WIDTHS[model.dtype]
        cache = max(one, min(layout.slots * one, CACHE))
    return replace(node, layout=replace(layout, longest=row, cache=cache))


def _model(draft: Draft, node: PlannedNode) -> Model:
    name = node.models[0].model
    return next(s for s in draft.graph.states if isinstance(s, Model) and s.name == name)
