"""Which kernel runs each node.

Owns: the choice: as asked for, else the first in the operator's order of preference that can run
the node here. Does not own: kernels, what they need (dataflow/needs.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile

from dataflow.errors import PlanError, nearest_or_all
from dataflow.importing import located
from dataflow.model import Model
from dataflow.needs import NO_NEEDS, Needs
from dataflow.operator import Operator
from engine.plan.cluster import Cluster
from engine.plan.cost.models import model_cost, model_type, some_windows
from engine.plan.draft import Draft
from engine.plan.kernel_needs import kernel_name, model_of
from engine.plan.plan import PlannedNode


def choose_kernels(draft: Draft) -> Draft:
    """Choose each node's kernel. Raises PlanError where it has none, or not the one asked for."""
    problems = [*_unknown(draft), *_unmet(draft)]
    if problems:
        raise PlanError("\n".join(f"kernel: {problem}" for problem in problems))
    nodes = tuple(_chosen(draft, n) for n in draft.nodes)
    passed = [note for n in nodes for note in _passed_over(draft, n)]
    return replace(draft, nodes=nodes, notes=(*draft.notes, *passed))


def offering(operator: Operator, without: str) -> str:
    """The first kernel of an operator that has tensor ranks of its own, but for this one."""
    return next((n for n, needs in operator.needs.items() if needs.tensor and n != without), "")


@dataclass(frozen=True, slots=True)
class _Misfit:
    """Why a kernel cannot run a node. found: a problem, as a part of a sentence."""

    found: str
    fix: str


def _operator(draft: Draft, node: PlannedNode) -> Operator:
    return draft.graph.node(node.name).operator


def _unknown(draft: Draft) -> Iterator[str]:
    """Wishes for nodes that the plan lacks, and for kernels that their operators lack."""
    nodes = {n.name: n for n in draft.nodes}
    for name, kernel in draft.placing.kernel.items():
        if name not in nodes:
            fix = nearest_or_all(name, list(nodes))
            yield f"expected a node of the plan, found {name!r}. Fix: {fix}."
        elif kernel not in (offered := _operator(draft, nodes[name]).kernels):
            problem = f"{name}={kernel}, and {nodes[name].operator} has {', '.join(offered)}"
            yield f"{problem}. Fix: {name}={nearest_or_all(kernel, list(offered))}."


def _unmet(draft: Draft) -> Iterator[str]:
    """Why kernels that were asked for cannot run their nodes."""
    for node in draft.nodes:
        kernel = draft.placing.kernel.get(node.name, "")
        if kernel in _operator(draft, node).kernels:
            for misfit in _misfits(draft, node, kernel):
                yield f"{node.name}={kernel}, and {misfit.found}. Fix: {misfit.fix}."


def _chosen(draft: Draft, node: PlannedNode) -> PlannedNode:
    offered = _operator(draft, node).kernels
    asked = draft.placing.kernel.get(node.name)
    for name in [asked] if asked else offered:
        if next(_misfits(draft, node, name), None) is None:
            return replace(node, kernel=offered[name])
    tried = ", ".join(offered.values()) or "none is declared"
    problem = f"{node.name}: operator {node.operator!r} has no kernel here (tried: {tried})"
    raise PlanError(f"{problem}. Fix: install one, or leave the node out.")


def _passed_over(draft: Draft, node: PlannedNode) -> Iterator[str]:
    operator = _operator(draft, node)
    before = takewhile(lambda name: operator.kernels[name] != node.kernel, operator.kernels)
    if node.name in draft.placing.kernel:
        passed = ", ".join(before)
        kernel = kernel_name(operator, node.kernel)
        yield f"{node.name}: kernel {kernel}, as asked for{f', not {passed}' if passed else ''}"
        return
    for name in before:
        for misfit in _misfits(draft, node, name):
            yield f"{node.name}: {misfit.found}"


# --- what a kernel needs --------------------------------------------------------------------------


