"""Which nodes of a plan work on parts of a Step, and why the others do not."""

from __future__ import annotations

from typing import Any

import pytest

from dataflow.graph import Graph
from dataflow.schema import Keep, Reward
from dataflow.user import Columns, operator
from engine.plan.plan import Plan
from operators.data import demonstrations
from operators.forward import logprobs
from operators.losses import clipped_policy_loss, decoupled_policy_loss, supervised_loss
from operators.select import select
from tests.kit.graphs import (
    compared,
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


def with_old(old_worker: str) -> Plan:
    """GRPO with a lag, whose proximal log-probs are computed in this Worker."""
    rollout = sampled(max_lag=1)
    old = logprobs(policy, rollout, name="old")
    loss = decoupled_policy_loss(compared(rollout), proximal=old)
    pins = {"old": old_worker, "train_policy": "t"}
    return streamed(graph_of(rollout, loss), pin=pins, part_tokens=64)


def test_a_step_with_a_lag_is_cut_once_it_is_formed_where_others_compute_beside_training() -> None:
    plan = with_old("o")
    assert list_in_parts(plan) == ["old", "train_policy"]
    (source,) = plan.sources
    assert (source.stream, source.part_tokens) == ("off", 64)
    assert "old, train_policy: work on parts of 64 tokens once a Step is formed" in plan.notes
    assert plan.node("rollout").layout.part_tokens == 0
    assert list_in_parts(with_old("t")) == []


def test_rows_of_each_chunk_leave_twice_for_each_part() -> None:
    plan = streamed(small_grpo(), part_tokens=120, chunks={"rollout": 3})
    assert plan.sources[0].part_tokens == 120
    assert plan.node("rollout").layout.part_tokens == 20
    assert plan.node("reference").layout.part_tokens == 0
