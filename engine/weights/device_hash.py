"""Hashes of pieces computed where they lie: the same 16 bytes on a CPU and on a GPU.

Owns: the hash of bytes by torch's integer operations. Does not own: what else a piece's hash is of
(hashed_pieces.py), which hash a version has (snapshot.py, flat_copy.py). XXH3 would first take all
bytes to the host.

Bytes are filled up with zeros to whole rows of `ROW` bytes, and read as little-endian words. A row
has two numbers modulo 2**64, the inner products of fixed odd multipliers with its 64-bit words, and
with the signed upper halves of these. Each is mixed with the row's place in its piece by a
bijection (the finaliser of splitmix64: Steele, Lea, Flood 2014, doi 10.1145/2660193.2660195); sums
over the rows are the hash.

What it detects, for damage that does not depend on the multipliers (multilinear hashing: Lemire and
Kaser 2014, doi 10.1093/comjnl/bxt070): one changed word always, since odd numbers have inverses.
If a difference of words has t zeros at its lower end, at most 2**t of the 2**63 values of its
multiplier hide it. Where lower halves of words differ, t is at most 31 in the first product, else
at most 31 in the second one: rows that differ look alike with a probability of at most 2**-32, and
of 2**-64 where both halves differ. It is no signature: whoever knows the multipliers can forge.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

ROW = 16384
"""Bytes of a row. Pieces that lie in one memory begin at multiples of it. What is computed of a row
takes some 100 bytes meanwhile.
"""
_WORD = 8
_WORDS = ROW // _WORD
_LANES = 2
_AT_ONCE = 1 << 25
"""Bytes that are multiplied at a time; their products take as many."""
_STEP = 0x9E3779B97F4A7C15
"""Of splitmix64: its states are multiples of this."""
_MIXERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def round_to_rows(size: int) -> int:
    """The bytes of the whole rows that so many bytes take."""
    return -(-size // ROW) * ROW


def begin_hash_flat(flat: Tensor, sizes: Sequence[int]) -> Tensor:
    """Hash pieces that lie one after another, each from a whole row on. flat: uint8, contiguous,
    whole rows. sizes: of the pieces, in bytes; what follows one in its last row has to be 0.
    Returns int64 [pieces, 2] for `read_hashes`, and does not wait for the device.
    """
    counts = [round_to_rows(size) // ROW for size in sizes]
    if sum(counts) * ROW != len(flat):
        raise ValueError(f"expected {sum(counts)} rows of {ROW} bytes, found {len(flat)} bytes")
    return _combine_rows(_hash_rows(flat), counts)


def hash_tensors(contents: Sequence[Tensor]) -> list[bytes]:
    """Hash tensors of uint8 that are on one device, each as `begin_hash_flat` does. Waits for the
    device once.
    """
    counts: list[int] = []
    rows: list[Tensor] = []
    for content in contents:
        whole = len(content) // ROW * ROW
        rows.append(_hash_rows(content[:whole]))
        if whole < len(content):
            last_row = content.new_zeros(ROW)
            last_row[: len(content) - whole] = content[whole:]
            rows.append(_hash_rows(last_row))
        counts.append(round_to_rows(len(content)) // ROW)
    if not rows:
        return []
    return read_hashes(_combine_rows(torch.cat(rows, dim=1), counts))


def read_hashes(lanes: Tensor) -> list[bytes]:
    """The 16 bytes of each piece's hash; waits until the device has computed them."""
    return [piece.tobytes() for piece in lanes.cpu().numpy()]


def _hash_rows(flat: Tensor) -> Tensor:
    """int64 [2, rows]: both inner products of each row. flat: uint8, whole rows."""
    # torch views bytes as wider numbers only where these may lie.
    if flat.storage_offset() % _WORD or flat.data_ptr() % _WORD:
        flat = flat.clone()
    words = flat.view(torch.int64).view(-1, _WORDS)
    # Little-endian: of each word the second half is the upper one.
    upper = flat.view(torch.int32).view(-1, _WORDS, 2)[:, :, 1]
    row_count = len(words)
    sums = torch.empty(_LANES, row_count, dtype=torch.int64, device=flat.device)
    at_once = min(row_count, _AT_ONCE // ROW)
    products = torch.empty(at_once, _WORDS, dtype=torch.int64, device=flat.device)
    multipliers = _multipliers(flat.device)
    for start in range(0, row_count, at_once or 1):
        end = min(start + at_once, row_count)
        product = products[: end - start]
        for lane, numbers in enumerate((words, upper)):
            torch.mul(numbers[start:end], multipliers[lane], out=product)
            torch.sum(product, dim=1, out=sums[lane, start:end])
    return sums


def _combine_rows(sums: Tensor, counts: Sequence[int]) -> Tensor:
    """int64 [pieces, 2], of the inner products of their rows. counts: rows of each piece."""
    device, row_count = sums.device, sums.shape[1]
    ends = list(accumulate(counts, initial=0))
    edges = torch.tensor(ends, dtype=torch.int64, device=device)
    lengths = torch.tensor(counts, dtype=torch.int64, device=device)
    # The number of rows is known here: asking the device for it would wait.
    first_rows = torch.repeat_interleave(edges[:-1], lengths, output_size=row_count)
    # From 1: at a place of 0 a row would be mixed with nothing.
    places = torch.arange(1, row_count + 1, device=device) - first_rows
    mixed = _mix(sums + places * _signed(_STEP))
    # Sums wrap modulo 2**64, so that their differences are exact.
    running = torch.zeros(_LANES, row_count + 1, dtype=torch.int64, device=device)
    torch.cumsum(mixed, dim=1, out=running[:, 1:])
    lanes = running[:, edges[1:]] - running[:, edges[:-1]]
    return lanes.T.contiguous()


def _mix(numbers: Tensor) -> Tensor:
    """The finaliser of splitmix64, a bijection of 64 bits."""
    for shift, factor in _MIXERS:
        numbers = (numbers ^ _shift_right(numbers, shift)) * _signed(factor)
    return numbers ^ _shift_right(numbers, 31)


def _shift_right(numbers: Tensor, bits: int) -> Tensor:
    """Shift zeros in; torch's own shift of int64 keeps the sign, which would lose a bit."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


@cache
def _multipliers(device: torch.device) -> Tensor:
    """int64 [2, words of a row]: odd, else the numbers of splitmix64 from its state 0 on."""
    states = np.arange(1, _LANES * _WORDS + 1, dtype=np.uint64) * np.uint64(_STEP)
    draws = _mix(torch.from_numpy(states.view(np.int64)))
    return (draws | 1).view(_LANES, _WORDS).to(device)


def _signed(number: int) -> int:
    """The int64 with these 64 bits."""
    if number >> 63:
        return number - (1 << 64)
    return number
