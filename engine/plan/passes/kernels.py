"""Which kernel runs each node.

Owns: the choice: as asked for, else the first in the operator's order of preference that can run
the node here. Does not own: kernels, what they need (dataflow/needs.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile

from dataflow.adapters import Lora
from dataflow.errors import PlanError, nearest_or_all
from dataflow.import_order import find_module
from dataflow.model import Model
from dataflow.needs import NO_NEEDS, Needs
from dataflow.operator import Operator
from dataflow.side_module import Side
from engine.plan.cluster import Cluster
from engine.plan.cost.models import model_cost, model_type, planned_dtype, some_windows
from engine.plan.draft import Draft
from engine.plan.kernel_needs import find_model, kernel_name
from engine.plan.plan import PlannedNode
from engine.plan.refusals import add_fix

_ADAPTER_PACKAGE = "peft"


def choose_kernels(draft: Draft) -> Draft:
    """Choose each node's kernel. Raises PlanError where it has none, or not the one asked for."""
    problems = [*_find_unknown(draft), *_find_unmet(draft)]
    if problems:
        raise PlanError("\n".join(f"kernel: {problem}" for problem in problems))
    nodes = [_choose_kernel(draft, node) for node in draft.nodes]
    notes = list(draft.notes)
    for node in nodes:
        notes.extend(_describe_passed_over(draft, node))
    return replace(draft, nodes=tuple(nodes), notes=tuple(notes))


def find_tensor_kernel(operator: Operator, without: str) -> str:
    """The first kernel of an operator that has tensor ranks of its own, but for this one."""
    for name, needs in operator.needs.items():
        if needs.tensor and name != without:
            return name
    return ""


@dataclass(frozen=True, slots=True)
class _Misfit:
    """Why a kernel cannot run a node. problem: as a part of a sentence."""

    problem: str
    fix: str


def _operator_of(draft: Draft, node: PlannedNode) -> Operator:
    return draft.graph.node(node.name).operator


def _find_unknown(draft: Draft) -> Iterator[str]:
    """Wishes for nodes that the plan lacks, and for kernels that their operators lack."""
    nodes = {node.name: node for node in draft.nodes}
    for name, kernel in draft.placing.kernel.items():
        if name not in nodes:
            fix = nearest_or_all(name, list(nodes))
            yield add_fix(f"expected a node of the plan, found {name!r}", fix)
            continue
        kernels = list(_operator_of(draft, nodes[name]).kernels)
        if kernel not in kernels:
            operator = f"{nodes[name].operator} has {', '.join(kernels)}"
            fix = f"{name}={nearest_or_all(kernel, kernels)}"
            yield add_fix(f"{name}={kernel}, and {operator}", fix)


def _find_unmet(draft: Draft) -> Iterator[str]:
    """Why kernels that were asked for cannot run their nodes."""
    for node in draft.nodes:
        kernel = draft.placing.kernel.get(node.name, "")
        if kernel in _operator_of(draft, node).kernels:
            for misfit in _find_misfits(draft, node, kernel):
                problem = f"{node.name}={kernel}, and {misfit.problem}"
                yield add_fix(problem, misfit.fix)


def _choose_kernel(draft: Draft, node: PlannedNode) -> PlannedNode:
    paths = _operator_of(draft, node).kernels
    requested = draft.placing.kernel.get(node.name)
    reasons: list[str] = []
    for name in [requested] if requested else paths:
        misfit = next(_find_misfits(draft, node, name), None)
        if misfit is None:
            return replace(node, kernel=paths[name])
        reasons.append(f"{name}: {misfit.problem}")
    why = "; ".join(reasons) or "none is declared"
    problem = f"{node.name}: operator {node.operator!r} has no kernel here ({why})"
    raise PlanError(add_fix(problem, "install what one of them needs, or leave the node out"))


def _describe_passed_over(draft: Draft, node: PlannedNode) -> Iterator[str]:
    """Why the kernels that the operator prefers do not run the node."""
    operator = _operator_of(draft, node)
    paths = operator.kernels
    before = list(takewhile(lambda name: paths[name] != node.kernel, paths))
    if node.name in draft.placing.kernel:
        note = f"{node.name}: kernel {kernel_name(operator, node.kernel)}, as asked for"
        if before:
            note += f", not {', '.join(before)}"
        yield note
        return
    for name in before:
        for misfit in _find_misfits(draft, node, name):
            yield f"{node.name}: {misfit.problem}"


# --- what a kernel needs --------------------------------------------------------------------------


