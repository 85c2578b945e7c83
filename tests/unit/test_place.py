"""What a plan places where: Workers, replicas and ranks, chunks, threads, shared modules."""

from __future__ import annotations

from typing import Any

import pytest

from dataflow.errors import PlanError
from dataflow.graph import Graph
from dataflow.model import Model
from engine.coordinator.core import Settings
from engine.coordinator.messages import Stepped
from engine.plan.plan import Plan
from engine.simulate.behaviour import Durations
from graphs.grpo import grpo
from graphs.sft import sft
from operators.data import prompts
from operators.forward import logprobs
from operators.generate import generate
from operators.losses import clipped_policy_loss
from operators.mean_over import mean_over
from operators.reward import reward
from operators.train import evaluate
from tests.kit.graphs import (
    ask,
    compared,
    graph_of,
    policy,
    sampled,
    small_grpo,
    small_ppo,
    trained,
)
from tests.kit.plans import module_of, placed, planned, workers_of
from tests.kit.rewards import exact
from tests.kit.simulations import simulation

pytestmark = pytest.mark.usefixtures("tiny")
judge = Model("judge", "tiny")
PART_OF_THE_WEIGHTS = "a rank that has a part of the weights cannot generate with it"


def with_old(max_lag: int = 0) -> Graph:
    """Two updates a Step, whose `old` log-probs stay."""
    rollout = sampled(max_lag=max_lag)
    loss = clipped_policy_loss(compared(rollout), old=logprobs(policy, rollout, name="old"))
    return graph_of(rollout, loss, minibatches=2)


def threads(plan: Plan, *names: str) -> int:
    """Of these nodes, which have the same."""
    (count,) = {plan.node(name).layout.threads for name in names or [n.name for n in plan.nodes]}
    return count


def test_without_a_lag_everything_is_in_one_worker() -> None:
    plan = placed(small_grpo())
    assert plan.workers == ("main",)
    assert plan.recorder == "main"
    assert threads(plan) == 4
    assert {e.route for e in plan.edges} == {"inproc"}
    assert placed(sft("tiny", "demos.jsonl")).workers == ("main",)


def test_with_a_lag_generation_columns_and_training_overlap() -> None:
    plan = placed(small_grpo(max_lag=1))
    assert workers_of(plan, "rollout", "prompts") == ("rollout",)
    assert workers_of(plan, "score", "advantage") == ("data",)
    assert workers_of(plan, "reference", "train_policy") == ("train",)
    assert plan.recorder == "data"
    assert {e.route for e in plan.edges if e.producer == "rollout"} == {"shm"}


@pytest.mark.parametrize(("asked", "worker"), [
    ({"pin": {"rollout": ("gen",)}}, "gen"),
    ({"pin": {"prompts": ("feed",)}}, "feed"),
    ({"replicas": {"rollout": 2}}, "prompts"),
], ids=["generation is pinned", "it is pinned", "generation has replicas"])  # fmt: skip
def test_a_source_is_with_the_generation_that_it_feeds_but_with_no_replica_of_it(
    asked: dict[str, Any], worker: str
) -> None:
    assert workers_of(placed(small_grpo(max_lag=1), **asked), "prompts") == (worker,)


def seconds_a_step(plan: Plan, *, generation: float, training: float, scoring: float) -> float:
    """Of a simulated run in which every Step of 64 rows takes so long in each of them."""
    row = {"rollout": generation, "score": scoring / 64, "advantage": 1e-4, "prompts": 1e-4}
    durations = Durations(row=row, tail=0.0, train=training, load=0.02, store=0.0, slots=64)
    run = simulation(plan, settings=Settings(steps=12), rows=1000, durations=durations)
    run.run()
    ends = [at for at, event in run.history.events if isinstance(event, Stepped)]
    return (ends[-1] - ends[2]) / (len(ends) - 3)


@pytest.mark.parametrize(("generation", "training"), [(1.0, 1.0), (1.5, 1.0), (1.0, 1.5)])
def test_with_lag_a_step_takes_as_long_as_its_longest(generation: float, training: float) -> None:
    graph = grpo("tiny", "train.parquet", exact, batch=16, n=4, max_lag=1)
    crowded = placed(graph, pin={"score": ("rollout",), "advantage": ("rollout",)})
    apart, together = (
        seconds_a_step(plan, generation=generation, training=training, scoring=0.3)
        for plan in (placed(graph), crowded)
    )
    assert apart < max(generation, training) + 0.2
    assert apart <= together


def test_below_the_cut_everything_is_with_training() -> None:
    plan = placed(small_ppo(max_lag=1))
    step = [n for n in plan.nodes if n.region == "step"]
    assert {n.workers for n in step} == {("train",)}
    assert {"values", "old", "gae", "whiten"} < {n.name for n in step}


def test_a_generation_below_another_has_a_worker_of_its_own() -> None:
    rollout = sampled(max_lag=1)
    verdict = generate(judge, ask(rollout), max_tokens=4, name="verdict")
    judged = mean_over(reward(exact, verdict, name="judged"), rollout)
    plan = placed(graph_of(rollout, clipped_policy_loss(compared(rollout, judged))))
    assert workers_of(plan, "verdict") == ("verdict",)
    assert workers_of(plan, "rollout") == ("rollout",)


