"""Plans in which a replica of a node of forward passes is several Workers."""

from __future__ import annotations

from typing import Any

import pytest

from dataflow.errors import PlanError
from engine.plan.cost.models import model_cost
from engine.plan.explain import explain
from tests.kit.graphs import small_grpo, small_ppo
from tests.kit.plans import module_of, placed

pytestmark = pytest.mark.usefixtures("tiny")

TWO: dict[str, Any] = {"tensor": {"reference": 2}, "threads": 1}
APART = {"pin": {"reference": ("r0", "r1")}}
"""On Workers of its own."""


def test_a_replica_has_a_part_of_each_matrix_in_each_of_its_workers() -> None:
    whole = placed(small_grpo(), threads=1, pin={"reference": ("r0",)}).node("reference")
    plan = placed(small_grpo(), **TWO, **APART)
    node = plan.node("reference")
    assert node.workers == ("r0", "r1")
    assert (node.layout.replicas, node.layout.tensor, node.chunks) == (1, 2, 1)
    assert (node.leads, node.shares) == (("r0",), (("r0", "r1"),))
    assert "2 tensor ranks" in explain(plan)
    cost = model_cost("tiny")
    split = 4 * (cost.parameters - cost.part(2).parameters)
    weights = [each.estimate.bytes["weights"] for each in (whole, node)]
    assert weights[0] - weights[1] == split
    assert node.estimate.seconds < whole.estimate.seconds


def test_replicas_of_several_workers_each() -> None:
    plan = placed(small_grpo(), **TWO, replicas={"reference": 2})
    node = plan.node("reference")
    assert node.workers == ("reference-0", "reference-1", "reference-2", "reference-3")
    assert node.leads == ("reference-0", "reference-2")
    assert (node.layout.replicas, node.chunks) == (2, 2)
    assert "2 replicas, 2 tensor ranks each" in explain(plan)


def test_it_is_in_the_ranks_of_a_train_node_where_these_have_equal_shares() -> None:
    both = {"train_policy": 2, "reference": 2}
    ranks = {"train_policy": 2}
    pins = {"reference": ("main", "main-1", "main-2", "main-3")}
    plan = placed(small_grpo(), tensor=both, ranks=ranks, pin=pins, threads=1)
    assert plan.node("reference").leads == ("main", "main-2")
    assert plan.node("train_policy").shares == plan.node("reference").shares
    with pytest.raises(
        PlanError, match="worlds: reference has ranks on main,x, train_policy on main,main-1"
    ):
        placed(small_grpo(), tensor=both, pin={"reference": ("main", "x")}, threads=1)
    # By default it has Workers of its own where the shares are others.
    own = placed(small_grpo(), ranks=ranks, **TWO)
    assert own.node("reference").workers == ("reference-0", "reference-1")


def test_a_reader_with_the_parts_of_its_writer_shares_them() -> None:
    tensor = {"train_critic": 2, "train_policy": 2, "values": 2}
    plan = placed(small_ppo(), tensor=tensor, threads=1)
    assert plan.node("values").workers == plan.node("train_critic").workers == ("main", "main-1")
    assert module_of(plan, "values") == module_of(plan, "train_critic") == "critic"
    del tensor["values"]
    assert module_of(placed(small_ppo(), tensor=tensor, threads=1), "values") == "critic copy"


@pytest.mark.parametrize(
    ("message", "asked"),
    [
        ("tensor: reference=3, and its Model has 4 heads, 4 key heads", {"reference": 3}),
        ("tensor: reference=0. Fix: reference=1.", {"reference": 0}),
    ],
)
def test_counts_that_cannot_be(message: str, asked: dict[str, int]) -> None:
    with pytest.raises(PlanError, match=message):
        placed(small_grpo(), tensor=asked)


def test_pins_have_all_workers_of_a_replica() -> None:
    with pytest.raises(PlanError, match=r"pin: reference on a,b,c has 4 ranks\. Fix: .*a,b,c,a-1"):
        placed(small_grpo(), **TWO, pin={"reference": ("a", "b", "c")})


def test_replicas_of_several_workers_neither_come_nor_go() -> None:
    with pytest.raises(PlanError, match="tensor: reference=2, and its replicas come and go"):
        placed(small_grpo(), **TWO, replicas={"reference": 3}, least={"reference": 1})
    two = {"rollout": 2}
    with pytest.raises(PlanError, match="workers: reference has ranks on r"):
        placed(
            small_grpo(),
            **TWO,
            together=(("rollout", "reference"),),
            replicas=two,
            least={"rollout": 1},
        )


def test_no_turns_where_ranks_train_while_chunks_of_ranks_go_on() -> None:
    tensor = {"train_policy": 2, "reference": 2}
    pins = {"train_policy": ("t0", "t1"), "reference": ("t0", "t1"), "rollout": ("gen",)}
    how: dict[str, Any] = {"tensor": tensor, "pin": pins, "threads": 1, "turns": (("gen", "t0"),)}
    assert placed(small_grpo(), **how).turns
    with pytest.raises(PlanError, match="turns: reference has ranks where train_policy trains me"):
        placed(small_grpo(max_lag=1), **how)


def test_replicas_of_one_node_may_take_turns_and_ranks_may_not() -> None:
    pins = {"reference": ("a0", "a1", "b0", "b1")}
    turns = (("a0", "b0"), ("a1", "b1"))
    assert placed(small_grpo(), **TWO, pin=pins, turns=turns).turns == turns
    with pytest.raises(PlanError, match="turns: a0,a1: these are ranks of reference, which act"):
        placed(small_grpo(), **TWO, pin=pins, turns=(("a0", "a1"),))
