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
    as_declared_column,
    is_tensor,
    join_tensors,
    lengths_array,
    offsets_of,
    take_tensor_rows,
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
        """Make keys from any integer sequences; samples and attempts default to 0."""
        positions = np.asarray(position, dtype=np.int64)
        zeros = np.zeros(len(positions), dtype=np.int32)
        samples = zeros if sample is None else np.asarray(sample, dtype=np.int32)
        attempts = zeros if attempt is None else np.asarray(attempt, dtype=np.int32)
        return Keys(positions, samples, attempts)

    def take(self, rows: np.ndarray) -> Keys:
        """Select the keys of these rows, by integer indices or a boolean mask."""
        return Keys(self.position[rows], self.sample[rows], self.attempt[rows])

    def expand(self, n: int) -> Keys:
        """Repeat each key n times, with samples sample * n + 0 .. n-1: keys of `expand(x, n)`."""
        offsets = np.tile(np.arange(n, dtype=np.int32), len(self))
        samples = np.repeat(self.sample, n) * n + offsets
        positions = np.repeat(self.position, n)
        return Keys(positions, samples.astype(np.int32), np.repeat(self.attempt, n))

    def expand_spans(self, n: int, spans: np.ndarray | None) -> Keys:
        """Expand each key to those of its n samples that its span says. spans: int [rows, 2], the
        first of them (0 .. n-1) and the one behind the last; None: all n.
        """
        if spans is None:
            return self.expand(n)
        counts = spans[:, 1] - spans[:, 0]
        last = np.cumsum(counts)
        within = np.arange(last[-1] if len(last) else 0) - np.repeat(last - counts, counts)
        samples = np.repeat(self.sample * n + spans[:, 0], counts) + within
        positions, attempts = np.repeat(self.position, counts), np.repeat(self.attempt, counts)
        return Keys(positions, samples.astype(np.int32), attempts)

    def number_episodes(self, segment: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64: the number of each row's episode, in the order of the keys, and of each episode
        the index of its first row. segment: int [rows], which of its episode's rows each is: an
        episode's rows have samples next to one another.
        """
        # Not by the column `episode`, which rows of two generations (concat) may share.
        first_place = self.sample - segment
        place = np.stack([self.position, first_place])
        unique = np.unique(place, axis=1, return_index=True, return_inverse=True)
        _, first_rows, episode = unique
        return episode.reshape(-1), first_rows

    def order(self) -> np.ndarray:
        """The permutation that sorts rows by (position, sample)."""
        return np.lexsort((self.sample, self.position))  # the last one is NumPy's primary key

    def rows(self) -> list[tuple[int, int, int]]:
        """As (position, sample, attempt) tuples; for messages and tests, not for hot paths."""
        columns = self.position.tolist(), self.sample.tolist(), self.attempt.tolist()
        return list(zip(*columns, strict=True))

    @staticmethod
    def concat(parts: Sequence[Keys]) -> Keys:
        """Join the rows of all parts, in order."""
        positions = np.concatenate([part.position for part in parts])
        samples = np.concatenate([part.sample for part in parts])
        attempts = np.concatenate([part.attempt for part in parts])
        return Keys(positions, samples, attempts)


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
            count = int(self.offsets(name)[-1])
            if len(values) != count:
                raise DataError(
                    f"device column {name!r}: its rows have {count} values, found {len(values)}"
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
        """Build a batch from columns: those in the schema get its types, others keep their own.
        Columns that it declares `device` are torch tensors of its type: Ragged(tensor, offsets), or
        without an axis a tensor [rows].

        Contiguous numbers of the column's own type are not copied: the batch is a view of them.
        Raises DataError if a column cannot be converted to its type or has another length, or if a
        required column has nulls.
        """
        fields: list[pa.Field] = []
        arrays: list[pa.Array] = []
        tensors: dict[str, Any] = {}
        for name, values in columns.items():
            declared = schema.columns.get(name)
            field = None if declared is None else declared.arrow
            if declared is not None and declared.device:
                column = as_declared_column(declared, values, len(keys))
                tensors[name] = column.values
                array = lengths_array(column, declared)
            else:
                array = _convert(name, values, field)
            if len(array) != len(keys):
                raise DataError(
                    f"column {name!r} has {len(array)} rows, its batch {len(keys)} keys"
                )
            fields.append(_make_field(name, array, field, schema))
            arrays.append(array)
        records = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))
        return Batch(keys, records, tensors)

    def array(self, name: str) -> pa.Array:
        """Return one column as Arrow. Raises DataError for one that is missing or on a device."""
        if name in self.device:
            raise DataError(
                f"column {name!r} is declared device, and is no Arrow array. Fix:"
                f" batch.tensor({name!r})."
            )
        return self._lengths_or_values(name)

    def tensor(self, name: str) -> Ragged:
        """Return a column declared `device`: its flat tensor, and offsets from 0 (without an axis
        each row has one value). Raises DataError for a column that is missing or not on a device.
        """
        if name not in self.device:
            self._lengths_or_values(name)  # raises for a column that is missing
            raise DataError(
                f"column {name!r} is not declared device. Fix: batch.ragged or batch.flat."
            )
        return Ragged(self.device[name], self.offsets(name))

    def _lengths_or_values(self, name: str) -> pa.Array:
        index = self.records.schema.get_field_index(name)
        if index < 0:
            raise DataError(f"no column {name!r}; there are: {', '.join(self.names)}")
        return self.records.column(index)

    def lengths(self, name: str) -> np.ndarray:
        """int64 [rows]: each row's number of elements in a column with an axis, wherever it is."""
        return steps_between(self.offsets(name))

    def offsets(self, name: str) -> np.ndarray:
        """int64 [rows + 1], from 0: where each row of such a column begins and ends."""
        return offsets_of(self._lengths_or_values(name))

    def flat(self, name: str) -> np.ndarray:
        """Return a column without an axis as NumPy, zero-copy for numbers."""
        array = self.array(name)
        if has_json_values(array.type):
            return as_objects(array)
        return array.to_numpy(zero_copy_only=False)

    def ragged(self, name: str) -> Ragged:
        """Return a list column as values and offsets, zero-copy; offsets start at 0. Values that
        are lists of k numbers each are [values, k].
        """
        return as_ragged(self.array(name))

    def select(self, names: Iterable[str]) -> Batch:
        """Keep only these columns."""
        columns = list(names)
        tensors = {name: values for name, values in self.device.items() if name in columns}
        return Batch(self.keys, self.records.select(columns), tensors)

    def take(self, rows: np.ndarray) -> Batch:
        """Keep these rows, by index or boolean mask, in this order; the same Batch if all stay."""
        index = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        if len(index) == len(self) and (index == np.arange(len(self))).all():
            return self
        records = self.records.take(pa.array(index)) if self.records.num_columns else self.records
        tensors = {name: take_tensor_rows(self.tensor(name), index).values for name in self.device}
        return Batch(self.keys.take(index), records, tensors)

    def with_columns(self, columns: Mapping[str, pa.Array]) -> Batch:
        """Add these columns; they replace those of the same name."""
        arrays = {name: self.records.column(name) for name in self.names} | dict(columns)
        tensors = {name: values for name, values in self.device.items() if name not in columns}
        return Batch(self.keys, pa.RecordBatch.from_pydict(arrays), tensors)

    def on_host(self) -> Batch:
        """Copy device columns to the host, as Arrow; the same Batch if there are none."""
        if not self.device:
            return self
        records = self.records
        for name in self.device:
            index = records.schema.get_field_index(name)
            values = whole_array(self.tensor(name), records.schema.field(index).type)
            records = records.set_column(index, pa.field(name, values.type, nullable=False), values)
        return Batch(self.keys, records)

    def sort(self) -> Batch:
        """Sort the rows by (position, sample); the same Batch if they are sorted already."""
        return self.take(self.keys.order())

    @staticmethod
    def concat(parts: Sequence[Batch]) -> Batch:
        """Join the rows of all parts, in order; their columns must agree."""
        if len(parts) == 1:
            return parts[0]
        keys = Keys.concat([p.keys for p in parts])
        if not parts[0].names:
            return Batch(keys, parts[0].records)
        tensors = {name: join_tensors([p.device[name] for p in parts]) for name in parts[0].device}
        return Batch(keys, pa.concat_batches([p.records for p in parts]), tensors)

    def with_keys(self) -> pa.RecordBatch:
        """Put the keys before the columns, in one record batch: the form for files and wires.
        Raises DataError if a column is on a device.
        """
        if self.device:
            raise DataError(
                f"columns on a device: {', '.join(self.device)}. Fix: batch.on_host() first."
            )
        keys = (self.keys.position, self.keys.sample, self.keys.attempt)
        arrays = [pa.array(key, type=kind) for key, kind in zip(keys, _KEY_TYPES, strict=True)]
        fields = [
            pa.field(n, kind, nullable=False) for n, kind in zip(KEYS, _KEY_TYPES, strict=True)
        ]
        schema = pa.schema([*fields, *self.records.schema])
        return pa.RecordBatch.from_arrays([*arrays, *self.records.columns], schema=schema)

    @staticmethod
    def from_keyed(records: pa.RecordBatch) -> Batch:
        """Make a batch of what `with_keys` returned."""
        position, sample, attempt = [records.column(name).to_numpy() for name in KEYS]
        return Batch(Keys(position, sample, attempt), records.drop_columns(list(KEYS)))


def as_ragged(array: pa.Array) -> Ragged:
    """Return a list array as values and offsets from 0, zero-copy for non-null numbers."""
    offsets, values = array.offsets.to_numpy(), array.values
    # A slice of an array has the whole one's values, and offsets into them.
    first, last = int(offsets[0]), int(offsets[-1])
    if last - first < len(values):
        values = values.slice(first, last - first)
    return Ragged(_to_numpy(values), offsets - first if first else offsets)


def _to_numpy(values: pa.Array) -> np.ndarray:
    """[values], or [values, k] for fixed-size lists."""
    if not pa.types.is_fixed_size_list(values.type):
        return values.to_numpy(zero_copy_only=False)
    flat = values.flatten().to_numpy(zero_copy_only=False)
    return flat.reshape(len(values), values.type.list_size)


def list_array(values: Any, offsets: np.ndarray, kind: pa.DataType | None = None) -> pa.Array:
    """Make a LargeList array on these buffers, the inverse of `as_ragged`. Its items are declared
    non-null if none is null.
    """
    elements = values if isinstance(values, pa.Array) else _to_arrow(values, kind)
    field = pa.field("item", elements.type, nullable=bool(elements.null_count))
    starts = pa.array(np.asarray(offsets, dtype=np.int64))
    return pa.LargeListArray.from_arrays(starts, elements, type=pa.large_list(field))


def _to_arrow(values: Any, kind: pa.DataType | None) -> pa.Array:
    """Values as Arrow; the rows of a matrix become fixed-size lists."""
    if not isinstance(values, np.ndarray) or values.ndim < 2:
        return pa.array(values, type=kind)
    numbers = pa.array(values.reshape(-1), type=None if kind is None else kind.value_type)
    return pa.FixedSizeListArray.from_arrays(numbers, values.shape[1])


def _make_field(
    name: str, array: pa.Array, declared: pa.Field | None, schema: type[Schema]
) -> pa.Field:
    if declared is None:
        return pa.field(name, array.type)
    if array.null_count and not declared.nullable:
        raise DataError(
            f"column {name!r} of {schema.__name__} holds {array.null_count} nulls; it is required"
        )
    return declared.with_type(array.type)


def _convert(name: str, values: Any, declared: pa.Field | None) -> pa.Array:
    """One column as Arrow, of the declared field's type if there is one."""
    kind = None if declared is None else declared.type
    elements = values.values if isinstance(values, Ragged) else values
    if is_tensor(elements):
        raise DataError(
            f"column {name!r} is given as a tensor, and is not declared device. Fix: .numpy(), or"
            " column(..., device=True) in its schema."
        )
    if isinstance(values, Ragged):
        return _convert_ragged(name, values, kind)
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    return _cast(name, values, kind)


def _convert_ragged(name: str, column: Ragged, kind: pa.DataType | None) -> pa.Array:
    if kind is None or not pa.types.is_large_list(kind):
        return list_array(column.values, column.offsets)
    element_type = kind.value_type
    array = list_array(column.values, column.offsets, element_type)
    if pa.types.is_fixed_size_list(element_type) and array.values.type != element_type:
        raise DataError(
            f"column {name!r}: expected values of {element_type}, found {array.values.type}. Fix:"
            f" an array [values, {element_type.list_size}]."
        )
    return array


def _cast(name: str, values: Any, kind: pa.DataType | None) -> pa.Array:
    # A prompt is text or a list of messages: both are declared.
    if isinstance(values, pa.Array) and (kind is None or values.type == kind or name == "prompt"):
        return values
    try:
        if isinstance(values, pa.Array):
            return values.cast(kind)
        return pa.array(values, type=kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise DataError(f"column {name!r}: expected {kind}: {error}") from error