def test_apart_and_one() -> None:
    plan = placed(small_grpo(), workers="apart")
    assert {n.name: n.workers for n in plan.nodes} == {n.name: (n.name,) for n in plan.nodes}
    assert placed(small_grpo(max_lag=1), workers="one").workers == ("main",)


def test_a_pin_moves_a_node_and_the_recorder_follows_the_source() -> None:
    plan = placed(small_grpo(), pin={"rollout": ("gen",)})
    assert set(plan.workers) == {"main", "gen"}
    assert workers_of(plan, "rollout") == ("gen",)
    assert plan.recorder == "main", "the source trains, too: the train node's"
    assert placed(small_grpo(), pin={"prompts": ("feed",)}).recorder == "feed"


def test_pins_of_several_workers_are_replicas_or_ranks() -> None:
    plan = placed(small_grpo(), pin={"rollout": ("g0", "g1"), "train_policy": ("t0", "t1")})
    assert (plan.node("rollout").layout.replicas, plan.node("rollout").ranks) == (2, 1)
    assert (plan.node("train_policy").layout.replicas, plan.node("train_policy").ranks) == (1, 2)
    assert plan.recorder == "main"


def test_nodes_that_are_together_share_the_workers_of_the_pinned_one_or_of_training() -> None:
    def together(*names: str, **asked: Any) -> Plan:
        return placed(small_grpo(), workers="apart", together=(names,), **asked)

    assert workers_of(together("rollout", "score", pin={"score": ("s",)}), "rollout") == ("s",)
    with_training = together("prompts", "rollout", "train_policy")
    assert workers_of(with_training, "prompts", "rollout") == ("train_policy",)


def test_generation_together_with_ranks_is_replicated_and_shares_their_weights() -> None:
    ranks = {"train_policy": 2}
    together = ("prompts", "rollout", "train_policy")
    plan = placed(small_grpo(), together=(together,), ranks=ranks)
    assert workers_of(plan, "rollout", "train_policy") == ("main", "main-1")
    assert plan.node("rollout").layout.replicas == plan.node("rollout").chunks == 2
    assert workers_of(plan, "prompts") == ("main",), "a source has one place in its data"
    assert plan.models[0].aliases == ("rollout",)
    sharded = placed(small_grpo(), together=(together[1:],), ranks=ranks, shard=True)
    assert sharded.models[0].aliases == (), PART_OF_THE_WEIGHTS
    assert sharded.node("train_policy").layout.shard


def test_rank_0_stays_with_those_that_share_its_weights() -> None:
    plan = placed(small_ppo(), ranks={"train_policy": 2, "train_critic": 2})
    assert workers_of(plan, "train_policy", "train_critic") == ("main", "main-1")
    assert workers_of(plan, "old") == ("main",)
    assert module_of(plan, "old") == "policy"


def test_inproc_keeps_the_chunks_and_nothing_else() -> None:
    asked: dict[str, Any] = {"ranks": {"train_policy": 2}, "workers": "apart"}
    asked["pin"] = {"rollout": ("g0", "g1", "g2")}
    plan, far = placed(small_grpo(), inproc=True, **asked), placed(small_grpo(), **asked)
    assert plan.workers == ("main",)
    assert {(n.layout.replicas, n.ranks) for n in plan.nodes} == {(1, 1)}
    assert [n.chunks for n in plan.nodes] == [n.chunks for n in far.nodes]
    assert plan.node("rollout").chunks == 3
    assert placed(small_grpo(), inproc=True, turns=(("a", "b"),)).turns == ()


def test_an_evaluation_is_with_the_weights_that_it_measures() -> None:
    asked = generate(policy, prompts("test.parquet", name="held_out"), max_tokens=8, name="tried")
    evaluation = evaluate(policy, reward(exact, asked, name="right"), every=2, name="held")
    plan = placed(Graph("g", trained(sampled(max_lag=1)), evaluation))
    assert workers_of(plan, "tried") == ("train",)
    assert module_of(plan, "tried") == module_of(plan, "train_policy")
    assert workers_of(plan, "right", "held") == ("data",)


@pytest.mark.parametrize(("asked", "chunks", "replicas"), [
    ({}, 1, 1),
    ({"replicas": {"rollout": 3}}, 3, 3),
    ({"replicas": {"rollout": 2}, "chunks": {"rollout": 6}}, 6, 2),
    ({"chunks": {"rollout": 3}}, 3, 1),
], ids=str)  # fmt: skip
def test_chunks_are_as_many_as_replicas_unless_asked_for(
    asked: dict[str, Any], chunks: int, replicas: int
) -> None:
    rollout = placed(small_grpo(), **asked).node("rollout")
    assert (rollout.chunks, rollout.layout.replicas) == (chunks, replicas)


