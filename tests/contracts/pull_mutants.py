"""Messages with one fault: in bytes, or in values within an encoded message."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

NASTY = (
    0, 1, -1, 2**31, 2**40, 2**62 - 1, 2**63 - 1, -(2**63), None, "", "x", b"", b"\xff" * 9, [],
    [[]], True, 1.5,
)  # fmt: skip


def bytes_mutated(data: bytes, rng: np.random.Generator) -> bytes:
    """A bit flipped, or a piece cut out, doubled or filled with noise."""
    mutated = bytearray(data)
    at = int(rng.integers(0, len(mutated)))
    end = min(len(mutated), at + int(rng.integers(1, 9)))
    match int(rng.integers(0, 4)):
        case 0:
            mutated[at] ^= 1 << int(rng.integers(0, 8))
        case 1:
            del mutated[at:end]
        case 2:
            mutated[at:at] = mutated[at:end]
        case _:
            mutated[at:end] = rng.bytes(end - at)
    return bytes(mutated)


def value_mutated(data: bytes, rng: np.random.Generator) -> bytes:
    """One value within a msgpack message changed, left out or doubled."""
    tree = msgspec.msgpack.decode(data)
    spots = list(_spots(tree))
    parent, index = spots[int(rng.integers(0, len(spots)))]
    value = parent[index]
    match int(rng.integers(0, 4)):
        case 0 if isinstance(value, int) and not isinstance(value, bool):
            parent[index] = max(
                -(2**63), min(2**63 - 1, value + int(rng.choice([-8, -1, 1, 8, 4096])))
            )
        case 1:
            del parent[index]
        case 2:
            parent.insert(index, value)
        case _:
            parent[index] = NASTY[int(rng.integers(0, len(NASTY)))]
    return msgspec.msgpack.encode(tree)


def _spots(tree: Any) -> Any:
    for index, value in enumerate(tree):
        yield tree, index
        if isinstance(value, list):
            yield from _spots(value)
