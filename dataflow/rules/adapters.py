"""Adapters and subsets: what they name is in the base, what they begin with can be taken, and what
is merged is there.

Owns: these faults, and the warnings about rates and merging. Does not own: what is refused for
itself (dataflow/adapters.py), placements and kernels (engine/plan/passes), the files
(adapter_config.py, model_files.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dataflow.adapter_config import find_adapter_complaint, find_base_complaint
from dataflow.adapters import ALL_LINEAR, Lora
from dataflow.architectures import EXPERTS_BY_NAME
from dataflow.errors import DataError, Fault, GraphWarning
from dataflow.model import Model
from dataflow.model_dtype import ComputedDtype, find_dtype
from dataflow.model_files import CONFIG, folder_of, maybe_object, stored_weights
from dataflow.node import Node
from dataflow.rules.context import Context, fault_at, node_models, warning_at
from dataflow.schedule import Schedule
from dataflow.side_config import find_side_complaint, name_weights_file
from dataflow.side_module import Side
from dataflow.trained_weights import (
    EXPERT_MATRICES,
    Shapes,
    count_layers,
    find_confused_targets,
    find_missing_targets,
    find_subset,
    list_leaves,
)

_LOW_RATE = 1e-5


def check_adapters(context: Context) -> Iterator[Fault]:
    """Targets and parts that no weight of the base has; adapters that no Model can begin with;
    generations that merge an adapter, and whose Model has none.
    """
    for node in context.graph.nodes:
        yield from _check_merge(node)
    for model in context.models:
        if model.follows is not None:
            continue  # its leader's
        yield from _check_start(context, model)
        shapes = _read_shapes(model)
        if shapes:
            yield from _check_names(model, shapes)


def _check_merge(node: Node) -> Iterator[Fault]:
    if node.operator.work != "decode" or node.params.get("merge") is not True:
        return
    for model in node_models(node):
        if not isinstance(model.adapter, Lora):
            what = "none" if model.adapter is None else "a side module, which is no part of it"
            problem = (
                f"merge=True merges an adapter into its base, and Model {model.name!r} has {what}"
            )
            fix = "merge=False, or Model(..., adapter=lora(rank=16))"
            yield fault_at(node, "adapters", problem, fix)


def low_rates(context: Context) -> Iterator[GraphWarning]:
    """The rate of whole weights for an adapter that begins from nothing."""
    for node in context.graph.nodes:
        if node.operator.work != "train":
            continue
        rate = _greatest_rate(node.params.get("lr"))
        for model in node_models(node):
            is_fresh = isinstance(model.adapter, Lora) and model.adapter.start is None
            if is_fresh and rate is not None and rate < _LOW_RATE:
                problem = (
                    f"lr={rate:g} for the adapter of {model.name!r}, which begins from nothing:"
                    " about ten times the rate of whole weights is usual for one, 1e-5 to 1e-4 in"
                    " reinforcement, 1e-4 to 2e-4 for demonstrations"
                )
                yield warning_at(node, "low_adapter_rate", problem, "lr=1e-4, or lr=2e-5")


def narrow_merges(context: Context) -> Iterator[GraphWarning]:
    """Adapters that are merged in bfloat16, in which early updates are rounded away."""
    for node in context.graph.nodes:
        if node.operator.work != "decode" or node.params.get("merge") is not True:
            continue
        for model in node_models(node):
            if model.adapter is not None and _find_dtype(model) == "bfloat16":
                problem = (
                    f"merge=True rounds each weight of {model.name!r} to bfloat16, of which a fresh"
                    " adapter's updates are less than the last digit: the sampler stays behind the"
                    " trainer by most of them (generate/merge_error)"
                )
                yield warning_at(node, "merged_in_bfloat16", problem, "merge=False")


def _find_dtype(model: Model) -> ComputedDtype | None:
    """What a Model computes in; None where its base is not here, or cannot be read, which others
    report.
    """
    try:
        return find_dtype(model)
    except (DataError, OSError):
        return None


def _greatest_rate(rate: Any) -> float | None:
    """The greatest rate of any Step; None of what is none."""
    if isinstance(rate, Schedule):
        return max(rate.start, rate.stop)
    is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
    return float(rate) if is_number else None


def _check_start(context: Context, model: Model) -> Iterator[Fault]:
    if model.adapter is None or model.adapter.start is None:
        return
    folder = Path(model.adapter.start).expanduser()
    weights_file = name_weights_file(model.adapter)
    try:
        if isinstance(model.adapter, Side):
            complaint = find_side_complaint(model.adapter, folder)
        else:
            complaint = find_adapter_complaint(model.adapter, folder)
        # An earlier phase may leave other weights in the place of the base.
        if complaint is None and model.name not in context.carried:
            complaint = find_base_complaint(model.base, folder / weights_file)
    except DataError as error:
        problem, _, fix = str(error).rstrip(".").partition(". Fix: ")
        complaint = problem, fix
    if complaint is not None:
        yield _fault(model, *complaint)


def _read_shapes(model: Model) -> Shapes | None:
    """Of the weights of a Model that trains a part; None where they cannot be read, which others
    report, or are not here.
    """
    folder = folder_of(model.base)
    if not model.is_partial or folder is None:
        return None
    try:
        stored = stored_weights(folder)
    except (DataError, OSError):
        return None
    if stored is None:
        return None
    return {name: tensor.shape for name, tensor in stored.items()}


def _check_names(model: Model, shapes: Shapes) -> Iterator[Fault]:
    if isinstance(model.adapter, Lora):
        yield from _check_targets(model, model.adapter, shapes)
    subset = model.subset
    if subset is not None and not find_subset(subset, shapes, count_layers(shapes)):
        problem = f"expected weights of its base in {subset}, found none"
        yield _fault(model, problem, "subset(last=4), or parts that are in the names of weights")


def _check_targets(model: Model, adapter: Lora, shapes: Shapes) -> Iterator[Fault]:
    leaves = list_leaves(shapes)
    missing = find_missing_targets(adapter, shapes)
    if missing:
        names = ", ".join(leaves) or "none"
        problem = f"expected targets among its base's linear layers, {names}, found"
        fix = f"targets={ALL_LINEAR!r}" if leaves else "no adapter="
        yield _fault(model, f"{problem} {', '.join(missing)}", fix)
    confused = find_confused_targets(adapter, shapes)
    if confused and _find_type(model) in EXPERTS_BY_NAME:
        problem = (
            f"expected targets that PEFT gives an adapter, found {confused[0]}, which it takes for"
            " an expert's by its name"
        )
        others = tuple(leaf for leaf in leaves if leaf not in EXPERT_MATRICES)
        yield _fault(model, problem, f"targets={others!r}")


def _find_type(model: Model) -> str | None:
    """The architecture of a Model whose base is here; None where its configuration is damaged."""
    folder = folder_of(model.base)
    return None if folder is None else maybe_object(folder / CONFIG).get("model_type")


def _fault(model: Model, problem: str, fix: str) -> Fault:
    where = f"Model {model.name!r}"
    return Fault(rule="adapters", where=where, problem=problem, fix=fix, origin=model.origin)
