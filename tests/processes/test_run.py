"""Whole runs in one process: algorithms, what they leave on disk, and that they give the same
numbers twice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_graphs import (
    consonants,
    dapo,
    digits,
    evaluated,
    followed,
    own_parts,
    reinforce,
    several,
    small,
    two_policies,
    verl_score,
    vowels,
)

from dataflow.graph import Graph
from dataflow.schema import Rollout
from dataflow.snapshot import from_json
from engine.api import Result, resume, run
from engine.observe.samples import read_samples
from engine.observe.trace import read_trace
from graphs.grpo import grpo
from graphs.ppo import ppo, ppo_from_grpo
from graphs.sft import sft
from operators.reward import reward
from operators.rewards import verl_reward
from tests.kit.runs import metrics, timeless, weights

Options = Callable[..., Any]
pytestmark = pytest.mark.timeout(180)


def finite(rows: list[dict[str, Any]]) -> bool:
    return all(value is not None and math.isfinite(value) for row in rows for value in row.values())


# algorithms


def test_grpo(tiny: Path, options: Options) -> None:
    result = run(small(tiny), options(3))
    rows = metrics(result.folder)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert finite(rows)
    for name in (
        "reward/mean",
        "reward/vowels/mean",
        "policy/lag/max",
        "time/step",
        "time/rollout",
        "optim/lr",
    ):
        assert name in rows[0], name
    assert rows[0]["throughput/samples_per_second"] > 0
    assert rows[0]["data/rows"] == 16
    assert max(row["policy/lag/max"] for row in rows) == 0
    assert result.reason == "all steps are done"
    assert result.step == 3
    assert result.metrics["reward/mean"] == rows[-1]["reward/mean"]


def test_sft_lowers_its_loss(tiny: Path, options: Options) -> None:
    result = run(
        sft(str(tiny / "model"), str(tiny / "demos.parquet"), batch=8, lr=1e-2), options(8)
    )
    rows = metrics(result.folder)
    assert rows[-1]["loss/supervised_loss"] < rows[0]["loss/supervised_loss"] - 0.1
    assert rows[0]["throughput/tokens_per_second"] > 0


@pytest.mark.parametrize("flat", [True, False])
def test_ppo(tiny: Path, options: Options, flat: bool) -> None:
    base, data = str(tiny / "model"), str(tiny / "train.parquet")
    graph = (
        ppo(
            base,
            data,
            vowels,
            batch=8,
            max_tokens=6,
            lr=1e-3,
            critic_lr=1e-2,
            epochs=2,
            minibatches=2,
        )
        if flat
        else ppo_from_grpo(base, data, vowels, batch=8, max_tokens=6, lr=1e-3, critic_lr=1e-2)
    )
    result = run(graph, options(3))
    rows = metrics(result.folder)
    assert finite(rows)
    assert set(result.trained) == {"policy", "critic"}
    assert rows[0]["optim/lr"] == pytest.approx(1e-3)
    assert rows[0]["optim/critic/lr"] == pytest.approx(1e-2)
    assert rows[0]["optim/updates"] == (4 if flat else 1)
    if flat:
        assert "policy/mismatch_kl" in rows[0]


def test_dapo_fills_each_step(tiny: Path, options: Options) -> None:
    result = run(dapo(tiny), options(4))
    rows = metrics(result.folder)
    assert all(row["data/prompts"] == 4 for row in rows)
    assert rows[-1]["data/admitted"] > 16, "nothing was ever refilled, so this tests nothing"
    assert all(0 < row["select/kept"] <= 1 for row in rows)
    samples = read_samples(result.folder / "samples")
    groups = samples.group_by(["step", "position"]).aggregate(
        [("reward", "min"), ("reward", "max")]
    )
    assert all(
        low < high
        for low, high in zip(
            *(groups[f"reward_{m}"].to_pylist() for m in ("min", "max")), strict=True
        )
    )


def test_kl_in_the_reward(tiny: Path, options: Options) -> None:
    rows = metrics(run(reinforce(tiny), options(3)).folder)
    assert finite(rows)
    assert "time/reference" in rows[0]


def test_rewards_with_weights_and_rows_to_which_one_does_not_apply(
    tiny: Path, options: Options
) -> None:
    result = run(several(tiny), options(3))
    samples = read_samples(result.folder / "samples").to_pylist()
    assert any(row["reward/digits"] is None for row in samples)
    assert any(row["reward/digits"] is not None for row in samples)
    for row in samples:
        assert row["reward"] == pytest.approx(
            row["reward/vowels"] + 0.5 * (row["reward/digits"] or 0.0)
        )


def test_operator_loss_and_reward_of_the_user(tiny: Path, options: Options) -> None:
    result = run(own_parts(tiny), options(2))
    rows = metrics(result.folder)
    assert rows[0]["policy/mine"] == 1.0
    assert "loss/plain" in rows[0]
    assert "time/centred" in rows[0]


def test_verl_data_and_score(tiny: Path, options: Options) -> None:
    graph = grpo(
        str(tiny / "model"),
        str(tiny / "verl.parquet"),
        verl_reward(verl_score),
        n=2,
        batch=4,
        max_tokens=6,
    )
    rows = metrics(run(graph, options(2)).folder)
    assert rows[0]["reward/mean"] > 0


# asynchrony


@pytest.mark.parametrize("max_lag", [1, 4])
def test_lag_is_measured_and_bounded(tiny: Path, options: Options, max_lag: int) -> None:
    result = run(small(tiny, max_lag=max_lag), options(9))
    lags = [row["policy/lag/max"] for row in metrics(result.folder)]
    assert max(lags) == max_lag
    assert lags[0] == 0
    samples = read_samples(result.folder / "samples").to_pylist()
    assert all(0 <= row["step"] - 1 - row["version"] <= max_lag for row in samples)


def test_with_lag_each_row_is_trained_once(tiny: Path, options: Options) -> None:
    result = run(small(tiny, max_lag=1), options(6))
    samples = read_samples(result.folder / "samples")
    keys = list(zip(samples["position"].to_pylist(), samples["sample"].to_pylist(), strict=True))
    assert sorted(keys) == [(position, sample) for position in range(24) for sample in range(4)]


# evaluation


def test_two_evaluations(tiny: Path, options: Options) -> None:
    rows = metrics(run(evaluated(tiny, every=2), options(5)).folder)
    assert [row["step"] for row in rows if "eval/vowels" in row] == [2, 4, 5]
    assert "eval/initial/vowels" in rows[0]
    assert "eval/initial/sampled/vowels" in rows[0]
    assert all("eval/initial/vowels" not in row for row in rows[1:])
    assert rows[1]["eval/rows"] == 3
    assert "eval/sampled/vowels" in rows[1]


def test_the_best_versions_by_the_reward_of_the_graph_stay(tiny: Path, options: Options) -> None:
    """Few vowels are good here: what its first function alone says would keep the worst."""
    from transformers import AutoModelForCausalLM

    graph = evaluated(tiny, every=1, keep_best=2)
    greedy = graph.port("greedy_rollout", Rollout)
    score = reward([vowels, digits], greedy, weights=[-1.0, 0.1], name="greedy_reward")
    result = run(graph.replace(greedy_reward=score), options(6, checkpoint_every=3))
    rows = metrics(result.folder)
    scores = {0: rows[0]["eval/initial/reward"]} | {row["step"]: row["eval/reward"] for row in rows}
    wanted = sorted(scores, key=lambda step: (-scores[step], step))[:2]
    assert [path.name for path in result.best["evaluate"]] == [f"step_{step}" for step in wanted]
    found = sorted(
        path.name for path in (result.folder / "checkpoints" / "best_evaluate").iterdir()
    )
    assert found == sorted(f"step_{step}" for step in wanted)
    for path, step in zip(result.best["evaluate"], wanted, strict=True):
        assert json.loads((path / "score.json").read_text()) == {
            "step": step,
            "score": scores[step],
        }
        assert AutoModelForCausalLM.from_pretrained(path).num_parameters() > 0


# the end of the data


def test_finite_data_ends_with_a_short_batch(tiny: Path, options: Options) -> None:
    result = run(small(tiny, batch=10), options(None))
    rows = metrics(result.folder)
    assert [row["data/prompts"] for row in rows] == [10, 10, 4]
    assert result.reason == "the data has ended"
    assert sorted(set(read_samples(result.folder / "samples")["position"].to_pylist())) == list(
        range(24)
    )


def test_an_evaluation_after_the_data_has_ended_belongs_to_the_last_step(
    tiny: Path, options: Options
) -> None:
    rows = metrics(run(evaluated(tiny, every=50, batch=8), options(None)).folder)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert "eval/vowels" in rows[-1]
    assert "reward/mean" in rows[-1]


# followers


def state(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")


def test_followers_move_towards_their_leaders(tiny: Path, options: Options) -> None:
    result = run(followed(tiny, every=1, rate=0.5), options(3, checkpoint_every=1, keep=3))
    assert result.checkpoint is not None
    steps = [result.folder / "checkpoints" / f"step_{step}" for step in (1, 2, 3)]
    slow = [state(step / "followers" / "slow") for step in steps]
    critic = [state(step / "train_critic") for step in steps]
    assert set(slow[0]) == set(critic[0])
    for before, leader, after in zip(slow[:-1], critic[1:], slow[1:], strict=True):
        for name in after:
            np.testing.assert_allclose(after[name], (before[name] + leader[name]) / 2, atol=1e-6)
    past = [state(step / "followers" / "past") for step in steps]
    policy = state(steps[2] / "train_policy")
    assert all(np.array_equal(past[0][name], past[1][name]) for name in past[0])
    assert all(np.array_equal(past[2][name], policy[name]) for name in policy)
    assert not all(np.array_equal(past[1][name], past[2][name]) for name in policy)


def test_followers_go_on_after_a_resume(tiny: Path, options: Options) -> None:
    whole = run(followed(tiny), options(5, name="whole"))
    part = run(followed(tiny), options(3, name="part"))
    again = resume(part.folder, steps=5)
    assert timeless(metrics(again.folder)) == timeless(metrics(whole.folder))
    assert weights(again) == weights(whole)


# the run folder


def test_the_run_folder_is_complete(tiny: Path, options: Options) -> None:
    graph = small(tiny)
    result = run(graph, options(2, sinks=("tensorboard",)))
    there = {path.name for path in result.folder.iterdir()}
    files = {
        "graph.json",
        "plan.json",
        "plan.txt",
        "metrics.jsonl",
        "command.txt",
        "versions.json",
        "options.json",
    }
    assert files | {"samples", "trace", "checkpoints", "logs", "tensorboard"} <= there
    assert from_json((result.folder / "graph.json").read_text()) == graph
    assert "rollout" in (result.folder / "plan.txt").read_text()
    assert json.loads((result.folder / "plan.json").read_text())["graph"] == "grpo"
    assert (result.folder / "command.txt").read_text().strip()
    assert "ended at step 2" in (result.folder / "logs" / "main.log").read_text()
    assert any((result.folder / "tensorboard").iterdir())


def test_samples_have_their_columns(tiny: Path, options: Options) -> None:
    samples = read_samples(run(small(tiny), options(2)).folder / "samples")
    wanted = [
        "step",
        "node",
        "position",
        "sample",
        "prompt",
        "completion",
        "reward",
        "reward/vowels",
        "advantage",
    ]
    wanted += [
        "finish",
        "length",
        "version",
        "prompt_ids",
        "completion_ids",
        "completion_mask",
        "versions",
    ]
    assert samples.column_names == wanted
    assert len(samples) == 32
    row = samples.to_pylist()[0]
    assert row["reward"] == pytest.approx(vowels([row["completion"]])[0])


def test_the_trace_has_spans_of_every_node(tiny: Path, options: Options) -> None:
    result = run(evaluated(tiny), options(2))
    (file,) = (result.folder / "trace").iterdir()
    events = read_trace(file)
    names = {
        e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"
    }
    spans = [e for e in events if e["ph"] == "X"]
    assert {node.name for node in evaluated(tiny).nodes} - {names[e["tid"]] for e in spans} <= {
        "reference"
    }
    assert all(e["dur"] >= 0 for e in spans)


# the same numbers twice


def twice(graph: Callable[[], Graph], options: Options, **changes: Any) -> tuple[Result, Result]:
    return run(graph(), options(4, name="one")), run(graph(), options(4, name="two", **changes))


@pytest.mark.parametrize(
    "make", [followed, *(pytest.param(g, marks=pytest.mark.long) for g in (evaluated, dapo))]
)
def test_equal_seeds_give_equal_bits(
    tiny: Path, options: Options, make: Callable[[Path], Graph]
) -> None:
    one, two = twice(lambda: make(tiny), options)
    assert timeless(metrics(one.folder)) == timeless(metrics(two.folder))
    assert weights(one) == weights(two)


@pytest.mark.long
def test_another_seed_gives_others(tiny: Path, options: Options) -> None:
    one, two = twice(lambda: small(tiny), options, seed=1)
    assert timeless(metrics(one.folder)) != timeless(metrics(two.folder))
    assert weights(one) != weights(two)


@pytest.mark.parametrize("places", [
    pytest.param({}, id="one"), pytest.param({"workers": "apart"}, id="apart", marks=pytest.mark.long)
])  # fmt: skip
def test_two_policies_have_samples_of_their_own(
    tiny: Path, options: Options, places: dict[str, Any]
) -> None:
    result = run(
        two_policies(str(tiny / "model"), str(tiny / "train.parquet")), options(2, **places)
    )
    rows = read_samples(result.folder / "samples").to_pylist()
    assert len(rows) == 2 * 2 * 8
    for node, fn in (("train_red", vowels), ("train_blue", consonants)):
        of_node = [row for row in rows if row["node"] == node]
        texts = [row["completion"] for row in of_node]
        assert len(of_node) == 16
        assert [row["reward"] for row in of_node] == pytest.approx(fn(texts))
        for position in {row["position"] for row in of_node}:
            group = [row for row in of_node if row["position"] == position]
            mean = sum(row["reward"] for row in group) / len(group)
            assert all(
                (row["reward"] > mean) == (row["advantage"] > 0) or row["reward"] == mean
                for row in group
            )
        for row in of_node:
            assert row["finish"] in ("stop", "length")
            assert (
                row["length"]
                == len(row["completion_ids"])
                == len(row["versions"])
                == len(row["completion_mask"])
            )
            assert row["prompt_ids"]
            assert min(row["versions"]) == row["version"] == row["step"] - 1
    last = metrics(result.folder)[-1]
    assert last["reward/mean"] >= 0 > last["rows/train_blue/reward/mean"]
    assert last["data/rows"] == 16
