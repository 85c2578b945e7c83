"""Which train nodes can have tensor ranks: a part of every weight matrix each, and the same rows.

Owns: the refusals, from a Model's config. Does not own: how a kernel splits its module
(operators/kernels/torch/slices.py), which decides if there is no config.
"""

from __future__ import annotations

from collections.abc import Iterator

from dataflow.model import Model
from engine.cost.models import Shape, model_cost
from engine.plan.draft import Draft
from engine.plan.plan import PlannedNode


def tensor_problems(draft: Draft, node: PlannedNode, count: int) -> Iterator[str]:
    """Why a node cannot have so many."""
    asked = f"tensor: {node.name}={count}"
    if node.work != "train":
        if count != 1:
            problem = f"{asked}, but only train nodes have tensor ranks"
            yield f"{problem}. Fix: replicas: {node.name}={count}."
    elif count < 1:
        yield f"{asked}. Fix: {node.name}=1."
    elif count > 1 and draft.placing.shard:
        yield f"{asked} with shard, and weights are split in one way only. Fix: one of both."
    elif count > 1:
        yield from _indivisible(asked, node.name, _shape(draft, node), count)


def _shape(draft: Draft, node: PlannedNode) -> Shape | None:
    """The shape of the Model that a node trains; None if unknown here."""
    trained = next((u.model for u in node.models if u.access == "write"), "")
    models = (s for s in draft.graph.states if isinstance(s, Model))
    model = next((m for m in models if m.name == trained), None)
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
