"""Messages as their file has them: content in parts, and fields that only some messages have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataflow.batch import Batch, Keys
from dataflow.check import check
from dataflow.errors import DataError, GraphError
from dataflow.kernel import Chunk, KernelNode, Layout
from dataflow.prompt_types import with_json_values
from dataflow.schema import Prompt
from engine.channels.layout import layout_from, layout_of
from operators.answers import answers
from operators.data import prompts as prompts_of_data
from operators.data_files import (
    demonstration_columns,
    preference_columns,
    prompt_columns,
    read_table,
)
from operators.kernels.data import Prompts, SourceRows, open_demonstrations, open_rows
from operators.kernels.preferences import open_preferences
from operators.kernels.scoring_keywords import as_keywords
from operators.kernels.text import prompts_of
from operators.losses import supervised_loss
from tests.kit.files import save_jsonl
from tests.kit.kernels import FakeSession
from tests.wrong_graphs.parts import trained

ENDINGS = ("jsonl", "parquet", "csv")
SYSTEM, USER = {"role": "system", "content": "s"}, {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "4"}


def in_parts(message: dict[str, Any], *more: dict[str, Any]) -> dict[str, Any]:
    """The message with its content in two parts, and these behind them."""
    text = message["content"]
    parts = [{"type": "text", "text": text[:1]}, {"type": "text", "text": text[1:]}, *more]
    return {**message, "content": parts}


IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}


def saved(folder: Path, ending: str, *rows: dict[str, Any]) -> str:
    """A file of these rows, whose values are lists of messages."""
    path = folder / f"a.{ending}"
    if ending == "jsonl":
        return save_jsonl(path, *rows)
    if ending == "parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
        return str(path)
    lines = [",".join(rows[0])]
    for row in rows:
        values = [json.dumps(value).replace('"', '""') for value in row.values()]
        lines.append(",".join(f'"{value}"' for value in values))
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def messages_in(rows: SourceRows, column: str) -> list[Any]:
    return prompts_of(rows.take(np.arange(len(rows))).column(column))


# content as a list of parts


SHAPES: list[tuple[Callable[[str], Any], Callable[[str], Any], dict[str, Any]]] = [
    (prompt_columns, open_rows, {"prompt": [USER]}),
    (demonstration_columns, open_demonstrations, {"messages": [USER, ANSWER]}),
    (demonstration_columns, open_demonstrations, {"prompt": [USER], "completion": [ANSWER]}),
    (preference_columns, open_preferences, {"chosen": [USER, ANSWER], "rejected": [USER, USER]}),
]
NAMES = ["prompts", "messages", "pairs of prompt and completion", "preferences"]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("columns, read, row", SHAPES, ids=NAMES)
def test_parts_that_are_text_are_read_as_one_text(
    tmp_path: Path, columns: Any, read: Any, row: dict[str, Any], ending: str
) -> None:
    parts = {name: [in_parts(message) for message in row[name]] for name in row}
    data = saved(tmp_path, ending, parts, parts)
    for name, messages in row.items():
        found = read(data)
        assert messages_in(found, name) == [messages, messages]
        assert columns(data)[name] == found.table.schema.field(name).type


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("columns, read, row", SHAPES, ids=NAMES)
def test_an_image_is_refused_by_the_check_with_its_row(
    tmp_path: Path, columns: Any, read: Any, row: dict[str, Any], ending: str
) -> None:
    parts = {name: [in_parts(message) for message in row[name]] for name in row}
    name = next(iter(row))
    data = saved(tmp_path, ending, parts, {**parts, name: [in_parts(row[name][0], IMAGE)]})
    place = {"jsonl": ":2: ", "parquet": ": row 1: ", "csv": ": row 1, "}[ending]
    told = rf"a\.{ending}{place}.*{name}.*found a part of type 'image_url'\. Fix: leave the row out"
    for reader in (columns, read):
        with pytest.raises(DataError, match=told):
            reader(data)


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_texts_and_parts_may_be_mixed(tmp_path: Path, ending: str) -> None:
    data = saved(tmp_path, ending, {"messages": [SYSTEM, in_parts(USER), ANSWER]})
    assert messages_in(open_demonstrations(data), "messages") == [[SYSTEM, USER, ANSWER]]


@pytest.mark.parametrize("ending", ENDINGS)
def test_sharegpts_value_may_have_parts(tmp_path: Path, ending: str) -> None:
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]
    said = [{"from": "human", "value": parts}, {"from": "gpt", "value": parts}]
    data = saved(tmp_path, ending, {"conversations": said})
    [found] = messages_in(open_demonstrations(data), "messages")
    assert found == [USER, {"role": "assistant", "content": "2+2?"}]


@pytest.mark.parametrize("ending", ENDINGS[:2])
def test_images_in_a_column_that_no_model_reads_stay_there(tmp_path: Path, ending: str) -> None:
    shown = [in_parts(USER, IMAGE)]
    data = saved(tmp_path, ending, {"prompt": [in_parts(USER)], "seen": shown})
    assert set(prompt_columns(data)) == {"prompt", "seen"}
    table = open_rows(data).table
    assert table.column("prompt").to_pylist() == [[USER]]
    [seen] = with_json_values(table.column("seen").combine_chunks())
    assert seen[0]["content"][2]["type"] == "image_url"


@pytest.mark.parametrize("ending", ENDINGS[:2])
def test_parts_of_any_column_of_messages_are_read_as_text(tmp_path: Path, ending: str) -> None:
    data = saved(tmp_path, ending, {"prompt": [USER], "solution": [in_parts(ANSWER)]})
    assert read_table(data).column("solution").to_pylist() == [[ANSWER]]
    assert prompt_columns(data)["solution"] == read_table(data).schema.field("solution").type


@pytest.mark.parametrize("part, told", [
    ({"type": "text", "text": None}, "a part of type 'text' without a text"),
    ({"type": None, "text": "a"}, "found"),
])  # fmt: skip
@pytest.mark.parametrize("ending", ENDINGS)
def test_parts_without_type_or_text_are_refused(
    tmp_path: Path, ending: str, part: dict[str, Any], told: str
) -> None:
    parts = [{"type": "text", "text": "a"}, part]
    data = saved(tmp_path, ending, {"prompt": [{"role": "user", "content": parts}]})
    with pytest.raises(DataError, match=rf"expected content as text.*{told}"):
        open_rows(data)


@pytest.mark.parametrize("content", [["a", "b"], {"text": "a"}, 3], ids=str)
@pytest.mark.parametrize("ending", ENDINGS)
def test_content_that_is_no_text_is_refused_by_the_check(
    tmp_path: Path, ending: str, content: Any
) -> None:
    data = saved(tmp_path, ending, {"prompt": [{"role": "user", "content": content}]})
    with pytest.raises(DataError, match=r"expected (content as text|a column 'prompt')"):
        prompt_columns(data)


@pytest.mark.parametrize("answer", [[{"type": "text", "text": "4"}], [4, 5]], ids=["parts", "ids"])
def test_answers_that_are_neither_text_nor_messages_are_refused_by_the_check(
    tmp_path: Path, answer: list[Any]
) -> None:
    data = save_jsonl(tmp_path / "a.jsonl", {"prompt": [USER], "solution": answer})
    rows = answers(prompts_of_data(data, batch=1), column="solution")
    with pytest.raises(GraphError, match="expected texts in column 'solution', found list"):
        check(trained(rows, supervised_loss()))


# fields that only some messages have


def calling(arguments: dict[str, Any]) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def arguments_in(message: dict[str, Any]) -> dict[str, Any]:
    return message["tool_calls"][0]["function"]["arguments"]


CALLS = [
    {"city": "Ulm"},
    {"a": None, "b": {"deep": [None, {"x": None}]}},
    {"b": 1, "city": 2.5},
    {"city": 1, "a": True},
]


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_tool_calls_of_json_are_as_the_file_has_them(tmp_path: Path, ending: str) -> None:
    rows = [{"messages": [USER, calling(arguments), ANSWER]} for arguments in CALLS]
    data = saved(tmp_path, ending, *rows)
    found = messages_in(open_demonstrations(data), "messages")
    assert found == [row["messages"] for row in rows]
    assert json.dumps(found) == json.dumps([row["messages"] for row in rows]), "in their order"
    assert demonstration_columns(data)["messages"] == read_table(data).schema.field(0).type


def test_tool_calls_of_parquet_have_no_fields_of_other_rows(tmp_path: Path) -> None:
    calls = [{"city": "Ulm"}, {"a": "x"}, {"inside": [{"y": 1, "z": None}, {"z": 2}]}]
    rows = [{"messages": [USER, calling(arguments)]} for arguments in calls]
    found = messages_in(open_demonstrations(saved(tmp_path, "parquet", *rows)), "messages")
    assert [arguments_in(row[1]) for row in found] == [
        {"city": "Ulm"},
        {"a": "x"},
        {"inside": [{"y": 1}, {"z": 2}]},
    ]
    assert [list(row[0]) for row in found] == [["role", "content"]] * 3


def prompts(data: str) -> Batch:
    """The rows of the kernel of `prompts`."""
    kernel, keys = Prompts(), Keys.of(range(2))
    node = KernelNode(name="prompts", operator="prompts", params={"data": data, "shuffle": False})
    kernel.open(node, Layout(), FakeSession(seed=7))
    [batch] = kernel.run(Chunk(id=0, step=1, keys=keys, inputs={}))
    return batch


def test_what_travels_and_what_is_recorded_is_still_as_the_file_has_it(tmp_path: Path) -> None:
    asked = [[USER, calling(arguments), USER] for arguments in CALLS[:2]]
    batch = prompts(saved(tmp_path, "jsonl", *({"prompt": turns} for turns in asked)))
    schema = layout_from(layout_of(batch.records.schema).encoded).schema
    arrived = pa.RecordBatch.from_arrays(batch.records.columns, schema=schema)
    pq.write_table(pa.table({"prompt": arrived.column("prompt")}), tmp_path / "recorded.parquet")
    recorded = pq.read_table(tmp_path / "recorded.parquet").column("prompt").combine_chunks()
    for column in (arrived.column("prompt"), recorded):
        assert prompts_of(column) == asked


def test_reward_functions_get_values_and_no_json(tmp_path: Path) -> None:
    asked = [[USER, calling(arguments)] for arguments in CALLS[:2]]
    batch = prompts(saved(tmp_path, "jsonl", *({"prompt": turns} for turns in asked)))
    shown = as_keywords(Batch.make(batch.keys, {"prompt": batch.array("prompt")}, Prompt).records)
    assert [turns[1] for turns in shown["prompts"]] == [turns[1] for turns in asked]
    assert shown["prompts"][0][0] == USER


def test_users_operators_get_values_and_no_json(tmp_path: Path) -> None:
    asked = [[USER, calling(arguments)] for arguments in CALLS[:2]]
    batch = prompts(saved(tmp_path, "jsonl", *({"prompt": turns} for turns in asked)))
    assert [turns[1] for turns in batch.flat("prompt")] == [turns[1] for turns in asked]


def test_a_line_that_is_no_conversation_is_named_as_before(tmp_path: Path) -> None:
    data = saved(tmp_path, "jsonl", {"prompt": [USER, calling({"a": 1})]}, {"prompt": "2+2?"})
    with pytest.raises(DataError, match=r"a\.jsonl:2: column 'prompt': expected a value like"):
        open_rows(data)
    data = saved(tmp_path, "jsonl", {"prompt": [USER]}, {"prompt": [{"role": 3, "content": ""}]})
    with pytest.raises(DataError, match=r"a\.jsonl:2: column 'prompt': expected a value like"):
        open_rows(data)
