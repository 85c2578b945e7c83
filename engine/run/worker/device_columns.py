"""Columns declared `device`: keeping those of a Worker, and getting those of others.

    read waits for                    unblocked by
    a transfer from each Worker       that Worker's thread for this one; its end; a time limit

Owns: which columns of a node are on a device, checks against their declaration, where received
values go. Does not own: their lengths (in the record batch, which is pulled first), the store
(engine/channels/tensors/columns.py), the transfer.

Own values are views where possible. Those of others are received into one tensor on this Worker's
device: its first GPU, else the host's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pyarrow as pa

from dataflow.batch import Batch, Ragged
from dataflow.device import (
    declared_device_columns,
    dtype_of,
    lengths_array,
    offsets_of,
    require_declared_tensor,
    shape_of,
)
from dataflow.errors import CheckpointError, DataError, KernelError
from dataflow.schema import Column
from engine.channels.contract import BlockRequest
from engine.channels.tensors.columns import ColumnStore
from engine.channels.tensors.pairs import TensorPairs
from engine.plan.plan import Plan
from engine.protocol.refs import Gather

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Room = tuple[BlockRequest, list["Tensor"]]
"""A request to another Worker, and the tensors that its values are copied to."""


class DeviceColumns:
    """Of one Worker. pairs: its worlds with others; None if it is the only one."""

    def __init__(self, worker: str, plan: Plan, pairs: TensorPairs | None) -> None:
        assert plan.program is not None
        self._worker = worker
        self._place = plan.place
        self._pairs = pairs
        self._store = ColumnStore() if pairs is None else pairs.columns
        of_nodes = {node.name: declared_device_columns(node.schemas) for node in plan.program.nodes}
        self._declared = {name: columns for name, columns in of_nodes.items() if columns}

    def require(self, node: str, batch: Batch) -> None:
        """Raises KernelError if a declared device column is not a tensor of its type."""
        for name, column in self._declared_in(node, batch.names).items():
            if name not in batch.device:
                fix = "Columns.make with the schema that the operator returns"
                where = f"{self._place(node)}: column {name!r}"
                raise KernelError(f"{where} is declared device, and is no tensor. Fix: {fix}.")
            try:
                require_declared_tensor(f"column {name!r}", column, batch.tensor(name))
            except DataError as error:
                raise KernelError(f"{self._place(node)}: {error}") from error

    def keep(self, block: int, batch: Batch) -> None:
        """Keep a batch's device columns under the number of its block."""
        self._store.keep(block, {name: batch.tensor(name) for name in batch.device})

    def release(self, blocks: Iterable[int]) -> None:
        """Forget the device columns of blocks, if any; from any thread."""
        if not self._declared:
            return
        for block in blocks:
            self._store.release(block)

    def has_columns_of(self, inputs: Mapping[str, Sequence[Gather]]) -> bool:
        """Whether some of what these inputs take may be on devices."""
        gathers = chain.from_iterable(inputs.values())
        return any(gather.producer in self._declared for gather in gathers)

    def restore_batch(self, node: str, batch: Batch) -> Batch:
        """Put device columns of a file's rows on this Worker's device. Raises CheckpointError."""
        records, tensors = batch.records, {}
        for name, column in self._declared_in(node, batch.names).items():
            values = _from_host(f"rows of {node}, column {name!r}", column, batch.array(name))
            tensors[name] = values.values
            index = records.schema.get_field_index(name)
            records = records.set_column(index, column.arrow, lengths_array(values, column))
        return Batch(batch.keys, records, tensors)

    def _declared_in(self, node: str, names: Sequence[str]) -> dict[str, Column]:
        """The node's device columns among these; a node may leave out what nobody reads."""
        return {n: c for n, c in self._declared.get(node, {}).items() if n in names}

    def read(
        self,
        gathers: Sequence[Gather],
        requests_by_gather: Sequence[Sequence[BlockRequest]],
        records_by_gather: Sequence[Sequence[pa.RecordBatch]],
    ) -> list[dict[str, Tensor]]:
        """The device columns of each gather. asked, found: of each block. Raises PeerLost."""
        if not self._declared:
            return [{} for _ in gathers]
        rooms: dict[str, list[Room]] = {}
        each = zip(gathers, requests_by_gather, records_by_gather, strict=True)
        columns = [self._read_own(g.producer, a, f, rooms) for g, a, f in each]
        for peer, wanted in rooms.items():
            self._receive(peer, wanted)
        return columns

    def move_to_device(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Move values that came by a broadcast to this Worker's device."""
        return {name: tensor.to(_own_device()) for name, tensor in values.items()}

    def _read_own(
        self,
        producer: str,
        requests: Sequence[BlockRequest],
        blocks: Sequence[pa.RecordBatch],
        rooms: dict[str, list[Room]],
    ) -> dict[str, Tensor]:
        """A gather's tensors with this Worker's values; adds what others have to `rooms`."""
        if not blocks:
            return {}
        columns = self._declared_in(producer, blocks[0].schema.names)
        if not columns:
            return {}
        names = tuple(columns)
        if len(requests) == 1 and requests[0].worker == self._worker:
            values = self._store.pick_rows(requests[0].block, names, requests[0].rows)
            return dict(zip(names, values, strict=True))
        whole, parts = _allocate(columns, blocks)
        for request, targets in zip(requests, parts, strict=True):
            if request.worker == self._worker:
                _copy(self._store.pick_rows(request.block, names, request.rows), targets)
            else:
                wanted = msgspec.structs.replace(request, columns=names)
                rooms.setdefault(request.worker, []).append((wanted, targets))
        return whole

    def _receive(self, peer: str, wanted: Sequence[Room]) -> None:
        """Get everything wanted of another Worker, in one transfer."""
        assert self._pairs is not None
        requests = [request for request, _ in wanted]
        targets = list(chain.from_iterable(tensors for _, tensors in wanted))
        # The pair's device may be another than the targets': values then come beside them.
        arrived = self._pairs.receive(peer, requests, lambda at: [_on(t, at) for t in targets])
        _copy(arrived, targets)


def _own_device() -> torch.device:
    import torch

    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def _allocate(
    columns: Mapping[str, Column], blocks: Sequence[pa.RecordBatch]
) -> tuple[dict[str, Tensor], list[list[Tensor]]]:
    """Uninitialized tensors for all blocks, by column; and each block's part of each of them."""
    import torch

    whole: dict[str, Tensor] = {}
    parts: list[list[Tensor]] = [[] for _ in blocks]
    for name, column in columns.items():
        offsets = [offsets_of(records.column(name)) for records in blocks]
        counts = [int(block_offsets[-1]) for block_offsets in offsets]
        shape, dtype = (sum(counts), *shape_of(column)), getattr(torch, dtype_of(column))
        whole[name] = torch.empty(shape, dtype=dtype, device=_own_device())
        for part, values in zip(parts, whole[name].split(counts), strict=True):
            part.append(values)
    return whole, parts


def _on(target: Tensor, device: str) -> Tensor:
    """The target itself if it is on that device, else an uninitialized tensor like it there."""
    import torch

    if target.device == torch.device(device):
        return target
    return torch.empty_like(target, device=device)


def _copy(values: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy the values that are not in their place yet."""
    for source, target in zip(values, targets, strict=True):
        if source is not target:
            target.copy_(source)


def _from_host(where: str, column: Column, array: pa.Array) -> Ragged:
    """The inverse of `dataflow.device.whole_array`, on this Worker's device."""
    import torch

    values, offsets = array, np.arange(len(array) + 1)
    if column.axis is not None and pa.types.is_large_list(array.type):
        values, offsets = array.flatten(), offsets_of(array)
    if pa.types.is_fixed_size_list(values.type):
        values = values.flatten()
    try:
        numbers = values.to_numpy(zero_copy_only=False).reshape(-1, *shape_of(column)).copy()
        restored = Ragged(torch.from_numpy(numbers).to(_own_device()), offsets)
        require_declared_tensor(where, column, restored)
    except (TypeError, ValueError) as error:  # DataError is one
        expected = f"expected {column.whole.type}: {error}"
        raise CheckpointError(f"{where}: {expected} Fix: an earlier checkpoint.") from error
    return restored
