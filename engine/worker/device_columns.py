"""Columns declared `device`: what a Worker keeps of its own, and how it gets those of others.

    read waits for                    unblocked by
    a transfer from each Worker       that Worker's thread for this one; its end; a time limit

Owns: which columns of a node are on a device, that they are what was declared, where what comes is
put. Does not own: their lengths (in the record batch, which is pulled first), the store
(engine/channels/tensors/columns.py), the transfer.

Own values are views where that is possible. Those of others come into one tensor on this Worker's
device: the first that it sees, else the host's memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch, Ragged
from dataflow.device import declared, dtype_of, lengths_array, offsets_of, require, shape_of
from dataflow.errors import CheckpointError, DataError, KernelError
from dataflow.schema import Column
from engine.channels.contract import BlockRequest
from engine.channels.tensors.columns import ColumnStore
from engine.channels.tensors.pairs import TensorPairs
from engine.coordinator.refs import Gather
from engine.plan.plan import Plan

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Room = tuple[BlockRequest, list["Tensor"]]
"""What is asked of another Worker, and where its values go."""


class DeviceColumns:
    """See the module. pairs: the worlds of this Worker with others; None if it is the only one."""

    def __init__(self, worker: str, plan: Plan, pairs: TensorPairs | None) -> None:
        assert plan.program is not None
        self._worker = worker
        self._place = plan.place
        self._pairs = pairs
        self._store = ColumnStore() if pairs is None else pairs.columns
        of_nodes = {node.name: declared(node.schemas) for node in plan.program.nodes}
        self._declared = {name: columns for name, columns in of_nodes.items() if columns}

    # --- its own ----------------------------------------------------------------------------------

    def require(self, node: str, batch: Batch) -> None:
        """Raises KernelError where a column that the node declares on a device is elsewhere, or of
        another type.
        """
        for name, column in self._declared.get(node, {}).items():
            if name not in batch.names:
                continue
            if name not in batch.device:
                fix = "Columns.make with the schema that the operator returns"
                where = f"{self._place(node)}: column {name!r}"
                raise KernelError(f"{where} is declared device, and is no tensor. Fix: {fix}.")
            try:
                require(f"column {name!r}", column, batch.tensor(name))
            except DataError as error:
                raise KernelError(f"{self._place(node)}: {error}") from error

    def keep(self, block: int, batch: Batch) -> None:
        """Keep a batch's device columns by the number of its block."""
        if batch.device:
            self._store.keep(block, {name: batch.tensor(name) for name in batch.device})

    def release(self, block: int) -> None:
        """Forget those of a block, if there are any; from any thread."""
        self._store.release(block)

    def restored(self, node: str, batch: Batch) -> Batch:
        """Rows from a file, where all values are Arrow, with the node's device columns on this
        Worker's device.

        Raises CheckpointError for values that are not what the node declares.
        """
        records, tensors = batch.records, {}
        for name, column in self._declared.get(node, {}).items():
            if name in batch.names:
                given = _from_host(f"rows of {node}, column {name!r}", column, batch.array(name))
                tensors[name] = given.values
                index = records.schema.get_field_index(name)
                records = records.set_column(index, column.arrow, lengths_array(given, column))
        return Batch(batch.keys, records, tensors)

    # --- those of others --------------------------------------------------------------------------

    def read(
        self,
        gathers: Sequence[Gather],
        asked: Sequence[Sequence[BlockRequest]],
        found: Sequence[Sequence[pa.RecordBatch]],
    ) -> list[dict[str, Tensor]]:
        """The device columns of each gather, the rows of its blocks one after another. asked,
        found: what was pulled of each block. Raises PeerLost.
        """
        rooms: dict[str, list[Room]] = {}
        made = [
            self._read_own(g, a, f, rooms) for g, a, f in zip(gathers, asked, found, strict=True)
        ]
        for peer, wanted in rooms.items():
            self._receive(peer, wanted)
        return made

    def placed(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Values that came by another way, on this Worker's device."""
        return {name: tensor.to(_own_device()) for name, tensor in values.items()}

    def _read_own(
        self,
        gather: Gather,
        asked: Sequence[BlockRequest],
        found: Sequence[pa.RecordBatch],
        rooms: dict[str, list[Room]],
    ) -> dict[str, Tensor]:
        """The tensors of a gather, filled with what this Worker has of them; rooms: is told of what
        is to come.
        """
        there = found[0].schema.names if found else []  # a node may leave out what nobody reads
        columns = {n: c for n, c in self._declared.get(gather.producer, {}).items() if n in there}
        if not columns:
            return {}
        names = tuple(columns)
        if len(asked) == 1 and asked[0].worker == self._worker:
            values = self._store.picked(asked[0].block, names, asked[0].rows)
            return dict(zip(names, values, strict=True))
        counts = {n: [int(offsets_of(part.column(n))[-1]) for part in found] for n in names}
        whole = {n: _empty(column, sum(counts[n])) for n, column in columns.items()}
        parts = {n: whole[n].split(counts[n]) for n in names}
        for index, request in enumerate(asked):
            self._read_block(request, names, [parts[n][index] for n in names], rooms)
        return whole

    def _read_block(
        self,
        request: BlockRequest,
        names: tuple[str, ...],
        target: list[Tensor],
        rooms: dict[str, list[Room]],
    ) -> None:
        """Copy a block of this Worker's own; note one of another in rooms."""
        if request.worker == self._worker:
            _copy(self._store.picked(request.block, names, request.rows), target)
            return
        wanted = replace(request, columns=names)
        rooms.setdefault(request.worker, []).append((wanted, target))

    def _receive(self, peer: str, wanted: Sequence[Room]) -> None:
        """One transfer of all that another Worker has."""
        assert self._pairs is not None
        targets = [target for _, many in wanted for target in many]
        arrived = self._pairs.receive(
            peer,
            [request for request, _ in wanted],
            lambda device: [_on(target, device) for target in targets],
        )
        _copy(arrived, targets)


def _own_device() -> torch.device:
    import torch

    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def _empty(column: Column, count: int) -> Tensor:
    """Room for so many values, whose contents are whatever was there."""
    import torch

    return torch.empty(
        (count, *shape_of(column)), dtype=getattr(torch, dtype_of(column)), device=_own_device()
    )


def _on(target: Tensor, device: str) -> Tensor:
    """The target itself where it is on that device, else room of its form there."""
    import torch

    return (
        target if target.device == torch.device(device) else torch.empty_like(target, device=device)
    )


def _copy(values: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """What is not in its place yet."""
    for value, target in zip(values, targets, strict=True):
        if value is not target:
            target.copy_(value)


def _from_host(where: str, column: Column, array: pa.Array) -> Ragged:
    """The inverse of `dataflow.device.whole_array`, on this Worker's device."""
    import torch

    values, offsets = array, np.arange(len(array) + 1)
    if column.axis is not None and pa.types.is_large_list(array.type):
        values, offsets = array.flatten(), offsets_of(array)
    if pa.types.is_fixed_size_list(values.type):
        values = values.flatten()
    try:
        numbers = torch.from_numpy(
            values.to_numpy(zero_copy_only=False).reshape(-1, *shape_of(column)).copy()
        )
        given = Ragged(numbers.to(_own_device()), offsets)
        require(where, column, given)
    except (TypeError, ValueError) as error:  # DataError is one
        raise CheckpointError(
            f"{where}: expected {column.whole.type}: {error} Fix: an earlier checkpoint."
        ) from error
    return given
