"""Metrics of an adapter that is trained: how far it is from its base, and how large it is.

Owns: both numbers. Does not own: other metrics of training (training_loop.py), collectives
(parallel.py).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from operators.kernels.torch.adapters import has_adapter, is_second_matrix, named_trained
from operators.kernels.torch.parallel import Ranks
from operators.kernels.torch.side_modules import find_side


class AdapterMetrics:
    """Of one module on one rank; of one without an adapter there are none."""

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        """After the module was split."""
        self._ranks = ranks
        self._matrices: list[Tensor] = []
        self._beginnings: list[Tensor] = []
        self._bytes = 0
        side = find_side(module)
        if side is None and not has_adapter(module):
            return
        for name, weight in named_trained(module):
            self._bytes += weight.numel() * weight.element_size()
            if is_second_matrix(name):
                self._matrices.append(weight)
        if side is not None:
            self._matrices += side.parameters()
            self._beginnings += [weight.detach().clone() for weight in self._matrices]

    def measure(self) -> dict[str, float]:
        """Measure `adapter/norm`, the norm of all matrices B together, or of the distance of a side
        module from where it began, and `adapter/bytes`; the same on all ranks, which have to call
        it.
        """
        if not self._bytes:
            return {}
        squares = {"adapter/norm": self._sum_squares()}
        norm = math.sqrt(self._ranks.add_up(squares)["adapter/norm"])
        return {"adapter/norm": norm, "adapter/bytes": float(self._bytes)}

    @torch.no_grad()
    def _sum_squares(self) -> float:
        """Of this rank's parts; of whole matrices, which all ranks have, on the first one alone."""
        total = 0.0
        for number, matrix in enumerate(self._matrices):
            part: Tensor = matrix
            if self._beginnings:
                part = matrix - self._beginnings[number].to(matrix.device)
            if isinstance(matrix, DTensor):
                part = matrix.to_local()
            elif not self._ranks.lead:
                continue
            squares = part.double().square()
            total += float(squares.sum())
        return total
