"""Rows by what they belong to, without a pass over all rows for each block or share.

Owns: these two functions on arrays, deterministic and pure. Does not own: what a group stands for:
a block (engine/coordinator/blocks.py), a share (engine/coordinator/ranks.py), a chunk
(engine/coordinator/tables.py), a request (engine/run/worker/input_batches.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_SPARSE = 4
"""Blocks with so many times the rows that are wanted are not copied together."""


def group_indices(group: np.ndarray, count: int) -> list[np.ndarray]:
    """Return the indices of the entries of each group 0 .. count - 1, ascending (int64).

    group: integers [rows], each below count. The work is rows * log(rows) + count.
    """
    order = np.argsort(group, kind="stable")
    bounds = np.searchsorted(group[order], np.arange(count + 1)).tolist()
    return [order[bounds[number] : bounds[number + 1]] for number in range(count)]


def values_at(
    blocks: Sequence[np.ndarray], block: np.ndarray, row: np.ndarray, dtype: type = np.int64
) -> np.ndarray:
    """blocks[block[i]][row[i]] for each i, as `dtype` [rows].

    blocks: integers, one array a block. block, row: integers [rows]. The work is linear in rows and
    blocks, but for a sort.
    """
    if not len(row):
        return np.zeros(0, dtype=dtype)
    if len(blocks) == 1:
        return blocks[0][row].astype(dtype)
    sizes = [len(each) for each in blocks]
    if sum(sizes) <= _SPARSE * len(row):
        starts = np.cumsum([0, *sizes], dtype=np.int64)
        return np.concatenate(blocks).astype(dtype)[starts[block] + row]
    gathered = np.zeros(len(row), dtype=dtype)
    for values, mine in zip(blocks, group_indices(block, len(blocks)), strict=True):
        gathered[mine] = values[row[mine]]
    return gathered
