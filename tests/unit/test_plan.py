"""The planner's first passes, one by one: what is left out, resolved, counted and fetched."""

from __future__ import annotations

from typing import Any

import pytest

from dataflow.errors import PlanError
from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.node import Port
from dataflow.schema import Prompt, Reward, Rollout
from dataflow.user import Columns, operator
from engine.plan.draft import Draft
from engine.plan.passes.prune import prune_graph
from engine.plan.plan import Plan
from engine.plan.planned_input import PlannedInput
from graphs.grpo import grpo
from graphs.sft import sft
from operators.advantage import baseline_advantage, group_advantage, returns
from operators.data import prompts
from operators.forward import logprobs
from operators.generate import generate
from operators.losses import clipped_policy_loss, policy_gradient_loss, supervised_loss
from operators.mean_over import mean_over
from operators.reward import reward
from operators.select import mixed_groups, select
from operators.train import evaluate, train
from tests.kit.graphs import ask, compared, graph_of, policy, sampled, scored, trained
from tests.kit.plans import CLUSTER, grpo_plan, planned, ppo_plan
from tests.kit.rewards import brief, exact

pytestmark = pytest.mark.usefixtures("tiny")


@operator()
def shortened(rollout: Columns[Rollout]) -> Columns[Rollout]:
    return rollout


@operator(parent="first")
def joined(later: Columns[Rollout], first: Columns[Rollout]) -> Columns[Rollout]:
    return later


def input_of(plan: Plan, node: str, key: str) -> PlannedInput:
    return next(i for i in plan.node(node).inputs if i.name == key)


def fetched(plan: Plan, node: str, key: str) -> dict[str, tuple[str, ...]]:
    """What an input takes: producer -> columns."""
    return {f.producer: f.columns for f in input_of(plan, node, key).fetches}


@pytest.mark.parametrize("asked", [{"n": 10**13}, {"batch": 10**13}])
def test_more_rows_than_a_plan_can_look_at_are_refused(asked: dict[str, int]) -> None:
    with pytest.raises(PlanError, match=r"at most 67,108,864 rows in a Step, found .*0,000\. Fix"):
        grpo_plan(**asked)


def params_of(plan: Plan, node: str) -> Any:
    """What the passes made of the parameters of a node."""
    return plan.program.node(node).params


def judged(rows: Port[Rollout], question: Port[Prompt] | None = None) -> Port[Reward]:
    """What a judge says of each row, in the mean: nodes `verdict` and `judged`."""
    judge, asked = Model("judge", "tiny"), question or ask(rows)
    verdict = generate(judge, asked, max_tokens=8, temperature=0.0, name="verdict")
    return mean_over(reward(brief, verdict, name="judged"), rows)


def test_a_reference_of_weight_0_is_left_out_and_reported() -> None:
    plan = grpo_plan(beta=0.0)
    assert "reference" not in [n.name for n in plan.nodes]
    assert "train_policy: clipped_policy_loss.reference left out, beta is 0" in plan.notes
    assert "reference: left out, nothing reads it" in plan.notes


def with_old(*, minibatches: int = 1, temperature: float | None = None) -> Plan:
    rollout = sampled(temperature=0.7)
    old = logprobs(policy, rollout, temperature=temperature, name="old")
    loss = clipped_policy_loss(compared(rollout), old=old)
    return planned(graph_of(rollout, loss, minibatches=minibatches))


@pytest.mark.parametrize("temperature", [None, 0.7])
def test_old_of_one_update_is_what_the_update_computes_itself(temperature: float | None) -> None:
    plan = with_old(temperature=temperature)
    assert "old" not in [n.name for n in plan.nodes]
    assert params_of(plan, "train_policy")["loss"].terms[0].now == ("old",)


def test_old_of_two_updates_stays() -> None:
    assert with_old(minibatches=2).node("old").region == "step"


