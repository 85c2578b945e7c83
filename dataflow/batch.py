"""Batches: an Arrow record batch whose rows have keys.

Owns: keys, the one form in which rows travel on a data edge, and zero-copy views of columns. Does
not own: which columns there should be (schema.py), where the bytes are (engine/channels), tensors
(operators/kernels/tensors.py).

Token columns are LargeLists and never padded: `values` and `offsets` of a list column are the
packed layout that variable-length attention needs. For a column declared `device` the record batch
has only the lengths; its values are a separate tensor (device.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from dataflow.arrays import steps_between
from dataflow.device import (
    as_declared,
    is_tensor,
    joined,
    lengths_array,
    offsets_of,
    taken,
    whole_array,
)
from dataflow.display import Displayed
from dataflow.errors import DataError
from dataflow.prompt_types import as_objects, has_json_values
from dataflow.ragged import Ragged
from dataflow.schema import Schema

KEYS = ("key.position", "key.sample", "key.attempt")
_KEY_TYPES = (pa.int64(), pa.int32(), pa.int32())


@dataclass(frozen=True, slots=True, eq=False)
class Keys:
    """Row keys as three arrays of one length.

    position: the prompt's place in the source's endless order; never repeats, not even across
    data epochs. sample: which of the rows expanded from that prompt (0 for the prompt itself).
    attempt: how often the row was begun before (after a crash, or dropped as too old).
    """

    position: np.ndarray
    sample: np.ndarray
    attempt: np.ndarray

    def __len__(self) -> int:
        return len(self.position)

    @staticmethod
    def of(
        position: Iterable[int],
        sample: Iterable[int] | None = None,
        attempt: Iterable[int] | None = None,
    ) -> Keys:
        """Keys from any integer sequences; samples and attempts default to 0."""
        where = np.asarray(position, dtype=np.int64)
        zeros = np.zeros(len(where), dtype=np.int32)
        return Keys(
            where,
            zeros if sample is None else np.asarray(sample, dtype=np.int32),
            zeros if attempt is None else np.asarray(attempt, dtype=np.int32),
        )

    def take(self, rows: np.ndarray) -> Keys:
        """The keys of the given rows (integer indices or a boolean mask)."""
        return Keys(self.position[rows], self.sample[rows], self.attempt[rows])

    def expand(self, n: int) -> Keys:
        """Each key n times, with samples sample * n + 0 .. n-1: the keys of `expand(x, n)`."""
        sample = np.repeat(self.sample, n) * n + np.tile(np.arange(n, dtype=np.int32), len(self))
        return Keys(
            np.repeat(self.position, n), sample.astype(np.int32), np.repeat(self.attempt, n)
        )

    def order(self) -> np.ndarray:
        """The permutation that sorts rows by (position, sample)."""
        return np.lexsort((self.sample, self.position))

    def rows(self) -> list[tuple[int, int, int]]:
        """As (position, sample, attempt) tuples; for messages and tests, not for hot paths."""
        return list(
            zip(self.position.tolist(), self.sample.tolist(), self.attempt.tolist(), strict=True)
        )

    @staticmethod
    def concat(parts: Sequence[Keys]) -> Keys:
        """All rows of the parts, in order."""
        return Keys(
            np.concatenate([p.position for p in parts]),
            np.concatenate([p.sample for p in parts]),
            np.concatenate([p.attempt for p in parts]),
        )


class Batch(Displayed):
    """Rows with keys. Immutable; `select` shares columns and copies nothing.

    device: the values of columns declared `device`, as flat tensors; `records` has their lengths.
    """

    __slots__ = ("device", "keys", "records")
    _page = "dataflow.draw.pages:batch_page"

    def __init__(
        self, keys: Keys, records: pa.RecordBatch, device: Mapping[str, Any] | None = None
    ) -> None:
        if records.num_columns and len(keys) != records.num_rows:
            raise DataError(f"a batch of {records.num_rows} rows with {len(keys)} keys")
        self.keys = keys
        self.records = records
        self.device = dict(device or {})
        for name, values in self.device.items():
            wanted = int(self.offsets(name)[-1])
            if len(values) != wanted:
                raise DataError(
                    f"device column {name!r}: its rows have {wanted} values, found {len(values)}"
                )

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        return f"Batch({len(self)} rows: {', '.join(self.names)})"

    @property
    def names(self) -> list[str]:
        """Column names, without the keys'."""
        return self.records.schema.names

    @property
    def nbytes(self) -> int:
        """Payload bytes of the columns, without the keys'."""
        return self.records.nbytes + sum(values.nbytes for values in self.device.values())

    @staticmethod
    def make(
        keys: Keys,
        columns: Mapping[str, pa.Array | np.ndarray | Ragged | Sequence | Any],
        schema: type[Schema],
    ) -> Batch:
        """Build a batch from columns; those in the schema get its types, others keep their own.
        Columns that it declares `device` are torch tensors of its type: Ragged(tensor, offsets), or
        without an axis a tensor [rows].

        Contiguous numbers of the column's own type are not copied: the batch is a view of them.
        Raises DataError if a column cannot be converted to its type or has another length, or if a
        required column has nulls.
        """
        fields, arrays, tensors = [], [], {}
        for name, data in columns.items():
            declared = schema.columns.get(name)
            want = None if declared is None else declared.arrow
            if declared is not None and declared.device:
                given = as_declared(declared, data, len(keys))
                array, tensors[name] = lengths_array(given, declared), given.values
            else:
                array = _array(name, data, want)
            if len(array) != len(keys):
                raise DataError(
                    f"column {name!r} has {len(array)} rows, its batch {len(keys)} keys"
                )
            fields.append(_field(name, array, want, schema))
            arrays.append(array)
        return Batch(keys, pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields)), tensors)

    def array(self, name: str) -> pa.Array:
        """One column as Arrow. Raises DataError for one that is missing or on a device."""
        if name in self.device:
            raise DataError(
                f"column {name!r} is declared device, and is no Arrow array. Fix:"
                f" batch.tensor({name!r})."
            )
        return self._lengths_or_values(name)

    def tensor(self, name: str) -> Ragged:
        """A column declared `device`: its flat tensor, and offsets from 0 (without an axis each row
        has one value). Raises DataError for a column that is missing or not on a device.
        """
        if name not in self.device:
            self._lengths_or_values(name)
            raise DataError(
                f"column {name!r} is not declared device. Fix: batch.ragged or batch.flat."
            )
        return Ragged(self.device[name], self.offsets(name))

    def _lengths_or_values(self, name: str) -> pa.Array:
        at = self.records.schema.get_field_index(name)
        if at < 0:
            raise DataError(f"no column {name!r}; there are: {', '.join(self.names)}")
        return self.records.column(at)

    def lengths(self, name: str) -> np.ndarray:
        """int64 [rows]: each row's number of elements in a column with an axis, wherever it is."""
        return steps_between(self.offsets(name))

    def offsets(self, name: str) -> np.ndarray:
        """int64 [rows + 1], from 0: where each row of such a column begins and ends."""
        return offsets_of(self._lengths_or_values(name))

    def flat(self, name: str) -> np.ndarray:
        """A column without an axis as NumPy, zero-copy for numbers."""
        array = self.array(name)
        if has_json_values(array.type):
            return as_objects(array)
        return array.to_numpy(zero_copy_only=False)

    def ragged(self, name: str) -> Ragged:
        """A list column as values and offsets, zero-copy; offsets start at 0. Values that are
        lists of k numbers each are [values, k].
        """
        return ragged(self.array(name))

    def select(self, names: Iterable[str]) -> Batch:
        """Only these columns."""
        wanted = list(names)
        return Batch(
            self.keys,
            self.records.select(wanted),
            {n: v for n, v in self.device.items() if n in wanted},
        )

    def take(self, rows: np.ndarray) -> Batch:
        """These rows, by index or boolean mask, in this order."""
        index = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        if len(index) == len(self) and (index == np.arange(len(self))).all():
            return self
        records = self.records.take(pa.array(index)) if self.records.num_columns else self.records
        tensors = {name: taken(self.tensor(name), index).values for name in self.device}
        return Batch(self.keys.take(index), records, tensors)

    def with_columns(self, columns: Mapping[str, pa.Array]) -> Batch:
        """With these columns added; a column of the same name is replaced."""
        merged = {name: self.records.column(name) for name in self.names} | dict(columns)
        left = {name: values for name, values in self.device.items() if name not in columns}
        return Batch(self.keys, pa.RecordBatch.from_pydict(merged), left)

    def on_host(self) -> Batch:
        """The same rows with nothing on a device: device columns as Arrow, copied to the host."""
        if not self.device:
            return self
        records = self.records
        for name in self.device:
            index = records.schema.get_field_index(name)
            values = whole_array(self.tensor(name), records.schema.field(index).type)
            records = records.set_column(index, pa.field(name, values.type, nullable=False), values)
        return Batch(self.keys, records)

    def sorted(self) -> Batch:
        """Rows by (position, sample); the same object if they are already sorted."""
        return self.take(self.keys.order())

    @staticmethod
    def concat(parts: Sequence[Batch]) -> Batch:
        """All rows of the parts; their columns must agree."""
        if len(parts) == 1:
            return parts[0]
        keys = Keys.concat([p.keys for p in parts])
        if not parts[0].names:
            return Batch(keys, parts[0].records)
        tensors = {name: joined([p.device[name] for p in parts]) for name in parts[0].device}
        return Batch(keys, pa.concat_batches([p.records for p in parts]), tensors)

    def with_keys(self) -> pa.RecordBatch:
        """One record batch with the keys as its first columns: the form for files and wires. Raises
        DataError if a column is on a device.
        """
        if self.device:
            raise DataError(
                f"columns on a device: {', '.join(self.device)}. Fix: batch.on_host() first."
            )
        keys = (self.keys.position, self.keys.sample, self.keys.attempt)
        arrays = [pa.array(k, type=t) for k, t in zip(keys, _KEY_TYPES, strict=True)]
        fields = [pa.field(n, t, nullable=False) for n, t in zip(KEYS, _KEY_TYPES, strict=True)]
        schema = pa.schema([*fields, *self.records.schema])
        return pa.RecordBatch.from_arrays([*arrays, *self.records.columns], schema=schema)

    @staticmethod
    def from_keyed(records: pa.RecordBatch) -> Batch:
        """The inverse of with_keys."""
        keys = Keys(*(records.column(name).to_numpy() for name in KEYS))
        return Batch(keys, records.drop_columns(list(KEYS)))


