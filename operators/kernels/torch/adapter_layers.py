"""The linear layers of an adapter: what they compute, in three products and nothing else.

Owns: their forward pass. Does not own: the layers and their matrices, which peft makes
(adapters.py), which layers have one.

peft multiplies by B, then by the factor, then adds, and each of the three is a new tensor as large
as the layer's output. Here the product by B adds to that output, times the factor. With peft's
layers generation by a model of 0.5 B parameters takes 1.4 of its base's time, with these hardly
more than that (benchmarks/adapters.py).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor, nn

ADAPTER = "adapter"
"""The name that peft's layers have for the one adapter of a module."""


def is_added(name: str) -> bool:
    """Whether a weight of this name is of an adapter, and not of the base."""
    return f".{ADAPTER}." in name


def use_lean_layers(peft: Any, module: nn.Module) -> None:
    """Let the module's linear layers with an adapter compute by three products, in place. Weights
    and names stay as they are. peft: the package.
    """
    linear = peft.tuners.lora.Linear
    for layer in module.modules():
        if type(layer) is linear:
            layer.__class__ = _make_class(linear)


@cache
def _make_class(linear: Any) -> Any:
    """Make the class; peft's, which it is a kind of, is there with the extra `lora` alone."""

    class LeanLinear(linear):
        """W x + factor * B (A x)."""

        def forward(self, x: Tensor) -> Tensor:
            """Compute it of x [..., in]; as peft does where the adapter is off, or has another
            dtype than its base: that of a Model that follows another.
            """
            first, second = self.lora_A[ADAPTER].weight, self.lora_B[ADAPTER].weight
            if self.merged or self.disable_adapters or x.dtype != first.dtype:
                return super().forward(x)
            # Of two dimensions, so that no output is a view, which autograd would copy.
            rows = x.reshape(-1, x.shape[-1])
            output = self.base_layer(rows)
            narrow = nn.functional.linear(rows, first)
            output.addmm_(narrow, second.t(), alpha=self.scaling[ADAPTER])
            return output.view(*x.shape[:-1], output.shape[-1])

    return LeanLinear
