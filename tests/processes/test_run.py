"""Whole runs in one process: lag, evaluations, followers, files on disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import pytest
from safetensors.numpy import load_file

from dataflow.model import Model
from dataflow.schema import Rollout
from dataflow.snapshot import from_json
from engine.api import resume
from engine.keep.trace.timeline import read_trace
from operators.data import prompts
from operators.generate import generate
from operators.reward import reward
from operators.train import evaluate
from tests.kit import run_graphs as graphs
from tests.kit import runs
from tests.kit.tiny_runs import TinyRuns

pytestmark = pytest.mark.timeout(180)


# asynchrony


@pytest.mark.long
def test_lag_is_measured_and_bounded(tiny: TinyRuns) -> None:
    result = tiny.run(partial(graphs.small, max_lag=4), 9)
    lags = runs.column(result, "policy/lag/max")
    assert max(lags) == 4
    assert lags[0] == 0
    for row in runs.samples(result).to_pylist():
        assert 0 <= row["step"] - 1 - row["version"] <= 4


# evaluation


@pytest.mark.long
def test_a_run_without_steps_evaluates(tiny: TinyRuns) -> None:
    def never(metrics: Mapping[str, float]) -> bool:
        raise AssertionError(f"Step {metrics['step']} is none")

    zero = tiny.run(graphs.evaluated, 0, on_step=[never], until=never)
    (row,) = runs.metrics(zero)
    assert row["step"] == 0
    assert (zero.step, zero.checkpoint) == (0, None)
    assert zero.metrics["eval/vowels"] == row["eval/vowels"]
    later = runs.metrics(resume(zero.folder, steps=1))
    assert [each["step"] for each in later] == [1]
    initial = {name: value for name, value in later[0].items() if "/initial/" in name}
    assert {name.replace("/initial/", "/"): value for name, value in initial.items()} == {
        name: value for name, value in row.items() if name.startswith(("eval/", "evaluation/"))
    }


@pytest.mark.long
def test_the_best_versions_by_the_reward_of_the_graph_stay(tiny: TinyRuns) -> None:
    """Few vowels are good here: what its first function alone says would keep the worst."""
    graph = graphs.evaluated(tiny.folder, every=1, keep_best=2)
    greedy = graph.port("greedy_rollout", Rollout)
    score = reward(
        [graphs.vowels, graphs.digits], greedy, weights=[-1.0, 0.1], name="greedy_reward"
    )
    result = tiny.run(graph.replace(greedy_reward=score), 6, checkpoint_every=3)
    rows = runs.metrics(result)
    scores = {0: rows[0]["eval/initial/reward"]} | {row["step"]: row["eval/reward"] for row in rows}
    wanted = sorted(scores, key=lambda step: (-scores[step], step))[:2]
    names = [f"step_{step}" for step in wanted]
    assert runs.best_names(result) == {"evaluate": names}
    there = (result.folder / "checkpoints" / "best_evaluate").iterdir()
    assert sorted(path.name for path in there) == sorted(names)
    for path, step in zip(result.best["evaluate"], wanted, strict=True):
        kept = json.loads((path / "score.json").read_text())
        assert kept == {"step": step, "score": scores[step]}
        assert runs.state_of(path)


HELD_OUT = ("q", "rr", "sss")


def logs_prompts(
    completions: Sequence[str], prompts: Sequence[str], log_metric: Callable[[str, float], None]
) -> list[float]:
    """Logs 1 for prompts of the evaluation, else 0."""
    for prompt in prompts:
        log_metric("of_held_out", float(prompt in HELD_OUT))
    return graphs.vowels(completions)


@pytest.mark.long
def test_numbers_of_two_nodes_never_meet_under_one_name(tiny: TinyRuns) -> None:
    """Two policies and an evaluation, all with a reward function of one name."""
    graph = graphs.two_policies(tiny.folder)
    scores = {
        f"{name}_score": reward(logs_prompts, graph.port(name, Rollout), name=f"{name}_score")
        for name in ("red", "blue")
    }
    red = Model("red", str(tiny.folder / "model"), trainable=True)
    held_out = prompts(str(tiny.folder / "test.parquet"), name="held_out")
    answers = generate(red, held_out, max_tokens=6, name="answers")
    judged = evaluate(red, reward(logs_prompts, answers, name="judged"), every=1)
    row = runs.metrics(tiny.run(graph.replace(**scores).extend(judged), 1))[0]
    for name in ("red", "blue"):
        assert f"rows/train_{name}/reward/{name}_score.logs_prompts/mean" in row
        assert row[f"reward/{name}_score.logs_prompts/of_held_out"] == 0.0
        assert f"optim/{name}/lr" in row
        assert f"policy/{name}/mismatch/mean" in row
    assert row["evaluation/judged/reward/logs_prompts/of_held_out"] == 1.0
    assert not {"reward/mean", "optim/lr", "policy/mismatch/mean", "train/tokens"} & row.keys()
    assert row["throughput/tokens_per_second"] > 0


# the end of the data


@pytest.mark.long
def test_an_evaluation_after_the_data_has_ended_belongs_to_the_last_step(tiny: TinyRuns) -> None:
    rows = runs.metrics(tiny.run(partial(graphs.evaluated, every=50, batch=8), None))
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert {"eval/initial/vowels", "eval/initial/sampled/vowels"} <= rows[0].keys()
    assert {"eval/vowels", "eval/sampled/vowels", "reward/mean"} <= rows[-1].keys()


# followers


@pytest.mark.long
def test_followers_move_towards_their_leaders(tiny: TinyRuns) -> None:
    result = tiny.run(partial(graphs.followed, every=1), checkpoint_every=1, keep=3)
    assert runs.column(result, "optim/critic/lr") == pytest.approx([1e-2] * 3)

    def states(node: str) -> list[dict[str, np.ndarray]]:
        """Its weights after each Step."""
        steps = [result.folder / "checkpoints" / f"step_{step}" for step in (1, 2, 3)]
        return [load_file(step / node / "model.safetensors") for step in steps]

    def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
        return all(np.array_equal(one[name], other[name]) for name in one)

    slow, critic = states("followers/slow"), states("train_critic")
    assert set(slow[0]) == set(critic[0])
    for before, leader, after in zip(slow[:-1], critic[1:], slow[1:], strict=True):
        for name in after:
            np.testing.assert_allclose(after[name], (before[name] + leader[name]) / 2, atol=1e-6)
    past, policy = states("followers/past"), states("train_policy")[2]
    assert same(past[0], past[1])
    assert same(policy, past[2])
    assert not same(past[1], past[2])


# the run folder


def test_the_run_folder_is_complete(tiny: TinyRuns) -> None:
    graph = graphs.small(tiny.folder)
    folder = tiny.run(graph, 2, sinks=("tensorboard",)).folder
    there = {path.name for path in folder.iterdir()}
    files = "graph.json plan.json plan.txt metrics.jsonl command.txt versions.json options.json"
    folders = "samples trace checkpoints logs tensorboard"
    assert {*files.split(), *folders.split()} <= there
    assert from_json((folder / "graph.json").read_text()) == graph
    assert "rollout" in (folder / "plan.txt").read_text()
    assert json.loads((folder / "plan.json").read_text())["graph"] == "grpo"
    assert (folder / "command.txt").read_text().strip()
    assert "ended at step 2" in (folder / "logs" / "main.log").read_text()
    assert any((folder / "tensorboard").iterdir())


def test_the_trace_has_spans_of_every_node(tiny: TinyRuns) -> None:
    (file,) = (tiny.run(graphs.evaluated, 2).folder / "trace").iterdir()
    events = read_trace(file)
    named = [e for e in events if e["ph"] == "M" and e["name"] == "thread_name"]
    names = {e["tid"]: e["args"]["name"] for e in named}
    spans = [e for e in events if e["ph"] == "X"]
    nodes = {node.name for node in graphs.evaluated(tiny.folder).nodes}
    assert nodes - {names[e["tid"]] for e in spans} <= {"reference"}
    assert all(e["dur"] >= 0 for e in spans)


# seeds, and several policies


@pytest.mark.long
def test_another_seed_gives_others(tiny: TinyRuns) -> None:
    one, two = tiny.run(graphs.small, 4, name="one"), tiny.run(graphs.small, 4, name="two", seed=1)
    assert runs.timeless(runs.metrics(one)) != runs.timeless(runs.metrics(two))
    assert runs.weights(one) != runs.weights(two)


@pytest.mark.long
def test_two_policies_have_samples_of_their_own(tiny: TinyRuns) -> None:
    result = tiny.run(graphs.two_policies, 2)
    rows = runs.samples(result).to_pylist()
    for node, fn in (("train_red", graphs.vowels), ("train_blue", graphs.consonants)):
        of_node = [row for row in rows if row["node"] == node]
        assert len(of_node) == 2 * 8
        rewards = fn([row["completion"] for row in of_node])
        assert [row["reward"] for row in of_node] == pytest.approx(rewards)
    for row in rows:
        assert row["finish"] in ("stop", "length")
        for name in ("completion_ids", "versions", "completion_mask"):
            assert len(row[name]) == row["length"]
        assert row["prompt_ids"]
        assert min(row["versions"]) == row["version"] == row["step"] - 1
    last = runs.metrics(result)[-1]
    assert last["rows/train_red/reward/mean"] >= 0 > last["rows/train_blue/reward/mean"]
    assert last["data/rows"] == 16
