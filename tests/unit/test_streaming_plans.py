"""Which nodes of a plan work on parts of a Step, and why the others do not."""

from __future__ import annotations

from typing import Any

import pytest

from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.node import Node
from dataflow.schema import Keep, Reward
from dataflow.user import Columns, operator
from engine.plan.plan import Plan
from operators.advantage import gae, group_advantage, kl_in_reward
from operators.data import demonstrations, prompts
from operators.forward import logprobs, values
from operators.generate import generate
from operators.losses import (
    clipped_policy_loss,
    decoupled_policy_loss,
    supervised_loss,
    value_loss,
)
from operators.reward import reward
from operators.select import mixed_groups, select
from operators.train import train
from tests.kit.graphs import (
    BASE,
    compared,
    exact,
    graph_of,
    policy,
    sampled,
    scored,
    small_grpo,
    small_ppo,
    trained,
)
from tests.kit.plans import placed

pytestmark = pytest.mark.usefixtures("tiny")


@operator(scope="batch")
def centred(score: Columns[Reward]) -> Columns[Reward]:
    return Columns.make(Reward, like=score, reward=score["reward"] - score["reward"].mean())


@operator(scope="batch", keeps="groups")
def best_groups(score: Columns[Reward]) -> Columns[Keep]:
    return Columns.make(Keep, like=score, keep=score["reward"] > score["reward"].mean())


def streamed(graph: Graph, **asked: Any) -> Plan:
    usual: dict[str, Any] = {"workers": "apart", "stream": "ordered"}
    return placed(graph, **usual | asked)


def list_in_parts(plan: Plan) -> list[str]:
    return [node.name for node in plan.nodes if node.in_parts]


def list_ends(plan: Plan) -> list[str]:
    """Where and why the stream ends, or why there is none."""
    return [note for note in plan.notes if "stream" in note.partition(":")[0]]


def with_demonstrations() -> Graph:
    rollout = sampled()
    demos = demonstrations("demos.parquet", batch=8)
    return graph_of(rollout, clipped_policy_loss(compared(rollout)) + supervised_loss(rows=demos))


def with_centred_scores() -> Graph:
    rollout = sampled()
    score = centred(scored(rollout))
    return graph_of(rollout, clipped_policy_loss(compared(rollout, score)))


def with_best_groups() -> Graph:
    """What is trained is chosen from all groups of a Step; its columns are made part by part."""
    rollout = sampled()
    score = scored(rollout)
    advantage = compared(rollout, score)
    rows, compared_rows = select(rollout, advantage, where=best_groups(score))
    return Graph("g", trained(rows, clipped_policy_loss(compared_rows)))


def test_all_below_a_generation_works_on_parts() -> None:
    plan = streamed(small_grpo())
    assert list_in_parts(plan) == ["score", "advantage", "reference", "train_policy"]
    assert list_ends(plan) == []
    assert plan.sources[0].stream == "ordered"


@pytest.mark.parametrize(
    ("graph", "in_parts", "end"),
    [
        (lambda: graph_of(sampled(), epochs=2), ["score", "advantage"], "train_policy: epochs=2"),
        (with_centred_scores, ["score"], "centred: batch scope"),
        (with_best_groups, ["score", "advantage"], "best_groups: batch scope"),
        (with_demonstrations, ["score", "advantage"], "train_policy: it trains on rows of several"),
    ],
    ids=("epochs", "scope", "selection", "sources"),
)
def test_the_stream_ends_where_the_whole_step_is_needed(
    graph: Any, in_parts: list[str], end: str
) -> None:
    plan = streamed(graph())
    assert list_in_parts(plan) == in_parts
    (why,) = list_ends(plan)
    assert why.startswith(f"the stream ends at {end}")


def test_values_are_computed_on_parts_though_advantages_are_whitened_over_the_step() -> None:
    in_parts = list_in_parts(streamed(small_ppo()))
    assert {"values", "gae", "old"} <= set(in_parts)
    assert {"whiten", "train_policy", "train_critic"}.isdisjoint(in_parts)


