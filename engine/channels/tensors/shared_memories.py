"""Memories that one Worker fills and others of its host map: on their common GPU, or on the host.

Owns: which of this Worker's memories are in use, tokens, what is mapped of other Workers. Does not
own: the memory itself (cuda_memory.py, host_memory.py), its contents (engine/weights), how a token
gets to a reader (it is a column of a block).

A memory is taken, filled, kept with a block, and free again once that block is released: then it is
filled anew, so that a reader maps each memory once. A token names its Worker's incarnation. The
first token of another one unmaps what was mapped of the one before.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, Struct
from msgspec.msgpack import Decoder

from dataflow.errors import RunError
from engine.channels.block_requests import decode_struct, encode
from engine.channels.contract import MovedBytes

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST = 1 << 48
"""Bytes of a memory that any machine could have."""

Place = Literal["cuda", "host"]


class MemoryToken(Struct, array_like=True, frozen=True, tag="memory"):
    """What a process maps a memory by. device: the GPU's id, empty on the host."""

    incarnation: Annotated[bytes, Meta(min_length=16, max_length=16)]
    place: Place
    device: str
    size: Annotated[int, Meta(gt=0, le=_LARGEST)]
    handle: Annotated[bytes, Meta(max_length=64)]


decode_token = partial(decode_struct, Decoder(MemoryToken))
"""A token. Raises RunError for other bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class FilledMemory:
    """One of this Worker's memories. size: bytes that were asked for; it may have more."""

    token: bytes
    flat: Tensor
    size: int


class SharedMemories:
    """Those that one Worker fills, and those of others that it maps. Filled ones are taken and
    freed from any thread. require_answer: raises PeerLost if a Worker is gone. place: where they
    are; by default on the GPU that the process computes on, if there is one.
    """

    def __init__(
        self,
        name: str,
        require_answer: Callable[[str], None] | None = None,
        *,
        place: Place | None = None,
    ) -> None:
        self._name = name
        self._require_answer = require_answer or (lambda peer: None)
        self._asked_place = place
        self._incarnation = os.urandom(16)
        self._memories: dict[bytes, FilledMemory] = {}
        self._free: list[FilledMemory] = []
        self._by_block: dict[int, FilledMemory] = {}
        self._lock = threading.Lock()
        self._mapped: dict[str, tuple[bytes, dict[bytes, Tensor]]] = {}
        """By Worker, its incarnation and what is mapped of that."""
        self._moved = MovedBytes()

    @property
    def filled_count(self) -> int:
        """How many memories this Worker has."""
        return len(self._memories)

    @property
    def mapped_count(self) -> int:
        """How many memories of others are mapped."""
        return sum(len(memories) for _, memories in self._mapped.values())

    def take(self, size: int) -> tuple[bytes, Tensor]:
        """Token and bytes, uint8, of a free memory of this size, else of a new one; of no bytes, an
        empty token. Raises RunError, OSError where there is no room.
        """
        import torch

        if not size:
            return b"", torch.empty(0, dtype=torch.uint8)
        with self._lock:
            # Versions of one Model are of one size. A larger memory is another Model's, which
            # would need one more in its place.
            fitting = [memory for memory in self._free if memory.size == size]
            if fitting:
                self._free.remove(fitting[0])
                return fitting[0].token, fitting[0].flat
        memory = self._allocate(size)
        with self._lock:
            self._memories[memory.token] = memory
        return memory.token, memory.flat

    def give_back(self, token: bytes) -> None:
        """Let a memory be taken again that no block was kept with."""
        with self._lock:
            if token:
                self._free.append(self._memories[token])

    def keep(self, block: int, token: bytes) -> None:
        """Keep a memory until this block is released."""
        with self._lock:
            if token:
                self._by_block[block] = self._memories[token]

    def release(self, block: int) -> None:
        """Free a block's memory, if it has one."""
        with self._lock:
            memory = self._by_block.pop(block, None)
            if memory is not None:
                self._free.append(memory)

    def map_token(self, peer: str, encoded: bytes) -> Tensor:
        """The bytes of a Worker's memory, uint8, mapped once; its own as they are. Raises PeerLost,
        or RunError where they cannot be mapped.
        """
        if peer == self._name:
            return self._memories[encoded].flat
        token = decode_token(encoded)
        incarnation, memories = self._mapped.get(peer, (b"", {}))
        if incarnation != token.incarnation:
            # What a process that is gone had is unmapped with the last view of it.
            memories = {}
            self._mapped[peer] = token.incarnation, memories
        if encoded not in memories:
            try:
                memories[encoded] = self._map(token)
            except RunError as error:
                # Memory is gone with its process, before the end of its connections is noticed.
                self._require_answer(peer)
                raise RunError(f"weights of {peer}: {error}") from error
        return memories[encoded]

    def wait_for_device(self) -> None:
        """Wait until what was read of mapped memories has been read, in whatever stream."""
        if self.mapped_count and self._find_place()[0] == "cuda":
            from torch import cuda

            cuda.synchronize()

    def count_read(self, size: int) -> None:
        """Note that so many bytes were read out of others' memories."""
        self._moved.add("ipc", size)

    def take_moved_bytes(self) -> int:
        """Return the bytes read since the last call."""
        return sum(self._moved.take_counts().values())

    def _allocate(self, size: int) -> FilledMemory:
        place, device = self._find_place()
        if place == "cuda":
            import torch

            from engine.channels.tensors import cuda_memory

            flat, handle = cuda_memory.allocate_on_gpu(size, torch.device("cuda:0"))
        else:
            from engine.channels.tensors import host_memory

            flat, handle = host_memory.allocate_on_host(size)
        token = MemoryToken(self._incarnation, place, device, len(flat), handle)
        return FilledMemory(encode(token), flat, size)

    def _map(self, token: MemoryToken) -> Tensor:
        place, device = self._find_place()
        if (token.place, token.device) != (place, device):
            expected = f"{place} {device}".strip()
            arrived = f"{token.place} {token.device}".strip()
            problem = f"expected memory of {expected}, where this Worker computes, found {arrived}"
            raise RunError(f"{problem}. Fix: weights=pull.")
        if place == "cuda":
            import torch

            from engine.channels.tensors import cuda_memory

            return cuda_memory.map_gpu_handle(token.handle, token.size, torch.device("cuda:0"))
        from engine.channels.tensors import host_memory

        return host_memory.map_host_handle(token.handle, token.size)

    def _find_place(self) -> tuple[Place, str]:
        """Where this process's memories are, and the id of that GPU."""
        from torch import cuda

        if self._asked_place == "host" or not cuda.is_available():
            return "host", ""
        return "cuda", str(cuda.get_device_properties(0).uuid)
