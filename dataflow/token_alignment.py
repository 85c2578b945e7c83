"""Token alignment: in one row, all columns of an axis have the same length.

Owns: comparing lengths. Does not own: which columns there should be (schema.py), when they are
compared (engine/run/worker/alignment.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dataflow.arrays import same_array, steps_between
from dataflow.batch import Batch
from dataflow.schema import Axis, Schema

AXES: dict[Axis, str] = {"P": "prompt token", "T": "completion token", "K": "turn"}
"""What an element of a column with this axis belongs to, in messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Misaligned:
    """The first row with two lengths on one axis. first, second: the columns, `<port>.<column>`."""

    row: int
    axis: Axis
    first: str
    second: str
    lengths: tuple[int, int]

    def __str__(self) -> str:
        a, b = self.lengths
        return (
            f"expected one value for every {AXES[self.axis]}, found {a} in {self.first!r} and {b}"
            f" in {self.second!r}"
        )


def find_misaligned(ports: Iterable[tuple[str, Batch, type[Schema]]]) -> Misaligned | None:
    """Find the first difference between columns of one axis, None if there is none; all batches
    have the same rows.
    """
    # Of each axis the first column, with which all others are compared.
    first_columns: dict[Axis, tuple[str, np.ndarray]] = {}
    for port, batch, schema in ports:
        for name in batch.names:
            column = schema.columns.get(name)
            if column is None or column.axis is None:
                continue
            label = f"{port}.{name}" if port else name
            offsets = batch.offsets(name)
            first, first_offsets = first_columns.setdefault(column.axis, (label, offsets))
            if not same_array(first_offsets, offsets):
                first_lengths, lengths = steps_between(first_offsets), steps_between(offsets)
                row = int(np.argmax(first_lengths != lengths))
                return Misaligned(
                    row=row,
                    axis=column.axis,
                    first=first,
                    second=label,
                    lengths=(int(first_lengths[row]), int(lengths[row])),
                )
    return None