def test_old_of_other_rows_is_no_current_logprob() -> None:
    rollout, other = sampled(n=2), shortened(sampled(n=2))
    loss = clipped_policy_loss(compared(rollout), old=logprobs(policy, other, name="old"))
    graph = graph_of(rollout, loss)  # the check refuses it: the pass sees for itself
    assert "old" in {
        n.name for n in prune_graph(Draft(graph=graph, seed=0, cluster=CLUSTER)).graph.nodes
    }


def test_logprobs_and_train_have_the_temperature_of_their_rows() -> None:
    plan = with_old(minibatches=2)
    for node in ("old", "train_policy"):
        assert params_of(plan, node)["temperature"] == 0.7
    assert params_of(plan, "train_policy")["max_tokens"] == 32
    assert "old: temperature 0.7, that of rollout" in plan.notes


def test_a_temperature_that_the_user_gave_stays() -> None:
    rollout = sampled(temperature=0.7)
    reference = logprobs(Model("reference", "tiny"), rollout, temperature=1.0)
    loss = clipped_policy_loss(compared(rollout), reference=reference, beta=0.1)
    assert params_of(planned(graph_of(rollout, loss)), "reference")["temperature"] == 1.0


def test_rows_of_two_generations_have_nobodys_temperature() -> None:
    rollout = sampled(n=1, temperature=0.7)
    later = generate(policy, ask(rollout), max_tokens=8, temperature=0.3, name="later")
    both, alone = joined(later, rollout), shortened(later)
    sink = train(policy, both, loss=supervised_loss(), lr=1e-3)
    other = logprobs(Model("reference", "tiny"), alone)
    second = Model("second", "tiny", trainable=True)
    advantage = returns(alone, reward(brief, alone, name="s"))
    loss = clipped_policy_loss(advantage, reference=other, beta=0.1)
    plan = planned(Graph("g", sink, train(second, alone, loss=loss, lr=1e-3)))
    assert "max_tokens" not in params_of(plan, "train_policy")
    # That of the one generation that wrote the tokens.
    assert params_of(plan, "reference")["temperature"] == 0.3


def test_the_temperature_is_found_behind_a_selection() -> None:
    rollout = sampled(temperature=0.7)
    score = scored(rollout)
    kept, kept_score = select(rollout, score, where=mixed_groups(score), refill=True)
    teacher = logprobs(Model("teacher", "tiny"), kept)
    loss = clipped_policy_loss(group_advantage(kept, kept_score), reference=teacher, beta=0.1)
    assert params_of(planned(graph_of(kept, loss)), "teacher")["temperature"] == 0.7


def test_demonstrations_are_trained_at_temperature_1() -> None:
    params = params_of(planned(sft("tiny", "demos.jsonl")), "train_policy")
    assert (params["temperature"], params["sampler_temperature"]) == (1.0, 0.0)


def test_a_source_may_lag_as_much_as_the_strictest_reader_above_the_cut() -> None:
    assert grpo_plan(max_lag=3).sources[0].max_lag == 3
    rollout = sampled(max_lag=3)
    loss = clipped_policy_loss(compared(rollout), old=logprobs(policy, rollout, name="old"))
    plan = planned(graph_of(rollout, loss, minibatches=2))
    assert plan.sources[0].max_lag == 3, "old reads at lag 0, but below the cut"


def test_a_node_returns_only_what_is_read() -> None:
    assert grpo_plan().node("advantage").returns == ("advantage",)


def test_a_reward_function_gets_no_dataset_column_that_it_does_not_ask_for() -> None:
    plan = planned(grpo("tiny", "train.parquet", brief))
    assert fetched(plan, "score", "rows")["prompts"] == ("prompt",)


def test_dataset_columns_are_expanded_by_the_reader() -> None:
    ratios = {f.producer: f.ratio for f in grpo_plan(n=8).node("score").inputs[0].fetches}
    assert ratios == {"rollout": 1, "prompts": 8}


