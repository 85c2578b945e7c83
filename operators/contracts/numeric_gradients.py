"""Derivatives of a loss by differences, in float64, with detached numbers held constant.

Owns: differences on both sides, and the mode in which what a loss detaches keeps the number that it
had. Does not own: comparing them with gradients (losses.py).

`weight = ratio.detach()` says that the weight is a constant of the gradient; a difference that
moved it would measure another function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

STEP_SIZE = 1e-5


class _Frozen(TorchFunctionMode):
    """Records what is detached; with numbers of an earlier run it gives these, in turn.

    A run that detaches more often than the first gets its own numbers for the rest.
    """

    def __init__(self, constants: list[Any]) -> None:
        super().__init__()
        self._constants = constants
        self._replays = bool(constants)
        self._next = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensor = func(*args, **(kwargs or {}))
        if func is not Tensor.detach:
            return tensor
        if not self._replays:
            self._constants.append(tensor.clone())
            return tensor
        self._next += 1
        if self._next > len(self._constants):
            return tensor
        return self._constants[self._next - 1].clone()


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """The derivative by one number: what backward says, and what differences to the left and to the
    right say. at: the number's place in its tensor, flat.
    """

    name: str
    at: int
    backward: float
    left: float
    right: float

    @property
    def is_kink(self) -> bool:
        """Whether the two sides differ."""
        size = 1 + abs(self.left) + abs(self.right)
        return abs(self.left - self.right) > 1e-3 * size


def measure_slopes(
    function: Callable[[dict[str, Tensor]], Tensor], leaves: dict[str, Tensor]
) -> Iterator[Slope]:
    """Measure the derivative of a function of float64 tensors by each of their numbers."""
    constants: list[Any] = []
    with _Frozen(constants):
        total = function(leaves)
    total.backward()
    base = float(total.detach())

    def compute_beside(name: str, at: int, step: float) -> float:
        """The function's number where one number is moved by a step."""
        moved = {n: leaf.detach().clone().requires_grad_() for n, leaf in leaves.items()}
        with torch.no_grad():
            moved[name].view(-1)[at] += step
        with _Frozen(list(constants)):
            return float(function(moved).detach())

    for name, leaf in leaves.items():
        gradient = leaf.grad
        if gradient is None:
            gradient = torch.zeros_like(leaf)
        for at, derivative in enumerate(gradient.reshape(-1).tolist()):
            right = (compute_beside(name, at, STEP_SIZE) - base) / STEP_SIZE
            left = (base - compute_beside(name, at, -STEP_SIZE)) / STEP_SIZE
            yield Slope(name=name, at=at, backward=derivative, left=left, right=right)
