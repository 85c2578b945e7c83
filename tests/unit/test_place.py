"""What a plan places where: Workers, replicas and ranks, chunks, threads, shared modules."""

from __future__ import annotations

from typing import Any

import pytest

from dataflow.errors import PlanError
from dataflow.graph import Graph
from dataflow.model import Model
from engine.plan.worker_index import nodes_by_worker
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

pytestmark = pytest.mark.usefixtures("tiny")
judge = Model("judge", "tiny")


def with_lag() -> Graph:
    return small_grpo(max_lag=1)


def with_old(max_lag: int = 0) -> Graph:
    """Two updates a Step, whose `old` log-probs stay."""
    rollout = sampled(max_lag=max_lag)
    loss = clipped_policy_loss(compared(rollout), old=logprobs(policy, rollout, name="old"))
    return graph_of(rollout, loss, minibatches=2)


def with_a_judge() -> Graph:
    """A second generation, `verdict`, below the first."""
    rollout = sampled(max_lag=1)
    verdict = generate(judge, ask(rollout), max_tokens=4, name="verdict")
    judged = mean_over(reward(exact, verdict, name="judged"), rollout)
    return graph_of(rollout, clipped_policy_loss(compared(rollout, judged)))


def with_an_evaluation() -> Graph:
    """Of the policy, by the generation `tried` and the reward `right`."""
    asked = generate(policy, prompts("test.parquet", name="held_out"), max_tokens=8, name="tried")
    evaluation = evaluate(policy, reward(exact, asked, name="right"), every=2, name="held")
    return Graph("g", trained(sampled(max_lag=1)), evaluation)


