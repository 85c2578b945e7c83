"""Which nodes can have tensor ranks: a part of every weight matrix each, and the same rows.

Those of a train node are Workers; those of a kernel that starts them itself are not.

Owns: the refusals, from a Model's config. Does not own: how a kernel splits its module
(operators/kernels/torch/slices.py), which decides if there is no config.
"""

from __future__ import annotations

from collections.abc import Iterator

from dataflow.model import Model
from engine.plan.cost.models import Shape, model_cost
from engine.plan.draft import Draft
from engine.plan.kernel_needs import kernel_name, model_of, needs_of
from engine.plan.passes.kernels import offering
from engine.plan.plan import PlannedNode


def tensor_problems(draft: Draft, node: PlannedNode, count: int) -> Iterator[str]:
    """Why a node cannot have so many."""
    asked = f"tensor: {node.name}={count}"
    if node.work != "train" and not needs_of(draft.graph, node).tensor:
        if count != 1:
            yield f"{asked}, but {_none(draft, node)} replicas: {node.name}={count}."
    elif count < 1:
        yield f"{asked}. Fix: {node.name}=1."
    elif count > 1 and draft.placing.shard and node.work == "train":
        yield f"{asked} with shard, and weights are split in one way only. Fix: one of both."
    elif count > 1:
        yield from _indivisible(asked, node.name, _shape(draft, node), count)


def _none(draft: Draft, node: PlannedNode) -> str:
    """That a node's kernel has no tensor ranks, and which one has."""
    operator = draft.graph.node(node.name).operator
    kernel = kernel_name(operator, node.kernel)
    if other := offering(operator, kernel):
        return f"its kernel {kernel} has no tensor ranks. Fix: --kernel {node.name}={other}, or"
    return f"{node.operator} has no tensor ranks. Fix:"


def _shape(draft: Draft, node: PlannedNode) -> Shape | None:
    """The shape of the Model that a node computes with, or trains; None if unknown here."""
    models = (s for s in draft.graph.states if isinstance(s, Model))
    model = next((m for m in models if m.name == model_of(node)), None)
    return None if model is None else model_cost(model.base, model.head).shape


def _indivisible(asked: str, name: str, shape: Shape | None, count: int) -> Iterator[str]:
    if shape is None:
        return
    sizes = {"heads": shape.heads, "key heads": shape.kv_heads}
    sizes["intermediate columns"] = shape.intermediate
    odd = [f"{size} {what}" for what, size in sizes.items() if size % count]
    if odd:
        near = max(n for n in range(1, count + 1) if not any(size % n for size in sizes.values()))
        problem = f"{asked}, and its Model has {', '.join(odd)}, which are not divisible"
        yield f"{problem}. Fix: {name}={near}."
