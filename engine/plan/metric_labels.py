"""Labels of the metrics of several train nodes, so that none is averaged with another's.

Owns: which names carry the Model of their node. Does not own: the metrics (docs/metrics.md).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from dataflow.model import Model, State
from engine.plan.plan import Plan

_OF_A_MODEL = ("optim", "train", "adapter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """Labels the metrics of one of several train nodes. every: all, not only the optimizer's."""

    model: str = ""
    every: bool = False

    def on(self, name: str) -> str:
        """`optim/lr` -> `optim/critic/lr`: the numbers of two optimizers are not averaged."""
        first, _, rest = name.partition("/")
        labelled = self.model and rest and (self.every or first in _OF_A_MODEL)
        return f"{first}/{self.model}/{rest}" if labelled else name


def metric_labels(plan: Plan) -> dict[str, Label]:
    """Choose the label of each train node: none for one alone; where several Models have the same
    head, all numbers of each are labelled.
    """
    assert plan.program is not None
    models: dict[str, State] = {}
    for node in plan.nodes:
        if node.work == "train":
            models[node.name] = plan.program.node(node.name).states["model"]
    if len(models) == 1:
        return {name: Label() for name in models}
    heads = Counter(model.head for model in models.values() if isinstance(model, Model))
    labels: dict[str, Label] = {}
    for name, model in models.items():
        if isinstance(model, Model):
            labels[name] = Label(model=model.name, every=heads[model.head] > 1)
    return labels
