"""From Gathers to the batches that a kernel sees.

Owns: fetching blocks, picking rows and columns, and joining the columns of one input.
Does not own: which rows (coordinator), nor transport (channels).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch, Keys
from engine.channels.contract import Pull
from engine.coordinator.messages import Gather


def assemble(keys: Keys, inputs: Mapping[str, Sequence[Gather]], channel: Pull) -> dict[str, Batch]:
    """The batch of each input, rows in the order of the keys."""
    return {name: _input(keys, gathers, channel) for name, gathers in inputs.items()}


def _input(keys: Keys, gathers: Sequence[Gather], channel: Pull) -> Batch:
    parts = [collect(gather, channel) for gather in gathers]
    if len(parts) == 1:
        return Batch(keys, parts[0])
    columns = {name: part.column(name) for part in parts for name in part.schema.names}
    fields = [field for part in parts for field in part.schema]
    unique = {field.name: field for field in fields}
    schema = pa.schema([unique[name] for name in columns])
    return Batch(keys, pa.RecordBatch.from_arrays(list(columns.values()), schema=schema))


def collect(gather: Gather, channel: Pull) -> pa.RecordBatch:
    """The rows of one gather, in its order; no columns named means all of them."""
    blocks = [_projected(channel.fetch(worker, block), gather.columns) for worker, block in gather.refs]
    if len(blocks) == 1 and _whole(gather, blocks[0]):
        return blocks[0]
    if not blocks or not blocks[0].num_columns:
        return pa.RecordBatch.from_arrays([], names=[])
    starts = np.cumsum([0, *(b.num_rows for b in blocks)])
    index = starts[gather.block] + gather.row
    joined = blocks[0] if len(blocks) == 1 else pa.concat_batches(blocks)
    return joined.take(pa.array(index))


def _whole(gather: Gather, block: pa.RecordBatch) -> bool:
    rows = gather.row
    return len(rows) == block.num_rows and bool((rows == np.arange(len(rows), dtype=rows.dtype)).all())


def _projected(batch: Batch, columns: Sequence[str]) -> pa.RecordBatch:
    """Only the named columns; a name ending in /* stands for all that begin so. A missing column is an error."""
    if not columns:
        return batch.records
    names: list[str] = []
    for name in columns:
        if name.endswith("/*"):
            names += [n for n in batch.names if n.startswith(name[:-1])]
        else:
            batch.array(name)  # raises DataError with the names that there are
            names.append(name)
    return batch.records.select(names)
