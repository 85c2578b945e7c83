"""Batches of every kind of column that a data edge may have, drawn from a seed."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from dataflow import schema as schemas
from dataflow.batch import Batch, Keys
from dataflow.schema import MESSAGE, Column, Schema

VOCABULARY: list[type[Schema]] = [
    s
    for s in vars(schemas).values()
    if isinstance(s, type) and issubclass(s, Schema) and s is not Schema
]

_WORDS = ("", "a", "reversed", "äöü", "数字", "x" * 70)

Draw = Callable[[np.random.Generator], Any]

USERS: dict[str, tuple[pa.DataType, Draw]] = {
    "chat": (
        pa.list_(MESSAGE),
        lambda r: [
            {"role": "user", "content": str(r.choice(_WORDS))} for _ in range(r.integers(0, 3))
        ],
    ),
    "flag": (pa.bool_(), lambda r: bool(r.integers(0, 2))),
    "when": (pa.timestamp("us"), lambda r: datetime.datetime(2024, 1, 1 + int(r.integers(0, 20)))),
    "price": (pa.decimal128(9, 2), lambda r: decimal.Decimal(int(r.integers(0, 999))) / 100),
    "pair": (pa.list_(pa.int16(), 2), lambda r: r.integers(-9, 9, 2).tolist()),
    "counts": (
        pa.map_(pa.utf8(), pa.int32()),
        lambda r: [(f"k{i}", i) for i in range(r.integers(0, 3))],
    ),
    "nothing": (pa.null(), lambda _: None),
    "digest": (pa.binary(4), lambda r: r.bytes(4)),
    "blob": (pa.large_binary(), lambda r: r.bytes(int(r.integers(0, 9)))),
    "half": (pa.float16(), lambda r: np.float16(r.random())),
    "nested": (
        pa.large_list(pa.list_(pa.utf8())),
        lambda r: [[str(r.choice(_WORDS))] * int(r.integers(0, 3))] * 2,
    ),
    "deep": (
        pa.struct(
            [("ground_truth", pa.large_utf8()), ("inner", pa.struct([("index", pa.int64())]))]
        ),
        lambda r: {
            "ground_truth": str(r.choice(_WORDS)),
            "inner": {"index": int(r.integers(0, 99))},
        },
    ),
}
"""Columns from datasets."""


def batch(schema: type[Schema], rows: int, seed: int, *, skipped: int = 0) -> Batch:
    """Rows of a schema and users' columns, as a slice that skips `skipped` rows at the start."""
    rng = np.random.default_rng(seed)
    total = rows + skipped
    columns = {name: _column(column, total, rng) for name, column in schema.columns.items()}
    columns |= {name: _user(kind, draw, total, rng) for name, (kind, draw) in USERS.items()}
    fields = [
        schema.columns[n].arrow if n in schema.columns else pa.field(n, a.type)
        for n, a in columns.items()
    ]
    records = pa.RecordBatch.from_arrays(list(columns.values()), schema=pa.schema(fields))
    return Batch(Keys.of(range(rows)), records.slice(skipped))


def rollouts(rows: int, tokens: int, seed: int = 0) -> Batch:
    """Only token columns, with this many tokens per row, 17 bytes each."""
    rng = np.random.default_rng(seed)
    offsets = pa.array(np.arange(rows + 1) * tokens)
    kinds = {
        "completion_ids": np.int32,
        "sampler_logprobs": np.float32,
        "advantage": np.float32,
        "returns": np.float32,
    }
    lists = {
        n: rng.integers(0, 1 << 20, rows * tokens).astype(k)
        for n, k in (kinds | {"mask": np.uint8}).items()
    }
    arrays = {n: pa.LargeListArray.from_arrays(offsets, pa.array(v)) for n, v in lists.items()}
    return Batch(
        Keys.of(range(rows)),
        pa.RecordBatch.from_pydict({"reward": pa.array(rng.random(rows)), **arrays}),
    )


def _column(column: Column, rows: int, rng: np.random.Generator) -> pa.Array:
    if column.axis is None:
        return pa.array(_elements(column.type, rows, rng), column.type)
    kind = column.arrow.type
    lists = [_elements(column.type, int(rng.integers(0, 5)), rng) for _ in range(rows)]
    if column.nullable:
        lists = [[None if rng.random() < 0.3 else v for v in many] for many in lists]
    return pa.array(lists, kind)


def _elements(kind: pa.DataType, count: int, rng: np.random.Generator) -> list[Any]:
    if pa.types.is_string(kind):
        return [str(w) for w in rng.choice(_WORDS, count)]
    if pa.types.is_floating(kind):
        return rng.standard_normal(count).astype(np.float32).tolist()
    return rng.integers(0, 100, count).tolist()


def _user(kind: pa.DataType, draw: Draw, rows: int, rng: np.random.Generator) -> pa.Array:
    return pa.array([None if rng.random() < 0.2 else draw(rng) for _ in range(rows)], kind)
