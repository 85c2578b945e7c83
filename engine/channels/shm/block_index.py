"""A page of shared memory on which a Worker notes where its blocks lie, so that a reader need not
ask for each.

Owns: the notes, their memory, and that a half-written or wrong one is never taken for a whole one.
Does not own: what a note says (header.py), the slabs that it speaks of (slabs.py), who may see it
(server.py).

A question and its answer are two processes that wake up, which takes longer than a small batch
needs for all else. A block's note is in the place of its number modulo `NOTES`; where a younger
block has taken that, or a note does not fit, the reader asks.
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
    """The owner's end. Callers lock. Raises OSError where there is no memory for it."""

    def __init__(self) -> None:
        self.descriptor, self._memory = sealed_memory(SIZE)

    def note(self, block: int, text: bytes) -> None:
        """Say where a block lies; not where the text does not fit."""
        at = _place(block)
        self._memory[at : at + 8] = bytes(8)
        if len(text) <= ROOM - _HEAD.size:
            self._memory[at + _HEAD.size : at + _HEAD.size + len(text)] = text
            self._memory[at : at + _HEAD.size] = _HEAD.pack(
                block + 1, _hash(block, text), len(text)
            )

    def wipe(self, block: int) -> None:
        """Take a block's note away, if it is there."""
        at = _place(block)
        if self._memory[at : at + 8] == (block + 1).to_bytes(8, "little"):
            self._memory[at : at + 8] = bytes(8)

    def close(self) -> None:
        """Let it go; readers that have mapped it can still read."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self._memory.close()
        self.descriptor = -1


def noted(index: pa.Buffer, block: int) -> bytes | None:
    """What an index says of a block; None where it says nothing, or is being written."""
    at = _place(block)
    text = index.slice(at, ROOM).to_pybytes()
    number, hashed, length = _HEAD.unpack_from(text)
    if number != block + 1 or length > ROOM - _HEAD.size:
        return None
    text = text[_HEAD.size : _HEAD.size + length]
    return text if _hash(block, text) == hashed else None


def _place(block: int) -> int:
    return block % NOTES * ROOM


def _hash(block: int, text: bytes) -> int:
    return xxhash.xxh3_64_intdigest(text, seed=block & 0xFFFFFFFFFFFFFFFF)
