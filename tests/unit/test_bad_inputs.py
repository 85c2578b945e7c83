"""Bad data, cluster files and run folders, those of torture/: one line each, with place and fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from dataflow.errors import DataError, GraphError, PlanError, RunError
from dataflow.safe_text import one_line
from dataflow.snapshot import from_json as graph_of
from engine.keep.run_measurements import node_seconds
from engine.plan.cluster_file import read_cluster
from engine.plan.options import decode_options as options_of
from operators.data_files import read_table
from operators.data_lines import read_lines
from operators.kernels.data import open_demonstrations, open_rows
from tests.kit.files import save_jsonl
from tests.torture.data import CLUSTERS, DATA, RIGHT, RUNS


def _refused(error: BaseException) -> str:
    text = str(error)
    assert text == one_line(text)
    assert "Fix: " in text
    return text


@pytest.mark.parametrize("case", DATA)
def test_bad_data_is_refused_with_its_place(case: str, tmp_path: Path) -> None:
    given = DATA[case](tmp_path)
    with pytest.raises(DataError) as caught:
        open_rows(given)
    assert (one_line(Path(given).name)[:40] or ".") in _refused(caught.value)


@pytest.mark.parametrize("case", RIGHT)
def test_data_that_looks_odd_is_read(case: str, tmp_path: Path) -> None:
    assert len(open_rows(RIGHT[case](tmp_path)))


@pytest.mark.parametrize("case", CLUSTERS)
def test_a_bad_cluster_file_is_refused_with_its_line(case: str, tmp_path: Path) -> None:
    given = CLUSTERS[case](tmp_path)
    with pytest.raises(PlanError) as caught:
        read_cluster(Path(given))
    assert f"cluster file {given}" in _refused(caught.value)


@pytest.mark.parametrize("case", [case for case in RUNS if ".json" in case and "UTF-8" not in case])
def test_a_bad_file_of_a_run_folder_is_refused_by_name(case: str, tmp_path: Path) -> None:
    given = Path(RUNS[case](tmp_path))
    read = graph_of if case.startswith("graph") else lambda text, where: options_of(text, {}, where)
    text = (given / f"{case.partition('.')[0]}.json").read_text()
    with pytest.raises((RunError, GraphError)) as caught:
        read(text, "runs/a/it.json")
    assert "runs/a/" in _refused(caught.value)


NO_UTF8 = "expected UTF-8, found byte 0xFF at column 13. Fix: save the file as UTF-8."
DEEP = "expected at most 200 levels of lists and objects, found more. Fix: keep it as text."
NO_OBJECT = 'expected one JSON object a line, found list. Fix: {"prompt": "..."} on each line.'


@pytest.mark.parametrize("line,told", [
    (b'{"prompt": "\xff"}', NO_UTF8),
    (b'{"a": 1, "a": 2}', "expected each key once, found 'a' twice. Fix: leave one out."),
    (b'{"a": {"b": 1,  "b" :2}}', "expected each key once, found 'b' twice. Fix: leave one out."),
    (b'{"a": ' + b"[" * 300 + b"]" * 300 + b"}", DEEP),
    (b"[1]", NO_OBJECT),
], ids=["no UTF-8", "a key twice", "an inner key twice", "deep", "no object"])  # fmt: skip
def test_messages_of_lines(line: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "a"}\n' + line + b"\n")
    with pytest.raises(DataError) as caught:
        read_lines([tmp_path / "a.jsonl"])
    assert str(caught.value) == f"{tmp_path}/a.jsonl:2: {told}"


def test_the_levels_that_are_allowed_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "x": ' + "[" * 150 + "1" + "]" * 150 + "}\n")
    assert len(read_table(str(tmp_path / "a.jsonl"))) == 1


def test_demonstrations_without_words_are_refused_with_their_line(tmp_path: Path) -> None:
    said = {"role": "user", "content": "a"}
    rows = [{"messages": [said, {"role": "assistant", "content": text}]} for text in ("b", None)]
    told = r"a\.jsonl:2: messages: expected content in each message, found null\. Fix: "
    with pytest.raises(DataError, match=told):
        open_demonstrations(save_jsonl(tmp_path / "a.jsonl", *rows))
    called = [said, {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    assert len(open_demonstrations(save_jsonl(tmp_path / "a.jsonl", {"messages": called})))


def test_the_measured_times_of_a_damaged_file_are_refused_with_the_line(tmp_path: Path) -> None:
    rows = '{"step": 1, "time/a": 1.0}\n{"step": 2, "time/a": null}\n'
    (tmp_path / "metrics.jsonl").write_text(rows + '{"time/')
    assert node_seconds(tmp_path) == {"a": 0.5}, "what a kill tore counts for nothing"
    (tmp_path / "metrics.jsonl").write_text('{"time/\n' + rows)
    problem = r"metrics\.jsonl:1: expected a JSON object with a step, found b'\{\"time/.*Fix: "
    with pytest.raises(DataError, match=problem):
        node_seconds(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(rows + '{"step": 3, "time/a": "x"}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, step 3: expected numbers, found "):
        node_seconds(tmp_path)
