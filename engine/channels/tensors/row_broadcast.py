"""Rows from one rank to the others of its world, which need the same rows, by broadcasts.

    broadcast    what                                                             length
    first        bytes of the second                                              known
    second       the reply: headers with checksums and layouts of device columns  in the first
    third        every buffer that is not empty                                   in the second
    fourth       the values of device columns, if there are any                   in the second

Owns: these tensors, and their checks before anything is allocated. Does not own: the reply, its
frames and their checks (engine/channels/multipart.py), a broadcast (collective.py), which rows
(engine/run/worker).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from math import prod

import numpy as np
import pyarrow as pa
import torch
from msgspec.structs import replace
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from dataflow.batch import Batch
from dataflow.errors import RunError
from engine.channels import multipart
from engine.channels.block_requests import BlockHeader, Reply, TensorLayout
from engine.channels.contract import BlockRequest, MovedBytes, Scheduled, make_refusal
from engine.channels.tensors.collective import CollectiveChannel
from engine.channels.tensors.column_hashes import of_tensors
from engine.channels.tensors.world import LOCK_STEP, agreed_device

LARGEST = 64 << 30
"""Bytes of the rows of one broadcast, at most."""
GIVER = 0
"""The rank that gives."""
_NOTHING = -1
"""In the place of the second broadcast's bytes, where nothing is given and none follows."""
_NUMBERS = frozenset([
    "float16", "float32", "float64", "int8", "int16", "int32", "int64",
    "uint8", "uint16", "uint32", "uint64",
])  # fmt: skip
"""Dtypes of device columns."""

Taken = tuple[pa.RecordBatch, dict[str, Tensor]]
"""Rows, and the values of their device columns, on the device that they came through."""


