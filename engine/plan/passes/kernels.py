"""Which kernel runs each node.

Owns: the choice: what was asked for, else the operator's first kernel whose needs are met. Does not
own: kernels, the Workers that an engine wants (place.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

from dataflow.errors import PlanError, nearest_or_all
from dataflow.importing import located
from dataflow.model import Model
from dataflow.model_files import CONFIG, read_object
from dataflow.needs import Needs
from dataflow.node import Node
from engine.cost.models import model_cost
from engine.plan.draft import Draft
from engine.plan.plan import PlannedNode

NOTHING = Needs()


def choose_kernels(draft: Draft) -> Draft:
    """Choose each node's kernel. Raises PlanError if it has none, or not the one asked for."""
    for name in draft.placing.kernel:
        if name not in [n.name for n in draft.nodes]:
            fix = nearest_or_all(name, [n.name for n in draft.nodes])
            raise PlanError(f"kernel: expected a node of the plan, found {name!r}. Fix: {fix}.")
    notes: list[str] = []
    nodes = tuple(_chosen(draft, n, draft.graph.node(n.name), notes) for n in draft.nodes)
    return replace(draft, nodes=nodes, notes=(*draft.notes, *notes))


def _chosen(draft: Draft, node: PlannedNode, of: Node, notes: list[str]) -> PlannedNode:
    offered, asked = of.operator.kernels, draft.placing.kernel.get(node.name)
    if asked is not None and asked not in offered:
        fix = nearest_or_all(asked, list(offered))
        raise PlanError(
            f"kernel: {node.name}={asked}, and {of.operator.name!r} has no such kernel. Fix: {fix}."
        )
    passed: list[str] = []
    for name in [asked] if asked is not None else offered:
        needs = of.operator.needs.get(name, NOTHING)
        why = next(_unmet(draft, node, offered[name], needs), None)
        if why is None:
            notes += [f"{node.name}: not kernel {line}" for line in passed]
            notes += [f"{node.name}: kernel {name}, as asked for"] if asked else []
            ranks = needs.engine
            return replace(
                node, kernel=offered[name], engine=ranks, environment=dict(needs.environment)
            )
        passed.append(f"{name}: {why}")
    if asked is not None:
        raise PlanError(f"kernel: {node.name}={passed[0].replace(': ', ', but ', 1)}")
    tried = "; ".join(passed) or "none is declared"
    problem = f"{node.name}: operator {node.operator!r} has no kernel here (tried: {tried})"
    raise PlanError(f"{problem}. Fix: install one, or leave the node out.")


def _unmet(draft: Draft, node: PlannedNode, path: str, needs: Needs) -> Iterator[str]:
    """Why a node cannot have this kernel, with what to do."""
    module = needs.package or path.partition(":")[0]
    if not _installed(module):
        fix = needs.install or "install it"
        yield f"{module if needs.package else path} is not installed here. Fix: {fix}."
    if needs.engine and draft.placing.inproc:
        yield (
            "an engine needs a Worker of its own, and inproc has none. Fix: no --inproc, or"
            f" --kernel {node.name}=torch."
        )
    for use in node.models:
        yield from _unread(draft, node, _model(draft, use.model), needs)


def _unread(draft: Draft, node: PlannedNode, model: Model, needs: Needs) -> Iterator[str]:
    """Why the kernel cannot read this Model."""
    fix = f"Fix: --kernel {node.name}=torch."
    if not needs.follower and model.follows is not None and not model.copies:
        yield f"Model {model.name!r} moves towards {model.follows.name!r} in parts. {fix}"
    kind = _type(model.base) if needs.types else ""
    if kind and kind not in needs.types:
        known = ", ".join(needs.types)
        yield f"Model {model.name!r} is of type {kind!r}, and it is tried with {known}. {fix}"
    shape = model_cost(model.base, model.head).shape
    sizes = () if draft.cluster.gpus else needs.head_sizes
    if shape is not None and sizes and shape.head_dim not in sizes:
        known = ", ".join(map(str, sizes))
        yield (
            f"Model {model.name!r} has heads of {shape.head_dim}, and without a GPU it has"
            f" attention for {known}. {fix}"
        )


def _model(draft: Draft, name: str) -> Model:
    return next(s for s in draft.graph.states if isinstance(s, Model) and s.name == name)


def _type(base: str) -> str:
    """The `model_type` of a base's config.json; empty if it is not here."""
    config = Path(base).expanduser() / CONFIG
    return str(read_object(config).get("model_type", "")) if config.is_file() else ""


@cache
def _installed(module: str) -> bool:
    return located(module) is not None
