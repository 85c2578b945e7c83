"""Lengths as texts, from samples of a run, and from traces."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataflow.errors import DataflowError, PlanError
from engine.seen_rows import distribution, seen_rows


def test_lengths_as_texts() -> None:
    same = seen_rows("512").answers
    assert same is not None
    assert same.lengths.tolist() == [512]
    both = seen_rows("lognormal:3000,0.9,20000", "200")
    assert both.answers is not None
    assert both.prompts is not None
    assert (both.answers.longest, both.prompts.mean) == (20000, 200.0)
    assert 2900 < np.median(both.answers.lengths) < 3100
    assert seen_rows("").answers is None


@pytest.mark.parametrize(
    "text", ["0", "many", "lognormal:3000", "lognormal:a,b,c", "-3", "lognormal:0,1,5", "none.csv"]
)
def test_texts_that_are_no_lengths(text: str) -> None:
    with pytest.raises(PlanError, match="Fix: "):
        distribution(text)


def save_run(folder: Path, **prompts: list[list[int]]) -> Path:
    """What a run leaves of lengths and seconds: two Steps of four rows."""
    (folder / "samples").mkdir(parents=True)
    (folder / "versions.json").write_text("{}")
    nodes = [
        {"name": "rollout", "models": [{"model": "policy"}], "work": "decode"},
        {"name": "score", "models": [], "work": "host"},
        {"name": "prompts", "models": [], "work": "source"},
    ]
    for node in nodes:
        node |= {"source": "prompts", "rows": 2 if node["name"] == "score" else 1}
    plan = {"nodes": nodes, "sources": [{"name": "prompts", "batch": 2}]}
    (folder / "plan.json").write_text(json.dumps(plan))
    rows = [{"time/score": s, "time/rollout": 3.0, "time/prompts": 1.0} for s in (9.0, 0.4)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for step, lengths in enumerate([[1, 2, 3, 0], [5, 6, 7, 8]], 1):
        columns = {"length": pa.array(lengths, pa.int32())} | prompts
        ids = columns.setdefault("prompt_ids", pa.nulls(4, pa.large_list(pa.int32())))
        assert len(ids) == 4
        pq.write_table(pa.table(columns), folder / "samples" / f"step_{step:06d}.parquet")
    return folder


def test_lengths_and_seconds_of_a_run(tmp_path: Path) -> None:
    found = seen_rows(str(save_run(tmp_path / "r", prompt_ids=[[1], [1, 2], [1], [1, 2, 3]])))
    assert found.answers is not None
    assert found.prompts is not None
    assert found.answers.lengths.tolist() == [1, 1, 2, 3, 5, 6, 7, 8], "a row of nothing is a pass"
    assert found.prompts.longest == 3
    assert found.seconds == {"score": 0.1}, "not the first Step; a Step has four rows"
    unknown = seen_rows(str(save_run(tmp_path / "without")))
    assert unknown.prompts is None
    assert seen_rows(str(tmp_path / "without"), "7").prompts is not None


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_lengths_of_a_trace(tmp_path: Path, ending: str) -> None:
    path, rows = tmp_path / f"trace.{ending}", [(10, 300), (20, 400)]
    if ending == "csv":
        path.write_text("ContextTokens,GeneratedTokens\n10,300\n20,400\n")
    elif ending == "jsonl":
        lines = [{"input_length": p, "output_length": a} for p, a in rows]
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    else:
        pq.write_table(pa.table({"prompt_tokens": [10, 20], "completion_tokens": [300, 400]}), path)
    found = seen_rows(str(path))
    assert found.prompts is not None
    assert found.answers is not None
    assert found.prompts.lengths.tolist() == [10, 20]
    assert found.answers.lengths.tolist() == [300, 400]


@pytest.mark.parametrize(
    "name, text, told",
    [
        ("t.csv", "a,b\n1,2\n", "expected a column completion_tokens or .*, found a, b"),
        ("t.csv", "completion_tokens\nmany\n", "expected numbers of tokens, found string"),
        ("t.jsonl", "{", "cannot be read"),
        ("t.parquet", "x", "cannot be read"),
        ("t.txt", "1", r"expected a file ending in .csv, .jsonl, .parquet, found .txt"),
    ],
)
def test_traces_that_say_nothing(tmp_path: Path, name: str, text: str, told: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataflowError, match=told) as caught:
        seen_rows(str(tmp_path / name))
    assert "Fix: " in str(caught.value)


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(DataflowError, match=r"expected a run folder.*Fix: --lengths runs/NAME"):
        seen_rows(str(tmp_path))
