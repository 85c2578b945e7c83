"""Weights as a block: content, hashes, and what a damaged block says."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch

from dataflow.errors import RunError
from dataflow.kernel import Piece
from engine.channels.contract import BlockRequest
from engine.channels.shm.channel import ShmChannel
from engine.weights.pieces import DTYPES, SCHEMA, from_records, to_batch


def some_pieces() -> list[Piece]:
    """Every dtype; odd bytes before wide ones, a scalar, an empty one, one not contiguous."""
    draw = torch.Generator().manual_seed(3)
    found = [Piece("odd", torch.arange(3, dtype=torch.uint8))]
    for dtype in DTYPES:
        entry = Piece(
            f"of.{dtype}", torch.randint(0, 2, (3, 5), generator=draw).to(getattr(torch, dtype))
        )
        found.append(entry)
    found += [
        Piece("scalar", torch.tensor(2.5)),
        Piece("empty", torch.zeros(0, 4)),
        Piece("turned", torch.randn(4, 6, generator=draw).t()),
        Piece("parameter", torch.nn.Parameter(torch.randn(7, generator=draw))),
    ]
    return found


def test_pieces_come_back_to_the_bit() -> None:
    given = some_pieces()
    batch, digest = to_batch(given)
    back = list(from_records(batch.records, digest))
    assert [p.name for p in back] == [p.name for p in given]
    for was, found in zip(given, back, strict=True):
        assert found.data.dtype == was.data.dtype
        assert found.data.shape == was.data.shape
        assert torch.equal(found.data.to(torch.float64), was.data.detach().to(torch.float64))


def test_a_block_is_a_snapshot_and_views_are_not_copies() -> None:
    tensor = torch.zeros(1000)
    batch, digest = to_batch([Piece("w", tensor)])
    tensor.add_(1)
    (piece,) = from_records(batch.records, digest)
    assert not piece.data.any()
    assert piece.data.data_ptr() == batch.records.column("data").buffers()[2].address


def test_views_keep_the_block_alive() -> None:
    batch, digest = to_batch([Piece("w", torch.full((100_000,), 7.0))])
    pieces = from_records(batch.records, digest)
    del batch
    filler = [np.zeros(100_000, dtype=np.float32) for _ in range(8)]
    assert (next(pieces).data == 7.0).all(), len(filler)


def test_allocate_is_where_the_data_lies() -> None:
    memory: list[bytearray] = []

    def allocate(size: int) -> bytearray:
        memory.append(bytearray(size))
        return memory[-1]

    batch, _ = to_batch(some_pieces(), allocate)
    data = batch.records.column("data")
    assert len(memory) == 1
    assert bytes(memory[0]) == b"".join(data.to_pylist())
    assert data.buffers()[2].address == pa.py_buffer(memory[0]).address


def test_an_outbox_of_shared_memory_keeps_the_block_without_a_copy() -> None:
    channel = ShmChannel("w", 0, lambda peer: pytest.fail(f"dialled {peer}"))
    memory: list[np.ndarray] = []

    def allocate(size: int) -> np.ndarray:
        memory.append(channel.allocate(size))
        return memory[-1]

    batch, digest = to_batch([Piece("w", torch.full((1 << 19,), 3.0))], allocate)
    block = channel.keep(batch)
    (records,) = channel.fetch([BlockRequest(worker="w", block=block)])
    (piece,) = from_records(records, digest)
    # One memory: the writer's change is seen.
    memory[0][:4] = np.frombuffer(np.float32(7.0).tobytes(), np.uint8)
    assert piece.data[:2].tolist() == [7.0, 3.0]
    channel.close()


def test_equal_weights_have_one_digest_and_others_another() -> None:
    first, again = to_batch(some_pieces())[1], to_batch(some_pieces())[1]
    assert first == again
    other = some_pieces()
    other[-1].data.data[3] += 1e-3
    assert to_batch(other)[1] != first
    assert to_batch(some_pieces()[:-1])[1] != first
    assert to_batch([Piece("a", torch.zeros(4))])[1] != to_batch([Piece("a", torch.zeros(2, 2))])[1]
    assert to_batch([Piece("a", torch.zeros(4))])[1] != to_batch([Piece("b", torch.zeros(4))])[1]


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
            list(from_records(changed(batch.records, column, row, value), digest))


def test_swapped_data_is_named() -> None:
    batch, digest = to_batch([Piece("a", torch.zeros(4)), Piece("b", torch.ones(4))])
    a, b = batch.records.column("data").to_pylist()
    swapped = changed(changed(batch.records, "data", 0, b), "data", 1, a)
    with pytest.raises(RunError, match="piece 'a'"):
        list(from_records(swapped, digest))


@pytest.mark.parametrize(("rows", "said"), [
    ([0, 2], "'c'.*missing"),
    ([0, 1, 1, 2], "'b' twice"),
    ([1, 0, 2], "'b'"),
    ([0, 1], "'b'.*missing"),
    ([], "none"),
])  # fmt: skip
def test_missing_doubled_and_swapped_pieces_are_named(rows: list[int], said: str) -> None:
    batch, digest = to_batch([Piece(n, torch.full((2,), float(i))) for i, n in enumerate("abc")])
    with pytest.raises(RunError, match=said):
        list(from_records(batch.records.take(pa.array(rows, pa.int64())), digest))


def test_another_version_is_refused() -> None:
    batch, _ = to_batch([Piece("a", torch.zeros(4))])
    with pytest.raises(RunError, match="another version"):
        list(from_records(batch.records, to_batch([Piece("a", torch.ones(4))])[1]))


def test_other_records_are_refused() -> None:
    with pytest.raises(RunError, match="expected the columns"):
        list(from_records(pa.record_batch({"x": [1]}), ""))


def test_a_name_twice_and_a_strange_dtype_are_refused_at_the_writer() -> None:
    with pytest.raises(RunError, match="'a' twice"):
        to_batch([Piece("a", torch.zeros(1)), Piece("a", torch.zeros(1))])
    with pytest.raises(RunError, match="complex64"):
        to_batch([Piece("a", torch.zeros(1, dtype=torch.complex64))])


def test_no_piece_at_all() -> None:
    batch, digest = to_batch([])
    assert list(from_records(batch.records, digest)) == []


def test_a_slice_of_a_greater_column_is_read_right() -> None:
    batch, digest = to_batch([Piece("a", torch.zeros(4)), Piece("b", torch.ones(4))])
    twice = pa.concat_batches([batch.records, batch.records]).slice(2, 2)
    assert [float(p.data[0]) for p in from_records(twice, digest)] == [0.0, 1.0]