@pytest.mark.parametrize(
    ("max_lag", "workers", "why"),
    [(1, "apart", "prompts has a lag"), (0, "auto", "the Worker that generates does everything")],
)
def test_no_step_is_streamed(max_lag: int, workers: str, why: str) -> None:
    plan = streamed(small_grpo(max_lag=max_lag), workers=workers)
    assert list_in_parts(plan) == []
    assert [source.stream for source in plan.sources] == ["off"]
    (note,) = list_ends(plan)
    assert note.startswith(f"no Step is streamed: {why}")


def late_ppo(max_lag: int = 1, *, selects: bool = False) -> Graph:
    """PPO with a lag; values and proximal log-probs are computed below the cut."""
    critic = Model("critic", BASE, trainable=True, head="scalar")
    rollout = sampled(max_lag=max_lag)
    correct = scored(rollout)
    if selects:
        rollout, correct = select(rollout, correct, where=mixed_groups(correct))
    divergence = logprobs(Model("reference", BASE), rollout, name="reference")
    score = kl_in_reward(rollout, correct, divergence, beta=0.05)
    value = values(critic, rollout, name="value")
    advantage = gae(rollout, score, value, gamma=1.0, lam=0.95)
    old = logprobs(policy, rollout, name="old")
    actor = trained(rollout, decoupled_policy_loss(advantage, proximal=old))
    fit = value_loss(advantage, old=value, clip=0.2)
    return Graph("ppo", actor, train(critic, rollout, loss=fit, lr=1e-3))


def test_a_step_with_a_lag_is_cut_once_it_is_formed() -> None:
    plan = streamed(late_ppo(), part_tokens=64)
    in_parts = ["value", "gae", "old", "train_policy", "train_critic"]
    assert sorted(list_in_parts(plan)) == sorted(in_parts)
    (source,) = plan.sources
    assert (source.stream, source.part_tokens) == ("off", 64)
    assert plan.node("rollout").layout.part_tokens == 0
    assert plan.node("reference").chunking == "ready"
    assert "reference: take rows as they come" in plan.notes
    asked = streamed(late_ppo(), part_tokens=64, chunks={"reference": 2})
    assert asked.node("reference").chunking == "cohort"


def test_each_source_with_a_lag_names_its_own_nodes() -> None:
    sinks: list[Node] = []
    for name in ("red", "blue"):
        model = Model(name, BASE, trainable=True)
        source = prompts("train.parquet", batch=8, name=f"{name}_prompts")
        rollout = generate(model, source, n=4, max_tokens=32, max_lag=1, name=name)
        score = reward(exact, rollout, name=f"{name}_score")
        old = logprobs(model, rollout, name=f"{name}_old")
        advantage = group_advantage(rollout, score, name=f"{name}_advantage")
        loss = decoupled_policy_loss(advantage, proximal=old)
        sinks.append(train(model, rollout, loss=loss, lr=1e-3, name=f"{name}_train"))
    plan = streamed(Graph("two", *sinks), part_tokens=64)
    notes = [note for note in plan.notes if note.endswith("once a Step is formed")]
    assert notes == [
        f"{name}_old, {name}_train: work on parts of 64 tokens once a Step is formed"
        for name in ("red", "blue")
    ]


@pytest.mark.parametrize(("selects", "region"), [(False, "stream"), (True, "step")])
def test_values_of_a_streamed_part_wait_for_a_selection_alone(selects: bool, region: str) -> None:
    plan = streamed(late_ppo(max_lag=0, selects=selects), part_tokens=64)
    value = plan.node("value")
    assert (value.in_parts, value.region) == (True, region)
    assert plan.node("train_critic").region == "step"


def test_a_formed_step_is_whole_where_nothing_computes_beside_training() -> None:
    trainers = dict.fromkeys(("value", "old", "train_policy", "train_critic"), "t")
    plan = streamed(late_ppo(), pin=trainers)
    assert list_in_parts(plan) == []
    assert plan.node("reference").chunking == "cohort"
    whole = placed(late_ppo(), workers="apart")
    assert list_in_parts(whole) == []


def test_rows_of_each_chunk_leave_twice_for_each_part() -> None:
    plan = streamed(small_grpo(), part_tokens=120, chunks={"rollout": 3})
    assert plan.sources[0].part_tokens == 120
    assert plan.node("rollout").layout.part_tokens == 20
    assert plan.node("reference").layout.part_tokens == 0
