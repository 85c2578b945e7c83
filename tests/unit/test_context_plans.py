"""Plans in which ranks of a train node divide the tokens of the same rows."""

from __future__ import annotations

from typing import Any

import pytest

from dataflow.errors import PlanError
from engine.plan.explain import explain
from tests.kit.graphs import small_grpo, small_ppo
from tests.kit.plans import placed

pytestmark = pytest.mark.usefixtures("tiny")

TWO: dict[str, Any] = {"context": {"train_policy": 2}, "threads": 1}


def test_context_ranks_have_the_same_rows_whole_weights_and_a_part_of_the_tokens() -> None:
    one = placed(small_grpo(), threads=1).node("train_policy")
    plan = placed(small_grpo(), **TWO)
    node = plan.node("train_policy")
    assert (node.layout.data, node.layout.context, node.layout.tensor) == (1, 2, 1)
    assert node.workers == ("main", "main-1")
    assert node.shares == (("main", "main-1"),)
    parts, whole = node.estimate.bytes, one.estimate.bytes
    assert parts["activations"] == -(-whole["activations"] // 2)
    assert parts["logits"] == -(-whole["logits"] // 2)
    assert parts["optimizer"] == whole["optimizer"]
    assert node.estimate.exchanged > 0
    text = " ".join(explain(plan).split())
    assert "1 x 2 ranks (data x context)" in text
    assert "each context rank computes 1 of 2 tokens, receives rows of " in text


def test_shares_of_rows_are_divided_by_tokens_and_these_by_matrices() -> None:
    wish: dict[str, Any] = {"context": {"train_policy": 2}, "tensor": {"train_policy": 2}}
    plan = placed(small_grpo(), ranks={"train_policy": 2}, **wish, threads=1)
    node = plan.node("train_policy")
    assert node.shares == (
        ("main", "main-1", "main-2", "main-3"),
        ("main-4", "main-5", "main-6", "main-7"),
    )
    assert "2 x 2 x 2 ranks (data x context x tensor)" in " ".join(explain(plan).split())


def test_with_shard_context_ranks_keep_a_part_of_the_state() -> None:
    one = placed(small_grpo(), threads=1).node("train_policy")
    node = placed(small_grpo(), **TWO, shard=True).node("train_policy")
    assert node.layout.shard
    assert node.estimate.bytes["optimizer"] == -(-one.estimate.bytes["optimizer"] // 2)


@pytest.mark.parametrize(("wish", "message"), [
    ({"context": {"rollout": 2}},
     "context: rollout=2, but generate has no ranks that divide tokens. Fix: train_policy=2"),
    ({"context": {"train_policy": 0}}, "context: train_policy=0. Fix: train_policy=1"),
    ({"context": {"train_policy": 3}},
     "context: train_policy=3, and its Model has 4 heads, which are not divisible."
     " Fix: train_policy=2"),
    ({"context": {"train_policy": 4}, "tensor": {"train_policy": 2}},
     "its Model has 2 heads in each tensor rank, which are not divisible. Fix: train_policy=2"),
    ({"context": {"nobody": 2}}, "context: expected a node of the plan, found 'nobody'"),
])  # fmt: skip
def test_what_cannot_divide_tokens_is_refused(wish: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        placed(small_grpo(), **wish, threads=1)
    assert message in str(caught.value)


def test_train_nodes_of_the_same_workers_divide_tokens_alike() -> None:
    pins = {"train_policy": ("a", "b"), "train_critic": ("a", "b")}
    message = "train_policy has context 2, train_critic 1, on the same workers"
    with pytest.raises(PlanError, match=message):
        placed(small_ppo(), **TWO, pin=pins)
    both = {"train_policy": 2, "train_critic": 2}
    plan = placed(small_ppo(), context=both, pin=pins, threads=1)
    assert plan.node("train_critic").shares == plan.node("train_policy").shares
