"""Texts that a model wrote, and files that a disk spoilt: one bad row or file spoils no other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.cli import main
from engine.keep.reader.sample_index import SampleQuery
from engine.keep.reader.sample_rows import as_text, prompt_of
from engine.keep.samples import SampleWriter
from engine.watch.json_answers import encode_answer
from engine.watch.report import make_report
from engine.watch.run_questions import ServedRuns
from tests.kit.watched import sample_rows, watched_run

DEEP = '[{"role":' + "[" * 30_000
CLOSED = '[{"role":"user","content":' + "[" * 400 + "]" * 400 + "}]"
CONTENT = '[{"role":"user","content":' + "[" * 30_000 + "]" * 30_000 + "}]"
HALF = '[{"role":"user","content":"\\ud800"}]'
HALF_KEY = '[{"role":"user","\\udfff":"x"}]'
LONG_NUMBER = '[{"role":"user","content":' + "9" * 5000 + "}]"
NO_ROLE = '[{"role":[[["user"]]]}]'
TORN = '[{"role":"user","content":"x"'
NUMBER = '[{"role":1e999}]'
TEXTS = [DEEP, CONTENT, HALF, HALF_KEY, LONG_NUMBER, NO_ROLE, TORN, NUMBER]


@pytest.mark.parametrize("text", TEXTS)
def test_what_are_no_messages_is_plain_text(text: str) -> None:
    assert prompt_of(text) == text
    assert as_text(text) == text


@pytest.mark.parametrize("text", [*TEXTS, CLOSED, "\ud800", "[{}]", "[{", ""])
def test_any_text_can_be_an_answer(text: str) -> None:
    encode_answer({"prompt": prompt_of(text), "short": as_text(text)})


def test_messages_are_read_and_half_characters_are_codes() -> None:
    messages = [{"role": "user", "content": "hello"}]
    assert prompt_of(json.dumps(messages)) == messages
    assert prompt_of(json.dumps(messages * 70)) == [*messages * 64, "... 70 in all"]
    assert json.loads(encode_answer({"a\ud800": ["\udfff", ("x",)]})) == {
        "a\\ud800": ["\\udfff", ["x"]]
    }


def with_texts(run: Path) -> Path:
    """The last Step has a row for each of TEXTS."""
    table = sample_rows(6, len(TEXTS))
    for name in ("prompt", "completion"):
        table = table.set_column(table.column_names.index(name), name, pa.array(TEXTS))
    SampleWriter(run / "samples").write(6, table)
    return run


def test_one_bad_row_is_shown_and_the_others_too(tmp_path: Path) -> None:
    with_texts(watched_run(tmp_path / "a", samples=4))
    runs = ServedRuns(tmp_path)
    found = runs.samples("a", SampleQuery())
    assert found["total"] == 5 * 4 + len(TEXTS)
    assert [row["completion"] for row in found["rows"][: len(TEXTS)]] == [t[:300] for t in TEXTS]
    encode_answer(found)
    for row in found["rows"]:
        key = (row["step"], row["node"], row["position"], row["sample"])
        encode_answer(runs.sample("a", *key))
    encode_answer(runs.edge("a", "rollout->score"))
    assert "&quot;\\ud800&quot;" in make_report(runs, "a", now=0.0)


def test_the_report_of_such_a_run_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = with_texts(watched_run(tmp_path / "a", samples=4))
    assert main(["report", str(run), "--out", str(tmp_path / "a.html")]) == 0
    assert "report of a" in capsys.readouterr().out


# --- damaged files --------------------------------------------------------------------------------


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def spoilt_texts(path: Path) -> None:
    """Its prompts and completions cannot be read; all else can."""
    content = bytearray(path.read_bytes())
    columns = pq.ParquetFile(path).metadata.row_group(0)
    for at in range(columns.num_columns):
        column = columns.column(at)
        if column.path_in_schema in ("prompt", "completion"):
            begin = column.dictionary_page_offset or column.data_page_offset
            end = begin + column.total_compressed_size
            content[begin:end] = b"\xff" * (end - begin)
    path.write_bytes(content)


QUESTIONS: dict[str, Callable[[ServedRuns], dict[str, Any]]] = {
    "the newest": lambda runs: runs.samples("a", SampleQuery()),
    "the best": lambda runs: runs.samples("a", SampleQuery(order="best")),
    "a search": lambda runs: runs.samples("a", SampleQuery(q="<SCRIPT>")),
    "the same prompt": lambda runs: runs.same("a", 1, "train_policy", 2),
}


@pytest.mark.parametrize("damage", [torn, empty, spoilt_texts])
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_damaged_file_is_named_and_the_others_are_shown(
    damage: Callable[[Path], None], question: str, tmp_path: Path
) -> None:
    run = watched_run(tmp_path / "a", samples=4)
    damage(run / "samples" / "step_000003.parquet")
    runs = ServedRuns(tmp_path)
    for _ in range(2):
        found = QUESTIONS[question](runs)
        steps = {row["step"] for row in found["rows"]}
        assert steps == {1, 2, 4, 5, 6}
        (problem,) = found["problems"]
        assert problem.startswith("step_000003.parquet is damaged and left out: ")
        encode_answer(found)
    page = make_report(runs, "a", now=0.0)
    assert "step_000003.parquet is damaged" in page
    assert "6.0&lt;/script&gt;" in page


def test_a_damaged_file_that_is_made_anew_is_shown_again(tmp_path: Path) -> None:
    run = watched_run(tmp_path / "a", samples=4)
    spoilt_texts(run / "samples" / "step_000003.parquet")
    runs = ServedRuns(tmp_path)
    assert runs.samples("a", SampleQuery(q="<script>"))["total"] == 20
    SampleWriter(run / "samples").write(3, sample_rows(3, 4))
    again = runs.samples("a", SampleQuery(q="<script>"))
    assert (again["total"], again["problems"]) == (24, [])


# --- other files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plan", "graph", "options", "ended", "changes", "versions"])
@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"state": "\xff"}', b'{"name": "\\ud800"}'])
def test_a_record_that_is_no_json_is_no_error(name: str, content: bytes, tmp_path: Path) -> None:
    run = watched_run(tmp_path / "a", samples=2)
    watched_run(tmp_path / "b", samples=2)
    (run / f"{name}.json").write_bytes(content)
    runs = ServedRuns(tmp_path)
    encode_answer([runs.runs(), runs.run("a", None), runs.flow("a", None, None)])
    encode_answer(runs.compare(["a", "b"]))
    encode_answer(runs.watcher("a").look())
    make_report(runs, "a", now=0.0)
    assert main(["top", "--once", str(run)]) == 0


def test_a_line_of_metrics_that_is_no_text_is_left_out(tmp_path: Path) -> None:
    run = watched_run(tmp_path / "a", samples=0)
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 7, "a": "\xff"}\n')
    found = ServedRuns(tmp_path).series("a", ["reward/mean"], None, None, 10)
    assert found["steps"] == [1, 2, 3, 4, 5, 6]


def test_a_folder_whose_name_is_no_text_is_listed(tmp_path: Path) -> None:
    watched_run(tmp_path / "a", samples=0)
    watched_run(tmp_path / b"b\xff".decode("utf-8", "surrogateescape"), samples=0)
    names = [run["name"] for run in json.loads(encode_answer(ServedRuns(tmp_path).runs()))]
    assert sorted(names) == ["a", "b\\udcff"]
