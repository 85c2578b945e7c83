"""What graphs, checks, plans and batches show in a notebook."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataflow.batch import Batch, Keys
from dataflow.check import check
from dataflow.draw.chart import COLOURS, draw_chart, thin_points
from dataflow.graph import Graph
from dataflow.program import Program
from dataflow.schema import Reward
from engine.api import plan
from tests.kit.episodes import episode_batch
from tests.kit.graphs import graph_of, sampled, small_grpo
from tests.kit.pages import page_of, pictures_of


@pytest.fixture(autouse=True)
def inputs(tiny: None, tmp_path: Path) -> None:
    """A model's header, and a data file."""
    pq.write_table(
        pa.table({"prompt": ["a", "b"], "answer": ["c", "d"]}), tmp_path / "train.parquet"
    )


def program() -> Program:
    """Two phases."""
    return Program((small_grpo(), 2), (small_grpo(), 1), name="two")


def test_a_graph_shows_its_drawing() -> None:
    graph = small_grpo()
    [drawn] = pictures_of(page_of(graph))
    assert all(node.name in drawn for node in graph.nodes)
    [drawn] = pictures_of(page_of(program()))
    assert "two" in drawn


def test_a_wrong_graph_shows_its_drawing_too() -> None:
    assert len(pictures_of(page_of(graph_of(sampled(n=0))))) == 1


def test_a_checked_graph_shows_what_the_check_found() -> None:
    checked = check(small_grpo())
    assert checked.describe().splitlines()[0] in page_of(checked)
    assert repr(checked).startswith("CheckedGraph(")
    assert len(repr(checked)) < 60
    both = check(program())
    assert "phase 1 of 2" in page_of(both)
    assert repr(both).startswith("CheckedProgram('two'")


def test_a_plan_shows_a_table_of_its_nodes() -> None:
    planned = plan(small_grpo())
    page = page_of(planned)
    for node in planned.nodes:
        assert f">{node.name}</td>" in page
    assert "<summary>the whole plan</summary>" in page
    assert repr(planned) == f"Plan({planned.graph!r}, {len(planned.nodes)} nodes in 1 Worker)"
    assert repr(plan(program())) == "ProgramPlan('two', 2 phases)"


def test_a_batch_shows_its_first_rows() -> None:
    reward = np.arange(12, dtype=np.float32)
    batch = Batch.make(Keys.of(range(100, 112)), {"reward": reward}, Reward)
    page = page_of(batch)
    assert "12 rows" in page
    assert "reward: float" in page
    assert "<td" in page
    assert ">109</td>" in page
    assert ">110</td>" not in page
    assert "... 2 more rows" in page


def test_of_a_batch_of_episodes_the_last_message_is_shown() -> None:
    page = page_of(episode_batch(rows=1, turns=2))
    assert "5 messages, the last: assistant: turn 1 says so" in page


def test_long_values_of_a_batch_are_cut() -> None:
    columns = {"ids": [list(range(40))], "words": ["<b>" + "x" * 500]}
    page = page_of(Batch.make(Keys.of([0]), columns, Reward))
    assert "[0, 1, 2, 3, 4, 5, ...] (40)" in page
    assert "&lt;b&gt;xxx" in page
    assert "<b>x" not in page
    assert "x" * 101 not in page


def test_names_in_a_page_are_escaped() -> None:
    assert "<script>" not in page_of(Graph("<script>", *small_grpo().sinks))


def test_a_chart_has_a_line_for_each_name() -> None:
    lines = {"reward/a/mean": [(1, 0.0), (2, 1.0)], "reward/b/mean": [(1, 5.0), (2, 3.0)]}
    drawn = draw_chart("reward", lines)
    assert drawn.count("<polyline") == 2
    assert all(name in drawn for name in [*lines, "step 1", ">5<", ">0<"])


def test_a_chart_leaves_a_gap_where_a_number_is_not_finite() -> None:
    points = [(1, 0.0), (2, 1.0), (3, math.nan), (4, 2.0), (5, math.inf), (6, 1.0), (7, 1.0)]
    drawn = draw_chart("loss", {"loss": points})
    assert drawn.count("<polyline") == 2
    assert drawn.count("<circle") == 1
    assert "nan" not in drawn
    assert "inf" not in drawn


def test_a_chart_of_one_value_is_drawn() -> None:
    assert "<circle" in draw_chart("reward", {"reward": [(3, 0.5)]})


def test_a_chart_says_what_it_leaves_out() -> None:
    lines = {f"m{i}": [(1, float(i)), (2, 0.0)] for i in range(len(COLOURS) + 2)}
    drawn = draw_chart("loss", lines)
    assert "(2 more not shown)" in drawn
    assert drawn.count("<polyline") == len(COLOURS)


def test_a_long_line_is_thinned_to_means() -> None:
    points = [(step, float(step % 2)) for step in range(1, 4001)]
    found = list(thin_points(points))
    assert len(found) == 400
    assert {value for _, value in found} == {0.5}
    assert found[-1][0] == 4000
