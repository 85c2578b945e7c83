"""The kernel of `data_weight`: a column of numbers that the data has, as weights.

Owns: reading the column. Does not own: refusing weights that are not finite, which the engine does
for every Weight that it is told.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch
from dataflow.errors import DataError
from dataflow.kernel import Chunk, KernelNode, Layout, Session
from dataflow.schema import Weight


class DataWeight:
    """Kernel of `data_weight`. params: column."""

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        """Nothing to load."""
        self._name = node.name
        self._column = node.params["column"]

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        """One batch of all rows. Raises DataError for a column of no numbers, and for a null."""
        rows = chunk.inputs["prompt"]
        column = rows.array(self._column)
        kind = column.type
        is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
        if not (is_number or pa.types.is_boolean(kind) or pa.types.is_decimal(kind)):
            raise DataError(
                f"{self._name}: expected numbers in column {self._column!r}, found {kind}."
                " Fix: a column of numbers."
            )
        missing = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))
        if len(missing):
            key = rows.keys.rows()[missing[0]]
            raise DataError(
                f"{self._name}: row {key}: expected a number in column {self._column!r}, found"
                f" null ({len(missing)} of {len(rows)} rows). Fix: a number for every row, such as"
                " 0 where nothing is known."
            )
        weight = column.cast(pa.float32(), safe=False)
        yield Batch.make(rows.keys, {"weight": weight}, Weight)

    def close(self) -> None:
        """Nothing to close."""
