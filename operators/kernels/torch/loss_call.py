"""A call of a loss's function: what it is given, and what it must leave alone.

Owns: the copy of Now that each term gets, and every fault of a call: an exception, a backward pass,
a change of what other terms read, settings of torch that it left changed, a result that is no
Terms. Does not own: what the function computes, reduction (reduce.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from dataflow.errors import KernelError
from dataflow.loss import Now, Tensors, Terms
from dataflow.metric_names import is_metric_name, is_of_the_engine, repaired_name
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


def call_loss(
    function: Callable[..., Terms],
    now: Now,
    ports: Mapping[str, Tensors[Any]],
    params: Mapping[str, Any],
) -> Terms:
    """Call one term's function. Raises LossFault, of what the function raised if it did.

    What comes from the rows is copied, so that no term sees what another did with it. What the
    model says has gradients and is shared: a change in place is a fault.
    """
    copies = {name: _copied(getattr(now, name)) for name in _FROM_ROWS}
    own_now = replace(now, **copies)
    shared = {name: getattr(now, name) for name in _FROM_MODEL}
    shared = {name: tensor for name, tensor in shared.items() if tensor is not None}
    versions = {name: tensor._version for name, tensor in shared.items()}
    settings = {name: read() for name, (read, _) in _SETTINGS.items()}
    terms = None
    with Caught() as caught, _without_backward(shared.values()):  # user code may raise anything
        terms = function(own_now, **ports, **params)
    changed_settings = _restored(settings)
    if caught.fault is not None:
        text = f"it {caught.fault.text}\n{caught.fault.detail}".rstrip()
        raise LossFault(text) from caught.error
    changed = (name for name, tensor in shared.items() if tensor._version != versions[name])
    problem = _changed(next(changed, None)) or changed_settings or unfit(terms)
    if problem or terms is None:
        raise LossFault(problem)
    return terms


def _changed(name: str | None) -> str:
    if name is None:
        return ""
    return (
        f"it changed now.{name} in place, which other terms read. Fix: a new tensor, such as"
        f" now.{name} * 2 for now.{name}.mul_(2)."
    )


def _copied(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


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


def _restored(settings: Mapping[str, Any]) -> str:
    """Set torch's settings back to these. Returns which one was changed, in words."""
    problem = ""
    for name, value in settings.items():
        read, write = _SETTINGS[name]
        if read() != value:
            problem = (
                f"it left torch's {name} at {read()}, found {value} before. Fix: set it back, or"
                " change it in a `with` block, such as `with torch.no_grad():`."
            )
            write(value)
    return problem


def unfit(made: object) -> str:
    """What is wrong with what a loss function returned, in words; empty if it is valid Terms."""
    if not isinstance(made, Terms):
        return f"expected it to return Terms, found {type(made).__name__}. {_RETURN_TERMS}"
    if not isinstance(made.loss, Tensor):
        kind = type(made.loss).__name__
        return f"expected Terms.loss to be a tensor, found {kind}. {_RETURN_TERMS}"
    if not isinstance(made.metrics, Mapping):
        return _no_metric("all", made.metrics)
    for name, value in made.metrics.items():
        pair = isinstance(value, tuple) and len(value) == 2
        if not pair or not all(_is_number(each) for each in value):
            return _no_metric(name, value)
        if problem := _name_problem(name):
            return problem
    return ""


def _name_problem(name: object) -> str:
    if not isinstance(name, str) or not is_metric_name(name):
        return (
            f"expected the metric to be named as in 'policy/clip_fraction', found {name!r}. Fix:"
            f" {repaired_name(str(name))!r}."
        )
    if is_of_the_engine(name):
        free_name = f"mine/{name.rpartition('/')[2]}"
        return (
            f"expected the metric to have a name of its own, found {name!r}, under which the engine"
            f" reports. Fix: {free_name!r}."
        )
    return ""


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, _NUMBERS)


def _no_metric(name: object, value: object) -> str:
    kind = type(value).__name__
    vectors = value if isinstance(value, tuple) else (value,)
    for each in vectors:
        if isinstance(each, Tensor) and each.numel() != 1:
            kind += f" with a tensor of shape {list(each.shape)}"
            break
    return (
        f"expected the metric {name!r} to be a pair of numbers (sum, count), found {kind}. Fix:"
        " (values.sum(), count), so that micro-batches add up."
    )
