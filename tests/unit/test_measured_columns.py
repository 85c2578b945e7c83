"""Columns that are measured: they travel, and nothing that compares rows reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataflow.batch import Batch, Keys
from dataflow.column import column, is_measured
from dataflow.errors import GraphError
from dataflow.schema import Episode, Schema
from engine.keep.record.recorder import compared_columns, own_columns
from engine.run.worker.row_digest import row_digests

MEASURED = ["model_seconds", "environment_seconds"]


def episodes(seconds: float, turn_end: int = 2) -> Batch:
    """Two rows of two turns; what Episode has beside these columns is left out."""
    columns: dict[str, Any] = {
        "completion_ids": [np.arange(3, dtype=np.int32)] * 2,
        "turn_end": [np.array([turn_end, 3], np.int32)] * 2,
        "model_seconds": [np.array([seconds, 0.5], np.float32)] * 2,
        "environment_seconds": [np.array([seconds, 2.0], np.float32)] * 2,
    }
    return Batch.make(Keys.of([4, 4], [0, 1]), columns, Episode)


def test_a_digest_knows_nothing_of_seconds() -> None:
    assert (row_digests(episodes(0.1)) == row_digests(episodes(7.5))).all()
    assert (row_digests(episodes(0.1)) != row_digests(episodes(0.1, turn_end=1))).all()


def test_rows_that_are_picked_joined_and_stored_still_say_so(tmp_path: Path) -> None:
    whole = episodes(0.1)
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_batches([whole.records]), path)
    read = pq.read_table(path).schema
    picked = whole.take(np.array([1])).records.schema
    joined = Batch.concat([whole, episodes(0.2)]).records.schema
    for schema in (read, picked, joined, whole.sort().records.schema):
        assert [name for name in schema.names if is_measured(schema.field(name))] == MEASURED


def test_comparisons_of_recorded_rows_leave_them_out() -> None:
    schema = episodes(0.1).records.schema
    assert set(own_columns(schema)) - set(compared_columns(schema)) == set(MEASURED)


def test_a_column_is_measured_or_not() -> None:
    with pytest.raises(GraphError, match="expected measured to be True or False, found 1"):
        column(pa.float32(), measured=1)  # type: ignore[arg-type]


class _Timed(Schema):
    seconds = column(pa.float32(), measured=True, distribution="by a clock")


def test_a_field_says_both() -> None:
    assert _Timed.columns["seconds"].metadata == {"distribution": "by a clock", "measured": "true"}
    assert is_measured(_Timed.columns["seconds"].arrow)
    assert not is_measured(Episode.columns["turn_end"].arrow)
