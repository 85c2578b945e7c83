"""Which nodes can have context ranks: a part of the tokens of the same rows each.

Owns: which these are; the refusals, from a Model's config. Does not own: tensor ranks (tensor.py),
how a kernel divides tokens (operators/kernels/torch/context_ranks.py), which decides if there is no
config.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.plan.cost.models import model_cost
from engine.plan.draft import Draft
from engine.plan.kernel_needs import find_model
from engine.plan.plan import PlannedNode
from engine.plan.refusals import add_fix


def find_context_problems(draft: Draft, node: PlannedNode, count: int) -> Iterator[str]:
    """Why a node cannot have so many context ranks."""
    wish = f"context: {node.name}={count}"
    if node.work != "train":
        if count != 1:
            trains = [each.name for each in draft.nodes if each.work == "train"]
            fix = f"{trains[0]}={count}" if trains else "leave it out"
            yield add_fix(f"{wish}, but only train nodes divide tokens among ranks", fix)
        return
    if count < 1:
        yield add_fix(wish, f"{node.name}=1")
        return
    model = find_model(draft, node)
    shape = None if model is None else model_cost(model.base, model.head).shape
    tensor = max(1, draft.placing.tensor.get(node.name, 1))
    if shape is None or shape.heads % tensor:  # the latter is refused as tensor ranks
        return
    heads = shape.heads // tensor
    if heads % count:
        nearest = max(number for number in range(1, count) if heads % number == 0)
        of_rank = f"{heads} heads{' in each tensor rank' * (tensor > 1)}"
        problem = f"{wish}, and its Model has {of_rank}, which are not divisible"
        yield add_fix(problem, f"{node.name}={nearest}")


def count_context_ranks(draft: Draft, node: PlannedNode) -> int:
    """How many ranks of a node divide the tokens of the same rows."""
    if node.work != "train":
        return 1
    return draft.placing.context.get(node.name, 1)
