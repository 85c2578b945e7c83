"""Weights in a memory that two processes map: what arrives, what is refused, what is filled anew.

Real processes; on a GPU, where there is one, the same by CUDA's IPC.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
import torch

from dataflow.errors import RunError
from dataflow.kernel import Piece
from engine.channels.block_requests import encode
from engine.channels.contract import PeerLost
from engine.channels.tensors.shared_memories import Place, SharedMemories, decode_token
from engine.weights.device_hash import ROW
from engine.weights.flat_copy import PLACED, FlatCopy, copy_flat, read_flat
from engine.weights.hashed_pieces import to_batch
from tests.contracts.pair_ends import OWNER, READER, on_device, weights
from tests.contracts.ranks import RankPool

pytestmark = pytest.mark.timeout(120)
RANKS = 2
FIRST, SECOND = 1, 2
"""Blocks, each with the version of that number."""

Copied = tuple[pa.RecordBatch, str]


def host_memories(name: str = OWNER) -> SharedMemories:
    return SharedMemories(name, place="host")


def copied_in(memories: SharedMemories, version: int = 1) -> FlatCopy:
    return copy_flat(weights(version), memories)


def read_own(memories: SharedMemories, records: pa.RecordBatch, digest: str) -> list[Piece]:
    return read_flat(records, lambda token: memories.map_token(OWNER, token), digest)


def are_equal(arrived: Sequence[Piece], expected: Sequence[Piece]) -> bool:
    same_names = [piece.name for piece in arrived] == [piece.name for piece in expected]
    pairs = zip(arrived, expected, strict=True)
    return same_names and all(torch.equal(a.data.cpu(), e.data.detach()) for a, e in pairs)


def replace_column(records: pa.RecordBatch, name: str, row: int, entry: object) -> pa.RecordBatch:
    entries = records.column(name).to_pylist()
    entries[row] = entry
    place = PLACED.get_field_index(name)
    field = PLACED.field(name)
    return records.set_column(place, field, pa.array(entries, field.type))


def test_pieces_are_views_of_the_memory_at_whole_rows() -> None:
    memories = host_memories()
    copied = copied_in(memories)
    records = copied.batch.records
    pieces = read_own(memories, records, copied.digest)
    assert are_equal(pieces, weights(1))
    flat = memories.map_token(OWNER, copied.token)
    offsets = records.column("offset").to_pylist()
    assert all(offset % ROW == 0 for offset in offsets)
    for piece, offset in zip(pieces, offsets, strict=True):
        assert not piece.data.numel() or piece.data.data_ptr() == flat.data_ptr() + offset


def test_its_hashes_are_of_another_kind_than_those_of_a_block_with_data() -> None:
    copied = copied_in(host_memories())
    assert copied.digest != to_batch(weights(1))[1]
    assert set(copied.batch.records.column("hash_kind").to_pylist()) == {"device"}


def test_one_memory_is_filled_anew_once_its_block_is_released() -> None:
    memories = host_memories()
    tokens: list[bytes] = []
    size = 0
    for block in range(6):
        copied = copy_flat(weights(block), memories, size)
        memories.keep(block, copied.token)
        assert are_equal(read_own(memories, copied.batch.records, copied.digest), weights(block))
        tokens.append(copied.token)
        size = copied.size
        if block:
            memories.release(block - 1)
    assert memories.filled_count == 2
    assert tokens[2:] == tokens[:2] * 2
    memories.release(99)


def test_models_of_other_sizes_have_other_memories() -> None:
    memories = host_memories()
    large, small = [Piece("w", torch.zeros(4 * ROW))], [Piece("w", torch.zeros(4))]
    for block, (pieces, size) in enumerate(((large, 16 * ROW), (small, ROW), (large, 16 * ROW))):
        memories.keep(block, copy_flat(pieces, memories, size).token)
        memories.release(block)
    assert memories.filled_count == 2


def test_what_lay_there_before_is_in_no_hash() -> None:
    """A shorter piece in a memory that is full of other bytes."""
    memories = host_memories()
    token, flat = memories.take(ROW)
    flat.fill_(0xA5)
    memories.give_back(token)
    piece = Piece("w", torch.arange(5.0))
    again = copy_flat([piece], memories, ROW)
    assert again.token == token
    assert again.digest == copy_flat([piece], host_memories()).digest
    assert are_equal(read_own(memories, again.batch.records, again.digest), [piece])


@pytest.mark.parametrize("expected_size", [0, ROW, 1 << 22])
def test_any_expected_size_gives_the_same_copy(expected_size: int) -> None:
    memories = host_memories()
    copied = copy_flat(weights(1), memories, expected_size)
    assert copied.digest == copied_in(host_memories()).digest
    assert are_equal(read_own(memories, copied.batch.records, copied.digest), weights(1))


def test_a_copy_does_not_change_with_the_weights() -> None:
    memories = host_memories()
    weight = torch.zeros(1000)
    copied = copy_flat([Piece("w", weight)], memories)
    weight.add_(1)
    (piece,) = read_own(memories, copied.batch.records, copied.digest)
    assert not piece.data.any()


@pytest.mark.parametrize("pieces", [[], [Piece("none", torch.zeros(0, 3))]], ids=["no", "empty"])
def test_without_a_byte_there_is_no_memory(pieces: list[Piece]) -> None:
    memories = host_memories()
    copied = copy_flat(pieces, memories)
    memories.keep(FIRST, copied.token)
    memories.release(FIRST)
    assert are_equal(read_own(memories, copied.batch.records, copied.digest), pieces)
    assert not memories.filled_count


def test_what_changed_is_named() -> None:
    memories = host_memories()
    copied = copied_in(memories)
    records = copied.batch.records
    row = records.column("name").to_pylist().index("turned")
    flat = memories.map_token(OWNER, copied.token)
    place = records.column("offset")[row].as_py() + 5
    flat[place] ^= 1
    with pytest.raises(RunError, match=r"piece 'turned' .*does not have the content"):
        read_own(memories, records, copied.digest)
    flat[place] ^= 1
    for column, entry, problem in (
        ("name", "other", "piece 'other' .*does not have the content"),
        ("shape", [4, 6], "piece 'turned' .*does not have the content"),
        ("dtype", "int32", "piece 'turned' .*does not have the content"),
        ("dtype", "complex64", "piece 'turned' of complex64 .* cannot be received"),
        ("shape", [-6, 4], "piece 'turned' of float32 .* cannot be received"),
        ("number", 1, "piece 'turned' .*does not have the content"),
        ("hash", bytes(16), "piece 'turned' .*does not have the content"),
        ("offset", 8, "found other places in a memory of"),
        ("shape", [1 << 40], "found other places in a memory of"),
        ("memory", b"other", "expected all pieces in one memory, found 2 memories"),
    ):
        with pytest.raises(RunError, match=problem):
            read_own(memories, replace_column(records, column, row, entry), copied.digest)
    with pytest.raises(RunError, match="it is another version"):
        read_own(memories, records, copied_in(host_memories(), version=2).digest)
    with pytest.raises(RunError, match="expected the columns"):
        read_own(memories, to_batch(weights(1))[0].records, copied.digest)
    with pytest.raises(RunError, match="twice"):
        copy_flat([*weights(1), weights(1)[0]], memories)


def test_a_missing_piece_is_named() -> None:
    memories = host_memories()
    copied = copied_in(memories)
    with pytest.raises(RunError, match=r"after '.*' have digest|pieces are missing after it"):
        read_own(memories, copied.batch.records.slice(0, 3), copied.digest)


def forge(token: bytes, **changes: Any) -> bytes:
    """A token with other fields."""
    return encode(msgspec.structs.replace(decode_token(token), **changes))


def test_what_is_no_memory_is_refused() -> None:
    copied = copied_in(host_memories())
    descriptor = os.memfd_create("unsealed")
    os.ftruncate(descriptor, 4096)
    unsealed = np.array([os.getpid(), descriptor], dtype="<u4").tobytes()
    reads = host_memories(READER)
    for token, problem in (
        (b"no token", "expected a message of the data plane"),
        (forge(copied.token, size=0), "expected a message of the data plane"),
        (forge(copied.token, size=123), "expected sealed memory of 123 bytes"),
        (forge(copied.token, handle=unsealed, size=4096), "expected sealed memory of 4096 bytes"),
        (forge(copied.token, handle=b"short"), "expected memory of .* bytes of another process"),
        (forge(copied.token, place="cuda", device="GPU-1"), "found cuda GPU-1.* Fix: weights=pull"),
    ):
        with pytest.raises(RunError, match=problem):
            reads.map_token(OWNER, token)
    os.close(descriptor)


# --- two processes --------------------------------------------------------------------------------


def own(rank: int, port: int, line: Connection, place: Place) -> None:
    """Copies the version of each block that the test names, into the memory of those released."""
    memories = SharedMemories(OWNER, place=place)
    device = "cuda" if place == "cuda" else "cpu"
    size = 0
    while (told := line.recv()) is not None:
        block, released = told
        memories.release(released)
        copied = copy_flat(on_device(weights(block), device), memories, size)
        memories.keep(block, copied.token)
        size = copied.size
        line.send((copied.batch.records, copied.digest))


def read(rank: int, port: int, line: Connection, place: Place) -> tuple[list[bool], list[int]]:
    """Whether each version arrived, and how many memories are mapped then."""

    def answers(peer: str) -> None:
        raise PeerLost(peer, "its process is gone")

    memories = SharedMemories(READER, answers, place=place)
    same: list[bool] = []
    mapped: list[int] = []
    while (told := line.recv()) is not None:
        version, (records, digest) = told
        try:
            pieces = read_flat(records, lambda token: memories.map_token(OWNER, token), digest)
            same.append(are_equal(pieces, weights(version)))
        except PeerLost:
            same.append(False)
        mapped.append(memories.mapped_count)
        line.send(None)
    return same, mapped


def pass_versions(
    owner: Connection, reader: Connection, told: Sequence[tuple[int, int]]
) -> list[Copied]:
    """Have these (block, released block) copied and read."""
    passed: list[Copied] = []
    for block, released in told:
        owner.send((block, released))
        passed.append(owner.recv())
        reader.send((block, passed[-1]))
        reader.recv()
    return passed


def begin(ranks: RankPool, rank: int, task: Callable[..., object], place: Place) -> Connection:
    mine, theirs = Pipe()
    ranks.tell(rank, task, theirs, place)
    return mine


VERSIONS = [(1, 0), (2, 0), (3, 1), (4, 2), (5, 3)]


def test_versions_arrive_and_each_memory_is_mapped_once(ranks: RankPool) -> None:
    owner, reader = begin(ranks, 0, own, "host"), begin(ranks, 1, read, "host")
    pass_versions(owner, reader, VERSIONS)
    owner.send(None)
    reader.send(None)
    same, mapped = ranks.answers([1])[0]
    assert same == [True] * 5
    assert mapped == [1, 2, 2, 2, 2]
    ranks.answers([0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_versions_arrive_on_one_gpu(ranks: RankPool) -> None:
    owner, reader = begin(ranks, 0, own, "cuda"), begin(ranks, 1, read, "cuda")
    passed = pass_versions(owner, reader, VERSIONS)
    owner.send(None)
    reader.send(None)
    same, mapped = ranks.answers([1])[0]
    assert same == [True] * 5
    assert mapped == [1, 2, 2, 2, 2]
    assert decode_token(passed[0][0].column("memory")[0].as_py()).place == "cuda"
    ranks.answers([0])


def test_memory_of_a_process_that_is_gone(ranks: RankPool) -> None:
    """Last, as it costs a process. What is mapped stays; what is not, is lost with its owner. One
    that begins anew has other memories, and those of the one before are unmapped.
    """
    owner, reader = begin(ranks, 0, own, "host"), begin(ranks, 1, read, "host")
    (first,) = pass_versions(owner, reader, [(1, 0)])
    owner.send((2, 0))
    second = owner.recv()
    ranks.signal(0, signal.SIGKILL)
    assert isinstance(ranks.answers([0])[0], EOFError)
    anew = host_memories()
    third = copied_in(anew, version=3)
    for version, copied in ((1, first), (2, second), (3, (third.batch.records, third.digest))):
        reader.send((version, copied))
        reader.recv()
    reader.send(None)
    same, mapped = ranks.answers([1])[0]
    assert same == [True, True, False, True]
    assert mapped == [1, 1, 1, 1]