def ragged(array: pa.Array) -> Ragged:
    """A list array as values and offsets from 0, zero-copy for non-null numbers."""
    offsets, values = array.offsets.to_numpy(), array.values
    first, last = int(offsets[0]), int(offsets[-1])
    if last - first < len(values):
        values = values.slice(first, last - first)
    return Ragged(_numpy(values), offsets - first if first else offsets)


def _numpy(values: pa.Array) -> np.ndarray:
    """[values], or [values, k] for fixed-size lists."""
    if not pa.types.is_fixed_size_list(values.type):
        return values.to_numpy(zero_copy_only=False)
    flat = values.flatten().to_numpy(zero_copy_only=False)
    return flat.reshape(len(values), values.type.list_size)


def list_array(values: Any, offsets: np.ndarray, kind: pa.DataType | None = None) -> pa.Array:
    """The inverse of `ragged`: a LargeList array on these buffers; items are non-null if none is
    null.
    """
    items = values if isinstance(values, pa.Array) else _items(values, kind)
    field = pa.field("item", items.type, nullable=bool(items.null_count))
    starts = pa.array(np.asarray(offsets, dtype=np.int64))
    return pa.LargeListArray.from_arrays(starts, items, type=pa.large_list(field))


def _items(values: Any, kind: pa.DataType | None) -> pa.Array:
    """Values as Arrow; the rows of a matrix become fixed-size lists."""
    if not isinstance(values, np.ndarray) or values.ndim < 2:
        return pa.array(values, type=kind)
    numbers = pa.array(values.reshape(-1), type=None if kind is None else kind.value_type)
    return pa.FixedSizeListArray.from_arrays(numbers, values.shape[1])