def _find_misfits(draft: Draft, node: PlannedNode, name: str) -> Iterator[_Misfit]:
    """Everything that a kernel lacks for a node, nearest to the machine first."""
    operator = _operator_of(draft, node)
    needs = operator.needs.get(name, NO_NEEDS)
    path = operator.kernels[name]
    other_kernels = [other for other in operator.kernels if other != name]
    instead = f"{node.name}={other_kernels[0]}" if other_kernels else "another graph"
    if not _is_installed(path.partition(":")[0]):
        yield _Misfit(f"kernel {path} is not installed here", instead)
    for package in _packages_needed(draft, needs):
        if not _is_installed(package):
            yield _Misfit(f"package {package} is not installed here", needs.install or instead)
    yield from _find_adapter_misfit(draft, node)
    if needs.own_worker and draft.placing.inproc:
        problem = "with inproc everything is in this process, and it has one of its own"
        yield _Misfit(problem, f"without inproc, or {instead}")
    yield from _find_params_misfits(draft, node, name, needs)
    model = find_model(draft, node)
    if needs != NO_NEEDS and model is not None:
        for problem in _find_model_problems(draft, node, name, needs, model):
            yield _Misfit(problem, instead)


def _packages_needed(draft: Draft, needs: Needs) -> tuple[str, ...]:
    """The packages that have to be here: none where the plan is of other machines, or is only
    simulated.
    """
    return () if _is_elsewhere(draft) else needs.packages


def _is_elsewhere(draft: Draft) -> bool:
    """Whether the plan is of other machines, or is only simulated."""
    is_of_others = bool(draft.cluster.hosts) and not draft.cluster.live
    return is_of_others or draft.placing.simulated


def _find_adapter_misfit(draft: Draft, node: PlannedNode) -> Iterator[_Misfit]:
    """The package that makes adapters, where a node's Model has one, and it is not here."""
    model = find_model(draft, node)
    if model is None or not isinstance(model.adapter, Lora) or _is_elsewhere(draft):
        return
    if not _is_installed(_ADAPTER_PACKAGE):
        problem = f"package {_ADAPTER_PACKAGE}, which makes the adapter of {model.name!r},"
        yield _Misfit(f"{problem} is not installed here", 'pip install "dataflow-rl[lora]"')


def _find_params_misfits(
    draft: Draft, node: PlannedNode, name: str, needs: Needs
) -> Iterator[_Misfit]:
    """Values of the node's parameters that a kernel does not take."""
    params = draft.graph.node(node.name).params
    for param, choices in needs.params.items():
        argument = params.get(param)
        if argument not in choices:
            shown = _join_choices([f"{param}={choice!r}" for choice in choices])
            problem = f"it has {param}={argument!r}, and {name} takes {shown}"
            yield _Misfit(problem, f"{shown}, or another kernel")


def _find_model_problems(
    draft: Draft, node: PlannedNode, name: str, needs: Needs, model: Model
) -> Iterator[str]:
    """What is wrong with a Model for a kernel, as far as its directory tells."""
    if not needs.follower and model.follows is not None and model.copies is None:
        yield f"{model.name!r} follows {model.follows.name!r}, and {name} takes whole versions only"
    ranks = needs.adapter_ranks
    if isinstance(model.adapter, Side) and ranks:
        yield f"{model.name!r} has a side module, which torch alone computes"
    if isinstance(model.adapter, Lora) and ranks and model.adapter.rank > ranks[-1]:
        rank = f"the adapter of {model.name!r} has rank {model.adapter.rank}"
        yield f"{rank}, and {name} has room for {ranks[-1]} at most"
    dtype = planned_dtype(model)
    if needs.dtypes is not None and dtype is not None and dtype not in needs.dtypes:
        dtypes = _join_choices(needs.dtypes)
        yield f"{model.name!r} computes in {dtype}, and {name} in {dtypes}"
    if needs.model_types is not None:
        kind = model_type(model.base)
        if kind is not None and kind not in needs.model_types:
            tried = ", ".join(sorted(needs.model_types))
            where = f"with {kind!r}, which {model.name!r} is"
            yield f"{name} is not tried here {where}, only with {tried}"
    if not needs.some_windows and some_windows(model.base):
        windows = f"only some layers of {model.name!r} have a sliding window"
        yield f"{windows}, and {name} takes all or none"
    if needs.head_sizes is not None and not _machine_of(draft, node).gpus:
        shape = model_cost(model.base, model.head).shape
        if shape is not None and shape.head_dim not in needs.head_sizes:
            sizes = _join_choices([str(size) for size in needs.head_sizes])
            yield f"{model.name!r} has heads of {shape.head_dim}, and {name} on CPU takes {sizes}"


def _join_choices(choices: Iterable[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    *first, last = choices
    if not first:
        return last
    return f"{', '.join(first)} or {last}"


def _machine_of(draft: Draft, node: PlannedNode) -> Cluster:
    """Where a node is pinned, else the first host. Hosts that are none are refused by place."""
    workers = draft.placing.pin.get(node.name, ())
    host = draft.placing.hosts.get(workers[0], "") if workers else ""
    if any(known.name == host for known in draft.cluster.hosts):
        return draft.cluster.on(host)
    return draft.cluster


@cache
def _is_installed(module: str) -> bool:
    return find_module(module) is not None
