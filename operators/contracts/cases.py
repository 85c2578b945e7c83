"""Generated rows, row by row: taken, renamed, changed, made into batches, shown.

Owns: those changes, each of which makes another one. Does not own: how rows are drawn
(generate.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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

    def taken(self, rows: Sequence[int]) -> GeneratedColumn:
        """Those of these rows."""
        return replace(self, values=[self.values[row] for row in rows])

    @property
    def by_token(self) -> bool:
        """Whether it has an element for each completion token."""
        return self.declared is not None and self.declared.axis == "T"

    @property
    def floats(self) -> bool:
        """Whether it has measurements, which may be any number."""
        return self.declared is not None and _holds_floats(self.declared.type)


def _holds_floats(kind: pa.DataType) -> bool:
    lists = pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind)
    return pa.types.is_floating(kind.value_type if lists else kind)


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
        found: dict[int, list[int]] = {}
        for row, position in enumerate(self.position):
            found.setdefault(position, []).append(row)
        return list(found.values())

    def take(self, rows: Sequence[int]) -> Generated:
        """These rows, with their keys."""
        return self.arranged(rows, [self.position[r] for r in rows], [self.sample[r] for r in rows])

    def arranged(
        self, rows: Sequence[int], position: list[int], sample: list[int], attempt: int = 0
    ) -> Generated:
        """These rows with other keys."""
        ports = {
            port: {name: column.taken(rows) for name, column in columns.items()}
            for port, columns in self.ports.items()
        }
        masks = [self.masks[row] for row in rows]
        return replace(
            self, position=position, sample=sample, attempt=attempt, masks=masks, ports=ports
        )

    def changed(self, change: Callable[[str, GeneratedColumn], list[Any] | None]) -> Generated:
        """With other values in the columns for which `change` returns some. change: of the port's
        name and the column.
        """
        ports = {}
        for port, columns in self.ports.items():
            found = {name: (change(port, column), column) for name, column in columns.items()}
            ports[port] = {
                name: column if values is None else replace(column, values=values)
                for name, (values, column) in found.items()
            }
        return replace(self, ports=ports)

    def without_holes(self) -> Generated:
        """Without the tokens of mask 0."""
        kept = self.changed(
            lambda port, column: (
                [
                    [v for v, m in zip(row, mask, strict=True) if m]
                    for row, mask in zip(column.values, self.masks, strict=True)
                ]
                if column.by_token
                else None
            )
        )
        return replace(kept, masks=[[1] * sum(mask) for mask in self.masks])

    def fouled(self, rubbish: float) -> Generated:
        """With rubbish wherever a token has mask 0 and its number means nothing."""

        def change(port: str, column: GeneratedColumn) -> list[Any] | None:
            if not (column.by_token and column.floats and _is_ours(column)):
                return None
            return [
                [v if m else _like(v, rubbish) for v, m in zip(row, mask, strict=True)]
                for row, mask in zip(column.values, self.masks, strict=True)
            ]

        return self.changed(change)

    def has(self, name: str) -> bool:
        """Whether a port has this column."""
        return any(name in columns for columns in self.ports.values())

    @property
    def keys(self) -> Keys:
        """Those of the rows."""
        return Keys.of(self.position, self.sample, [self.attempt] * len(self))

    def batch(self, port: str) -> Batch:
        """The rows of one port, in memory of their own."""
        schema = self.schemas[port]
        made = {name: _arrow(column) for name, column in self.ports[port].items()}
        return Batch.make(self.keys, made, schema)


def _like(value: Any, rubbish: float) -> Any:
    return [rubbish] * len(value) if isinstance(value, list) else rubbish


def _is_ours(column: GeneratedColumn) -> bool:
    """Whether it is a number of the model's own tokens: a reward may stand at any token."""
    return column.declared is not None and column.declared.name in _OWN


_OWN = (
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


def _arrow(column: GeneratedColumn) -> Any:
    declared = column.declared
    if declared is None:
        return pa.array(column.values)
    if declared.device:
        return _tensor(column, declared)
    values = column.values
    if pa.types.is_float16(declared.type):
        values = [_half(value) for value in values]
    return pa.array(values, type=declared.whole.type)


def _half(value: Any) -> Any:
    """Arrow takes no other numbers for this type."""
    return [_half(v) for v in value] if isinstance(value, list) else np.float16(value)


def _tensor(column: GeneratedColumn, declared: Column) -> Any:
    kind = declared.type
    number = kind.value_type if pa.types.is_fixed_size_list(kind) else kind
    dtype = number.to_pandas_dtype()
    if declared.axis is None:
        return torch.from_numpy(np.array(column.values, dtype=dtype))
    flat = [value for row in column.values for value in row]
    shape = (len(flat), kind.list_size) if pa.types.is_fixed_size_list(kind) else (len(flat),)
    offsets = np.cumsum([0, *map(len, column.values)]).astype(np.int64)
    return Ragged(torch.from_numpy(np.array(flat, dtype=dtype).reshape(shape)), offsets)


def table(rows: Generated) -> str:
    """The rows as text: position, sample, mask, and each column that is not at its simplest."""
    columns: dict[str, list[str]] = {
        "position": [str(p) for p in rows.position],
        "sample": [str(s) for s in rows.sample],
    }
    if any(rows.masks):
        columns["mask"] = [_cell(mask) for mask in rows.masks]
    for port, found in rows.ports.items():
        for name, column in found.items():
            if name != MASK and any(not _is_simple(v) for v in column.values):
                columns[f"{port}.{name}"] = [_cell(v) for v in column.values]
    wide = {name: max(map(len, [name, *cells])) for name, cells in columns.items()}
    lines = ["  ".join(name.ljust(wide[name]) for name in columns)]
    for row in range(len(rows)):
        lines.append("  ".join(cells[row].ljust(wide[name]) for name, cells in columns.items()))
    chosen = [f"{name}={value!r}" for name, value in rows.params.items()]
    lines += [f"with {', '.join(chosen)}"] if chosen else []
    return "\n".join(f"  {line}".rstrip() for line in lines)


def _is_simple(value: Any) -> bool:
    return all(map(_is_simple, value)) if isinstance(value, list) else not value


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return f"[{' '.join(map(_cell, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else repr(value)