GRPO = "prompts rollout score advantage reference train_policy"
PLACES = {
    "without a lag all are in one": (small_grpo, {}, {"main": GRPO}),
    "a source is with the generation that it feeds": (with_lag, {}, {"rollout": "rollout prompts"}),
    "all are in one where that was asked for": (with_lag, {"workers": "one"}, {"main": GRPO}),
    "each is alone where that was asked for": (
        small_grpo,
        {"workers": "apart"},
        {name: name for name in GRPO.split()},
    ),
    "a source is with a pinned generation": (
        with_lag, {"pin": {"rollout": ("gen",)}}, {"gen": "prompts rollout"},
    ),
    "a source that is pinned is not": (
        with_lag, {"pin": {"prompts": ("feed",)}}, {"feed": "prompts", "rollout": "rollout"},
    ),
    "a source is with no replica": (
        with_lag,
        {"replicas": {"rollout": 2}},
        {"prompts": "prompts", "rollout-0,rollout-1": "rollout"},
    ),
    "a pin moves one node": (
        small_grpo,
        {"pin": {"rollout": ("gen",)}},
        {"gen": "rollout", "main": "prompts score train_policy"},
    ),
    "pins of several Workers are replicas or ranks": (
        small_grpo,
        {"pin": {"rollout": ("g0", "g1"), "train_policy": ("t0", "t1")}},
        {"g0,g1": "rollout", "t0,t1": "train_policy"},
    ),
    "below the cut all are with training": (
        lambda: small_ppo(max_lag=1), {}, {"train": "values old gae whiten train_policy"},
    ),
    "a generation below another has a Worker of its own": (
        with_a_judge, {}, {"verdict": "verdict", "rollout": "rollout"},
    ),
    "an evaluation is with the weights that it measures": (
        with_an_evaluation, {}, {"train": "tried train_policy", "data": "right held"},
    ),
    "those that are together are with the pinned one": (
        small_grpo,
        {"workers": "apart", "together": (("rollout", "score"),), "pin": {"score": ("s",)}},
        {"s": "rollout score"},
    ),
    "rank 0 stays with those that share its weights": (
        small_ppo,
        {"ranks": {"train_policy": 2, "train_critic": 2}},
        {"main,main-1": "train_policy train_critic", "main": "old"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PLACES)
def test_where_nodes_are(case: str) -> None:
    make, asked, wanted = PLACES[case]
    plan = placed(make(), **asked)
    for workers, names in wanted.items():
        assert ",".join(workers_of(plan, *names.split())) == workers


@pytest.mark.parametrize(("max_lag", "asked", "recorder"), [
    (0, {}, "main"),
    (1, {}, "data"),
    (0, {"pin": {"rollout": ("gen",)}}, "main"),  # the source trains, too: the train node's
    (0, {"pin": {"prompts": ("feed",)}}, "feed"),
    (0, {"pin": {"prompts": ("z",), "score": ("a",)}}, "z"),  # not the other that is free
])  # fmt: skip
def test_the_recorder_follows_the_source_unless_that_generates(
    max_lag: int, asked: dict[str, Any], recorder: str
) -> None:
    assert placed(small_grpo(max_lag=max_lag), **asked).recorder == recorder


def test_generation_together_with_ranks_is_replicated_and_shares_their_weights() -> None:
    ranks = {"train_policy": 2}
    together = ("prompts", "rollout", "train_policy")
    plan = placed(small_grpo(), together=(together,), ranks=ranks)
    assert workers_of(plan, "rollout", "train_policy") == ("main", "main-1")
    assert plan.node("rollout").layout.replicas == plan.node("rollout").chunks == 2
    assert workers_of(plan, "prompts") == ("main",), "a source has one place in its data"
    assert plan.models[0].aliases == ("rollout",)
    sharded = placed(small_grpo(), together=(together[1:],), ranks=ranks, shard=True)
    assert sharded.models[0].aliases == (), "a rank with a part of them cannot generate"
    assert sharded.node("train_policy").layout.shard


@pytest.mark.parametrize("shard", [True, False])
def test_of_ranks_with_a_part_of_the_weights_the_first_keeps_versions(shard: bool) -> None:
    pin = {"rollout": ("gen",)}
    plan = placed(small_grpo(), ranks={"train_policy": 3}, shard=shard, pin=pin)
    keepers: list[str] = []
    for worker, nodes in nodes_by_worker(plan.nodes).items():
        if any("snapshot" in node.estimate.bytes for node in nodes):
            keepers.append(worker)
    ranks = plan.node("train_policy").workers
    assert keepers == list(ranks[:1] if shard else ranks)


@pytest.mark.parametrize(("ranks", "shard"), [(2, True), (1, False)])
def test_shard_splits_over_ranks_with_other_rows_alone(ranks: int, shard: bool) -> None:
    two = {"tensor": {"train_policy": 2}, "shard": True}
    layout = placed(small_grpo(), ranks={"train_policy": ranks}, **two).node("train_policy").layout
    assert (layout.data, layout.tensor, layout.shard) == (ranks, 2, shard)


def test_inproc_keeps_the_chunks_and_nothing_else() -> None:
    pin = {"rollout": ("g0", "g1", "g2")}
    plan = placed(small_grpo(), inproc=True, workers="apart", ranks={"train_policy": 2}, pin=pin)
    assert plan.workers == ("main",)
    assert {(n.layout.replicas, n.ranks) for n in plan.nodes} == {(1, 1)}
    assert plan.node("rollout").chunks == 3
    assert placed(small_grpo(), inproc=True, turns=(("a", "b"),)).turns == ()


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


def test_with_a_lag_columns_stream_unless_chunks_were_asked_for() -> None:
    plan = placed(with_lag())
    assert plan.sources[0].cohort == 64
    assert plan.node("score").chunking == "ready"
    assert plan.node("rollout").binds_late
    assert not placed(with_lag(), chunks={"rollout": 2}).node("rollout").binds_late
    # Products of matrices are batched: fewer and larger is better.
    assert plan.node("reference").chunking == "cohort"
    assert placed(with_lag(), chunks={"score": 2}).node("score").chunking == "cohort"
    # In the Worker that generates nothing is ready meanwhile.
    assert {n.chunking for n in placed(with_lag(), workers="one").nodes} == {"cohort"}
    # Without a lag prompts are admitted in waves.
    apart = placed(small_grpo(), workers="apart")
    assert (apart.sources[0].cohort, {n.chunking for n in apart.nodes}) == (0, {"cohort"})


THREADS = {
    "one Worker": (small_grpo, {"cores": 4}, dict.fromkeys(GRPO.split(), 4)),
    "at the same time": (
        with_lag, {"cores": 8}, {"rollout": 4, "train_policy": 4, "score": 1},
    ),
    "one core": (with_lag, {"cores": 1}, {"rollout": 1}),
    "one waits for the other": (
        small_grpo, {"cores": 8, "pin": {"rollout": ("gen",)}}, {"rollout": 8, "train_policy": 8},
    ),
    "taking turns": (
        with_lag,
        {"cores": 8, "turns": (("rollout", "train"),)},
        {"rollout": 8, "train_policy": 8},
    ),
    "replicas": (small_grpo, {"cores": 8, "replicas": {"rollout": 4}}, {"rollout": 2}),
    "ranks and siblings": (
        small_ppo,
        {"cores": 8, "workers": "apart", "ranks": {"train_policy": 2}},
        {"train_policy": 4, "old": 4, "values": 4, "rollout": 8},
    ),
    "as asked for": (with_lag, {"cores": 8, "threads": 3}, {"rollout": 3, "train_policy": 3}),
}  # fmt: skip


@pytest.mark.parametrize("case", THREADS)
def test_who_computes_at_the_same_time_shares_the_cores(case: str) -> None:
    make, asked, wanted = THREADS[case]
    plan = placed(make(), **asked)
    assert {name: plan.node(name).layout.threads for name in wanted} == wanted


def test_below_the_cut_and_in_an_evaluation_readers_share_the_trained_weights() -> None:
    for graph, reader in ((with_old(max_lag=2), "old"), (with_an_evaluation(), "tried")):
        plan = placed(graph)
        assert module_of(plan, reader) == module_of(plan, "train_policy")


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
    reference = logprobs(Model("target", "tiny", follows=policy, every=4), rollout, name="ref")
    graph = graph_of(rollout, clipped_policy_loss(compared(rollout), reference=reference, beta=0.1))
    plan = placed(graph)
    assert module_of(plan, "ref") == "target"
    assert plan.stateful == {"train"}
    with pytest.raises(PlanError, match=r"ref=2, but it is a reader of 'target'.* Fix: ref=1"):
        placed(graph, replicas={"ref": 2})
