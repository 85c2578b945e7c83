"""Shared memory in which a Worker notes where its blocks lie, so that a reader need not ask.

Owns: the notes, and that a half-written or wrong one is never read as whole. Does not own: a note's
contents (engine/channels/block_requests.py), slabs (slabs.py), who sees it (server.py).

Asking wakes two processes, which takes longer than all else for a small batch. A note's place is
the block's number modulo `NOTES`; if a later block has taken it, or a note does not fit, the reader
asks.
"""

from __future__ import annotations

import os
import struct

import pyarrow as pa
import xxhash

from engine.channels.shm.slabs import sealed_memory

NOTES = 1024
ROOM = 1024
"""Bytes of one note, with its head."""
SIZE = NOTES * ROOM
_HEAD = struct.Struct("<QQI")
"""Block number + 1 (0 for none), xxh3 of number and text, bytes of the text."""


class BlockIndex:
    """The owner's end; callers lock. Raises OSError without memory for it."""

    def __init__(self) -> None:
        self.descriptor, self._memory = sealed_memory(SIZE)

    def note(self, block: int, text: bytes) -> None:
        """Note where a block lies, if the text fits."""
        at = _place(block)
        # The block number goes first and comes last, as a reader may look at any moment. It reads
        # without a lock, and what it sees half-written fails its hash.
        self._memory[at : at + 8] = bytes(8)
        if len(text) <= ROOM - _HEAD.size:
            head = _HEAD.pack(block + 1, _hash(block, text), len(text))
            self._memory[at + _HEAD.size : at + _HEAD.size + len(text)] = text
            self._memory[at : at + _HEAD.size] = head

    def wipe(self, block: int) -> None:
        """Remove a block's note, if it is there."""
        at = _place(block)
        if self._memory[at : at + 8] == (block + 1).to_bytes(8, "little"):
            self._memory[at : at + 8] = bytes(8)

    def close(self) -> None:
        """Release the memory; readers that have mapped it can still read."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self._memory.close()
        self.descriptor = -1


def read_note(index: pa.Buffer, block: int) -> bytes | None:
    """A block's note; None if there is none, or it is being written."""
    at = _place(block)
    text = index.slice(at, ROOM).to_pybytes()
    number, hashed, length = _HEAD.unpack_from(text)
    if number != block + 1 or length > ROOM - _HEAD.size:
        return None
    text = text[_HEAD.size : _HEAD.size + length]
    if _hash(block, text) != hashed:
        return None
    return text


def _place(block: int) -> int:
    return block % NOTES * ROOM


def _hash(block: int, text: bytes) -> int:
    return xxhash.xxh3_64_intdigest(text, seed=block & 0xFFFFFFFFFFFFFFFF)
