"""Rows from one rank to all others of its world, by broadcasts: those that need the same rows and fetched none.

    broadcast    what                                            length
    first        bytes of the header                             known
    second       the header: schemas, rows, arrays, lengths      of the first
    third        every buffer that is not empty                  of the second

Owns: which tensors these are, and the checks of what came, those of a pull's reader: lengths, checksums, arrays that
fit their schema. Does not own: the form of header and buffers (multipart.py), a broadcast (collective.py), which rows
(engine/runtime/worker.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from dataflow.errors import RunError
from engine.channels.collective import CollectiveChannel
from engine.channels.contract import Request, Scheduled
from engine.channels.multipart import LARGEST_REQUEST, Header, Sent, header_bytes, header_of, received, sent
from engine.channels.world import TIMEOUT, agreed_device

LARGEST = 64 << 30
"""Bytes of the rows of one broadcast, at most: beyond it nothing is allocated."""
GIVER = 0
"""The rank that gives."""


class RowCast:
    """One rank's end. Rows lie in the host's memory before and after. device: where they go through, `cpu` (gloo) or
    where each rank has a device of its own that (NCCL). giver: what rank 0 is called in errors. Not for several threads
    at once.
    """

    def __init__(self, channel: Scheduled, *, giver: str, device: str = "cpu") -> None:
        self._channel = channel
        self._giver = giver
        self._device = device
        self._number = 0
        self._sequence = 0
        self._moved = 0

    def give(self, inputs: Mapping[str, pa.RecordBatch]) -> None:
        """Rank 0: these rows, to all others. Raises DataError for a column whose type does not travel, and what the
        channel raises.
        """
        parts = [sent(number, records) for number, records in enumerate(inputs.values())]
        header = np.frombuffer(header_bytes(self._next(), [answer for answer, _ in parts]), np.uint8)
        self._cast([torch.tensor([len(header)])])
        self._cast([_of(header)])
        self._cast([_of(np.frombuffer(buffer, np.uint8)) for _, buffers in parts for buffer in buffers])

    def take(self, names: Sequence[str]) -> dict[str, pa.RecordBatch]:
        """Another rank: the rows of these inputs, which have to be those that are given.

        Raises RunError for what cannot be right, and what the channel raises.
        """
        (length,) = self._came([torch.zeros(1, dtype=torch.int64)])
        header = self._header(int(length), len(names))
        buffers = self._came([torch.empty(n, dtype=torch.uint8) for n in _lengths(header)])
        self._moved += sum(buffer.numel() for buffer in buffers)
        asked = [Request(worker=self._giver, block=number) for number in range(len(names))]
        try:
            found = received(header, [buffer.numpy() for buffer in buffers], asked)
        except (KeyError, RunError) as error:
            raise self._wrong(str(error)) from error
        return dict(zip(names, found, strict=True))

    def moved(self) -> int:
        """Bytes of rows that came since the last call."""
        found, self._moved = self._moved, 0
        return found

    def close(self) -> None:
        """Leave; whoever waits for this rank is told."""
        self._channel.close()

    def _header(self, length: int, inputs: int) -> Header:
        if not 0 < length <= LARGEST_REQUEST:
            raise self._wrong(f"a header of {length} bytes")
        (data,) = self._came([torch.empty(length, dtype=torch.uint8)])
        try:
            header = header_of(data.numpy())
        except RunError as error:
            raise self._wrong(str(error)) from error
        number = self._next()
        if header.id != number or len(header.answers) != inputs:
            what = f"rows {number} of {inputs} inputs, found rows {header.id} of {len(header.answers)}"
            raise self._wrong(f"expected {what}")
        if sum(_lengths(header)) > LARGEST:
            raise self._wrong(f"rows of {sum(_lengths(header))} bytes, expected at most {LARGEST}")
        return header

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _came(self, tensors: list[Tensor]) -> list[Tensor]:
        """What was given, in the host's memory."""
        return [tensor.cpu() for tensor in self._cast(tensors)]

    def _cast(self, tensors: list[Tensor]) -> list[Tensor]:
        moved = [tensor.to(self._device) for tensor in tensors]
        self._channel.broadcast(GIVER, self._sequence, moved)
        self._sequence += 1
        return moved

    def _wrong(self, found: str) -> RunError:
        """What is wrong; nobody waits for this rank any longer."""
        self._channel.close()
        return RunError(
            f"{self._giver}: refused the rows that it gives: {found}. Fix: both ends have to be of one build of the "
            "engine."
        )


def join(store: Store, rank: int, tensor: int, names: Sequence[str], *, timeout: float = TIMEOUT) -> RowCast:
    """This rank's end in the world of its share: `tensor` ranks one after another, of those that meet at the store.

    names: of all of these. Raises RunError where one of the share does not come.
    """
    share, own = divmod(rank, tensor)
    mine = PrefixStore(f"rows/{share}", store)
    device = agreed_device(mine, own, tensor)
    members = tuple(names[share * tensor : (share + 1) * tensor])
    channel = CollectiveChannel(own, tensor, mine, name="rows", names=members, device=device, timeout=timeout)
    return RowCast(channel, giver=members[GIVER], device=device)


def _lengths(header: Header) -> list[int]:
    """Of the buffers that follow."""
    return [n for answer in header.answers if isinstance(answer, Sent) for n in answer.lengths if n]


def _of(data: np.ndarray) -> Tensor:
    """uint8 [bytes], which nobody writes, as a tensor: nothing is copied, though torch knows no read-only memory."""
    return torch.from_numpy(np.asarray(_Writable(data)))


class _Writable:
    """An array's memory, which it keeps, said to be writable."""

    def __init__(self, data: np.ndarray) -> None:
        self._data = data
        self.__array_interface__ = data.__array_interface__ | {"data": (data.ctypes.data, False)}
