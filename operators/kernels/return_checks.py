"""Checks of what a function on columns returned.

Owns: restoring the order of rows by key, giving them memory of their own, and how many rows of
each group a Keep may keep. Does not own: calling the function, the type of its values (host.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch, Keys
from dataflow.errors import DataError

LIKE = "Fix: Columns.make(..., like=one of its arguments), whose rows they then are"


def in_order(output: Batch, keys: Keys) -> Batch:
    """The rows of `output` in the order of `keys`; the same object if they are already in order.

    Raises DataError unless they are exactly these rows, each once.
    """
    if output.keys is keys or _are_same(output.keys, keys):
        return output
    output_order = _sort_order(output.keys)
    key_order = _sort_order(keys)
    if len(output_order) != len(key_order):
        raise DataError(_describe_difference(output.keys, keys))
    if not _are_same(output.keys.take(output_order), keys.take(key_order)):
        raise DataError(_describe_difference(output.keys, keys))
    index = np.empty(len(output_order), dtype=np.int64)
    index[key_order] = output_order
    return output.take(index)


def in_own_memory(output: Batch, inputs: Iterable[Batch]) -> Batch:
    """Copy the columns that the function made, so that it can fill the same arrays in its next
    call. Columns of its inputs, which nobody writes to, stay views.
    """
    input_addresses: set[int] = set()
    input_tensors: set[int] = set()
    for batch in inputs:
        for column in batch.records.columns:
            input_addresses.update(_buffer_addresses(column))
        input_tensors.update(tensor.data_ptr() for tensor in batch.device.values())
    arrays: list[pa.Array] = []
    for column in output.records.columns:
        is_view = input_addresses.issuperset(_buffer_addresses(column))
        arrays.append(column if is_view else pa.concat_arrays([column]))
    device: dict[str, Any] = {}
    for name, tensor in output.device.items():
        is_view = tensor.data_ptr() in input_tensors
        device[name] = tensor if is_view else tensor.clone()
    records = pa.RecordBatch.from_arrays(arrays, schema=output.records.schema)
    return Batch(output.keys, records, device)


def _buffer_addresses(column: pa.Array) -> list[int]:
    """Where the column's values lie in memory."""
    return [buffer.address for buffer in column.buffers() if buffer is not None]


def refuse_broken_promise(output: Batch, keeps: str | None) -> None:
    """Raise DataError if `keep` leaves rows of a group that the operator promised not to leave.

    keeps: `groups` (each whole or not at all), `pairs` (two rows of each, with sign +1 and -1, or
    none), or None or `rows` (any). A group: the rows of one position.
    """
    if keeps not in ("groups", "pairs"):
        return
    position, first, group = np.unique(output.keys.position, return_index=True, return_inverse=True)
    keep = output.flat("keep") != 0
    kept_count = np.bincount(group, weights=keep)
    size = np.bincount(group)
    if keeps == "pairs":
        wrong = ~np.isin(kept_count, (0, 2))
    else:
        wrong = (kept_count != 0) & (kept_count != size)
    if wrong.any():
        at = int(np.argmax(wrong))
        attempt = int(output.keys.attempt[first[at]])
        raise DataError(
            f"it declares keeps={keeps!r}: expected {_EXPECTED[keeps]}, found"
            f" {int(kept_count[at])} of the {int(size[at])} rows of the group at position"
            f" {int(position[at])}, attempt {attempt}. {_FIXES[keeps]}"
        )
    if keeps == "pairs" and "sign" in output.names:
        _require_signs(output, keep, group, position)


_EXPECTED = {
    "pairs": "two rows kept of each group, or none",
    "groups": "each group kept whole, or not at all",
}
_FIXES = {
    "pairs": (
        "Fix: keep one chosen and one rejected row (sign 1 and -1), or return a Keep with"
        " keeps='rows'"
    ),
    "groups": "Fix: the same number for all rows of a group, or keeps='rows'",
}


def _require_signs(
    output: Batch, keep: np.ndarray, group: np.ndarray, position: np.ndarray
) -> None:
    """Raise DataError unless one of two kept rows is chosen (+1) and the other rejected (-1)."""
    sign = output.flat("sign").astype(np.int64)
    product = np.ones(len(position), dtype=np.int64)
    np.multiply.at(product, group[keep], sign[keep])
    wrong = (product != -1) & (np.bincount(group, weights=keep) > 0)
    if wrong.any():
        at = int(np.argmax(wrong))
        signs = ", ".join(str(s) for s in sign[keep & (group == at)])
        raise DataError(
            "expected sign 1 for the chosen row of a pair and -1 for the rejected one, found"
            f" {signs} in the group at position {int(position[at])}. Fix: sign=1 for the better"
            " row, -1 for the other"
        )


def _are_same(a: Keys, b: Keys) -> bool:
    return (
        np.array_equal(a.position, b.position)
        and np.array_equal(a.sample, b.sample)
        and np.array_equal(a.attempt, b.attempt)
    )


def _sort_order(keys: Keys) -> np.ndarray:
    return np.lexsort((keys.attempt, keys.sample, keys.position))


def _describe_difference(returned: Keys, keys: Keys) -> str:
    """What is wrong with the returned rows: their number, a duplicate, or one not given."""
    if len(returned) != len(keys):
        return f"it returned {len(returned)} rows for {len(keys)}. {LIKE}"
    input_rows = set(keys.rows())
    returned_rows = returned.rows()
    unknown = next((row for row in returned_rows if row not in input_rows), None)
    if unknown is not None:
        problem = f"a row (position, sample, attempt) {unknown}, which it was not given"
    else:
        twice = next(row for row in returned_rows if returned_rows.count(row) > 1)
        problem = f"the row (position, sample, attempt) {twice} twice"
    return f"expected each row that it was given, once, found {problem}. {LIKE}"
