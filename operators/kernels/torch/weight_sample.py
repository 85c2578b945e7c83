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

    weights: float32. They may change in place, and must not move to other memory.
    """

    @torch.no_grad()
    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._views = [_spread(weight) for weight in weights]
        self._before = torch.cat(self._views)

    def __len__(self) -> int:
        return len(self._before)

    @torch.no_grad()
    def changed(self) -> Tensor:
        """int64 []: how many have other bits now. Waits for no device."""
        now = torch.cat(self._views)
        return (self._before.view(torch.int32) != now.view(torch.int32)).count_nonzero()


def _spread(weight: Tensor) -> Tensor:
    """Up to MOST elements of this rank's part of a weight: a view, never a copy."""
    held = weight.to_local() if isinstance(weight, DTensor) else weight
    while held.dim() > 1 and not held.is_contiguous():
        held = held[len(held) // 2]  # one row of a transposed matrix: all of it has no flat view
    # An odd stride: a multiple of the length of a row would only see the same column of each.
    stride = -(-held.numel() // MOST) | 1
    if held.dim() == 1:
        return held[::stride]
    return held.as_strided((-(-held.numel() // stride),), (stride,))
