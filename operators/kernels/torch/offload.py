"""Optimizer state that waits in host memory between updates.

Owns: where the float32 numbers of a weight wait, how they come to the device and go back, and which
weights do so together. Does not own: the update (optimizer.py), whether state waits (the plan).

A tensor that waits keeps its shape, its device and its gradient, and gives back its memory alone,
as FSDP2 does with gathered weights: all that looks at masters and their gradients sees no
difference. Copies are queued on the device's stream, as is all that computes with them, so that
none has to be waited for; `wait_for_host` is for those who read host memory.

    fetch bucket 1, update it, park it; fetch bucket 2, ...

The update is that of the kernel without offloading, of fewer weights at a time: no bit differs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

BUCKET = 1 << 26
"""Weights that are on the device at once, or one larger tensor: with both moments 768 MiB."""


def has_own_memory(device: torch.device) -> bool:
    """Whether tensors of a device are anywhere else than on the host."""
    return device.type != "cpu"


def cut_buckets(sizes: Sequence[int], most: int) -> Iterator[range]:
    """Cut tensors of these sizes into ranges, in their order, of at most `most` elements each, or
    of one larger tensor.
    """
    first, filled = 0, 0
    for index, size in enumerate(sizes):
        if index > first and filled + size > most:
            yield range(first, index)
            first, filled = index, 0
        filled += size
    if first < len(sizes):
        yield range(first, len(sizes))


def count_largest_part(weight: Tensor) -> int:
    """Count the elements of a weight's largest part on a rank: the same on all ranks."""
    if not isinstance(weight, DTensor):
        return weight.numel()
    sizes = zip(weight.device_mesh.shape, weight.placements, strict=True)
    parts = math.prod(ranks for ranks, placement in sizes if not placement.is_replicate())
    return math.ceil(weight.numel() / parts)


class HostTensors:
    """Host memory for some float32 tensors of the shape of one weight, of this rank's part of it.

    It is pinned where that makes copies fast, once, as pinning takes long.
    """

    @torch.no_grad()
    def __init__(self, weight: Tensor, count: int) -> None:
        part = _local_part(weight)
        self._shape, self._strides, self._elements = part.shape, part.stride(), part.numel()
        self._rows = torch.empty(
            count, self._elements, dtype=torch.float32, pin_memory=part.device.type == "cuda"
        )

    @torch.no_grad()
    def park(self, number: int, tensor: Tensor) -> None:
        """Copy a tensor to its place, and give back the memory that it has on the device."""
        part = _local_part(tensor)
        self._rows[number].copy_(self._flatten(part), non_blocking=True)
        part.untyped_storage().resize_(0)

    @torch.no_grad()
    def fetch(self, number: int, tensor: Tensor) -> None:
        """Give a tensor that waits its memory and its numbers again."""
        part = _local_part(tensor)
        part.untyped_storage().resize_(self._elements * part.element_size())
        self._flatten(part).copy_(self._rows[number], non_blocking=True)

    def view(self, number: int) -> Tensor:
        """The numbers of a tensor that waits, in host memory."""
        offset = number * self._elements
        return self._rows.as_strided(self._shape, self._strides, offset)

    def _flatten(self, part: Tensor) -> Tensor:
        """The elements in the order in which they lie in memory, which nothing else is in."""
        assert part.untyped_storage().nbytes() == self._elements * part.element_size()
        return part.as_strided((self._elements,), (1,))


def wait_for_host(device: torch.device) -> None:
    """Wait until host memory has what was parked."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
