"""Checks of what a function on columns returned.

Owns: restoring the order of rows by key, giving them memory of their own, and how many rows of
each group a Keep may keep. Does not own: calling the function, the type of its values (host.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch, Keys
from dataflow.errors import DataError

LIKE = "Fix: Columns.make(..., like=one of its arguments), whose rows they then are"


def in_order(made: Batch, keys: Keys) -> Batch:
    """The rows of `made` in the order of `keys`; the same object if they are already in order.

    Raises DataError unless they are exactly these rows, each once.
    """
    if made.keys is keys or _same(made.keys, keys):
        return made
    ours, theirs = _sorting(made.keys), _sorting(keys)
    if len(ours) != len(theirs) or not _same(made.keys.take(ours), keys.take(theirs)):
        raise DataError(_difference(made.keys, keys))
    index = np.empty(len(ours), dtype=np.int64)
    index[theirs] = ours
    return made.take(index)


def in_own_memory(made: Batch, inputs: Iterable[Batch]) -> Batch:
    """Copy the columns that the function made, so that it can fill the same arrays in its next
    call. Columns of its inputs, which nobody writes to, stay views.
    """
    batches = list(inputs)
    shared = {address for batch in batches for address in _addresses(batch)}
    tensors = {values.data_ptr() for batch in batches for values in batch.device.values()}
    arrays = [
        column if shared.issuperset(_buffers(column)) else pa.concat_arrays([column])
        for column in made.records.columns
    ]
    device = {
        name: values if values.data_ptr() in tensors else values.clone()
        for name, values in made.device.items()
    }
    records = pa.RecordBatch.from_arrays(arrays, schema=made.records.schema)
    return Batch(made.keys, records, device)


def _addresses(batch: Batch) -> Iterator[int]:
    for column in batch.records.columns:
        yield from _buffers(column)


def _buffers(column: pa.Array) -> list[int]:
    """Where the column's values lie in memory."""
    return [buffer.address for buffer in column.buffers() if buffer is not None]


def refuse_broken_promise(made: Batch, keeps: str | None) -> None:
    """Raise DataError if `keep` leaves rows of a group that the operator promised not to leave.

    keeps: `groups` (each whole or not at all), `pairs` (two rows of each, with sign +1 and -1, or
    none), or None or `rows` (any). A group: the rows of one position.
    """
    if keeps not in ("groups", "pairs"):
        return
    position, first, group = np.unique(made.keys.position, return_index=True, return_inverse=True)
    keep = made.flat("keep") != 0
    kept, size = np.bincount(group, weights=keep), np.bincount(group)
    wrong = ~np.isin(kept, (0, 2)) if keeps == "pairs" else (kept != 0) & (kept != size)
    if wrong.any():
        at = int(np.argmax(wrong))
        attempt = int(made.keys.attempt[first[at]])
        expected = (
            "two rows kept of each group, or none"
            if keeps == "pairs"
            else "each group kept whole, or not at all"
        )
        raise DataError(
            f"it declares keeps={keeps!r}: expected {expected}, found {int(kept[at])} of the"
            f" {int(size[at])} rows of the group at position {int(position[at])}, attempt"
            f" {attempt}. {_FIXES[keeps]}"
        )
    if keeps == "pairs" and "sign" in made.names:
        _refuse_signs(made, keep, group, position)


_FIXES = {
    "pairs": (
        "Fix: keep one chosen and one rejected row (sign 1 and -1), or return a Keep with"
        " keeps='rows'"
    ),
    "groups": "Fix: the same number for all rows of a group, or keeps='rows'",
}


def _refuse_signs(made: Batch, keep: np.ndarray, group: np.ndarray, position: np.ndarray) -> None:
    """Raise DataError unless one of two kept rows is chosen (+1) and the other rejected (-1)."""
    sign = made.flat("sign").astype(np.int64)
    product = np.ones(len(position), dtype=np.int64)
    np.multiply.at(product, group[keep], sign[keep])
    wrong = (product != -1) & (np.bincount(group, weights=keep) > 0)
    if wrong.any():
        at = int(np.argmax(wrong))
        found = ", ".join(str(s) for s in sign[keep & (group == at)])
        raise DataError(
            "expected sign 1 for the chosen row of a pair and -1 for the rejected one, found"
            f" {found} in the group at position {int(position[at])}. Fix: sign=1 for the better"
            " row, -1 for the other"
        )


def _same(a: Keys, b: Keys) -> bool:
    return (
        np.array_equal(a.position, b.position)
        and np.array_equal(a.sample, b.sample)
        and np.array_equal(a.attempt, b.attempt)
    )


def _sorting(keys: Keys) -> np.ndarray:
    return np.lexsort((keys.attempt, keys.sample, keys.position))


def _difference(made: Keys, keys: Keys) -> str:
    """What is wrong with the returned rows: their number, a duplicate, or one not given."""
    if len(made) != len(keys):
        return f"it returned {len(made)} rows for {len(keys)}. {LIKE}"
    given, found = set(keys.rows()), made.rows()
    unknown = next((key for key in found if key not in given), None)
    if unknown is not None:
        what = f"a row (position, sample, attempt) {unknown}, which it was not given"
    else:
        what = (
            f"the row (position, sample, attempt) {next(k for k in found if found.count(k) > 1)}"
            " twice"
        )
    return f"expected each row that it was given, once, found {what}. {LIKE}"
