"""Who reads metrics.jsonl agrees on its rows: torn lines, damage, a Step written twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.errors import DataError
from engine.keep.metrics.metric_lines import METRICS, MetricTail, recorded_rows, recorded_steps
from engine.keep.reader.metric_index import MetricIndex, ascending_rows
from engine.keep.reader.open_folder import open_run
from engine.keep.reader.run_state import NO_WORD
from engine.keep.reader.run_summary import read_summary, summarize
from engine.keep.run_measurements import seconds_by_step
from engine.watch.run_description import describe_in_list
from tests.kit.kept_runs import kept_run

DAMAGED = ("", "[1]", "{}", '{"step": -1}', '{"step": true}', '{"step": 1.5}', '{"step": NaN}')


def rows_that_count(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As a run that went back to a checkpoint leaves them."""
    counted: list[dict[str, Any]] = []
    for row in rows:
        counted = [each for each in counted if each["step"] < row["step"]] + [row]
    return counted


@given(
    steps=st.lists(st.integers(0, 6), max_size=12),
    damage=st.lists(st.sampled_from(DAMAGED), max_size=3),
    torn=st.sampled_from(["", '{"step": 9, "rew']),
)
def test_all_readers_agree_on_the_rows(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], damage: list[str], torn: str
) -> None:
    rows = [{"step": step, "time/score": float(at)} for at, step in enumerate(steps)]
    path = tmp_path_factory.mktemp("run") / METRICS
    lines = [*map(json.dumps, rows), *damage]
    path.write_text("".join(f"{line}\n" for line in lines) + torn)
    (path.parent / "versions.json").write_text("{}")
    counted = rows_that_count(rows)
    index = MetricIndex()
    with open_run(path.parent) as folder:
        index.refresh(folder)
        assert list(ascending_rows(folder)) == counted
        assert describe_in_list("run", folder)["step"] == summarize(folder, path.parent).step
    assert index.steps.tolist() == [row["step"] for row in counted]
    assert index.last == (counted[-1] if counted else {})
    with open(path, "rb") as file:
        assert list(MetricTail(file, METRICS).rows()) == counted[::-1]
    if len(damage) + bool(torn) <= 1:  # it is the last line, and counts as torn
        assert list(recorded_rows(path)) == counted
        assert recorded_steps(path) == index.steps.tolist()
        measured = [row["score"] for row in seconds_by_step(path.parent).get(0, [])]
        assert measured == [row["time/score"] for row in counted]
    else:
        with pytest.raises(DataError, match="expected a JSON object with a step"):
            recorded_steps(path)


def test_the_index_sees_a_step_again_that_it_has_read(tmp_path: Path) -> None:
    """A run of a version that did not cut its file when it went back."""
    run = kept_run(tmp_path / "a", rows=[{"step": step, "x": 1.0} for step in (1, 2, 3, 4, 5, 6)])
    index = MetricIndex()
    with open_run(run) as folder:
        assert dict(index.columns(folder, ["x"]))["x"].tolist() == [1.0] * 6
        with open(run / METRICS, "a") as file:
            file.write('{"step": 1, "x": 2.0}\n{"step": 2, "x": 2.0}\n')
        assert dict(index.columns(folder, ["x"]))["x"].tolist() == [2.0, 2.0]
        assert index.row(folder, 1) == {"step": 1, "x": 2.0}
        assert index.row(folder, 3) == {}


def test_the_list_and_the_page_say_the_same_of_a_run(tmp_path: Path) -> None:
    rows = [{"step": 1, "reward/b/mean": 0.5, "reward/a/max": 9.0}, {"step": 2, "eval/reward": 1.0}]
    run = kept_run(tmp_path / "a", rows=rows, torn='{"step": 3, "rew')
    with open_run(run) as folder:
        line = describe_in_list("a", folder)
    in_list = read_summary(run)
    assert in_list.reward is not None
    assert (line["step"], line["reward"]) == (in_list.step, in_list.reward.value) == (2, 0.5)
    assert (in_list.reward.metric, in_list.reward.step) == ("reward/b/mean", 1)
    assert (in_list.state, line["state"]) == (NO_WORD, "ended")
