"""What the plan fills in for training: temperatures, divisors, columns of the sampler's cut."""

from __future__ import annotations

from typing import Any

import pytest

from dataflow.loss import Loss, Now, Terms, loss
from dataflow.model import Model
from dataflow.node import Port
from dataflow.schema import Rollout, TruncatedRollout
from dataflow.snapshot import from_json, to_json
from engine.plan.plan import Plan
from operators.advantage import add, group_advantage
from operators.concat import concat
from operators.data import prompts
from operators.generate import generate
from operators.losses import (
    clipped_policy_loss,
    entropy_loss,
    policy_gradient_loss,
    supervised_loss,
)
from operators.reward import reward
from operators.select import best_of, select
from operators.train import evaluate
from tests.kit.graphs import BASE, DATA, compared, graph_of, policy, sampled, scored
from tests.kit.plans import planned
from tests.kit.rewards import brief, exact

pytestmark = pytest.mark.usefixtures("tiny")


def resolved(rows: Port[Any], loss: Loss | None = None, **params: Any) -> tuple[Any, list[str]]:
    """The parameters of a train node on these rows, and what is noted of its temperature."""
    plan = planned(graph_of(rows, loss or supervised_loss(), **params))
    notes = [n for n in plan.notes if n.startswith("train_policy: temperature")]
    return plan.program.node("train_policy").params, notes


def best(*, sampled_at: float) -> Port[Rollout]:
    """The best of several answers."""
    rollout = sampled(temperature=sampled_at)
    return select(rollout, where=best_of(scored(rollout)))


@pytest.mark.parametrize(
    "loss", [supervised_loss(), supervised_loss() + 0.01 * entropy_loss(), 2.0 * supervised_loss()]
)
def test_the_best_of_several_are_imitated_at_temperature_1_however_sampled(loss: Loss) -> None:
    params, notes = resolved(best(sampled_at=0.3), loss)
    assert (params["temperature"], params["sampler_temperature"]) == (1.0, 0.3)
    assert notes == [
        "train_policy: temperature 1.0, as its rows are only imitated; rollout sampled at 0.3"
    ]


def parts_of(plan: Plan) -> dict[str, Any]:
    """By reward node: the names of its functions that the plan gives it."""
    assert plan.program is not None
    nodes = [node for node in plan.program.nodes if node.operator.part_names]
    return {node.name: node.params.get("part_names") for node in nodes}


def test_functions_of_one_name_carry_their_nodes_names_where_they_would_meet() -> None:
    rollout = sampled()
    first, second = scored(rollout), reward([exact, brief], rollout, name="second")
    advantage = group_advantage(rollout, add(first, second))
    held_out = generate(
        policy, prompts("data/test.parquet", name="held_out"), max_tokens=8, name="answers"
    )
    judged = reward(exact, held_out, name="judged")
    graph = graph_of(rollout, clipped_policy_loss(advantage))
    plan = planned(graph.extend(evaluate(policy, judged, every=10)))
    assert parts_of(plan) == {
        "score": ("score.exact",),
        "second": ("second.exact", "brief"),
        "judged": None,
    }


def test_a_stated_temperature_of_training_is_taken_and_shown() -> None:
    params, notes = resolved(best(sampled_at=0.3), temperature=0.3)
    assert params["temperature"] == params["sampler_temperature"] == 0.3
    assert notes == ["train_policy: temperature 0.3, that of rollout"]
    assert resolved(best(sampled_at=1.0))[1] == []


@loss(supervised=True)
def imitation(now: Now) -> Terms:
    return Terms(-now.logprobs)


@loss()
def pull(now: Now) -> Terms:
    return Terms(-now.logprobs)


def test_a_users_loss_is_at_the_rollouts_temperature_unless_it_says_it_imitates() -> None:
    assert resolved(best(sampled_at=0.3), imitation())[0]["temperature"] == 1.0
    assert resolved(best(sampled_at=0.3), pull())[0]["temperature"] == 0.3


def test_a_policy_loss_beside_a_supervised_one_keeps_the_rollouts_temperature() -> None:
    rollout = sampled(temperature=0.3)
    both = policy_gradient_loss(compared(rollout)) + supervised_loss()
    assert resolved(rollout, both)[0]["temperature"] == 0.3


def test_a_constant_divisor_counts_the_rows_of_a_step_before_any_selection() -> None:
    assert resolved(best(sampled_at=1.0))[0]["step_rows"] == 64 * 8


@pytest.mark.parametrize(("cut", "there"), [
    ({"top_p": 0.9}, True),
    ({"top_k": 5}, True),
    ({}, False),
    ({"top_p": 0.9, "temperature": 0.0}, False),
], ids=["top-p", "top-k", "nothing is cut", "greedy"])  # fmt: skip
def test_the_mass_of_what_was_kept_travels_to_training_where_something_is_cut_and_nowhere_else(
    cut: dict[str, float], there: bool
) -> None:
    rollout = sampled(**cut)
    assert rollout.schema is (TruncatedRollout if there else Rollout)
    plan = planned(graph_of(rollout))
    assert ("sampler_mass" in plan.node("rollout").returns) is there
    rows = next(i for i in plan.node("train_policy").inputs if i.name == "rows")
    columns = next(f.columns for f in rows.fetches if f.producer == "rollout")
    assert ("sampler_mass" in columns) is there


def test_a_graph_that_cuts_is_the_same_graph_when_it_is_read_again() -> None:
    graph = graph_of(sampled(top_p=0.9))
    again = from_json(to_json(graph))
    assert again == graph
    assert again.port("rollout", Rollout).schema is TruncatedRollout


def test_a_train_node_knows_which_rows_its_model_wrote() -> None:
    assert resolved(best(sampled_at=1.0))[0]["own_samples"] is True
    other, source = Model("other", BASE), prompts(DATA, batch=8)
    foreign = generate(other, source, n=2, max_tokens=4, name="foreign")
    written = generate(policy, source, n=2, max_tokens=4, name="own")
    assert resolved(foreign)[0]["own_samples"] is False
    assert resolved(concat(foreign, written))[0]["own_samples"] == (False, False, True, True)
