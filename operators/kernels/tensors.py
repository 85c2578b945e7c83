"""Arrow to torch and back.

Owns: all handling of read-only memory. Does not own: padding (there is none), packing
(torch/packing.py), devices (the calling kernel says which).

Columns arrive as views of memory that another process may own, and torch has no read-only tensors.
So no tensor is ever made on that memory: `gather` copies the wanted values, once, in the order that
packing needs, and its result may be written to and kept. Columns declared `device` are already
tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataflow.batch import Batch, Keys, Ragged
from dataflow.errors import DataError
from dataflow.schema import Schema


def gather(
    values: np.ndarray | Tensor,
    index: np.ndarray,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`values[index]` as a new tensor on the device; dtype: default the column's."""
    if isinstance(values, Tensor):
        return values[index].to(device=device, dtype=dtype, non_blocking=True)
    return torch.from_numpy(values[index]).to(device=device, dtype=dtype, non_blocking=True)


def index(values: np.ndarray, device: torch.device) -> Tensor:
    """An int64 index array that the caller made, as a tensor."""
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(
        device, non_blocking=True
    )


def aligned(batch: Batch, name: str, offsets: np.ndarray, where: str) -> Any:
    """The flat values of a token column, NumPy or tensor. Raises DataError if offsets differ."""
    column = batch.tensor(name) if name in batch.device else batch.ragged(name)
    if not np.array_equal(column.offsets, offsets):
        row = (
            int(np.argmax(column.lengths != np.diff(offsets)))
            if len(column) == len(offsets) - 1
            else 0
        )
        found = int(column.lengths[row]) if len(column) > row else 0
        raise DataError(
            f"{where}.{name}: row {batch.keys.take(np.array([row])).rows()[0]} has {found} values,"
            f" expected one for each of its {int(np.diff(offsets)[row])} completion tokens. Fix: a"
            " column made from these rows."
        )
    return column.values


def numbers(tensor: Tensor) -> np.ndarray:
    """A tensor as float32 or whole numbers of NumPy on the host; on its own memory if it is there
    already.
    """
    kind = torch.float32 if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(device="cpu", dtype=kind).numpy()


def batch_of(
    keys: Keys, columns: Mapping[str, Tensor], offsets: np.ndarray | None, schema: type[Schema]
) -> Batch:
    """A batch of columns of numbers: [rows], or with offsets [tokens] or [tokens, k] as lists."""
    made = {name: numbers(tensor) for name, tensor in columns.items()}
    shaped = (
        made
        if offsets is None
        else {name: Ragged(values, offsets) for name, values in made.items()}
    )
    return Batch.make(keys, shaped, schema)
