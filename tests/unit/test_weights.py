"""Weights as a block: content, hashes, and what a damaged block says."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch

from dataflow.batch import Batch
from dataflow.errors import RunError
from dataflow.kernel import Piece
from engine.channels.contract import BlockRequest
from engine.channels.shm.channel import ShmChannel
from engine.weights.hashed_pieces import DTYPES, SCHEMA, from_records, to_batch


def some_pieces() -> list[Piece]:
    """Every dtype; odd bytes before wide ones, a scalar, an empty one, one not contiguous."""
    draw = torch.Generator().manual_seed(3)
    found = [Piece("odd", torch.arange(3, dtype=torch.uint8))]
    for dtype in DTYPES:
        drawn = torch.randint(0, 2, (3, 5), generator=draw)
        found.append(Piece(f"of.{dtype}", drawn.to(getattr(torch, dtype))))
    found += [
        Piece("scalar", torch.tensor(2.5)),
        Piece("empty", torch.zeros(0, 4)),
        Piece("turned", torch.randn(4, 6, generator=draw).t()),
        Piece("parameter", torch.nn.Parameter(torch.randn(7, generator=draw))),
    ]
    return found


def block_of(**tensors: torch.Tensor) -> tuple[Batch, str]:
    """A block of these pieces, and its digest."""
    return to_batch([Piece(name, tensor) for name, tensor in tensors.items()])


def read(records: pa.RecordBatch, digest: str) -> list[Piece]:
    return list(from_records(records, digest))


def test_pieces_come_back_to_the_bit() -> None:
    given = some_pieces()
    batch, digest = to_batch(given)
    back = read(batch.records, digest)
    assert [p.name for p in back] == [p.name for p in given]
    for was, found in zip(given, back, strict=True):
        assert found.data.dtype == was.data.dtype
        assert torch.equal(found.data.double(), was.data.detach().double())


def test_a_block_is_a_snapshot_and_views_are_not_copies() -> None:
    tensor = torch.zeros(1000)
    batch, digest = block_of(w=tensor)
    tensor.add_(1)
    (piece,) = read(batch.records, digest)
    assert not piece.data.any()
    assert piece.data.data_ptr() == batch.records.column("data").buffers()[2].address


def test_views_keep_the_block_alive() -> None:
    batch, digest = block_of(w=torch.full((100_000,), 7.0))
    pieces = from_records(batch.records, digest)
    del batch
    filler = [np.zeros(100_000, dtype=np.float32) for _ in range(8)]
    assert (next(pieces).data == 7.0).all(), len(filler)


def test_an_outbox_of_shared_memory_keeps_the_block_without_a_copy() -> None:
    channel = ShmChannel("w", 0, lambda peer: pytest.fail(f"dialled {peer}"))
    memory: list[np.ndarray] = []

    def allocate(size: int) -> np.ndarray:
        memory.append(channel.allocate(size))
        return memory[-1]

    batch, digest = to_batch([Piece("w", torch.full((1 << 19,), 3.0))], allocate)
    (records,) = channel.fetch([BlockRequest(worker="w", block=channel.keep(batch))])
    (piece,) = from_records(records, digest)
    # One memory: the writer's change is seen.
    memory[0][:4] = np.frombuffer(np.float32(7.0).tobytes(), np.uint8)
    assert piece.data[:2].tolist() == [7.0, 3.0]
    channel.close()


def changed(records: pa.RecordBatch, column: str, row: int, value: object) -> pa.RecordBatch:
    values = records.column(column).to_pylist()
    values[row] = value
    at = records.schema.get_field_index(column)
    return records.set_column(at, SCHEMA.field(column), pa.array(values, SCHEMA.field(column).type))


def test_a_changed_piece_is_named() -> None:
    batch, digest = to_batch(some_pieces())
    row = batch.records.column("name").to_pylist().index("turned")
    data = bytearray(batch.records.column("data")[row].as_py())
    data[5] ^= 1
    for column, value in (
        ("data", bytes(data)),
        ("shape", [4, 6]),
        ("dtype", "int32"),
        ("hash", bytes(16)),
    ):
        with pytest.raises(RunError, match="piece 'turned'"):
            read(changed(batch.records, column, row, value), digest)


@pytest.mark.parametrize(("rows", "said"), [
    ([0, 2], "'c'.*missing"),
    ([0, 1, 1, 2], "'b' twice"),
    ([1, 0, 2], "'b'"),
    ([0, 1], "'b'.*missing"),
    ([], "none"),
])  # fmt: skip
def test_missing_doubled_and_swapped_pieces_are_named(rows: list[int], said: str) -> None:
    batch, digest = block_of(a=torch.zeros(2), b=torch.ones(2), c=torch.full((2,), 2.0))
    with pytest.raises(RunError, match=said):
        read(batch.records.take(pa.array(rows, pa.int64())), digest)


def test_another_version_is_refused() -> None:
    digest = block_of(a=torch.ones(4))[1]
    with pytest.raises(RunError, match="another version"):
        read(block_of(a=torch.zeros(4))[0].records, digest)


def test_other_records_are_refused() -> None:
    with pytest.raises(RunError, match="expected the columns"):
        read(pa.record_batch({"x": [1]}), "")


@pytest.mark.parametrize(
    ("pieces", "told"),
    [
        ([Piece("a", torch.zeros(1))] * 2, "'a' twice"),
        ([Piece("a", torch.zeros(1, dtype=torch.complex64))], "complex64"),
    ],
    ids=["a name twice", "a strange dtype"],
)
def test_what_cannot_be_read_again_is_refused_at_the_writer(pieces: list[Piece], told: str) -> None:
    with pytest.raises(RunError, match=told):
        to_batch(pieces)


def test_no_piece_at_all() -> None:
    batch, digest = block_of()
    assert read(batch.records, digest) == []


def test_a_slice_of_a_greater_column_is_read_right() -> None:
    batch, digest = block_of(a=torch.zeros(4), b=torch.ones(4))
    twice = pa.concat_batches([batch.records, batch.records]).slice(2, 2)
    assert [float(p.data[0]) for p in read(twice, digest)] == [0.0, 1.0]
