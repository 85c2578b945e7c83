"""The kernel of `concat`.

Owns: putting the rows of several inputs together, and the columns that some of them lack. Does not
own: which rows there are: each input row comes with the key that it has here.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch
from dataflow.errors import KernelError
from dataflow.kernel import Chunk, KernelNode, Layout, Session
from dataflow.ragged import Ragged
from dataflow.schema import Column, Schema, common_schema


class ConcatRows:
    """See `operators.concat.concat`. Yields the columns that somebody reads, rows by key."""

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        """Nothing to load."""
        self._node = node
        self._schema = common_schema(list(node.schemas.values()))

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        """One batch of all rows. Raises KernelError where a column's types differ."""
        parts = {name: batch for name, batch in chunk.inputs.items() if len(batch)}
        if not self._node.returns:  # only the keys are read
            yield Batch(chunk.keys, pa.RecordBatch.from_arrays([], names=[]))
            return
        completed = [self._complete(name, batch) for name, batch in parts.items()]
        for part in completed[1:]:
            self._require_types(completed[0], part)
        yield Batch.concat(completed).sort()

    def close(self) -> None:
        """Nothing to close."""

    def _complete(self, input_name: str, batch: Batch) -> Batch:
        """Give a part every column that is read, in the order of `node.returns`."""
        schema = self._node.schemas[input_name]
        columns: dict[str, pa.Array | Ragged] = {}
        for name in self._node.returns:
            if name in batch.names:
                columns[name] = batch.array(name)
            else:
                columns[name] = _fill(self._schema.columns[name], batch, schema)
        return Batch.make(batch.keys, columns, self._schema)

    def _require_types(self, first: Batch, other: Batch) -> None:
        for mine, theirs in zip(first.records.schema, other.records.schema, strict=True):
            if mine.type != theirs.type:
                raise KernelError(
                    f"{self._node.name}: expected column {mine.name!r} of one type, found"
                    f" {mine.type} and {theirs.type}. Fix: ports with the same kind of"
                    f" {mine.name}."
                )


def _fill(column: Column, batch: Batch, schema: type[Schema]) -> pa.Array | Ragged:
    """Make a column that the batch lacks: its value of absent rows, once for each row; for a column
    with an axis, once for each of a row's elements.
    """
    if column.axis is None:
        return pa.array([column.absent] * len(batch), column.type)
    aligned_names = (name for name in batch.names if schema.columns[name].axis == column.axis)
    elements = batch.ragged(next(aligned_names))
    values = np.full(len(elements.values), column.absent, column.type.to_pandas_dtype())
    return elements.like(values)
