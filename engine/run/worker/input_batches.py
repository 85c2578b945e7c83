"""From Gathers to the batches that a kernel sees.

Owns: fetching the rows of every gather at once, joining the columns of one input. Does not own:
which rows (coordinator), transport (channels), values on devices (device_columns.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from dataflow.arrays import any_true, steps_between
from dataflow.batch import Batch, Keys, Ragged
from dataflow.device import offsets_of, taken
from engine.channels.contract import BlockRequest, Pull
from engine.protocol.grouping import grouped
from engine.protocol.refs import Gather
from engine.run.worker.device_columns import DeviceColumns


class AssembledRows(msgspec.Struct, frozen=True, eq=False):
    """Rows of one producer: a record batch, and the values of its device columns."""

    records: pa.RecordBatch
    device: Mapping[str, Any]


def assemble(
    keys: Keys,
    inputs: Mapping[str, Sequence[Gather]],
    channel: Pull,
    device: DeviceColumns | None = None,
    count: Callable[[Gather, pa.RecordBatch], None] | None = None,
) -> dict[str, Batch]:
    """The batch of each input, in the order of its keys. count: called with each gather's rows.
    Raises PeerLost.
    """
    gathers = [g for many in inputs.values() for g in many]
    rows = collect(gathers, channel, device)
    for gather, its_rows in zip(gathers, rows, strict=True):
        if count is not None:
            count(gather, its_rows.records)
    rows_left = iter(rows)
    batches: dict[str, Batch] = {}
    for name, many in inputs.items():
        reduced_keys = many[0].keys if many else None  # of rows that are reduced
        batches[name] = _joined(
            keys if reduced_keys is None else reduced_keys, [next(rows_left) for _ in many]
        )
    return batches


def collect(
    gathers: Sequence[Gather], channel: Pull, device: DeviceColumns | None = None
) -> list[AssembledRows]:
    """The rows of each gather, in its order. Raises PeerLost."""
    requests_by_gather = [requests(gather) for gather in gathers]
    parts = iter(channel.fetch([request for many in requests_by_gather for request in many]))
    blocks_by_gather = [[next(parts) for _ in many] for many in requests_by_gather]
    values = (
        [{} for _ in gathers]
        if device is None
        else device.read(gathers, requests_by_gather, blocks_by_gather)
    )
    return [_ordered(*each) for each in zip(gathers, blocks_by_gather, values, strict=True)]


def requests(gather: Gather) -> list[BlockRequest]:
    """One request for each block of a gather: the rows that it needs of it, in its order."""
    if len(gather.refs) == 1:
        rows = [gather.row]
    else:
        rows = [gather.row[mine] for mine in grouped(gather.block, len(gather.refs))]
    return [
        BlockRequest(worker=worker, block=block, columns=gather.columns, rows=block_rows)
        for (worker, block), block_rows in zip(gather.refs, rows, strict=True)
    ]


def _ordered(
    gather: Gather, parts: Sequence[pa.RecordBatch], device: Mapping[str, Any]
) -> AssembledRows:
    """The blocks' rows in the order of the gather. device: the values of its blocks in sequence."""
    if len(parts) == 1:
        return AssembledRows(parts[0], device)
    if not parts or not parts[0].num_columns:
        return AssembledRows(pa.RecordBatch.from_arrays([], names=[]), {})
    joined = pa.concat_batches(parts)
    if not any_true(steps_between(gather.block) < 0):
        return AssembledRows(joined, device)
    place = np.empty(len(gather.block), dtype=np.int64)
    place[np.argsort(gather.block, kind="stable")] = np.arange(len(place))
    lengths = {name: offsets_of(joined.column(name)) for name in device}
    moved = {
        name: taken(Ragged(values, lengths[name]), place).values for name, values in device.items()
    }
    return AssembledRows(joined.take(pa.array(place)), moved)


def _joined(keys: Keys, parts: Sequence[AssembledRows]) -> Batch:
    if len(parts) == 1:
        return Batch(keys, parts[0].records, parts[0].device)
    columns = {
        name: part.records.column(name) for part in parts for name in part.records.schema.names
    }
    unique = {field.name: field for part in parts for field in part.records.schema}
    schema = pa.schema([unique[name] for name in columns])
    device = {name: values for part in parts for name, values in part.device.items()}
    return Batch(keys, pa.RecordBatch.from_arrays(list(columns.values()), schema=schema), device)
