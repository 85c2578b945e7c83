"""Hashes of device columns, computed where they lie: of each row, or of each tensor.

In host memory it is XXH3-64 of the bytes. On a GPU it is the sum of the finaliser of splitmix64
(Steele, Lea, Flood 2014, doi 10.1145/2660193.2660195) over each number mixed with its place in the
row. It detects accidental differences, not deliberate ones. Does not own: what hashes are compared
with (pairs.py, row_broadcast.py; rows that were made twice: engine/run/worker/row_digest.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from dataflow.batch import Ragged

if TYPE_CHECKING:
    from torch import Tensor

_AT_ONCE = 1 << 22
"""Numbers of a tensor that are hashed at a time: each takes 24 bytes meanwhile."""


def of_tensors(tensors: Sequence[Tensor]) -> list[int]:
    """64 bits for each, signed; comparable only between devices of one kind."""
    hashes = [_of_tensor(tensor.detach().contiguous()) for tensor in tensors]
    return np.array(hashes, dtype=np.uint64).view(np.int64).tolist()


def _of_tensor(tensor: Tensor) -> int:
    if not tensor.numel():
        return 0
    flat = tensor.reshape(-1)
    if tensor.is_cuda:
        one_row = Ragged(flat, np.array([0, tensor.numel()]))
        return int(on_device(one_row)[0])
    import torch

    elements = flat.view(torch.uint8).numpy()
    return xxhash.xxh3_64_intdigest(elements.data)


def on_device(column: Ragged) -> np.ndarray:
    """uint64 [rows]: a hash of the bits of each row's values, exact in any order of sums."""
    import torch

    values, width = column.values, width_of(column)
    integer = getattr(torch, f"int{8 * values.element_size()}")
    bits = values.reshape(-1).view(integer)
    offsets = torch.from_numpy(column.offsets * width).to(values.device)
    hashes = torch.zeros(len(column), dtype=torch.int64, device=values.device)
    for start in range(0, len(bits), _AT_ONCE):
        numbers = bits[start : start + _AT_ONCE].to(torch.int64)
        index = torch.arange(start, start + len(numbers), device=values.device)
        row = torch.searchsorted(offsets[1:], index, right=True)
        # From 1: at a place of 0 a number would be mixed with nothing.
        place = index - offsets[row] + 1
        hashes.index_add_(0, row, _mix(numbers ^ (place * -0x61C8864680B583EB)))
    return hashes.cpu().numpy().view(np.uint64)


def width_of(column: Ragged) -> int:
    """Numbers of one value."""
    return column.values.shape[1:].numel()


def _mix(numbers: Tensor) -> Tensor:
    """The finaliser for int64, whose shifts keep the sign."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        numbers = (numbers ^ (numbers >> shift)) * factor
    return numbers ^ (numbers >> 31)
