"""Products with large weights on a CPU, where nothing is differentiated.

Owns: which library multiplies. Does not own: any module (attention.py), the weights.

PyTorch multiplies float32 matrices by MKL. oneDNN, which PyTorch has too, takes 0.7 to 0.9 of the
time for weights from half a million numbers on, and longer for small ones (measured on an EPYC
with AVX-512, with 1 to 2,000 rows: benchmarks/generate.py's model of 0.5 B parameters). It reads
the weights as they are: nothing is packed, so new weights cost nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

LARGE = 1 << 19
"""Numbers in a weight from which on oneDNN is faster, whatever the rows."""


def linear_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute torch.nn.functional.linear without a gradient, by the faster library."""
    if not _large(weight) or x.dtype != torch.float32:
        return nn.functional.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def fast_products(module: nn.Module) -> AbstractContextManager[Any]:
    """Make a context in which the module's linear layers multiply by `linear_product`; it can be
    entered many times.
    """
    large = any(_large(weight) for weight in module.parameters())
    return _Products() if large else nullcontext()


def _large(weight: Tensor) -> bool:
    """Whether oneDNN multiplies by this weight faster, and can."""
    if type(weight) not in (Tensor, nn.Parameter):  # a DTensor multiplies by its own rules
        return False
    return (
        weight.dim() == 2
        and weight.numel() >= LARGE
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
    )


class _Products(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        product = linear_product if function is nn.functional.linear else function
        return product(*args, **(kwargs or {}))
