"""Weights of a base that several Models in a Worker have together.

Owns: which nodes have such weights, and which of them each node counts. Does not own: the sharing
itself (operators/kernels/torch/adapters.py), which Models share a whole module (passes/modules.py),
bytes (passes/estimate.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dataflow.model import Model
from engine.plan.cost.models import ModelCost, counted_dtype
from engine.plan.plan import ModelUse, PlannedNode
from engine.plan.planned_phase import PlannedPhase
from engine.plan.profiled_passes import kernel_family

Base = tuple[str, str, str]
"""A Worker, a base, and the dtype in which it is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedWeights:
    """Parameters that a node counts. base: of a base, or of a module that shares none. beside: what
    a Model has beside its base: an adapter, a subset, a head. merged: copies of the base's matrices
    into which its adapter is merged.
    """

    base: int = 0
    beside: int = 0
    merged: int = 0


def name_beginnings(models: Mapping[str, Model], phase: PlannedPhase | None) -> dict[str, Model]:
    """The Models of a phase, or of a graph alone, each with a base that names the weights with
    which it begins: those that an earlier phase has left are not the base's, which others may have.
    """
    named_models = dict(models)
    if phase is None:
        return named_models
    for name, weights in phase.carried.items():
        model = models.get(name)
        # An adapter that a Model no longer has is merged into its weights.
        if model is not None and not (weights.is_adapter and model.adapter):
            base = f"{model.base} as {weights.model} after phase {weights.phase}"
            named_models[name] = replace(model, base=base, dtype=counted_dtype(model))
    return named_models


def find_owned_weights(
    nodes: Sequence[PlannedNode], models: Mapping[str, Model], costs: Mapping[str, ModelCost]
) -> dict[str, OwnedWeights]:
    """Find what each node counts, by its name: of those that share a module, or a base, the trainer
    or the first counts it. Nodes that count nothing are not there.
    """
    sizes = _find_base_sizes(nodes, models, costs)
    counted_modules: set[tuple[str, str]] = set()
    counted_bases: set[Base] = set()
    owned: dict[str, OwnedWeights] = {}
    for node in sorted(nodes, key=lambda n: n.work != "train"):
        for use in _computing_uses(node):
            modules = {(worker, use.module) for worker in node.workers}
            if modules <= counted_modules:
                continue
            counted_modules |= modules
            model, cost = models[use.model], costs[use.model]
            if not shares_base(model, node):
                part = cost.part(node.layout.tensor)
                # An engine that merges has the merged matrices in the place of the base's.
                parameters = part.parameters or 0
                if not use.merged:
                    parameters += part.added
                owned[node.name] = OwnedWeights(base=parameters)
                continue
            bases = set(_bases_of(node, model))
            missing = bases - counted_bases
            counted_bases |= bases
            base = max((sizes[each] for each in missing), default=0)
            merged = 0
            if use.merged:
                merged = cost.mergeable
            owned[node.name] = OwnedWeights(base=base, beside=cost.beside, merged=merged)
    return owned


def count_sharers(nodes: Sequence[PlannedNode], models: Mapping[str, Model]) -> dict[str, int]:
    """Count the Models that share a base with each in a Worker, with itself; 0 without one."""
    sharers: dict[Base, set[str]] = defaultdict(set)
    for node, model in _list_sharing(nodes, models):
        for base in _bases_of(node, model):
            sharers[base].add(model.name)
    counts = dict.fromkeys(models, 0)
    for names in sharers.values():
        for name in names:
            counts[name] = max(counts[name], len(names))
    return counts


def find_shared_base(
    nodes: Sequence[PlannedNode], models: Mapping[str, Model], node: PlannedNode
) -> str:
    """Find the name of a Model of this node whose base another module in one of its Workers has,
    too; empty if there is none.
    """
    modules: dict[Base, set[str]] = defaultdict(set)
    for each in nodes:
        for use in _computing_uses(each):
            if shares_base(models[use.model], each):
                for base in _bases_of(each, models[use.model]):
                    modules[base].add(use.module)
    for use in _computing_uses(node):
        if shares_base(models[use.model], node):
            bases = _bases_of(node, models[use.model])
            if any(len(modules[base]) > 1 for base in bases):
                return use.model
    return ""


def shares_base(model: Model, node: PlannedNode) -> bool:
    """Whether a node has the weights of its Model's base with others of its Worker."""
    is_torch = kernel_family(node) == "torch"
    return is_torch and model.leaves_base and not node.layout.partial


def _find_base_sizes(
    nodes: Sequence[PlannedNode], models: Mapping[str, Model], costs: Mapping[str, ModelCost]
) -> dict[Base, int]:
    """Parameters of each base that nobody changes: those of the Model that leaves most."""
    sizes: dict[Base, int] = defaultdict(int)
    for node, model in _list_sharing(nodes, models):
        for base in _bases_of(node, model):
            sizes[base] = max(sizes[base], costs[model.name].left)
    return sizes


def _list_sharing(
    nodes: Iterable[PlannedNode], models: Mapping[str, Model]
) -> Iterator[tuple[PlannedNode, Model]]:
    for node in nodes:
        for use in _computing_uses(node):
            model = models[use.model]
            if shares_base(model, node):
                yield node, model


def _computing_uses(node: PlannedNode) -> Iterator[ModelUse]:
    """The Models that a node has weights of."""
    if node.work == "evaluate":
        return
    for use in node.models:
        if use.param != "tokenizer":
            yield use


def _bases_of(node: PlannedNode, model: Model) -> Iterator[Base]:
    for worker in node.workers:
        yield worker, model.base, counted_dtype(model)