def _misfits(draft: Draft, node: PlannedNode, name: str) -> Iterator[_Misfit]:
    """Everything that a kernel lacks for a node, nearest to the machine first."""
    operator = _operator(draft, node)
    needs, path = operator.needs.get(name, NO_NEEDS), operator.kernels[name]
    others = [other for other in operator.kernels if other != name]
    instead = f"{node.name}={others[0]}" if others else "another graph"
    if not _installed(path.partition(":")[0]):
        yield _Misfit(f"kernel {path} is not installed here", instead)
    for package in (p for p in _packages(draft, needs) if not _installed(p)):
        yield _Misfit(f"package {package} is not installed here", needs.install or instead)
    if needs.own_worker and draft.placing.inproc:
        found = "with inproc everything is in this process, and it has one of its own"
        yield _Misfit(found, f"without inproc, or {instead}")
    yield from _of_params(draft, node, name, needs)
    if needs != NO_NEEDS:
        found = (s for s in draft.graph.states if isinstance(s, Model))
        for model in (m for m in found if m.name == model_of(node)):
            problems = _of_model(draft, node, name, needs, model)
            yield from (_Misfit(problem, instead) for problem in problems)


def _packages(draft: Draft, needs: Needs) -> tuple[str, ...]:
    """Those that have to be here: none where the plan is of other machines, or only simulated."""
    elsewhere = bool(draft.cluster.hosts) and not draft.cluster.live
    return () if elsewhere or draft.placing.simulated else needs.packages


def _of_params(draft: Draft, node: PlannedNode, name: str, needs: Needs) -> Iterator[_Misfit]:
    """Values of the node's parameters that a kernel does not take."""
    given = draft.graph.node(node.name).params
    for param, taken in needs.params.items():
        if given.get(param) not in taken:
            shown = _any([f"{param}={value!r}" for value in taken])
            found = f"it has {param}={given.get(param)!r}, and {name} takes {shown}"
            yield _Misfit(found, f"{shown}, or another kernel")


def _of_model(
    draft: Draft, node: PlannedNode, name: str, needs: Needs, model: Model
) -> Iterator[str]:
    """What is wrong with a Model for a kernel, as far as its directory tells."""
    if not needs.follower and model.follows is not None and model.copies is None:
        yield f"{model.name!r} follows {model.follows.name!r}, and {name} takes whole versions only"
    if needs.dtypes is not None and model.dtype not in needs.dtypes:
        yield f"{model.name!r} computes in {model.dtype}, and {name} in {_any(needs.dtypes)}"
    kind = model_type(model.base) if needs.model_types is not None else None
    if kind is not None and kind not in (needs.model_types or ()):
        tried = ", ".join(sorted(needs.model_types or ()))
        yield f"{name} is not tried here with {kind!r}, which {model.name!r} is, only with {tried}"
    if not needs.some_windows and some_windows(model.base):
        windows = f"only some layers of {model.name!r} have a sliding window"
        yield f"{windows}, and {name} takes all or none"
    if needs.head_sizes is not None and not _machine(draft, node).gpus:
        shape = model_cost(model.base, model.head).shape
        if shape is not None and shape.head_dim not in needs.head_sizes:
            sizes = _any([str(size) for size in needs.head_sizes])
            yield f"{model.name!r} has heads of {shape.head_dim}, and {name} on CPU takes {sizes}"


def _any(given: Iterable[str]) -> str:
    names = list(given)
    return " or ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def _machine(draft: Draft, node: PlannedNode) -> Cluster:
    """Where a node is pinned, else the first host. Hosts that are none are refused by place."""
    host = next((draft.placing.hosts.get(w, "") for w in draft.placing.pin.get(node.name, ())), "")
    known = host in [h.name for h in draft.cluster.hosts]
    return draft.cluster.on(host) if known else draft.cluster


@cache
def _installed(module: str) -> bool:
    return located(module) is not None
