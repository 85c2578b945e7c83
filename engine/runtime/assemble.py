"""From Gathers to the batches that a kernel sees.

Owns: asking for the rows of every gather at once, and joining the columns of one input.
Does not own: which rows (coordinator), nor transport (channels).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch, Keys
from engine.channels.contract import Pull, Request
from engine.coordinator.messages import Gather


def assemble(keys: Keys, inputs: Mapping[str, Sequence[Gather]], channel: Pull) -> dict[str, Batch]:
    """The batch of each input, rows in the order of the keys."""
    gathers = [gather for many in inputs.values() for gather in many]
    found = iter(collect(gathers, channel))
    return {name: _joined(keys, [next(found) for _ in many]) for name, many in inputs.items()}


def collect(gathers: Sequence[Gather], channel: Pull) -> list[pa.RecordBatch]:
    """The rows of each gather, in its order; no columns named means all of them."""
    asked = [requests(gather) for gather in gathers]
    parts = iter(channel.fetch([request for many in asked for request in many]))
    return [_ordered(gather, [next(parts) for _ in many]) for gather, many in zip(gathers, asked, strict=True)]


def requests(gather: Gather) -> list[Request]:
    """What a gather asks for: one request a block, of the rows that it has there, in its order."""
    one = len(gather.refs) == 1
    return [
        Request(
            worker=worker,
            block=block,
            columns=gather.columns,
            rows=gather.row if one else gather.row[gather.block == number],
        )
        for number, (worker, block) in enumerate(gather.refs)
    ]


def _ordered(gather: Gather, parts: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """The blocks' rows in the order of the gather."""
    if len(parts) == 1:
        return parts[0]
    if not parts or not parts[0].num_columns:
        return pa.RecordBatch.from_arrays([], names=[])
    joined = pa.concat_batches(parts)
    if (np.diff(gather.block) >= 0).all():
        return joined
    place = np.empty(len(gather.block), dtype=np.int64)
    place[np.argsort(gather.block, kind="stable")] = np.arange(len(place))
    return joined.take(pa.array(place))


def _joined(keys: Keys, parts: Sequence[pa.RecordBatch]) -> Batch:
    if len(parts) == 1:
        return Batch(keys, parts[0])
    columns = {name: part.column(name) for part in parts for name in part.schema.names}
    unique = {field.name: field for part in parts for field in part.schema}
    schema = pa.schema([unique[name] for name in columns])
    return Batch(keys, pa.RecordBatch.from_arrays(list(columns.values()), schema=schema))
