"""Plans in which a replica of a torch generation is several Workers."""

from __future__ import annotations

from typing import Any

import pytest

from dataflow.errors import PlanError
from engine.plan.cluster import Cluster
from engine.plan.cost.models import model_cost
from engine.plan.explain import explain
from tests.kit.graphs import small_grpo
from tests.kit.plans import module_of, placed, planned_on

pytestmark = pytest.mark.usefixtures("tiny")

TWO: dict[str, Any] = {"tensor": {"rollout": 2}, "threads": 1}
PAIR: dict[str, Any] = {"pin": {"rollout": ("r0", "r1")}}
"""On Workers of its own."""


def test_a_generation_has_a_part_of_each_matrix_and_of_the_cache_in_each_worker() -> None:
    whole = placed(small_grpo(), threads=1, pin={"rollout": ("r0",)}).node("rollout")
    plan = placed(small_grpo(), **TWO, **PAIR)
    node = plan.node("rollout")
    assert (node.layout.replicas, node.layout.tensor, node.layout.inner) == (1, 2, 1)
    assert (node.leads, node.shares) == (("r0",), (("r0", "r1"),))
    assert "2 tensor ranks" in explain(plan)
    cost, part = model_cost("tiny"), model_cost("tiny").part(2)
    assert cost.parameters is not None
    assert part.parameters is not None
    split = 4 * (cost.parameters - part.parameters)
    both = [each.estimate.bytes for each in (whole, node)]
    assert both[0]["weights"] - both[1]["weights"] == split
    assert both[1]["kv_cache"] * 2 == both[0]["kv_cache"]


def test_replicas_of_a_generation_have_several_workers_each() -> None:
    plan = placed(small_grpo(), **TWO, replicas={"rollout": 2})
    node = plan.node("rollout")
    assert node.leads == ("rollout-0", "rollout-2")
    assert (node.layout.replicas, node.layout.tensor, node.chunks) == (2, 2, 2)
    assert "2 replicas, 2 tensor ranks each" in explain(plan)


def test_a_generation_in_the_ranks_of_what_trains_shares_its_parts() -> None:
    plan = placed(small_grpo(), tensor={"train_policy": 2, "rollout": 2}, threads=1)
    assert plan.node("rollout").workers == plan.node("train_policy").workers == ("main", "main-1")
    assert module_of(plan, "rollout") == module_of(plan, "train_policy") == "policy"
    apart = placed(small_grpo(), **TWO, **PAIR)
    assert module_of(apart, "rollout") == "policy copy in 2 parts"


def test_with_a_lag_ranks_of_a_generation_are_not_where_its_model_is_trained() -> None:
    assert placed(small_grpo(max_lag=1), **TWO).node("rollout").layout.tensor == 2
    pin = {"rollout": ("a", "b"), "train_policy": ("a", "b")}
    with pytest.raises(PlanError, match=r"a trains, too, .* Fix: other Workers, max_lag=0, or"):
        placed(small_grpo(max_lag=1), tensor={"rollout": 2, "train_policy": 2}, pin=pin)


def test_on_gpus_its_steps_are_in_no_graph_and_rows_share_prompts() -> None:
    cluster = Cluster(cores=8, memory=2**38, gpus=(2**36,) * 3)
    one = planned_on(cluster, small_grpo(), pin={"rollout": "r0"})
    two = planned_on(cluster, small_grpo(), pin={"rollout": "r0,r1"}, tensor={"rollout": 2})
    note = "rollout: no CUDA graph holds a step of several tensor ranks"
    assert (note in explain(one), note in explain(two)) == (False, True)
    parts = [plan.node("rollout").estimate.bytes for plan in (one, two)]
    assert ["kv_cache" in each for each in parts] == [False, True]
