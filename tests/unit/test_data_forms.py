"""Forms of users' data that other systems read: CSV, ShareGPT's messages, Alpaca's columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataflow.errors import DataError
from operators.data_files import (
    demonstration_columns,
    prompt_columns,
    read_prompts,
    read_table,
    source_columns,
)
from operators.data_sources import row_count
from operators.kernels.data import SourceRows, open_demonstrations, open_rows
from operators.kernels.preferences import open_preferences
from operators.kernels.text import prompts_of
from tests.kit.files import save_jsonl

HUMAN, GPT = {"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}
USER, ASSISTANT = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
SYSTEM = {"from": "system", "value": "short"}


def save(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_csv_columns_are_text_unless_each_value_is_a_number(tmp_path: Path) -> None:
    text = (
        "prompt,answer,day,code,level,share,note\n"
        '"a, ""b""\nc",yes,2024-01-01,007,1,0.5,\n'
        "p,true,2024-01-02,10,,2,x\n"
    )
    data = save(tmp_path / "a.csv", text)
    assert read_table(data).to_pydict() == {
        "prompt": ['a, "b"\nc', "p"],
        "answer": ["yes", "true"],
        "day": ["2024-01-01", "2024-01-02"],
        "code": ["007", "10"],
        "level": [1, None],
        "share": [0.5, 2.0],
        "note": ["", "x"],
    }
    kinds = source_columns(data)
    assert (kinds["code"], kinds["level"], kinds["share"]) == (pa.utf8(), pa.int64(), pa.float64())
    assert row_count(data, None) == 2
    assert open_rows(data).shape == "trl"


def test_csv_prompts_and_answers_that_are_numbers_stay_text(tmp_path: Path) -> None:
    data = save(tmp_path / "a.csv", "prompt,completion,text,answer\n1,2,3.5,4\n5,6,7,8\n")
    found = {"prompt": ["1", "5"], "completion": ["2", "6"], "text": ["3.5", "7"], "answer": [4, 8]}
    assert read_table(data).to_pydict() == found


def test_completions_that_are_numbers_are_refused_before_a_run(tmp_path: Path) -> None:
    data = save(tmp_path / "a.jsonl", '{"prompt": "1+1=", "completion": 2}\n')
    with pytest.raises(DataError, match=r"found completion: int64\. Fix: a string"):
        demonstration_columns(data)


def test_csv_messages_are_parsed_if_the_first_value_is_a_list_of_them(tmp_path: Path) -> None:
    said = json.dumps([USER, ASSISTANT]).replace('"', '""')
    data = save(tmp_path / "a.csv", f'messages,answer\n"{said}","[1]"\n"{said}",[]\n')
    rows = open_demonstrations(data)
    assert rows.shape == "messages"
    assert texts(rows, "messages") == [[USER, ASSISTANT]] * 2
    assert read_table(data).column("answer").to_pylist() == ["[1]", "[]"]
    torn = save(tmp_path / "b.csv", f'messages,answer\n"{said}",1\n"[{{""role"": 1",2\n')
    with pytest.raises(DataError, match=r"b\.csv: row 1, column 'messages'.*Fix:"):
        read_table(torn)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("prompt,answer\na,b,c\n", r"each record with the 2 columns .*, found: .*a,b,c.* Fix:"),
        ("prompt;answer\na;b\n", r"a\.csv:1: expected names between commas, found semicolons"),
        ("prompt,prompt\na,b\n", r"a\.csv:1: .* found 'prompt' twice"),
        ("prompt,\na,b\n", r"a\.csv:1: .* found an empty one"),
        ("prompt,answer\n", r"expected at least one row, found none"),
    ],
)
def test_bad_csv_is_refused_with_its_place(tmp_path: Path, text: str, told: str) -> None:
    data = save(tmp_path / "a.csv", text)
    with pytest.raises(DataError, match=told):
        open_rows(data)


def test_csv_may_begin_with_a_byte_order_mark_and_have_long_records(tmp_path: Path) -> None:
    long = "x" * (3 << 20)
    path = tmp_path / "a.csv"
    path.write_bytes(b"\xef\xbb\xbf" + f"prompt,n\n{long},1\n".encode())
    assert read_table(str(path)).to_pydict() == {"prompt": [long], "n": [1]}
    days = save(tmp_path / "b.csv", "\n\nprompt,day\np,2024-01-01\n")
    assert read_table(days).to_pydict() == {"prompt": ["p"], "day": ["2024-01-01"]}


def test_csv_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"prompt\n\xff\xfe\n")
    with pytest.raises(DataError, match=r"expected CSV in UTF-8.* Fix:"):
        read_table(str(path))


def forms(folder: Path, column: str, *rows: list[dict[str, Any]]) -> list[str]:
    """The same conversations as JSONL, Parquet and CSV."""
    table = pa.table({column: list(rows)})
    pq.write_table(table, folder / "a.parquet")
    with (folder / "a.csv").open("w") as file:
        file.write(f"{column}\n")
        for row in rows:
            file.write('"' + json.dumps(row).replace('"', '""') + '"\n')
    save_jsonl(folder / "a.jsonl", *({column: row} for row in rows))
    return [str(folder / f"a.{ending}") for ending in ("jsonl", "parquet", "csv")]


def texts(rows: SourceRows, column: str) -> list[Any]:
    """A column of all rows."""
    return prompts_of(rows.take(np.arange(len(rows))).column(column))


@pytest.mark.parametrize("column", ["conversations", "messages"])
def test_sharegpt_messages_are_read_as_messages(tmp_path: Path, column: str) -> None:
    whole = [{"role": "system", "content": "short"}, USER, ASSISTANT, USER]
    for data in forms(tmp_path, column, [HUMAN, GPT], [SYSTEM, HUMAN, GPT, HUMAN]):
        assert list(demonstration_columns(data)) == ["messages"]
        assert texts(open_demonstrations(data), "messages") == [[USER, ASSISTANT], whole], data
        assert list(prompt_columns(data)) == ["prompt", "messages"]
        asked = open_rows(data)
        assert asked.table.column("messages").type == source_columns(data)["messages"]
        assert texts(asked, "prompt") == [[USER], whole], data


def test_sharegpt_roles_may_be_written_as_ours_and_nulls_stay(tmp_path: Path) -> None:
    own = [{"from": "user", "value": "q"}, {"from": "assistant", "value": "a"}]
    table = pa.table({"conversations": [own, None]})
    pq.write_table(table, tmp_path / "a.parquet")
    found = read_prompts(str(tmp_path / "a.parquet")).to_pydict()
    assert found["prompt"] == [[{"role": "user", "content": "q"}], None]
    assert [m["role"] for m in found["messages"][0]] == ["user", "assistant"]
    with pytest.raises(DataError, match="row 1: expected a prompt, found null"):
        open_rows(str(tmp_path / "a.parquet"))


def test_an_unknown_role_is_named_with_its_row(tmp_path: Path) -> None:
    odd = {"from": "narrator", "value": "Once"}
    found = forms(tmp_path, "conversations", [HUMAN, GPT], [HUMAN, odd])
    places = (r"a\.jsonl:2", r"a\.parquet: row 1", r"a\.csv: row 1")
    for data, place in zip(found, places, strict=True):
        with pytest.raises(DataError, match=rf"{place}: conversations: .*found 'narrator'.*Fix:"):
            open_demonstrations(data)


def test_preferences_in_sharegpts_form(tmp_path: Path) -> None:
    row = {"chosen": [HUMAN, GPT], "rejected": [HUMAN, {"from": "gpt", "value": "5"}]}
    assert open_preferences(save_jsonl(tmp_path / "a.jsonl", row)).shape == "implicit"


def test_alpacas_columns_are_refused_with_what_to_write(tmp_path: Path) -> None:
    row = {"instruction": "Add.", "input": "2 2", "output": "4"}
    data = save_jsonl(tmp_path / "a.jsonl", row)
    with pytest.raises(DataError, match=r"'input' below it.* rename 'output' to 'completion'"):
        demonstration_columns(data)
    with pytest.raises(DataError, match="Fix: write 'instruction', and 'input' below it"):
        prompt_columns(data)
