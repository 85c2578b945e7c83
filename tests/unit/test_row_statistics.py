"""Lengths as texts, from samples of a run, and from traces."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataflow.errors import DataflowError, PlanError
from engine.keep.flow.records import Flow, ReplicaFlow
from engine.predict.row_statistics import SeenRows, parse_distribution, seen_rows
from tests.kit.files import save_jsonl
from tests.kit.kept_runs import kept_run
from tests.kit.watched import write_flows


def lengths(found: SeenRows) -> tuple[list[int] | None, ...]:
    """Of prompts, and of answers."""
    known = (found.prompts, found.answers)
    return tuple(None if each is None else each.lengths.tolist() for each in known)


def test_lengths_as_texts() -> None:
    assert lengths(seen_rows("")) == (None, None)
    assert lengths(seen_rows("512", "200")) == ([200], [512])
    drawn = parse_distribution("lognormal:3000,0.9,20000")
    assert drawn.longest == 20000
    assert 2900 < np.median(drawn.lengths) < 3100


@pytest.mark.parametrize(
    "text", ["0", "many", "lognormal:3000", "lognormal:a,b,c", "-3", "lognormal:0,1,5", "none.csv"]
)
def test_texts_that_are_no_lengths(text: str) -> None:
    with pytest.raises(PlanError, match="Fix: "):
        parse_distribution(text)


def save_run(folder: Path, **prompts: list[list[int]]) -> Path:
    """What a run leaves of lengths and seconds: two Steps of four rows."""
    nodes = [
        {"name": "rollout", "models": [{"model": "policy"}], "work": "decode", "rows": 1},
        {"name": "score", "models": [], "work": "host", "rows": 2},
        {"name": "prompts", "models": [], "work": "source", "rows": 1},
    ]
    nodes = [node | {"source": "prompts"} for node in nodes]
    plan = {"nodes": nodes, "sources": [{"name": "prompts", "batch": 2}]}
    times = {"time/rollout": 3.0, "time/prompts": 1.0}
    rows = [{"step": step, "time/score": s, **times} for step, s in enumerate((9.0, 0.4), 1)]
    kept_run(folder, rows=rows)
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "samples").mkdir()
    for step, answers in enumerate([[1, 2, 3, 0], [5, 6, 7, 8]], 1):
        unknown = {"prompt_ids": pa.nulls(4, pa.large_list(pa.int32()))}
        columns = {"length": pa.array(answers, pa.int32())} | unknown | prompts
        pq.write_table(pa.table(columns), folder / "samples" / f"step_{step:06d}.parquet")
    return folder


def test_lengths_and_seconds_of_a_run(tmp_path: Path) -> None:
    found = seen_rows(str(save_run(tmp_path / "r", prompt_ids=[[1], [1, 2], [1], [1, 2, 3]])))
    # A row of nothing is a pass.
    assert lengths(found) == ([1, 1, 1, 1, 2, 2, 3, 3], [1, 1, 2, 3, 5, 6, 7, 8])
    assert found.seconds == {"score": 0.1}, "not the first Step; a Step has four rows"
    without = str(save_run(tmp_path / "without"))
    assert lengths(seen_rows(without))[0] is None
    assert lengths(seen_rows(without, "7"))[0] == [7]


def _flow(step: int, rows: dict[str, int]) -> Flow:
    nodes = {name: ReplicaFlow(rows=count) for name, count in rows.items()}
    return Flow(step=step, start=step - 1.0, end=step, wall=step, nodes=nodes)


def test_what_was_made_for_two_steps_counts_for_two(tmp_path: Path) -> None:
    """With a lag rows of several Steps are made in one, and the next has no seconds of them."""
    folder = save_run(tmp_path / "r")
    second = {"time/score": 1.6, "cpu/score": 0.2, "queue/score": 0.8}
    times: list[dict[str, float]] = [{"time/score": 9.0}, second, {}]
    lines = "".join(json.dumps(row | {"step": step}) + "\n" for step, row in enumerate(times, 1))
    (folder / "metrics.jsonl").write_text(lines)
    found = seen_rows(str(folder))
    same = pytest.approx(0.1)
    assert found.seconds == {"score": same}, "two Steps of four rows; no waiting for a core"
    assert found.cpu == {"score": pytest.approx(0.25)}
    made: list[dict[str, int]] = [{"score@a": 99}, {"score@a": 6, "score@b": 4, "rollout@a": 8}, {}]
    write_flows(folder / "events", (_flow(step, rows) for step, rows in enumerate(made, 1)))
    assert seen_rows(str(folder)).seconds == {"score": pytest.approx(0.08)}, (
        "some were dropped after it"
    )


def save_counted_run(folder: Path) -> Path:
    """Two Steps of a refilling selection, and an evaluation of four rows after the second."""
    nodes = [
        {"name": "score", "work": "host", "source": "prompts", "rows": 2},
        {"name": "chosen", "work": "select", "source": "prompts", "rows": 2},
        {"name": "eval_score", "work": "host", "source": "eval_prompts", "rows": 1},
    ]
    nodes[1]["relation"] = "subset"
    nodes = [node | {"models": []} for node in nodes]
    plan = {"nodes": nodes, "sources": [{"name": "prompts", "batch": 2}]}
    rows = [
        {"step": 1, "time/score": 9.0, "chosen/kept": 0.5},
        {"step": 2, "time/score": 2.0, "time/eval_score": 0.8, "chosen/kept": 0.25},
    ]
    kept_run(folder, rows=rows)
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "samples").mkdir()
    columns = {"length": pa.array([4], pa.int32()), "prompt_ids": pa.array([[1]])}
    pq.write_table(pa.table(columns), folder / "samples" / "step_000001.parquet")
    made = [{"score@main": 8, "chosen@main": 4}]
    made += [{"score@a": 10, "score@b": 6, "chosen@main": 4, "eval_score@main": 4}]
    flows = [{name: ReplicaFlow(rows=count) for name, count in each.items()} for each in made]
    write_flows(
        folder / "events",
        (Flow(step=s, start=0.0, end=1.0, wall=0.0, nodes=n) for s, n in enumerate(flows, 1)),
    )
    return folder


def test_seconds_of_a_row_are_of_the_rows_that_there_were(tmp_path: Path) -> None:
    rows = seen_rows(str(save_counted_run(tmp_path / "run")))
    assert rows.seconds["score"] == 2.0 / 16, "a refill scores more rows than a batch has"
    assert rows.seconds["eval_score"] == 0.8 / 4, "not those of the whole evaluation"


def test_seconds_of_an_evaluation_whose_rows_nobody_counted_are_not_known(tmp_path: Path) -> None:
    run = save_counted_run(tmp_path / "run")
    shutil.rmtree(run / "events")
    assert seen_rows(str(run)).seconds == {"score": 2.0 / 4}


def test_what_selections_kept_of_all_rows_of_a_run(tmp_path: Path) -> None:
    rows = seen_rows(str(save_counted_run(tmp_path / "run")))
    assert rows.kept == {"chosen": (4 + 4) / (8 + 16)}


TRACES = {
    "csv": lambda path: path.write_text("ContextTokens,GeneratedTokens\n10,300\n20,400\n"),
    "jsonl": lambda path: save_jsonl(
        path,
        {"input_length": 10, "output_length": 300},
        {"input_length": 20, "output_length": 400},
    ),
    "parquet": lambda path: pq.write_table(
        pa.table({"prompt_tokens": [10, 20], "completion_tokens": [300, 400]}), path
    ),
}


@pytest.mark.parametrize("ending", TRACES)
def test_lengths_of_a_trace(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"trace.{ending}"
    TRACES[ending](path)
    assert lengths(seen_rows(str(path))) == ([10, 20], [300, 400])


@pytest.mark.parametrize(
    "name, text, told",
    [
        (
            "negative.csv",
            "input_tokens,output_tokens\n3,4\n5,-4\n",
            "row 1: .* found -4",
        ),
        ("t.csv", "a,b\n1,2\n", "expected a column completion_tokens or .*, found a, b"),
        ("t.csv", "completion_tokens\nmany\n", "expected numbers of tokens, found string"),
        ("t.jsonl", "{", "cannot be read"),
        ("t.parquet", "x", "cannot be read"),
        ("t.txt", "1", r"expected a file ending in .csv, .jsonl, .parquet, found .txt"),
    ],
)
def test_traces_that_say_nothing(tmp_path: Path, name: str, text: str, told: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataflowError, match=f"{told}.*Fix: "):
        seen_rows(str(tmp_path / name))


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(DataflowError, match=r"expected a run folder.*Fix: --lengths runs/NAME"):
        seen_rows(str(tmp_path))
