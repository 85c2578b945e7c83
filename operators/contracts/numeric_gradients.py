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
    """Keeps what is detached; a second run gets the first one's numbers."""

    def __init__(self, kept: list[Any]) -> None:
        super().__init__()
        self._kept, self._replays, self._next = kept, bool(kept), 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is not Tensor.detach:
            return made
        if not self._replays:
            self._kept.append(made.clone())
            return made
        self._next += 1
        return self._kept[self._next - 1].clone() if self._next <= len(self._kept) else made


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """The derivative by one number: what backward says, and what differences to the left and to the
    right say.
    """

    name: str
    at: int
    said: float
    left: float
    right: float

    @property
    def kink(self) -> bool:
        """Whether the two sides differ."""
        return abs(self.left - self.right) > 1e-3 * (1 + abs(self.left) + abs(self.right))


def slopes(
    function: Callable[[dict[str, Tensor]], Tensor], leaves: dict[str, Tensor]
) -> Iterator[Slope]:
    """The derivative of a function of float64 tensors by each of their numbers."""
    kept: list[Any] = []
    with _Frozen(kept):
        here = function(leaves)
    here.backward()
    base = float(here.detach())

    def moved(name: str, at: int, by: float) -> float:
        other = {n: leaf.detach().clone().requires_grad_() for n, leaf in leaves.items()}
        with torch.no_grad():
            other[name].view(-1)[at] += by
        with _Frozen(list(kept)):
            return float(function(other).detach())

    for name, leaf in leaves.items():
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for at, own in enumerate(gradient.reshape(-1).tolist()):
            right = (moved(name, at, STEP_SIZE) - base) / STEP_SIZE
            left = (base - moved(name, at, -STEP_SIZE)) / STEP_SIZE
            yield Slope(name=name, at=at, said=own, left=left, right=right)
