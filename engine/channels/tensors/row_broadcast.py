"""Rows from one rank to all others of its world, by broadcasts: those that need the same rows and
fetched none.

    broadcast    what                                                         length
    first        bytes of what is in the second                               known
    second       the header: schemas, rows, arrays, lengths, checksums;       of the first
                 the form of each column declared `device`
    third        every buffer that is not empty                               of the second
    fourth       the values of columns declared `device`, if there are any    of the second

Owns: which tensors these are, and the checks of what came, those of a pull's reader: lengths,
checksums, arrays that fit their schema. Does not own: the form of header and buffers
(multipart.py), a broadcast (collective.py), which rows (engine/worker/worker.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

import msgspec
import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from dataflow.batch import Batch
from dataflow.errors import RunError
from engine.channels.contract import BlockRequest, Scheduled
from engine.channels.frames import checksums
from engine.channels.shm.messages import Count
from engine.channels.tensors.collective import CollectiveChannel
from engine.channels.tensors.hashes import of_tensors
from engine.channels.tensors.world import LOCK_STEP, agreed_device
from engine.channels.zmq.messages import (
    LARGEST_REQUEST,
    Answered,
    Header,
    Sent,
    received,
    reply_bytes,
    reply_of,
    sent,
)

LARGEST = 64 << 30
"""Bytes of the rows of one broadcast, at most: beyond it nothing is allocated."""
GIVER = 0
"""The rank that gives."""
_NUMBERS = frozenset(
    [
        "float16",
        "float32",
        "float64",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
    ]
)

Taken = tuple[pa.RecordBatch, dict[str, Tensor]]
"""Rows, and the values of their columns declared `device`, on the device that they came through."""


class BufferLayout(msgspec.Struct, array_like=True, frozen=True):
    """The tensor of one column declared `device`: of which input, its name, torch's name of its
    dtype, its shape; its hash where content is checked.
    """

    input: Count
    name: str
    dtype: str
    shape: list[Count]
    hash: int = 0


_forms = msgspec.msgpack.Decoder(list[BufferLayout])


class RowBroadcast:
    """One rank's end. Record batches lie in the host's memory before and after. device: where
    everything goes through, `cpu` (gloo) or where each rank has a device of its own that (NCCL).
    giver: what rank 0 is called in errors. content: columns declared `device` are checked by
    hashes, too, as all ranks have to know. Not for several threads at once.
    """

    def __init__(
        self, channel: Scheduled, *, giver: str, device: str = "cpu", content: bool = False
    ) -> None:
        self._channel = channel
        self._giver = giver
        self._device = device
        self._content = content
        self._number = 0
        self._sequence = 0
        self._moved = 0

    def give(self, inputs: Mapping[str, Batch]) -> None:
        """Rank 0: these rows, to all others. Raises DataError for a column whose type does not
        travel, and what the channel raises.
        """
        parts = [sent(number, batch.records) for number, batch in enumerate(inputs.values())]
        buffers = [buffer for _, many in parts for buffer in many]
        header = reply_bytes(
            Header(self._next(), [answer for answer, _ in parts], checksums(buffers), 0)
        )
        forms, values = self._formed(inputs.values())
        self._cast([torch.tensor([len(header), len(forms)])])
        self._cast([_of(header), _of(forms)])
        self._cast([_of(buffer) for buffer in buffers])
        if values:
            self._cast(values)

    def take(self, names: Sequence[str]) -> dict[str, Taken]:
        """Another rank: the rows of these inputs, which have to be those that are given.

        Raises RunError for what cannot be right, and what the channel raises.
        """
        header, forms = self._said(len(names))
        buffers = self._came([torch.empty(n, dtype=torch.uint8) for n in _lengths(header)])
        room = [torch.empty(form.shape, dtype=getattr(torch, form.dtype)) for form in forms]
        values = self._cast(room) if room else []
        if self._content and [form.hash for form in forms] != of_tensors(values):
            raise self._wrong("columns on a device whose values were changed on their way")
        self._moved += sum(tensor.nbytes for tensor in (*buffers, *values))
        asked = [BlockRequest(worker=self._giver, block=number) for number in range(len(names))]
        try:
            found = received(Answered.of(header, [buffer.numpy() for buffer in buffers]), asked)
        except (KeyError, RunError) as error:
            raise self._wrong(str(error)) from error
        device = [
            {
                form.name: tensor
                for form, tensor in zip(forms, values, strict=True)
                if form.input == number
            }
            for number in range(len(names))
        ]
        return dict(zip(names, zip(found, device, strict=True), strict=True))

    def moved(self) -> int:
        """Bytes of rows that came since the last call."""
        found, self._moved = self._moved, 0
        return found

    def close(self) -> None:
        """Leave; whoever waits for this rank is told."""
        self._channel.close()

    def _said(self, inputs: int) -> tuple[Header, list[BufferLayout]]:
        """What is going to be given."""
        (lengths,) = self._came([torch.zeros(2, dtype=torch.int64)])
        if not all(0 < length <= LARGEST_REQUEST for length in lengths.tolist()):
            raise self._wrong(f"headers of {lengths.tolist()} bytes")
        said = self._came([torch.empty(length, dtype=torch.uint8) for length in lengths.tolist()])
        try:
            header, forms = reply_of(said[0].numpy()), _forms.decode(said[1].numpy().data)
        except (RunError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._wrong(str(error)) from error
        if not isinstance(header, Header):
            raise self._wrong(f"expected a header, found {type(header).__name__}")
        number = self._next()
        if header.id != number or len(header.answers) != inputs:
            what = (
                f"rows {number} of {inputs} inputs, found rows {header.id} of {len(header.answers)}"
            )
            raise self._wrong(f"expected {what}")
        if odd := [form for form in forms if form.dtype not in _NUMBERS or form.input >= inputs]:
            raise self._wrong(f"expected tensors of {inputs} inputs of numbers, found {odd[0]}")
        size = sum(_lengths(header)) + sum(
            prod(form.shape) * np.dtype(form.dtype).itemsize for form in forms
        )
        if size > LARGEST:
            raise self._wrong(f"rows of {size} bytes, expected at most {LARGEST}")
        return header, forms

    def _formed(self, batches: Iterable[Batch]) -> tuple[bytes, list[Tensor]]:
        """The forms of all device columns as bytes, and their tensors."""
        named = [
            (number, *named)
            for number, batch in enumerate(batches)
            for named in batch.device.items()
        ]
        values = [tensor.to(self._device) for _, _, tensor in named]
        hashes = of_tensors(values) if self._content else [0] * len(values)
        forms = [
            BufferLayout(
                number, name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), hash
            )
            for (number, name, tensor), hash in zip(named, hashes, strict=True)
        ]
        return msgspec.msgpack.encode(forms), values

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
            f"{self._giver}: refused the rows that it gives: {found}. Fix: both ends have to be of"
            " one build of the engine."
        )


def join(
    store: Store,
    rank: int,
    tensor: int,
    names: Sequence[str],
    *,
    content: bool = False,
    timeout: float = LOCK_STEP,
) -> RowBroadcast:
    """This rank's end in the world of its share: `tensor` ranks one after another, of those that
    meet at the store.

    names: of all of these. Raises RunError where one of the share does not come.
    """
    share, own = divmod(rank, tensor)
    mine = PrefixStore(f"rows/{share}", store)
    device = agreed_device(mine, own, tensor)
    members = tuple(names[share * tensor : (share + 1) * tensor])
    channel = CollectiveChannel(
        own, tensor, mine, name="rows", names=members, device=device, timeout=timeout
    )
    return RowBroadcast(channel, giver=members[GIVER], device=device, content=content)


def _lengths(header: Header) -> list[int]:
    """Of the buffers that follow."""
    return [n for answer in header.answers if isinstance(answer, Sent) for n in answer.lengths if n]


def _of(data: bytes | pa.Buffer) -> Tensor:
    """uint8 [bytes], which nobody writes, as a tensor: nothing is copied, though torch knows no
    read-only memory.
    """
    return torch.from_numpy(np.asarray(_Writable(np.frombuffer(data, np.uint8))))


class _Writable:
    """An array's memory, which it keeps, said to be writable."""

    def __init__(self, data: np.ndarray) -> None:
        self._data = data
        self.__array_interface__ = data.__array_interface__ | {"data": (data.ctypes.data, False)}