class RowBroadcast:
    """One rank's end, not for several threads at once. device: of all payloads, `cpu` (gloo) or
    this rank's own (NCCL); record batches are in host memory. giver: rank 0's name in errors.
    content: check device columns by hashes; the same on all ranks. rank, size: which of how many.
    """

    def __init__(
        self,
        channel: Scheduled,
        *,
        giver: str,
        device: str = "cpu",
        content: bool = False,
        rank: int = GIVER,
        size: int = 1,
    ) -> None:
        self._rank, self._size = rank, size
        self._channel = channel
        self._giver = giver
        self._device = device
        self._content = content
        self._number = 0
        self._sequence = 0
        self._moved = MovedBytes()

    def give(self, inputs: Mapping[str, Batch]) -> None:
        """Rank 0: send these rows. Raises DataError, and what the channel raises."""
        headers: list[BlockHeader] = []
        frames: list[pa.Buffer] = []
        values: list[Tensor] = []
        for number, batch in enumerate(inputs.values()):
            header, buffers = multipart.frame_block(number, batch.records)
            tensors = {n: tensor.to(self._device) for n, tensor in batch.device.items()}
            headers.append(replace(header, tensors=self._layouts(tensors)))
            frames += buffers
            values += tensors.values()
        reply = multipart.seal_message(
            Reply(self._next(), multipart.add_checksums(headers, frames))
        )
        self._cast([torch.tensor([len(reply)])])
        self._cast([_tensor(reply)])
        self._cast([_tensor(frame) for frame in frames])
        if values:
            self._cast(values)

    def give_nothing(self) -> None:
        """Rank 0: let the others go, which wait for rows that it does not have."""
        self._cast([torch.tensor([_NOTHING])])

    def take(self, names: Sequence[str]) -> dict[str, Taken]:
        """Any other rank: these inputs' rows. Raises RunError, and what the channel raises."""
        inputs = self.take_any(names)
        if inputs is None:
            raise self._wrong("nothing, expected rows")
        return inputs

    def take_any(self, names: Sequence[str]) -> dict[str, Taken] | None:
        """The same; None where rank 0 gives nothing."""
        length = int(self._receive([torch.zeros(1, dtype=torch.int64)])[0])
        if length == _NOTHING:
            return None
        reply = self._reply(length, len(names))
        lengths = multipart.lengths_of(reply)
        frames = self._receive([torch.empty(n, dtype=torch.uint8) for n in lengths])
        values = self._values(_layouts_of(reply))
        self._moved.add("broadcast", sum(tensor.nbytes for tensor in (*frames, *values)))
        asked = [BlockRequest(worker=self._giver, block=number) for number in range(len(names))]
        try:
            incoming = multipart.IncomingReply.of(reply, [frame.numpy() for frame in frames])
            rows = incoming.rows(asked)
        except (KeyError, RunError) as error:
            raise self._wrong(str(error)) from error
        values_left = iter(values)
        inputs: dict[str, Taken] = {}
        for name, records, layouts in zip(names, rows, _tensors_of(reply), strict=True):
            inputs[name] = records, {layout.name: next(values_left) for layout in layouts}
        return inputs

    def share(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """Send as many whole numbers as every rank does. Returns those of all, by rank. Raises what
        the channel raises.
        """
        shared: list[tuple[int, ...]] = []
        for rank in range(self._size):
            is_own = rank == self._rank
            sent = torch.tensor(numbers if is_own else [0] * len(numbers), dtype=torch.int64)
            (received,) = self._cast([sent], source=rank)
            shared.append(tuple(received.tolist()))
        return shared

    def take_moved_bytes(self) -> int:
        """Return the bytes of rows received since the last call."""
        return sum(self._moved.take_counts().values())

    def close(self) -> None:
        """Leave; ranks that wait for this one fail."""
        self._channel.close()

    def _values(self, layouts: Sequence[TensorLayout]) -> list[Tensor]:
        """The values of device columns."""
        room = [torch.empty(each.shape, dtype=getattr(torch, each.dtype)) for each in layouts]
        values: list[Tensor] = []
        if room:  # rank 0 sends a fourth broadcast only then
            values = self._cast(room)
        if self._content and [each.hash for each in layouts] != of_tensors(values):
            raise self._wrong("columns on a device whose values were changed on their way")
        return values

    def _reply(self, length: int, inputs: int) -> Reply:
        """The reply of so many bytes that describes what will be given."""
        if not 0 < length <= multipart.LARGEST_REQUEST:
            raise self._wrong(f"a header of {length} bytes")
        (message,) = self._receive([torch.empty(length, dtype=torch.uint8)])
        try:
            reply = multipart.message_of(message.numpy())
        except RunError as error:
            raise self._wrong(str(error)) from error
        if not isinstance(reply, Reply):
            raise self._wrong(f"expected a header, found {type(reply).__name__}")
        number, count = self._next(), len(reply.answers)
        if (reply.id, count) != (number, inputs):
            other_rows = f"found rows {reply.id} of {count}"
            raise self._wrong(f"expected rows {number} of {inputs} inputs, {other_rows}")
        self._require_possible(reply)
        return reply

    def _require_possible(self, reply: Reply) -> None:
        """Raises RunError for tensors that are not allocated here."""
        layouts = _layouts_of(reply)
        if odd := [each for each in layouts if each.dtype not in _NUMBERS]:
            raise self._wrong(f"expected tensors of numbers, found {odd[0]}")
        values = sum(prod(each.shape) * np.dtype(each.dtype).itemsize for each in layouts)
        size = sum(multipart.lengths_of(reply)) + values
        if size > LARGEST:
            raise self._wrong(f"rows of {size} bytes, expected at most {LARGEST}")

    def _layouts(self, tensors: Mapping[str, Tensor]) -> list[TensorLayout]:
        hashes = [0] * len(tensors)
        if self._content:
            hashes = of_tensors(list(tensors.values()))
        layouts: list[TensorLayout] = []
        for (name, tensor), hash in zip(tensors.items(), hashes, strict=True):
            dtype = str(tensor.dtype).removeprefix("torch.")
            layouts.append(TensorLayout(name, dtype, list(tensor.shape), hash))
        return layouts

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _receive(self, tensors: list[Tensor]) -> list[Tensor]:
        """What rank 0 sent, in host memory."""
        return [tensor.cpu() for tensor in self._cast(tensors)]

    def _cast(self, tensors: list[Tensor], source: int = GIVER) -> list[Tensor]:
        moved = [tensor.to(self._device) for tensor in tensors]
        self._channel.broadcast(source, self._sequence, moved)
        self._sequence += 1
        return moved

    def _wrong(self, problem: str) -> RunError:
        """The error for a wrong message; also leaves, so that no rank waits for this one."""
        self._channel.close()
        return make_refusal(self._giver, problem, " the rows that it gives")


def join(
    store: Store,
    share: int,
    part: int,
    members: Sequence[str],
    *,
    content: bool = False,
    timeout: float = LOCK_STEP,
) -> RowBroadcast:
    """The end of member `part` in a share's world. Raises RunError if a member does not come."""
    mine, size = PrefixStore(f"rows/{share}", store), len(members)
    device = agreed_device(mine, part, size)
    channel = CollectiveChannel(
        part, size, mine, name="rows", names=members, device=device, timeout=timeout
    )
    return RowBroadcast(
        channel, giver=members[GIVER], device=device, content=content, rank=part, size=size
    )


def _tensors_of(reply: Reply) -> list[list[TensorLayout]]:
    """The tensors of each block."""
    return [a.tensors if isinstance(a, BlockHeader) else [] for a in reply.answers]


def _layouts_of(reply: Reply) -> list[TensorLayout]:
    return list(chain.from_iterable(_tensors_of(reply)))


def _tensor(buffer: bytes | pa.Buffer) -> Tensor:
    """A uint8 [bytes] view; torch has no read-only memory, so it must not be written to."""
    return torch.from_numpy(np.asarray(_Writable(np.frombuffer(buffer, np.uint8))))


class _Writable:
    """An array's memory, declared writable."""

    def __init__(self, array: np.ndarray) -> None:
        self._data = array
        self.__array_interface__ = array.__array_interface__ | {"data": (array.ctypes.data, False)}