def _field(name: str, array: pa.Array, want: pa.Field | None, schema: type[Schema]) -> pa.Field:
    if want is None:
        return pa.field(name, array.type)
    if array.null_count and not want.nullable:
        raise DataError(
            f"column {name!r} of {schema.__name__} holds {array.null_count} nulls; it is required"
        )
    return want.with_type(array.type)


def _array(name: str, data: Any, want: pa.Field | None) -> pa.Array:
    """One column, converted to the wanted field's type if there is one."""
    kind = want.type if want is not None else None
    if is_tensor(data.values if isinstance(data, Ragged) else data):
        raise DataError(
            f"column {name!r} is given as a tensor, and is not declared device. Fix: .numpy(), or"
            " column(..., device=True) in its schema."
        )
    if isinstance(data, Ragged):
        items = kind.value_type if kind is not None and pa.types.is_large_list(kind) else None
        made = list_array(data.values, data.offsets, items)
        if items is not None and pa.types.is_fixed_size_list(items) and made.values.type != items:
            raise DataError(
                f"column {name!r}: expected values of {items}, found {made.values.type}. Fix: an"
                f" array [values, {items.list_size}]."
            )
        return made
    if isinstance(data, pa.ChunkedArray):
        data = data.combine_chunks()
    return _cast(name, data, kind)


def _cast(name: str, data: Any, kind: pa.DataType | None) -> pa.Array:
    # A prompt is text or a list of messages: both are declared.
    if isinstance(data, pa.Array) and (kind is None or data.type == kind or name == "prompt"):
        return data
    try:
        return data.cast(kind) if isinstance(data, pa.Array) else pa.array(data, type=kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise DataError(f"column {name!r}: expected {kind}: {error}") from error