def test_with_a_lag_a_steps_prompts_are_generated_together_and_columns_stream() -> None:
    plan = placed(small_grpo(max_lag=2))
    assert plan.sources[0].cohort == 64
    chunking = {n.name: n.chunking for n in plan.nodes}
    assert chunking["score"] == chunking["advantage"] == "ready"
    # Products of matrices are batched: fewer and larger is better.
    assert chunking["rollout"] == chunking["reference"] == "cohort"
    assert placed(small_grpo(max_lag=2), chunks={"score": 2}).node("score").chunking == "cohort"
    # In the Worker that generates nothing is ready meanwhile.
    alone = placed(small_grpo(max_lag=2), workers="one")
    assert {n.chunking for n in alone.nodes} == {"cohort"}


def test_without_a_lag_prompts_are_admitted_in_waves() -> None:
    plan = placed(small_grpo(), workers="apart")
    assert plan.sources[0].cohort == 0
    assert {n.chunking for n in plan.nodes} == {"cohort"}


def test_workers_that_compute_at_the_same_time_share_the_cores() -> None:
    plan = placed(small_grpo(max_lag=1), cores=8)
    assert threads(plan, "rollout", "train_policy") == 4
    assert threads(plan, "score") == 1
    assert threads(placed(small_grpo(max_lag=1), cores=1), "rollout") == 1


def test_workers_that_take_turns_have_all_cores_each() -> None:
    pinned = placed(small_grpo(), cores=8, pin={"rollout": ("gen",)})
    taking_turns = placed(small_grpo(max_lag=1), cores=8, turns=(("rollout", "train"),))
    for plan in (pinned, taking_turns):
        assert threads(plan, "rollout", "train_policy") == 8


def test_replicas_ranks_and_siblings_share_the_cores() -> None:
    assert threads(placed(small_grpo(), cores=8, replicas={"rollout": 4}), "rollout") == 2
    plan = placed(small_ppo(), cores=8, workers="apart", ranks={"train_policy": 2})
    assert threads(plan, "train_policy", "old", "values") == 4
    assert threads(plan, "rollout") == 8


def test_threads_that_were_asked_for_win() -> None:
    assert threads(placed(small_grpo(max_lag=1), cores=8, threads=3)) == 3


def test_at_lag_0_the_sampler_has_the_trained_weights_by_alias() -> None:
    plan = planned(grpo("tiny", "train.parquet", exact))
    assert module_of(plan, "rollout") == module_of(plan, "train_policy") == "policy"
    assert plan.models[0].aliases == ("rollout",)
    assert "weights" not in plan.node("rollout").estimate.bytes


def test_at_lag_1_the_sampler_has_weights_of_its_own() -> None:
    plan = planned(grpo("tiny", "train.parquet", exact, max_lag=1))
    assert module_of(plan, "rollout") != module_of(plan, "train_policy")
    assert plan.models[0].aliases == ()
    assert plan.node("rollout").estimate.bytes["weights"] == 4 * 452_480


def test_below_the_cut_readers_share_at_any_lag() -> None:
    graph = with_old(max_lag=2)
    for plan in (planned(graph), placed(graph)):
        assert module_of(plan, "old") == module_of(plan, "train_policy")


def test_frozen_models_of_one_base_share_and_others_do_not() -> None:
    rollout = sampled()
    first, second = (logprobs(Model(name, "tiny"), rollout) for name in ("first", "second"))
    wide = logprobs(Model("wide", "tiny", dtype="bfloat16"), rollout)
    advantage = compared(rollout)
    terms = [clipped_policy_loss(advantage, reference=r, beta=0.1) for r in (first, second, wide)]
    plan = planned(graph_of(rollout, terms[0] + terms[1] + terms[2]))
    assert module_of(plan, "first") == module_of(plan, "second") != module_of(plan, "wide")
    # Weights that are trained are nobody's frozen ones.
    assert module_of(plan, "first") != module_of(plan, "train_policy")
    counted = {n.name for n in plan.nodes if "weights" in n.estimate.bytes}
    assert counted in ({"first", "wide", "train_policy"}, {"second", "wide", "train_policy"})


def test_readers_in_another_worker_share_one_copy() -> None:
    graph = with_old()
    plan = placed(graph, pin={"rollout": ("far",), "old": ("far",)})
    assert module_of(plan, "rollout") == module_of(plan, "old") == "policy copy"
    assert plan.models[0].aliases == ()
    held = [n.name for n in plan.nodes if "weights" in n.estimate.bytes]
    assert sorted(held) == ["rollout", "train_policy"], "once in each Worker"
    assert plan.node("train_policy").estimate.bytes["snapshot"] == 2 * 4 * 452_480
    assert "snapshot" not in planned(graph).node("train_policy").estimate.bytes


def test_a_follower_is_one_module_in_each_worker() -> None:
    rollout = sampled(max_lag=1)
    target = Model("target", "tiny", follows=policy, every=4)
    reference = logprobs(target, rollout, name="ref")
    graph = graph_of(rollout, clipped_policy_loss(compared(rollout), reference=reference, beta=0.1))
    plan = placed(graph)
    assert module_of(plan, "ref") == "target"
    assert plan.stateful == {"train"}
    told = r"replicas: ref=2, but it is a reader of 'target'.* Fix: ref=1"
    with pytest.raises(PlanError, match=told):
        placed(graph, replicas={"ref": 2})
