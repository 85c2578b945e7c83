"""Generated rows, row by row: taken, renamed, changed, made into batches, shown.

Owns: those changes, each of which makes another one. Does not own: how rows are drawn
(generate.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from dataflow.batch import Batch, Keys
from dataflow.ragged import Ragged
from dataflow.schema import Column, Schema

MASK = "completion_mask"


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedColumn:
    """One value for each row; with an axis a list of them. declared: None for a dataset column."""

    values: list[Any]
    declared: Column | None

    def take(self, rows: Sequence[int]) -> GeneratedColumn:
        """The column with the values of these rows alone."""
        return replace(self, values=[self.values[row] for row in rows])

    @property
    def by_token(self) -> bool:
        """Whether it has an element for each completion token."""
        return self.declared is not None and self.declared.axis == "T"

    @property
    def has_floats(self) -> bool:
        """Whether it has measurements, which may be any number."""
        return self.declared is not None and _holds_floats(self.declared.type)


def _holds_floats(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    return pa.types.is_floating(kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """Rows, sorted by (position, sample). masks: of each row, 1 where it is trained. ports: columns
    by port. params: values of free parameters. spare: further draws for a test's own use.
    """

    position: list[int]
    sample: list[int]
    attempt: int = 0
    masks: list[list[int]]
    ports: Mapping[str, Mapping[str, GeneratedColumn]]
    schemas: Mapping[str, type[Schema]]
    params: Mapping[str, Any]
    absent: frozenset[str] = frozenset()
    spare: Any = None

    def __len__(self) -> int:
        return len(self.position)

    @property
    def groups(self) -> list[list[int]]:
        """The rows of each position."""
        rows_by_position: dict[int, list[int]] = {}
        for row, position in enumerate(self.position):
            rows_by_position.setdefault(position, []).append(row)
        return list(rows_by_position.values())

    def take(self, rows: Sequence[int]) -> Generated:
        """These rows, with their keys."""
        position = [self.position[row] for row in rows]
        sample = [self.sample[row] for row in rows]
        return self.arrange(rows, position, sample)

    def arrange(
        self, rows: Sequence[int], position: list[int], sample: list[int], attempt: int = 0
    ) -> Generated:
        """Take these rows and give them other keys."""
        ports: dict[str, dict[str, GeneratedColumn]] = {}
        for port, columns in self.ports.items():
            ports[port] = {name: column.take(rows) for name, column in columns.items()}
        masks = [self.masks[row] for row in rows]
        return replace(
            self, position=position, sample=sample, attempt=attempt, masks=masks, ports=ports
        )

    def change_columns(
        self, new_values: Callable[[str, GeneratedColumn], list[Any] | None]
    ) -> Generated:
        """Give other values to the columns for which `new_values`, called with the port's name and
        the column, returns some.
        """
        ports: dict[str, dict[str, GeneratedColumn]] = {}
        for port, columns in self.ports.items():
            ports[port] = dict(columns)
            for name, column in columns.items():
                values = new_values(port, column)
                if values is not None:
                    ports[port][name] = replace(column, values=values)
        return replace(self, ports=ports)

    def drop_holes(self) -> Generated:
        """Leave out the tokens of mask 0."""

        def trained_values(port: str, column: GeneratedColumn) -> list[Any] | None:
            if not column.by_token:
                return None
            values_and_masks = zip(column.values, self.masks, strict=True)
            return [_trained_elements(row, mask) for row, mask in values_and_masks]

        without_holes = self.change_columns(trained_values)
        return replace(without_holes, masks=[[1] * sum(mask) for mask in self.masks])

    def foul(self, rubbish: float) -> Generated:
        """Put rubbish wherever a token has mask 0 and its number means nothing."""

        def fouled_values(port: str, column: GeneratedColumn) -> list[Any] | None:
            if not (column.by_token and column.has_floats and _is_of_model(column)):
                return None
            values_and_masks = zip(column.values, self.masks, strict=True)
            return [_foul_holes(row, mask, rubbish) for row, mask in values_and_masks]

        return self.change_columns(fouled_values)

    def has(self, name: str) -> bool:
        """Whether a port has this column."""
        return any(name in columns for columns in self.ports.values())

    @property
    def keys(self) -> Keys:
        """Those of the rows."""
        return Keys.of(self.position, self.sample, [self.attempt] * len(self))

    def make_batch(self, port: str) -> Batch:
        """Make a batch of one port's rows, in memory of its own."""
        arrays = {name: _make_array(column) for name, column in self.ports[port].items()}
        return Batch.make(self.keys, arrays, self.schemas[port])


