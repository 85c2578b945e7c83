"""A hash of each row's content, by which rows that were made twice are compared.

Owns: the hash. Does not own: when it is taken (worker.py: where a run has several Workers), nor
what a difference means (the coordinator: the node is not deterministic).

Every element becomes 64 bits by the finaliser of splitmix64 (Steele, Lea, Flood 2014, doi 10.1145/2660193.2660195) of
its bits and its place; a list is the sum of its elements, so no loop goes over rows. It finds what differs by chance;
it is no protection against somebody who looks for two equal ones.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_NULL = np.uint64(0xD6E8FEB86659FD93)


def row_digests(batch: Batch) -> np.ndarray:
    """uint64 [rows]: a hash of all columns of each row, names included and keys not; equal content, equal hash.

    How the columns lie in memory (slices, chunks, widths of offsets) does not count; the order of columns neither.
    """
    total = np.zeros(len(batch), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for name in batch.names:
            total += _mix(_hashed(batch.array(name)) ^ _salt(name))
    return total


def _hashed(array: pa.Array) -> np.ndarray:
    """uint64 [len]: a hash of each element."""
    kind = array.type
    if pa.types.is_null(kind):
        return np.full(len(array), _NULL)
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return _nulls(array, _texts(array))
    if pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        return _nulls(array, _texts(array))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        starts = array.offsets.to_numpy().astype(np.int64)
        return _nulls(array, _lists(_hashed(array.values.slice(starts[0], starts[-1] - starts[0])), starts - starts[0]))
    if pa.types.is_struct(kind):
        return _nulls(array, _struct(array))
    return _nulls(array, _numbers(array))


def _numbers(array: pa.Array) -> np.ndarray:
    """Of numbers, their bits: 0.0 and -0.0 differ, a nan equals itself. Whoever takes them up mixes them."""
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    width = array.type.bit_width // 8
    data = array.buffers()[1]
    if data is None or not len(array):
        return np.zeros(len(array), dtype=np.uint64)
    bits = np.frombuffer(data, dtype=f"u{width}", count=len(array), offset=array.offset * width)
    return bits.astype(np.uint64)


def _texts(array: pa.Array) -> np.ndarray:
    """Of strings, by their bytes."""
    wide = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    offsets, data = array.buffers()[1], array.buffers()[2]
    if not len(array) or offsets is None:
        return np.zeros(len(array), dtype=np.uint64)
    kind = np.dtype(np.int64 if wide else np.int32)
    starts = np.frombuffer(offsets, dtype=kind, count=len(array) + 1, offset=array.offset * kind.itemsize)
    starts = starts.astype(np.int64)
    flat = np.frombuffer(data, dtype=np.uint8) if data is not None else np.zeros(0, dtype=np.uint8)
    return _lists(flat[starts[0] : starts[-1]].astype(np.uint64), starts - starts[0])


def _lists(elements: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Of lists, given their elements' hashes: the sum of each element with its place, and the length."""
    lengths = np.diff(starts)
    # Golden * (place + 1) + element, with the multiples of a row's start taken off its elements.
    mixed = np.arange(1, len(elements) + 1, dtype=np.uint64)
    mixed *= _GOLDEN
    mixed -= np.repeat(_GOLDEN * starts[:-1].astype(np.uint64), lengths)
    mixed += elements
    sums = np.zeros(len(elements) + 1, dtype=np.uint64)
    np.cumsum(_mix(mixed), out=sums[1:])
    return _mix(sums[starts[1:]] - sums[starts[:-1]] + _GOLDEN * (lengths.astype(np.uint64) + np.uint64(1)))


def _struct(array: pa.Array) -> np.ndarray:
    total = np.zeros(len(array), dtype=np.uint64)
    for index in range(array.type.num_fields):
        field = array.type.field(index)
        total += _mix(_hashed(array.field(index)) ^ _salt(field.name))
    return total


def _nulls(array: pa.Array, hashed: np.ndarray) -> np.ndarray:
    """What lies under a null does not count."""
    if not array.null_count:
        return hashed
    return np.where(array.is_null().to_numpy(zero_copy_only=False), _NULL, hashed)


def _salt(name: str) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"))


def _mix(x: np.ndarray) -> np.ndarray:
    """In place where x is an array of its own, as all are here."""
    spare = np.empty_like(x)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        np.right_shift(x, np.uint64(shift), out=spare)
        x ^= spare
        x *= np.uint64(factor)
    x ^= np.right_shift(x, np.uint64(31), out=spare)
    return x
