"""The statistics of a Table, and the kernels that write and read them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.batch import Batch, Keys, Ragged
from dataflow.errors import CheckpointError, DataError
from dataflow.kernel import Assignment, Chunk, KernelNode, Layout
from dataflow.model import Table
from dataflow.operator import DATA_ROW
from dataflow.schema import Schema
from engine.weights.hashed_pieces import from_records, to_batch
from operators.kernels.tables import FILE, LookUpTable, RecordTable, Statistics
from tests.kit.kernels import FakeSession

ROWS = st.lists(st.tuples(st.integers(0, 6), st.floats(0.01, 1e6)), max_size=12)
STEPS = st.lists(ROWS, max_size=6)


@given(steps=STEPS)
def test_statistics_are_those_of_a_plain_dict(steps: list[list[tuple[int, float]]]) -> None:
    statistics = Statistics()
    numbers_by_row: dict[int, list[float]] = defaultdict(list)
    for step in steps:
        statistics.add(
            np.array([row for row, _ in step], dtype=np.int64),
            np.array([number for _, number in step], dtype=np.float64),
        )
        for row, number in step:
            numbers_by_row[row].append(number)
    means = {row: sum(numbers) / len(numbers) for row, numbers in numbers_by_row.items()}
    overall = sum(means.values()) / len(means) if means else math.nan
    expected = [means.get(row, overall) for row in range(8)]
    np.testing.assert_allclose(statistics.means(np.arange(8)), expected, rtol=1e-12)
    known = [row in means for row in range(8)]
    assert statistics.knows(np.arange(8)).tolist() == known
    # The sums have the bits of a loop that adds one number after another.
    sums = dict(zip(statistics.arrays["row"].tolist(), statistics.arrays["sum"], strict=True))
    assert sums == {row: sum(numbers) for row, numbers in sorted(numbers_by_row.items())}


@given(steps=STEPS)
def test_a_reader_of_the_pieces_has_what_the_writer_has(
    steps: list[list[tuple[int, float]]],
) -> None:
    writer, reader = writer_of(Table("t", statistic="mean")), reader_of(Table("t"))
    for number, step in enumerate(steps):
        rows = [row for row, _ in step]
        writer.step(assignment(rows, pa.array([x for _, x in step], pa.float64())))
        block, digest = to_batch(writer.pieces())
        reader.load(from_records(block.records, digest), number)
    ours, theirs = reader._statistics.arrays, writer._statistics.arrays
    assert {name: array.tolist() for name, array in ours.items()} == {
        name: array.tolist() for name, array in theirs.items()
    }


def test_a_version_that_was_offered_stays_as_it_is() -> None:
    writer = writer_of(Table("t", statistic="mean"))
    writer.step(assignment([3], pa.array([2.0])))
    before = {piece.name: piece.data for piece in writer.pieces()}
    writer.step(assignment([3, 4], pa.array([4.0, 5.0])))
    assert before["sum"].tolist() == [2.0]
    assert before["row"].tolist() == [3]


def test_a_version_is_copied_from_the_block_that_is_filled_anew() -> None:
    arrays = {"row": np.array([3]), "sum": np.array([6.0]), "count": np.array([2])}
    statistics = Statistics()
    statistics.replace(arrays)
    arrays["sum"][0] = 100.0
    assert statistics.means(np.array([3])).tolist() == [3.0]


def test_lengths_are_expected_by_their_geometric_mean() -> None:
    table = Table("lengths")
    writer, reader = writer_of(table, "ids"), reader_of(table)
    assert weights(reader, [0, 1]) == [0.0, 0.0]
    lengths = [2, 8, 0, 9]
    values = np.zeros(sum(lengths), dtype=np.int32)
    metrics = writer.step(assignment([5, 5, 7, 7], Ragged(values, np.cumsum([0, *lengths]))))
    assert metrics == {"table/lengths/known": 0.0, "table/lengths/rows": 2.0}
    reader.load(list(writer.pieces()), 1)
    # A list without elements counts as one of 1; a row that was never visited is as the others.
    assert weights(reader, [5, 7]) == pytest.approx([4.0, 3.0])
    assert weights(reader, [6]) == pytest.approx([math.sqrt(4.0 * 3.0)])
    again = writer.step(assignment([5, 6], pa.array([[1], [1]], pa.list_(pa.int32()))))
    assert again["table/lengths/known"] == 0.5


def test_nulls_are_skipped_and_wrong_numbers_refused() -> None:
    writer, reader = (
        writer_of(Table("t", statistic="mean")),
        reader_of(Table("t", statistic="mean")),
    )
    writer.step(assignment([1, 2, 1], pa.array([1.0, None, -2.0])))
    reader.load(writer.pieces(), 1)
    assert weights(reader, [1, 2]) == [-0.5, -0.5]
    with pytest.raises(DataError, match=r"record: number: row \(11, 0, 0\): .*finite.*found nan"):
        writer.step(assignment([1, 2], pa.array([1.0, math.nan])))
    geometric = writer_of(Table("t"))
    with pytest.raises(DataError, match=r'above 0, found -2\. Fix: statistic="mean"'):
        geometric.step(assignment([1], pa.array([-2.0])))


def test_what_was_saved_is_restored_to_the_bit(tmp_path: Path) -> None:
    writer = writer_of(Table("t"))
    writer.step(assignment([4, 1, 4], pa.array([3.0, 7.0, 11.0])))
    writer.save(tmp_path / "record")
    other = writer_of(Table("t"))
    other.restore(tmp_path / "record")
    for name, array in writer._statistics.arrays.items():
        assert other._statistics.arrays[name].tobytes() == array.tobytes()
    with pa.ipc.new_file(str(tmp_path / FILE), pa.schema([("row", pa.int64())])):
        pass
    with pytest.raises(CheckpointError, match=r"expected the columns row, sum, count, found"):
        other.restore(tmp_path)


class CountedRows(Schema):
    """As a test needs it."""


def assignment(rows: Sequence[int], numbers: Any) -> Assignment:
    """A Step's rows, from position 10 on, on these rows of the data."""
    keys = Keys.of(range(10, 10 + len(rows)))
    name = "number" if isinstance(numbers, pa.Array) and not is_list(numbers) else "ids"
    columns = {DATA_ROW: pa.array(rows, pa.int64()), name: numbers}
    batch = Batch.make(keys, columns, CountedRows)
    return Assignment(sequence=1, step=1, keys=keys, inputs={"rows": batch})


def is_list(array: pa.Array) -> bool:
    return pa.types.is_list(array.type)


def writer_of(table: Table, column: str = "number") -> RecordTable:
    kernel = RecordTable()
    node = KernelNode(
        name="record", operator="record", tables={"table": table}, params={"column": column}
    )
    kernel.open(node, Layout(), FakeSession())
    return kernel


def reader_of(table: Table) -> LookUpTable:
    kernel = LookUpTable()
    node = KernelNode(name="lookup", operator="lookup", tables={"table": table})
    kernel.open(node, Layout(), FakeSession())
    return kernel


def weights(reader: LookUpTable, rows: Sequence[int]) -> list[float]:
    keys = Keys.of(range(len(rows)))
    batch = Batch.make(keys, {DATA_ROW: pa.array(rows, pa.int64())}, CountedRows)
    chunk = Chunk(id=0, step=1, keys=keys, inputs={"rows": batch})
    (made,) = reader.run(chunk)
    return made.records.column("weight").to_pylist()
