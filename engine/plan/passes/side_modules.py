"""Which nodes have a side module, and what a train node of one cannot have.

Owns: both. Does not own: what else is refused of one (kernels.py, tensor.py), the module itself
(operators/kernels/torch/side_modules.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from dataflow.side_module import Side
from engine.plan.draft import Draft
from engine.plan.kernel_needs import find_model, model_of
from engine.plan.plan import PlannedNode
from engine.plan.refusals import add_fix


def has_side(draft: Draft, node: PlannedNode) -> bool:
    """Whether a node computes with a Model that has a side module, or trains it."""
    model = find_model(draft, node)
    return model is not None and isinstance(model.adapter, Side)


def find_side_problems(draft: Draft) -> Iterator[str]:
    """Why train nodes of a side module cannot be as they were asked for."""
    for node in draft.nodes:
        if node.work != "train" or not has_side(draft, node):
            continue
        name = model_of(node)
        if draft.placing.shard:
            problem = f"shard: {node.name} trains the side module of {name!r}, which is not split"
            yield add_fix(problem, "leave it out")
        if draft.placing.recompute.get(node.name, "none") != "none":
            problem = (
                f"recompute: {node.name}=layers, and nothing of a layer is kept below the side"
                f" module of {name!r}"
            )
            yield add_fix(problem, "leave it out")
