"""From Gathers to the batches that a kernel sees.

Owns: fetching the rows of every gather at once, joining the columns of one input. Does not own:
which rows (coordinator), transport (channels), values on devices (device_columns.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from dataflow.arrays import any_true, steps_between
from dataflow.batch import Batch, Keys, Ragged
from dataflow.device import offsets_of, take_tensor_rows
from engine.channels.contract import BlockRequest, Pull
from engine.protocol.grouping import group_indices
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
    gathers = list(chain.from_iterable(inputs.values()))
    rows = collect(gathers, channel, device)
    for gather, its_rows in zip(gathers, rows, strict=True):
        if count is not None:
            count(gather, its_rows.records)
    rows_left = iter(rows)
    batches: dict[str, Batch] = {}
    for name, its_gathers in inputs.items():
        its_keys = keys
        if its_gathers and its_gathers[0].keys is not None:  # rows that are reduced
            its_keys = its_gathers[0].keys
        batches[name] = _join_columns(its_keys, list(islice(rows_left, len(its_gathers))))
    return batches


def collect(
    gathers: Sequence[Gather], channel: Pull, device: DeviceColumns | None = None
) -> list[AssembledRows]:
    """The rows of each gather, in its order. Raises PeerLost."""
    requests_by_gather = [requests(gather) for gather in gathers]
    # One fetch for all gathers, so that every Worker is asked at once.
    all_requests = list(chain.from_iterable(requests_by_gather))
    blocks = iter(channel.fetch(all_requests))
    blocks_by_gather = [list(islice(blocks, len(each))) for each in requests_by_gather]
    values: Sequence[Mapping[str, Any]] = [{} for _ in gathers]
    if device is not None:
        values = device.read(gathers, requests_by_gather, blocks_by_gather)
    return list(map(_order_rows, gathers, blocks_by_gather, values))


def requests(gather: Gather) -> list[BlockRequest]:
    """One request for each block of a gather: the rows that it needs of it, in its order."""
    if len(gather.refs) == 1:
        rows = [gather.row]
    else:
        rows = [gather.row[mine] for mine in group_indices(gather.block, len(gather.refs))]
    return [
        BlockRequest(worker=worker, block=block, columns=gather.columns, rows=block_rows)
        for (worker, block), block_rows in zip(gather.refs, rows, strict=True)
    ]


def _order_rows(
    gather: Gather, parts: Sequence[pa.RecordBatch], device: Mapping[str, Any]
) -> AssembledRows:
    """Put the blocks' rows in the gather's order. device: the values of its blocks in sequence."""
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
        name: take_tensor_rows(Ragged(values, lengths[name]), place).values
        for name, values in device.items()
    }
    return AssembledRows(joined.take(pa.array(place)), moved)


def _join_columns(keys: Keys, parts: Sequence[AssembledRows]) -> Batch:
    if len(parts) == 1:
        return Batch(keys, parts[0].records, parts[0].device)
    columns: dict[str, pa.Array] = {}
    fields: dict[str, pa.Field] = {}
    device: dict[str, Any] = {}
    for part in parts:
        records = part.records
        columns.update(zip(records.schema.names, records.columns, strict=True))
        fields.update(zip(records.schema.names, records.schema, strict=True))
        device.update(part.device)
    schema = pa.schema(list(fields.values()))
    return Batch(keys, pa.RecordBatch.from_arrays(list(columns.values()), schema=schema), device)
