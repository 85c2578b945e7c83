"""From a planned node to its kernel.

Owns: finding the kernel's class, what it is told of its node, and the labels of its metrics.
Does not own: any kernel, nor when it runs (worker.py).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from dataflow.errors import PlanError
from dataflow.graph import Graph
from dataflow.kernel import KernelNode
from dataflow.model import Model
from engine.plan.plan import Plan, PlannedNode


def kernel_node(planned: PlannedNode, program: Graph, *, inproc: bool = False) -> KernelNode:
    """What a kernel is told of its node."""
    node = program.node(planned.name)
    models = {s.name: s for s in program.states if isinstance(s, Model)}
    schemas = {key: port.schema for key, port in node.inputs.items()}
    return KernelNode(
        name=planned.name,
        operator=planned.operator,
        scope=planned.scope,
        models={use.param: models[use.model] for use in planned.models},
        params=node.params,
        reads={i.name: tuple(c for f in i.fetches for c in f.columns) for i in planned.inputs},
        returns=planned.returns,
        function=node.operator.function,
        schemas=schemas,
        keeps=node.operator.keeps,
        inproc=inproc,
    )


def kernel_class(node: PlannedNode) -> type:
    """The class that the plan names. Raises PlanError where it cannot be imported."""
    module, _, name = node.kernel.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise PlanError(
            f"{node.name}: kernel {node.kernel} cannot be imported: {error}. Fix: install what it"
            " needs."
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """What the metrics of a further train node are labelled with; `every`: all of them, not the
    optimizer's alone.
    """

    model: str = ""
    every: bool = False

    def on(self, name: str) -> str:
        """`optim/lr` -> `optim/critic/lr`: the numbers of two optimizers are not averaged."""
        first, _, rest = name.partition("/")
        labelled = self.model and rest and (self.every or first in ("optim", "train"))
        return f"{first}/{self.model}/{rest}" if labelled else name


def metric_labels(plan: Plan) -> dict[str, Label]:
    """For each train node. The first has none; one whose Model has the head of an earlier one
    labels everything.
    """
    assert plan.program is not None
    found: dict[str, Label] = {}
    heads: list[str] = []
    for planned in plan.nodes:
        if planned.work == "train":
            model = plan.program.node(planned.name).states["model"]
            assert isinstance(model, Model)
            found[planned.name] = (
                Label(model=model.name, every=model.head in heads) if heads else Label()
            )
            heads.append(model.head)
    return found
