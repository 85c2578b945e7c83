"""Nested columns of JSON: reward functions get the keys that the file has, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataflow.batch import Batch, Keys
from dataflow.errors import DataError
from dataflow.schema import Prompt
from dataflow.user import Columns
from engine.channels.layout import layout_from, layout_of
from operators.data_files import read_prompts, source_columns
from operators.kernels.data import open_rows
from operators.kernels.scoring_keywords import as_keywords
from operators.rewards import verl_reward
from tests.kit.files import save_jsonl

CITY = {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}
SUM = {"name": "add", "parameters": {"properties": {"a": {"type": "number", "default": None}}}}
NESTED: dict[str, list[Any]] = {
    "keys of one row": [{"a": 1}, {"b": 2}],
    "null beside absent": [{"a": 1}, {"a": None}, {"b": 2}],
    "no object": [{"a": "x"}, None, {"b": "x"}],
    "objects in an object": [{"a": {"b": 1}}, {"a": {"c": [{"d": 1}, {}]}}],
    "lists of objects": [[{"a": 1}, {"b": 2}], [], None, [None, {"a": 2}]],
    "tools": [[CITY], [SUM, CITY]],
    "lists of lists": [[[{"a": 1}], []], [[{"b": 2}, {"a": None}], None]],
    "messages": [
        [{"role": "user", "content": "a", "name": "b"}, {"role": "assistant", "tool_calls": [SUM]}],
        [{"role": "user", "content": None, "name": None}],
    ],
    "messages of images": [
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "b"}}]}],
    ],
}


def shown(data: str, column: str) -> list[Any]:
    """What a reward function is given, after the column has travelled to another Worker."""
    array = read_prompts(data).column(column).combine_chunks()
    sent = pa.RecordBatch.from_arrays([array], schema=pa.schema([(column, array.type)]))
    schema = layout_from(layout_of(sent.schema).encoded).schema
    return as_keywords(pa.RecordBatch.from_arrays([array], schema=schema))[column]


@pytest.mark.parametrize("name", NESTED)
def test_a_key_that_a_row_lacks_is_absent(name: str, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "x": value} for value in NESTED[name]]
    data = save_jsonl(tmp_path / "a.jsonl", *rows)
    assert shown(data, "x") == NESTED[name]


def test_keys_that_all_rows_have_stay_columns_of_arrow(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "x": {"n": n, "of": [{"m": n}]}} for n in (1, 2)]
    kind = source_columns(save_jsonl(tmp_path / "a.jsonl", *rows))["x"]
    assert kind == pa.struct({"n": pa.int64(), "of": pa.list_(pa.struct({"m": pa.int64()}))})


def test_a_users_operator_gets_what_a_reward_function_gets(tmp_path: Path) -> None:
    for name in ("objects in an object", "lists of lists"):
        rows = [{"prompt": "a", "x": value} for value in NESTED[name]]
        table = open_rows(save_jsonl(tmp_path / "a.jsonl", *rows)).table
        columns = {each: table.column(each).combine_chunks() for each in ("prompt", "x")}
        batch = Batch.make(Keys.of(range(len(rows))), columns, Prompt)
        assert list(Columns(batch, Prompt)["x"]) == NESTED[name]


def test_parquet_has_the_nulls_itself(tmp_path: Path) -> None:
    data = str(tmp_path / "a.parquet")
    pq.write_table(pa.table({"prompt": ["a", "b"], "x": [{"a": 1}, {"b": 2}]}), data)
    assert shown(data, "x") == [{"a": 1, "b": None}, {"a": None, "b": 2}]


def test_a_split_is_found_where_rows_lack_it(tmp_path: Path) -> None:
    infos = [{"split": "train"}, {"split": None, "index": 1}, {"index": 2}, None]
    rows = [{"prompt": str(n), "extra_info": info} for n, info in enumerate(infos)]
    data = save_jsonl(tmp_path / "a.jsonl", *rows)
    assert open_rows(data, "train").table.column("prompt").to_pylist() == ["0"]


def test_verls_row_without_a_ground_truth_has_none() -> None:
    scored = verl_reward(lambda ground_truth, **columns: float(ground_truth is None))
    models: list[Any] = [{"ground_truth": "a"}, {"style": "rule"}]
    assert scored(["a", "b"], ["d", "d"], models, lambda name, value: None) == [0.0, 1.0]


@pytest.mark.parametrize("silent", [{}, {"tool_calls": None}, {"tool_calls": None, "name": "a"}])
def test_a_message_that_says_nothing_is_refused(silent: dict[str, Any], tmp_path: Path) -> None:
    calls = {"role": "assistant", "content": None, "tool_calls": [SUM]}
    turns = [{"role": "user", "content": "a"}, calls, {"role": "user", "content": None} | silent]
    with pytest.raises(DataError, match=r"a\.jsonl:1: prompt: expected content in each message"):
        open_rows(save_jsonl(tmp_path / "a.jsonl", {"prompt": turns}))
