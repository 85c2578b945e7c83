"""The hash of a row's content: equal exactly for equal content, wherever it is in memory."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.batch import Batch, Keys
from dataflow.schema import MESSAGE
from engine.run.worker.row_digest import row_digests
from tests.kit.turns import example_count

TURN = {"role": st.text(max_size=1), "content": st.none()}
KINDS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "text": (pa.utf8(), st.text(max_size=4)),
    "number": (pa.float32(), st.floats(width=32, allow_nan=False) | st.none()),
    "whole": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "flag": (pa.bool_(), st.booleans() | st.none()),
    "ids": (pa.large_list(pa.int32()), st.lists(st.integers(0, 5), max_size=4)),
    "some": (pa.large_list(pa.float32()), st.lists(st.sampled_from([None, 0.5, -0.5]), max_size=3)),
    "pairs": (
        pa.large_list(pa.list_(pa.int32(), 2)),
        st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), max_size=3),
    ),
    "pair": (
        pa.list_(pa.float32(), 2),
        st.none() | st.lists(st.sampled_from([0.5, -0.5]), min_size=2, max_size=2),
    ),
    "said": (pa.list_(MESSAGE), st.lists(st.fixed_dictionaries(TURN))),
}
ROW = st.fixed_dictionaries({name: values for name, (_, values) in KINDS.items()})


def digests(name: str, column: pa.Array) -> np.ndarray:
    """Of a batch of this column."""
    keys = Keys.of(range(len(column)))
    return row_digests(Batch(keys, pa.RecordBatch.from_pydict({name: column})))


def batch(rows: list[dict[str, Any]], names: list[str] | None = None) -> Batch:
    columns = {
        name: pa.array([row[name] for row in rows], KINDS[name][0]) for name in names or KINDS
    }
    return Batch(Keys.of(range(len(rows))), pa.RecordBatch.from_pydict(columns))


@settings(max_examples=example_count(60))
@given(rows=st.lists(ROW, min_size=1, max_size=5))
def test_rows_are_equal_where_their_hashes_are(rows: list[dict[str, Any]]) -> None:
    found = row_digests(batch(rows))
    texts = [repr(row) for row in batch(rows).records.to_pylist()]
    for (one, text), (other, another) in combinations(zip(found, texts, strict=True), 2):
        assert (one == other) == (text == another)


@settings(max_examples=example_count(40))
@given(rows=st.lists(ROW, min_size=3, max_size=6), data=st.data())
def test_slices_and_picked_rows_keep_their_hashes(
    rows: list[dict[str, Any]], data: st.DataObject
) -> None:
    whole = batch(rows)
    found = row_digests(whole)
    start = data.draw(st.integers(0, len(rows) - 1))
    keys = whole.keys.take(np.arange(start, len(rows)))
    assert (row_digests(Batch(keys, whole.records.slice(start))) == found[start:]).all()
    order = np.array(data.draw(st.permutations(range(len(rows)))))
    assert (row_digests(whole.take(order)) == found[order]).all()
    assert (row_digests(batch(rows, list(reversed(KINDS)))) == found).all()


@pytest.mark.parametrize("one,other", [
    ([[1, 2], [3]], [[1], [2, 3]]),
    ([[1, 2]], [[2, 1]]),
    ([[0]], [[0, 0]]),
    ([[]], [[0]]),
    ([[1.0]], [[-1.0]]),
    ([[0.0]], [[-0.0]]),
])  # fmt: skip
def test_what_is_alike_differs(one: list[list[float]], other: list[list[float]]) -> None:
    lists = pa.large_list(pa.float32())
    apart = digests("x", pa.array(one, lists)) != digests("x", pa.array(other, lists))
    assert apart.all()


def test_the_name_of_a_column_counts_and_no_column_is_no_row_less() -> None:
    rows = pa.array([1, 2])
    assert (digests("a", rows) != digests("b", rows)).all()
    assert len(row_digests(Batch(Keys.of([0, 1]), pa.RecordBatch.from_arrays([], names=[])))) == 2
