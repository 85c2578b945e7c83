"""A call of a loss's function: what it is given, and what it must leave alone.

Owns: the copy of Now that each term gets, the numbers of its parameters at a Step, and every fault
of a call: an exception, a backward pass, a change of what other terms read, settings of torch that
it left changed, a result that is no Terms. Does not own: what the function computes, reduction
(reduce.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from dataflow.errors import KernelError
from dataflow.loss import Now, Tensors, Terms
from dataflow.memory_limits import is_out_of_memory
from dataflow.metric_names import is_metric_name, is_of_the_engine, repair_name
from dataflow.model import Schedule
from operators.kernels.scoring_child import Caught

_FROM_ROWS = (
    "mask",
    "row",
    "group",
    "row_group",
    "sampler_logprobs",
    "sampler_mass",
    "version",
)
_FROM_MODEL = ("logprobs", "values", "scores", "entropy", "at_ids")
_RETURN_TERMS = "Fix: return Terms(loss, {...}), unreduced: train takes the mean."
_NUMBERS = (Tensor, int, float)
_SETTINGS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
}
"""What of torch is the same for all code of the process: how it is read, and how it is set."""


class LossFault(Exception):
    """What is wrong with a call, in words that follow on the name of the loss."""


def resolve_parameter(parameter: Any, step: int) -> Any:
    """Read a loss parameter at a Step: schedules become numbers, also within tuples and
    dataclasses.
    """
    if isinstance(parameter, Schedule):
        return parameter.at(step)
    if is_dataclass(parameter) and not isinstance(parameter, type):
        return _resolve_fields(parameter, step)
    if isinstance(parameter, tuple):
        return tuple(resolve_parameter(part, step) for part in parameter)
    return parameter


def _resolve_fields(group: Any, step: int) -> Any:
    """Make a copy with numbers for schedules; the same object if it has none."""
    names = [field.name for field in fields(group) if field.init]
    settings = {name: getattr(group, name) for name in names}
    numbers = {name: resolve_parameter(setting, step) for name, setting in settings.items()}
    if numbers == settings:
        return group
    return replace(group, **numbers)


def call_loss(
    function: Callable[..., Terms],
    now: Now,
    ports: Mapping[str, Tensors[Any]],
    params: Mapping[str, Any],
) -> Terms:
    """Call one term's function. Raises LossFault if it raises or breaks a rule of such calls.

    What comes from the rows is copied, so that no term sees what another did with it. What the
    model says has gradients and is shared: a change in place is a fault.
    """
    copied_now = _copy_rows_part(now)
    shared = {name: getattr(now, name) for name in _FROM_MODEL}
    shared = {name: tensor for name, tensor in shared.items() if tensor is not None}
    # torch counts the changes in place of each tensor: a comparison of numbers would read them.
    versions = {name: tensor._version for name, tensor in shared.items()}
    settings = {name: read() for name, (read, _) in _SETTINGS.items()}
    terms = None
    with Caught() as caught, _without_backward(shared.values()):  # user code may raise anything
        terms = function(copied_now, **ports, **params)
    # Set back also after an exception: they are those of the whole process.
    settings_problem = _restore_settings(settings)
    if caught.error is not None and is_out_of_memory(caught.error):
        raise caught.error  # no fault of the function: with fewer rows there may be room
    if caught.fault is not None:
        text = f"it {caught.fault.text}\n{caught.fault.detail}".rstrip()
        raise LossFault(text) from caught.error
    problem = _find_change(shared, versions) or settings_problem or find_misfit(terms)
    if problem or terms is None:
        raise LossFault(problem)
    return terms


def _copy_rows_part(now: Now) -> Now:
    """Copy what comes from the rows; the model's part is shared."""
    copied_now = copy(now)
    for name in _FROM_ROWS:
        tensor = getattr(now, name)
        if tensor is not None:
            setattr(copied_now, name, tensor.clone())
    return copied_now


def _find_change(tensors: Mapping[str, Tensor], versions: Mapping[str, int]) -> str:
    """Say which of these was changed in place since it had this version; empty if none was."""
    for name, tensor in tensors.items():
        if tensor._version != versions[name]:
            return (
                f"it changed now.{name} in place, which other terms read. Fix: a new tensor, such"
                f" as now.{name} * 2 for now.{name}.mul_(2)."
            )
    return ""


@contextmanager
def _without_backward(tensors: Any) -> Iterator[None]:
    """While this is open, a backward pass into the model raises KernelError where it is called."""
    nodes = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    hooks = [node.register_prehook(_refuse_backward) for node in nodes]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _refuse_backward(gradients: Any) -> NoReturn:
    raise KernelError(
        "it called backward, which train does once, for the sum of all terms. Fix: return"
        " Terms(loss), unreduced, without backward()."
    )


def _restore_settings(settings: Mapping[str, Any]) -> str:
    """Set torch's settings back to these. Returns which one was changed, in words."""
    problem = ""
    for name, before in settings.items():
        read, write = _SETTINGS[name]
        if read() != before:
            problem = (
                f"it left torch's {name} at {read()}, found {before} before. Fix: set it back, or"
                " change it in a `with` block, such as `with torch.no_grad():`."
            )
            write(before)
    return problem


def find_misfit(returned: object) -> str:
    """Say what is wrong with what a loss function returned; empty if it is valid Terms."""
    if not isinstance(returned, Terms):
        return f"expected it to return Terms, found {type(returned).__name__}. {_RETURN_TERMS}"
    if not isinstance(returned.loss, Tensor):
        kind = type(returned.loss).__name__
        return f"expected Terms.loss to be a tensor, found {kind}. {_RETURN_TERMS}"
    if not isinstance(returned.metrics, Mapping):
        return _say_no_metric("all", returned.metrics)
    for name, metric in returned.metrics.items():
        pair = isinstance(metric, tuple) and len(metric) == 2
        if not pair or not all(_is_number(each) for each in metric):
            return _say_no_metric(name, metric)
        if problem := _find_name_problem(name):
            return problem
    return ""


def _find_name_problem(name: object) -> str:
    if not isinstance(name, str) or not is_metric_name(name):
        return (
            f"expected the metric to be named as in 'policy/clip_fraction', found {name!r}. Fix:"
            f" {repair_name(str(name))!r}."
        )
    if is_of_the_engine(name):
        free_name = f"mine/{name.rpartition('/')[2]}"
        return (
            f"expected the metric to have a name of its own, found {name!r}, under which the engine"
            f" reports. Fix: {free_name!r}."
        )
    return ""


def _is_number(number: object) -> bool:
    if isinstance(number, Tensor):
        return number.numel() == 1
    return isinstance(number, _NUMBERS)


def _say_no_metric(name: object, metric: object) -> str:
    kind = type(metric).__name__
    vectors = metric if isinstance(metric, tuple) else (metric,)
    for each in vectors:
        if isinstance(each, Tensor) and each.numel() != 1:
            kind += f" with a tensor of shape {list(each.shape)}"
            break
    return (
        f"expected the metric {name!r} to be a pair of numbers (sum, count), found {kind}. Fix:"
        " (values.sum(), count), so that micro-batches add up."
    )
