"""Runs in which the rows of a generation have weights, and Models that learn them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataflow.errors import DataflowError
from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.schema import Completion, Reward
from dataflow.user import Columns, operator
from engine.api import plan
from engine.plan.explain import explain
from operators.advantage import group_advantage
from operators.data import prompts
from operators.forward import scores
from operators.generate import generate
from operators.losses import clipped_policy_loss, rank_loss, ranks
from operators.reward import reward
from operators.row_weights import data_weight, prompt_rows
from operators.train import train
from tests.kit import algorithms, runs
from tests.kit.run_graphs import vowels
from tests.kit.tiny_runs import PROMPTS, TinyRuns

pytestmark = pytest.mark.timeout(180)


def save_weighted(folder: Path, weights: pa.Array) -> str:
    path = folder / "weighted.parquet"
    pq.write_table(pa.table({"prompt": PROMPTS, "effort": weights}), path)
    return str(path)


def weighted_graph(folder: Path, data: str, *, is_weighted: bool = True) -> Graph:
    policy = Model("policy", str(folder / "model"), trainable=True)
    prompt = prompts(data, batch=4)
    weight = data_weight(prompt, column="effort") if is_weighted else None
    rollout = generate(policy, prompt, weight=weight, n=4, max_tokens=24, name="rollout")
    advantage = group_advantage(rollout, reward(vowels, rollout))
    return Graph("weighted", train(policy, rollout, loss=clipped_policy_loss(advantage), lr=1e-3))


@pytest.mark.parametrize("workers", ["one", "apart"])
def test_a_weight_changes_no_row(tiny: TinyRuns, tmp_path: Path, workers: str) -> None:
    data = save_weighted(tmp_path, pa.array(range(len(PROMPTS)), pa.int16()))
    weighted = tiny.run(weighted_graph(tiny.folder, data), workers=workers, name="weighted")
    plain = tiny.run(weighted_graph(tiny.folder, data, is_weighted=False), name="plain")
    for row, plain_row in zip(runs.metrics(weighted), runs.metrics(plain), strict=True):
        assert row["loss/clipped_policy_loss"] == plain_row["loss/clipped_policy_loss"]
        assert row["completion/tokens"] == plain_row["completion/tokens"]
        assert ("weight/tau" in row, "weight/tau" in plain_row) == (True, False)
        assert 0.0 <= row["weight/recall"] <= 1.0
    recorded = runs.samples(weighted)
    effort = dict(zip(PROMPTS, range(len(PROMPTS)), strict=True))
    assert recorded["weight"].to_pylist() == [effort[p] for p in recorded["prompt"].to_pylist()]


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        (pa.array([1.0, float("nan")] * 12), "expected a finite weight, found nan"),
        (pa.array([1.0, 1e300] * 12), "expected a finite weight, found inf"),
        (pa.array([1, None] * 12), r"column 'effort', found null \([0-9]+ of 4 rows\)"),
        (pa.array(["short", "long"] * 12), "expected numbers in column 'effort', found string"),
    ],
)
def test_what_is_no_weight_ends_the_run_and_names_the_row(
    tiny: TinyRuns, tmp_path: Path, weights: pa.Array, problem: str
) -> None:
    graph = weighted_graph(tiny.folder, save_weighted(tmp_path, weights))
    with pytest.raises(DataflowError, match=problem) as caught:
        tiny.run(graph, inproc=True)
    text = str(caught.value)
    assert "Fix: " in text
    assert "data_weight: row (" in text or "string" in problem


def test_a_row_of_a_prompt_is_a_token_longer_than_the_prompt(tiny: TinyRuns) -> None:
    shown = explain(plan(algorithms.small("grpo_ranked", tiny.folder), tiny.options()))
    assert "tasks: prompts of 2 tokens, from 24 rows of train.parquet" in shown


def test_a_ranker_is_trained_in_each_second_step(tiny: TinyRuns) -> None:
    graph = algorithms.small("grpo_ranked", tiny.folder, every=2)
    rows = runs.metrics(tiny.run(graph, 4, inproc=True))
    assert [row["optim/ranker/updates"] for row in rows] == [0.0, 1.0, 0.0, 1.0]
    assert [row["optim/policy/updates"] for row in rows] == [1.0] * 4


@operator()
def first_letter(tasks: Columns[Completion]) -> Columns[Reward]:
    """What a ranker is to find in the prompt's first token."""
    ids = tasks["prompt_ids"]
    letters = ids.values[ids.offsets[:-1]].astype(np.float32)
    return Columns.make(Reward, like=tasks, reward=letters)


def test_a_ranker_learns_an_order(tiny: TinyRuns) -> None:
    ranker = Model("ranker", str(tiny.folder / "model"), trainable=True, head="scalar")
    tasks = prompt_rows(prompts(str(tiny.folder / "train.parquet"), batch=12))
    order = ranks(scores(ranker, tasks), first_letter(tasks))
    graph = Graph("order", train(ranker, tasks, loss=rank_loss(order), lr=1e-2))
    losses = runs.column(tiny.run(graph, 30, inproc=True), "loss/rank_loss")
    assert losses[0] > 1.0, "all scores are 0: any order is as likely"
    assert np.mean(losses[-5:]) < 0.5 * losses[0]


@pytest.mark.long
@pytest.mark.parametrize("workers", ["one", "apart"])
def test_with_a_lag_the_ranker_may_be_a_version_behind(tiny: TinyRuns, workers: str) -> None:
    graph = algorithms.small("grpo_ranked", tiny.folder, max_lag=1)
    rows = runs.metrics(tiny.run(graph, 4, workers=workers))
    assert [row["optim/ranker/updates"] for row in rows] == [1.0] * 4
    assert max(row["policy/lag/max"] for row in rows) == 1.0
