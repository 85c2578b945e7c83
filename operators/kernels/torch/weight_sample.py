"""Whether a Step changed the weights, told from the weights themselves: from the bits of some.

Owns: which weights are looked at, and how many of them changed. Does not own: the updates
(optimizer.py), sums over ranks (reduce.py), what it means that none changed
(engine/session/learning.py).

To compare all weights would take a second copy of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

MOST = 64
"""Weights of one tensor that are looked at; of a split one, of this rank's part of it."""


class WeightSample:
    """Up to MOST weights of each tensor, spread over it, as they are now.

    weights: float32, on the device or, where they wait between updates, on the host. They may
    change in place, and must not move to other memory.
    """

    @torch.no_grad()
    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._views: dict[torch.device, list[Tensor]] = {}
        for weight in weights:
            view = _sample(weight)
            self._views.setdefault(view.device, []).append(view)
        self._before = {device: torch.cat(views) for device, views in self._views.items()}

    def __len__(self) -> int:
        return sum(map(len, self._before.values()))

    @torch.no_grad()
    def count_changed(self) -> Tensor:
        """Count those that have other bits now: int64 []. Waits for no device."""
        counts: list[Tensor] = []
        for device, views in self._views.items():
            now = torch.cat(views)
            # As integers: NaN is not equal to itself, and -0.0 is equal to 0.0.
            differs = self._before[device].view(torch.int32) != now.view(torch.int32)
            counts.append(differs.count_nonzero())
        total, *others = counts
        for count in others:
            total = total + count.to(total.device)
        return total


def _sample(weight: Tensor) -> Tensor:
    """View up to MOST elements of this rank's part of a weight, never a copy."""
    part = weight.to_local() if isinstance(weight, DTensor) else weight
    while part.dim() > 1 and not part.is_contiguous():
        part = part[len(part) // 2]  # one row of a transposed matrix: all of it has no flat view
    # An odd stride: a multiple of the length of a row would only see the same column of each.
    stride = -(-part.numel() // MOST) | 1
    if part.dim() == 1:
        return part[::stride]
    count = -(-part.numel() // stride)
    return part.as_strided((count,), (stride,))