def _trained_elements(row: Sequence[Any], mask: Sequence[int]) -> list[Any]:
    return [element for element, bit in zip(row, mask, strict=True) if bit]


def _foul_holes(row: Sequence[Any], mask: Sequence[int], rubbish: float) -> list[Any]:
    """A row's elements with rubbish where the mask is 0: in each number of a list."""
    fouled: list[Any] = []
    for element, bit in zip(row, mask, strict=True):
        if bit:
            fouled.append(element)
        elif isinstance(element, list):
            fouled.append([rubbish] * len(element))
        else:
            fouled.append(rubbish)
    return fouled


def _is_of_model(column: GeneratedColumn) -> bool:
    """Whether it is a number of the model's own tokens: a reward may stand at any token."""
    return column.declared is not None and column.declared.name in _MODEL_COLUMNS


_MODEL_COLUMNS = (
    "sampler_logprobs",
    "sampler_mass",
    "logprobs",
    "top_logprobs",
    "values",
    "advantage",
    "returns",
    "entropy",
    "at_ids",
)


def _make_array(column: GeneratedColumn) -> Any:
    declared = column.declared
    if declared is None:
        return pa.array(column.values)
    if declared.device:
        return _make_tensor(column, declared)
    values = column.values
    if pa.types.is_float16(declared.type):
        values = _to_halves(values)
    return pa.array(values, type=declared.whole.type)


def _to_halves(element: Any) -> Any:
    """NumPy's float16, in lists as deep: Arrow takes no other numbers for this type."""
    if isinstance(element, list):
        return [_to_halves(inner) for inner in element]
    return np.float16(element)


def _make_tensor(column: GeneratedColumn, declared: Column) -> Any:
    kind = declared.type
    is_of_lists = pa.types.is_fixed_size_list(kind)
    number_kind = kind.value_type if is_of_lists else kind
    dtype = number_kind.to_pandas_dtype()
    if declared.axis is None:
        return torch.from_numpy(np.array(column.values, dtype=dtype))
    elements = list(chain.from_iterable(column.values))
    shape = (len(elements), kind.list_size) if is_of_lists else (len(elements),)
    flat = np.array(elements, dtype=dtype).reshape(shape)
    lengths = list(map(len, column.values))
    offsets = np.cumsum([0, *lengths]).astype(np.int64)
    return Ragged(torch.from_numpy(flat), offsets)


def format_rows(rows: Generated) -> str:
    """Format rows as text: position, sample, mask, and each column that is not at its simplest."""
    columns: dict[str, list[str]] = {}
    columns["position"] = list(map(str, rows.position))
    columns["sample"] = list(map(str, rows.sample))
    if any(rows.masks):
        columns["mask"] = list(map(_format_cell, rows.masks))
    for port, port_columns in rows.ports.items():
        for name, column in port_columns.items():
            if name != MASK and not all(map(_is_simple, column.values)):
                columns[f"{port}.{name}"] = list(map(_format_cell, column.values))
    # Each column is as wide as its widest cell, the name included.
    lines = [""] * (1 + len(rows))
    for name, column_cells in columns.items():
        cells = [name, *column_cells]
        width = max(map(len, cells))
        for index, cell in enumerate(cells):
            lines[index] += f"{cell.ljust(width)}  "
    if rows.params:
        params = (f"{name}={setting!r}" for name, setting in rows.params.items())
        lines.append(f"with {', '.join(params)}")
    return "\n".join(f"  {line}".rstrip() for line in lines)


def _is_simple(element: Any) -> bool:
    if isinstance(element, list):
        return all(map(_is_simple, element))
    return not element


def _format_cell(element: Any) -> str:
    if isinstance(element, list):
        return f"[{' '.join(map(_format_cell, element))}]"
    if isinstance(element, float):
        return f"{element:.6g}"
    return repr(element)
