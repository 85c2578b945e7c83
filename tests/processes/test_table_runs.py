"""Runs with a Table: what is looked up, in one process and several, after deaths and resumes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataflow.program import Program
from engine.api import Result, peek, rerun, resume
from engine.keep.record.place import row_files
from engine.watch.report import make_report
from engine.watch.run_questions import ServedRuns
from operators.kernels.tables import FILE
from tests.kit.processes import KillWorkers
from tests.kit.runs import column, metrics, require_same_numbers, require_same_runs, steps_stored
from tests.kit.table_graphs import lengths_graph
from tests.kit.tiny_runs import PROMPTS, TinyRuns

pytestmark = pytest.mark.timeout(180)
LONG = pytest.mark.long
STEPS = 7
"""Of 8 of 24 prompts each: the third epoch has begun."""
RECORDED = "prompts,lookup_lengths,rollout"


def rows_of(folder: Path, node: str) -> list[dict[str, Any]]:
    """All rows that a node made, by their key."""
    tables = [pq.read_table(file.path) for file in row_files(folder / "recorded", node)]
    rows = pa.concat_tables(tables, promote_options="permissive").to_pylist()
    return sorted(rows, key=lambda row: (row["key.position"], row["key.sample"]))


def read_table(run: Result) -> dict[str, list[Any]]:
    """The Table in the last checkpoint."""
    step = max(steps_stored(run))
    path = run.folder / "checkpoints" / f"step_{step}" / "record_lengths" / FILE
    with pa.OSFile(str(path), "rb") as source:
        return pa.ipc.open_file(source).read_all().to_pydict()


def expected_length(logs_by_prompt: dict[str, list[float]], prompt: str) -> float:
    """By a plain dict of the logs of all lengths so far."""
    means = {text: sum(logs) / len(logs) for text, logs in logs_by_prompt.items()}
    if not means:
        return 0.0
    if prompt in means:
        return math.exp(means[prompt])
    return math.exp(sum(means.values()) / len(means))


def require_expected(folder: Path, *, batch: int, lag: int) -> None:
    """Require each weight to be what a plain dict over the Steps before gives."""
    prompts = {row["key.position"]: row["prompt"] for row in rows_of(folder, "prompts")}
    weights = {row["key.position"]: row["weight"] for row in rows_of(folder, "lookup_lengths")}
    answers: dict[int, list[int]] = defaultdict(list)
    for row in rows_of(folder, "rollout"):
        answers[row["key.position"]].append(len(row["completion_ids"]))
    versions: list[dict[str, list[float]]] = [{}]
    for begin in range(0, batch * STEPS, batch):
        logs = {text: list(numbers) for text, numbers in versions[-1].items()}
        for position in range(begin, begin + batch):
            numbers = map(math.log, answers[position])
            logs.setdefault(prompts[position], []).extend(numbers)
        versions.append(logs)
    for position in range(batch * STEPS):
        step = position // batch
        possible = versions[max(0, step - lag) : step + 1]
        wanted = [expected_length(logs, prompts[position]) for logs in possible]
        assert any(math.isclose(weights[position], each, rel_tol=1e-6) for each in wanted)
    assert set(prompts.values()) == set(PROMPTS), "every prompt came back"
    assert len(set(weights.values())) > 12, "the weights differ"


def test_what_is_looked_up_is_what_a_plain_dict_has(tiny: TinyRuns) -> None:
    run = tiny.run(lengths_graph, STEPS, record=RECORDED)
    require_expected(run.folder, batch=8, lag=0)
    assert column(run, "table/lengths/known") == [0.0] * 3 + [1.0] * 4
    assert read_table(run)["row"] == list(range(24))
    assert sum(read_table(run)["count"]) == STEPS * 8 * 4


def test_in_any_number_of_processes_it_has_the_same_bits(tiny: TinyRuns) -> None:
    one = tiny.run(lengths_graph, STEPS, name="one")
    death = KillWorkers({2: "lookup_lengths", 4: "record_lengths", 5: "prompts"})
    apart = tiny.run(lengths_graph, STEPS, workers="apart", checkpoint_every=2, on_step=[death])
    assert len(death.killed) == 3
    require_same_numbers(apart, one)
    assert read_table(apart) == read_table(one)


@LONG
def test_a_resumed_run_goes_on_exactly(tiny: TinyRuns) -> None:
    whole = tiny.run(lengths_graph, STEPS, name="whole", workers="apart")
    part = tiny.run(lengths_graph, 4, name="part", checkpoint_every=2)
    resumed = resume(part.folder, steps=STEPS)
    require_same_runs(resumed, whole)
    assert read_table(resumed) == read_table(whole)


def test_with_a_lag_it_may_be_as_much_older(tiny: TinyRuns) -> None:
    graph = partial(lengths_graph, max_lag=1)
    run = tiny.run(graph, STEPS, workers="auto", record=RECORDED)
    require_expected(run.folder, batch=8, lag=1)
    assert max(column(run, "policy/lag/max")) == 1.0
    assert "weights/lengths/load" in metrics(run)[-1]


@LONG
def test_recorded_steps_run_again_to_the_same_bits(tiny: TinyRuns) -> None:
    run = tiny.run(lengths_graph, STEPS, record="all", workers="apart", checkpoint_every=2)
    nodes: Iterable[str] = ("lookup_lengths", "weighed", "record_lengths", "train_policy")
    assert rerun(run.folder, list(nodes), 5).same


def test_peek_looks_at_rows_that_an_empty_table_weighs(tiny: TinyRuns) -> None:
    weights = peek(lengths_graph(tiny.folder), "lookup_lengths").column("weight")
    assert set(weights.to_pylist()) == {0.0}


@LONG
def test_each_phase_of_a_program_begins_with_an_empty_table(tiny: TinyRuns) -> None:
    graph = lengths_graph(tiny.folder)
    run = tiny.run(Program((graph, 4), (graph, 4)), None)
    assert column(run, "table/lengths/known") == [0.0, 0.0, 0.0, 1.0] * 2


def test_the_page_of_a_run_knows_of_it(tiny: TinyRuns) -> None:
    tiny.run(lengths_graph, 2)
    served = ServedRuns(tiny.runs)
    states = {state["name"]: state for state in served.run("lengths", None)["models"]}
    assert states["lengths"]["writer"] == "record_lengths"
    assert states["lengths"]["readers"] == ["lookup_lengths"]
    assert "table/lengths/known" in served.run("lengths", None)["metrics"]
    assert "record_lengths" in make_report(served, "lengths", now=0.0)