def test_a_select_moves_no_rows() -> None:
    score = scored(rollout := sampled())
    kept, kept_score = select(rollout, score, where=mixed_groups(score), refill=True)
    plan = planned(graph_of(kept, clipped_policy_loss(compared(kept, kept_score))))
    assert fetched(plan, "advantage", "score") == {"score": ("reward",)}
    assert input_of(plan, "advantage", "score").gate == "select"
    assert "rollout" in fetched(plan, "train_policy", "rows")
    assert plan.node("select").returns == ()
    assert fetched(plan, "select", "port0") == {}


def held_out(**how: Any) -> Port[Rollout]:
    source = prompts("test.parquet", name="held")
    return generate(policy, source, max_tokens=32, name="held_rollout", **how)


def test_an_evaluation_gets_each_functions_own_reward() -> None:
    score = reward([exact, brief], held_out(temperature=0.0), name="held_score")
    plan = planned(Graph("g", trained(sampled()), evaluate(policy, score, every=5)))
    assert fetched(plan, "evaluate", "score") == {"held_score": ("reward", "reward/*")}
    assert plan.node("held_score").region == "evaluation"


@pytest.mark.parametrize("selected", [False, True])
def test_the_prompt_of_a_judge_is_the_one_that_the_judge_was_asked(selected: bool) -> None:
    rollout = sampled()
    question = ask(rollout)
    if selected:
        passing = mixed_groups(scored(rollout))
        rollout, question = select(rollout, question, where=passing, refill=True)
    loss = clipped_policy_loss(compared(rollout, judged(rollout, question)))
    plan = planned(graph_of(rollout, loss))
    assert fetched(plan, "judged", "rows")["ask"] == ("prompt",)
    assert fetched(plan, "verdict", "prompt") == {"ask": ("prompt",)}


@pytest.mark.parametrize("n", [1, 4])
def test_rewards_of_another_generation_of_the_same_width_are_not_shown(n: int) -> None:
    rollout = sampled(n=n)
    asked = rollout.node.inputs["prompt"]
    other = generate(policy, asked, n=n, max_tokens=32, temperature=0.0, name="other")
    baseline = mean_over(reward([exact, brief], other, name="of_other"), asked)
    advantage = baseline_advantage(rollout, scored(rollout), baseline, name="advantage")
    plan = planned(graph_of(rollout, policy_gradient_loss(advantage)))
    shown = {f.producer: f.columns for f in plan.recorded[0].fetches}
    assert shown["score"] == ("reward", "reward/*")
    assert not shown.keys() & {"of_other", "mean_over"}


def test_an_evaluation_of_a_mean_has_no_parts_of_other_rows() -> None:
    evaluation = evaluate(policy, judged(held_out()), every=5)
    plan = planned(Graph("g", trained(sampled()), evaluation))
    assert fetched(plan, "evaluate", "score") == {"mean_over": ("reward",)}


@pytest.mark.parametrize("n,second", [(1, 3), (4, 1), (4, 2)])
def test_what_is_reduced_has_the_rows_that_it_is_reduced_to(n: int, second: int) -> None:
    rollout = sampled(n=n)
    later = generate(policy, ask(rollout), n=second, max_tokens=8, name="later")
    score = mean_over(reward(brief, later, name="score"), rollout, name="up")
    top = mean_over(score, rollout.node.inputs["prompt"], name="top")
    plan = planned(graph_of(rollout, policy_gradient_loss(baseline_advantage(rollout, score, top))))
    up, highest = plan.node("up"), plan.node("top")
    assert (up.relation, up.inner, up.rows, highest.inner, highest.rows) == ("reduce", n, n, 1, 1)
    assert [(i.gate, i.fan_in) for i in up.inputs] == [("score", second), ("rollout", 0)]
    assert [i.fan_in for i in highest.inputs] == [n, 0]
    assert fetched(plan, "up", "rows") == {}, "whose rows they are is enough"


def test_what_is_recorded_is_returned() -> None:
    plan = ppo_plan()
    for fetch in plan.recorded[0].fetches:
        assert set(fetch.columns) <= set(plan.node(fetch.producer).returns)
