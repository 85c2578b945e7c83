"""Which nodes can have context ranks: a part of the tokens of the same rows each.

Owns: which these are; the refusals, from a Model's config; how many Workers have the same rows.
Does not own: tensor ranks (tensor.py), how a kernel divides tokens
(operators/kernels/torch/context_ranks.py), which decides if there is no config.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.plan.cost.models import model_cost
from engine.plan.draft import Draft
from engine.plan.kernel_needs import find_model, needs_of
from engine.plan.passes.tensor import count_worker_ranks, find_replica_problems
from engine.plan.plan import PlannedNode
from engine.plan.refusals import add_fix


def find_context_problems(draft: Draft, node: PlannedNode, count: int) -> Iterator[str]:
    """Why a node cannot have so many context ranks."""
    wish = f"context: {node.name}={count}"
    if not _divides_tokens(draft, node):
        if count != 1:
            others = [each.name for each in draft.nodes if _divides_tokens(draft, each)]
            fix = f"{others[-1]}={count}" if others else "leave it out"
            yield add_fix(f"{wish}, but {node.operator} has no ranks that divide tokens", fix)
        return
    if count < 1:
        yield add_fix(wish, f"{node.name}=1")
    elif count > 1:
        if node.work != "train":
            yield from find_replica_problems(draft, node, "context", count)
            yield from _find_tensor_ranks(draft, node, wish)
        yield from _find_indivisible(draft, node, count)


def count_context_ranks(draft: Draft, node: PlannedNode) -> int:
    """How many ranks of a node divide the tokens of the same rows."""
    return draft.placing.context.get(node.name, 1) if _divides_tokens(draft, node) else 1


def count_alike_ranks(draft: Draft, node: PlannedNode) -> int:
    """How many Workers have the same rows of a node: its tensor ranks of each context rank."""
    return count_worker_ranks(draft, node) * count_context_ranks(draft, node)


def _divides_tokens(draft: Draft, node: PlannedNode) -> bool:
    """Whether a node's kernel can divide finished rows' tokens among ranks."""
    is_forward = node.work == "forward" and not node.traits.generates
    return node.work == "train" or (is_forward and needs_of(draft.graph, node).ranks)


def _find_tensor_ranks(draft: Draft, node: PlannedNode, wish: str) -> Iterator[str]:
    """That a replica divides tokens or matrices, not both."""
    tensor = draft.placing.tensor.get(node.name, 1)
    if tensor > 1:
        problem = f"{wish}, and tensor: {node.name}={tensor}: a replica divides tokens or matrices"
        yield add_fix(problem, f"one of them, {node.name}=1")


def _find_indivisible(draft: Draft, node: PlannedNode, count: int) -> Iterator[str]:
    """That the heads of a node's Model cannot be shared equally."""
    model = find_model(draft, node)
    shape = None if model is None else model_cost(model.base, model.head).shape
    tensor = max(1, draft.placing.tensor.get(node.name, 1))
    if shape is None or shape.heads % tensor:  # the latter is refused as tensor ranks
        return
    heads = shape.heads // tensor
    if heads % count:
        nearest = max(number for number in range(1, count) if heads % number == 0)
        of_rank = f"{heads} heads{' in each tensor rank' * (tensor > 1)}"
        problem = f"context: {node.name}={count}, and its Model has {of_rank}, which are not"
        yield add_fix(f"{problem} divisible", f"{node.name}={nearest}")
