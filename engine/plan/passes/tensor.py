"""Which nodes can have tensor ranks: a part of every weight matrix each, and the same rows.

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
        yield from _of_engine(draft, node, count)
    elif count < 1:
        yield f"{asked}. Fix: {node.name}=1."
    elif count > 1 and draft.placing.shard:
        yield f"{asked} with shard, and weights are split in one way only. Fix: one of both."
    elif count > 1:
        yield from _indivisible(asked, node.name, _shape(draft, node), count)


def _of_engine(draft: Draft, node: PlannedNode, count: int) -> Iterator[str]:
    asked, operator = f"tensor: {node.name}={count}", draft.graph.node(node.name).operator
    able = [name for name, needs in operator.needs.items() if needs.ranks]
    if count < 1:
        yield f"{asked}. Fix: {node.name}=1."
    elif count > 1 and operator.kernels.get(next(iter(able), "")) != node.kernel:
        problem = f"{asked}, but only train nodes and engines have tensor ranks"
        also = f"--kernel {node.name}={able[0]}, or " if able else ""
        yield f"{problem}. Fix: {also}replicas: {node.name}={count}."
    elif count > 1:
        yield from _indivisible(asked, node.name, _shape(draft, node), count)


def _shape(draft: Draft, node: PlannedNode) -> Shape | None:
    """The shape of the Model that a node trains, or reads; None if unknown here."""
    uses = sorted(node.models, key=lambda use: use.access != "write")
    trained = next((u.model for u in uses), "")
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
