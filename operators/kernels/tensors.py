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
    """Copy `values[index]` into a new tensor on the device; dtype: default the column's."""
    rows = values[index]
    if not isinstance(rows, Tensor):
        rows = torch.from_numpy(rows)
    return rows.to(device=device, dtype=dtype, non_blocking=True)


def widen(tensor: Tensor) -> Tensor:
    """As float32; float64 stays what it is."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def to_index_tensor(values: np.ndarray, device: torch.device) -> Tensor:
    """An int64 index array that the caller made, as a tensor on the device."""
    array = np.ascontiguousarray(values, dtype=np.int64)
    return torch.from_numpy(array).to(device, non_blocking=True)


def require_aligned(batch: Batch, name: str, offsets: np.ndarray, where: str) -> Any:
    """The flat values of a token column, NumPy or tensor. Raises DataError if offsets differ."""
    column = batch.tensor(name) if name in batch.device else batch.ragged(name)
    if not np.array_equal(column.offsets, offsets):
        expected_lengths = np.diff(offsets)
        row = 0
        if len(column) == len(offsets) - 1:
            row = int(np.argmax(column.lengths != expected_lengths))
        length = int(column.lengths[row]) if len(column) > row else 0
        key = batch.keys.take(np.array([row])).rows()[0]
        raise DataError(
            f"{where}.{name}: row {key} has {length} values,"
            f" expected one for each of its {int(expected_lengths[row])} completion tokens. Fix: a"
            " column made from these rows."
        )
    return column.values


def to_host_array(tensor: Tensor) -> np.ndarray:
    """Move a tensor to NumPy on the host, floats as float32, whole numbers as they are. The array
    is on the tensor's own memory if that is there already.
    """
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(device="cpu", dtype=dtype).numpy()


def make_batch(
    keys: Keys, columns: Mapping[str, Tensor], offsets: np.ndarray | None, schema: type[Schema]
) -> Batch:
    """Make a batch of columns of numbers: [rows], or with offsets [tokens] or [tokens, k] as
    lists.
    """
    arrays = {name: to_host_array(tensor) for name, tensor in columns.items()}
    if offsets is None:
        return Batch.make(keys, arrays, schema)
    lists = {name: Ragged(array, offsets) for name, array in arrays.items()}
    return Batch.make(keys, lists, schema)
