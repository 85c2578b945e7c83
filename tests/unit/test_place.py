"""Where a plan puts what: Workers, replicas and ranks, chunks, threads, shared modules, and what is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.errors import PlanError
from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.node import Port
from dataflow.schema import Advantage, Rollout
from engine.coordinator.core import Settings
from engine.coordinator.messages import Stepped
from engine.cost.models import model_cost
from engine.plan.explain import WIDTH, explain
from engine.plan.plan import Plan
from engine.simulate.behaviour import Outcomes, Timing
from engine.simulate.workers import Simulation
from graphs.grpo import grpo
from graphs.ppo import ppo
from graphs.sft import sft
from operators.advantage import group_advantage
from operators.data import prompts
from operators.forward import logprobs
from operators.generate import generate
from operators.losses import clipped_policy_loss
from operators.mean_over import mean_over
from operators.reward import reward
from operators.train import evaluate, train
from tests.kit.graphs import ask
from tests.kit.plans import placed, planned, save_tiny_header
from tests.kit.rewards import exact
from tests.right_graphs import RIGHT

policy = Model("policy", "tiny", trainable=True)


@pytest.fixture(autouse=True)
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model directory named `tiny` in the working directory."""
    save_tiny_header(tmp_path)
    monkeypatch.chdir(tmp_path)


def sampled(n: int = 8, *, max_lag: int = 0) -> Port[Rollout]:
    source = prompts("train.parquet", batch=64)
    return generate(policy, source, n=n, max_tokens=32, max_lag=max_lag, name="rollout")


def scored(rollout: Port[Rollout]) -> Port[Advantage]:
    return group_advantage(rollout, reward(exact, rollout, name="score"), name="advantage")


def grpo_of(max_lag: int = 0, **params: Any) -> Graph:
    return grpo("tiny", "train.parquet", exact, beta=0.04, max_lag=max_lag, **params)


def workers(plan: Plan) -> dict[str, tuple[str, ...]]:
    return {n.name: n.workers for n in plan.nodes}


def module(plan: Plan, node: str) -> str:
    return next(u.module for u in plan.node(node).models if u.param != "tokenizer")


# --- workers --------------------------------------------------------------------------------------


def test_without_a_lag_everything_is_in_one_worker() -> None:
    plan = placed(grpo_of())
    assert plan.workers == ("main",)
    assert plan.recorder == "main"
    assert {n.layout.threads for n in plan.nodes} == {4}
    assert {e.route for e in plan.edges} == {"inproc"}
    assert placed(sft("tiny", "demos.jsonl")).workers == ("main",)


def test_with_a_lag_generation_columns_and_training_overlap() -> None:
    plan = placed(grpo_of(max_lag=1))
    found = workers(plan)
    assert found["rollout"] == found["prompts"] == ("rollout",)
    assert found["score"] == found["advantage"] == ("data",)
    assert found["reference"] == found["train_policy"] == ("train",)
    assert plan.recorder == "data"
    assert {e.route for e in plan.edges if e.producer == "rollout"} == {"shm"}


def test_a_source_is_with_the_generation_that_it_feeds_but_with_no_replica_of_it() -> None:
    assert placed(grpo_of(max_lag=1), pin={"rollout": ("gen",)}).node("prompts").workers == ("gen",)
    assert placed(grpo_of(max_lag=1), pin={"prompts": ("feed",)}).node("prompts").workers == (
        "feed",
    )
    assert placed(grpo_of(max_lag=1), replicas={"rollout": 2}).node("prompts").workers == (
        "prompts",
    )


def seconds_a_step(plan: Plan, *, generation: float, training: float, scoring: float) -> float:
    """Of a simulated run in which every Step of 64 rows takes so long in each of them."""
    row = {"rollout": generation, "score": scoring / 64, "advantage": 1e-4, "prompts": 1e-4}
    timing = Timing(row=row, tail=0.0, train=training, load=0.02, store=0.0, slots=64)
    run = Simulation(
        plan, Settings(steps=12), rows={"prompts": 1000}, timing=timing, outcomes=Outcomes()
    )
    run.begin()
    run.run()
    ends = [at for at, event in run.history.events if isinstance(event, Stepped)]
    return (ends[-1] - ends[2]) / (len(ends) - 3)


@pytest.mark.parametrize(("generation", "training"), [(1.0, 1.0), (1.5, 1.0), (1.0, 1.5)])
def test_with_a_lag_a_step_takes_as_long_as_its_longest_part(
    generation: float, training: float
) -> None:
    graph = grpo("tiny", "train.parquet", exact, batch=16, n=4, max_lag=1)
    found = seconds_a_step(placed(graph), generation=generation, training=training, scoring=0.3)
    assert found < max(generation, training) + 0.2
    crowded = placed(graph, pin={"score": ("rollout",), "advantage": ("rollout",)})
    assert found <= seconds_a_step(crowded, generation=generation, training=training, scoring=0.3)


def test_below_the_cut_everything_is_with_training() -> None:
    plan = placed(ppo("tiny", "train.parquet", exact, max_lag=1))
    step = [n for n in plan.nodes if n.region == "step"]
    assert {n.workers for n in step} == {("train",)}
    assert {"values", "old", "gae", "whiten"} < {n.name for n in step}


def test_a_generation_below_another_has_a_worker_of_its_own() -> None:
    rollout = sampled(max_lag=1)
    verdict = generate(Model("judge", "tiny"), ask(rollout), max_tokens=4, name="verdict")
    assert verdict.node.name == "verdict"
    judged = mean_over(reward(exact, verdict, name="judged"), rollout)
    advantage = group_advantage(rollout, judged, name="advantage")
    plan = placed(Graph("g", train(policy, rollout, loss=clipped_policy_loss(advantage), lr=1e-3)))
    assert plan.node("verdict").workers == ("verdict",)
    assert plan.node("rollout").workers == ("rollout",)


def test_apart_and_one() -> None:
    plan = placed(grpo_of(), workers="apart")
    assert workers(plan) == {n.name: (n.name,) for n in plan.nodes}
    assert placed(grpo_of(max_lag=1), workers="one").workers == ("main",)


def test_a_pin_moves_a_node_and_the_recorder_follows_the_source() -> None:
    plan = placed(grpo_of(), pin={"rollout": ("gen",)})
    assert set(plan.workers) == {"main", "gen"}
    assert plan.node("rollout").workers == ("gen",)
    assert plan.recorder == "main", "the source trains, too: the train node's"
    assert placed(grpo_of(), pin={"prompts": ("feed",)}).recorder == "feed"


def test_pins_of_several_workers_are_replicas_or_ranks() -> None:
    plan = placed(grpo_of(), pin={"rollout": ("g0", "g1"), "train_policy": ("t0", "t1")})
    assert (plan.node("rollout").layout.replicas, plan.node("rollout").ranks) == (2, 1)
    assert (plan.node("train_policy").layout.replicas, plan.node("train_policy").ranks) == (1, 2)
    assert plan.recorder == "main"


def test_nodes_that_are_together_share_the_workers_of_the_pinned_one_or_of_training() -> None:
    pinned = placed(
        grpo_of(), workers="apart", together=(("rollout", "score"),), pin={"score": ("s",)}
    )
    assert pinned.node("rollout").workers == ("s",)
    trained = placed(grpo_of(), workers="apart", together=(("prompts", "rollout", "train_policy"),))
    assert trained.node("prompts").workers == trained.node("rollout").workers == ("train_policy",)


def test_generation_together_with_ranks_is_replicated_and_shares_their_weights() -> None:
    plan = placed(
        grpo_of(), together=(("prompts", "rollout", "train_policy"),), ranks={"train_policy": 2}
    )
    assert plan.node("rollout").workers == plan.node("train_policy").workers == ("main", "main-1")
    assert plan.node("rollout").layout.replicas == plan.node("rollout").chunks == 2
    assert plan.node("prompts").workers == ("main",), "a source has one place in its data"
    assert plan.models[0].aliases == ("rollout",)
    sharded = placed(
        grpo_of(), together=(("rollout", "train_policy"),), ranks={"train_policy": 2}, shard=True
    )
    assert sharded.models[0].aliases == (), (
        "a rank that has a part of the weights cannot generate with it"
    )
    assert sharded.node("train_policy").layout.shard


def test_rank_0_stays_with_those_that_share_its_weights() -> None:
    plan = placed(ppo("tiny", "train.parquet", exact), ranks={"train_policy": 2, "train_critic": 2})
    assert (
        plan.node("train_policy").workers == plan.node("train_critic").workers == ("main", "main-1")
    )
    assert plan.node("old").workers == ("main",)
    assert module(plan, "old") == "policy"


def test_inproc_keeps_the_chunks_and_nothing_else() -> None:
    asked: dict[str, Any] = {
        "pin": {"rollout": ("g0", "g1", "g2")},
        "ranks": {"train_policy": 2},
        "workers": "apart",
    }
    plan, far = placed(grpo_of(), inproc=True, **asked), placed(grpo_of(), **asked)
    assert plan.workers == ("main",)
    assert {(n.layout.replicas, n.ranks) for n in plan.nodes} == {(1, 1)}
    assert [n.chunks for n in plan.nodes] == [n.chunks for n in far.nodes]
    assert plan.node("rollout").chunks == 3
    assert placed(grpo_of(), inproc=True, turns=(("a", "b"),)).turns == ()


def test_an_evaluation_is_with_the_weights_that_it_measures() -> None:
    asked = generate(policy, prompts("test.parquet", name="held_out"), max_tokens=8, name="tried")
    rollout = sampled(max_lag=1)
    graph = Graph(
        "g",
        train(policy, rollout, loss=clipped_policy_loss(scored(rollout)), lr=1e-3),
        evaluate(policy, reward(exact, asked, name="right"), every=2, name="held"),
    )
    plan = placed(graph)
    assert plan.node("tried").workers == ("train",)
    assert module(plan, "tried") == module(plan, "train_policy")
    assert plan.node("right").workers == plan.node("held").workers == ("data",)


# --- chunks and cohorts ---------------------------------------------------------------------------


def test_chunks_are_as_many_as_replicas_unless_asked_for() -> None:
    assert placed(grpo_of()).node("rollout").chunks == 1
    assert placed(grpo_of(), replicas={"rollout": 3}).node("rollout").chunks == 3
    asked = placed(grpo_of(), replicas={"rollout": 2}, chunks={"rollout": 6})
    assert (asked.node("rollout").chunks, asked.node("rollout").layout.replicas) == (6, 2)
    assert placed(grpo_of(), chunks={"rollout": 3}).node("rollout").chunks == 3


def test_with_a_lag_a_steps_prompts_are_generated_together_and_columns_stream() -> None:
    plan = placed(grpo_of(max_lag=2))
    assert plan.sources[0].cohort == 64
    found = {n.name: n.chunking for n in plan.nodes}
    assert found["score"] == found["advantage"] == "ready"
    assert found["rollout"] == found["reference"] == "cohort", (
        "their products are batched: fewer and larger is better"
    )
    assert placed(grpo_of(max_lag=2), chunks={"score": 2}).node("score").chunking == "cohort"
    alone = placed(grpo_of(max_lag=2), workers="one")
    assert {n.chunking for n in alone.nodes} == {"cohort"}, (
        "in the Worker that generates nothing is ready meanwhile"
    )


def test_without_a_lag_prompts_are_admitted_in_waves() -> None:
    plan = placed(grpo_of(), workers="apart")
    assert plan.sources[0].cohort == 0
    assert {n.chunking for n in plan.nodes} == {"cohort"}


# --- threads --------------------------------------------------------------------------------------


def test_workers_that_compute_at_the_same_time_share_the_cores() -> None:
    plan = placed(grpo_of(max_lag=1), cores=8)
    assert plan.node("rollout").layout.threads == plan.node("train_policy").layout.threads == 4
    assert plan.node("score").layout.threads == 1
    assert placed(grpo_of(max_lag=1), cores=1).node("rollout").layout.threads == 1


def test_workers_that_take_turns_have_all_cores_each() -> None:
    plan = placed(grpo_of(), cores=8, pin={"rollout": ("gen",)})
    assert plan.node("rollout").layout.threads == plan.node("train_policy").layout.threads == 8
    taking_turns = placed(grpo_of(max_lag=1), cores=8, turns=(("rollout", "train"),))
    assert (
        taking_turns.node("rollout").layout.threads
        == taking_turns.node("train_policy").layout.threads
        == 8
    )


def test_replicas_ranks_and_siblings_share_the_cores() -> None:
    assert placed(grpo_of(), cores=8, replicas={"rollout": 4}).node("rollout").layout.threads == 2
    plan = placed(
        ppo("tiny", "train.parquet", exact), cores=8, workers="apart", ranks={"train_policy": 2}
    )
    assert plan.node("train_policy").layout.threads == 4
    assert plan.node("old").layout.threads == plan.node("values").layout.threads == 4
    assert plan.node("rollout").layout.threads == 8


def test_threads_that_were_asked_for_win() -> None:
    plan = placed(grpo_of(max_lag=1), cores=8, threads=3)
    assert {n.layout.threads for n in plan.nodes} == {3}


# --- modules --------------------------------------------------------------------------------------
def test_at_lag_0_the_sampler_has_the_trained_weights_by_alias() -> None:
    plan = planned(grpo("tiny", "train.parquet", exact))
    assert module(plan, "rollout") == module(plan, "train_policy") == "policy"
    assert plan.models[0].aliases == ("rollout",)
    assert "weights" not in plan.node("rollout").estimate.bytes


def test_at_lag_1_the_sampler_has_weights_of_its_own() -> None:
    plan = planned(grpo("tiny", "train.parquet", exact, max_lag=1))
    assert module(plan, "rollout") != module(plan, "train_policy")
    assert plan.models[0].aliases == ()
    assert plan.node("rollout").estimate.bytes["weights"] == 4 * 452_480


def test_below_the_cut_readers_share_at_any_lag() -> None:
    rollout = sampled(max_lag=2)
    loss = clipped_policy_loss(scored(rollout), old=logprobs(policy, rollout, name="old"))
    graph = Graph("g", train(policy, rollout, loss=loss, lr=1e-3, minibatches=2))
    for plan in (planned(graph), placed(graph)):
        assert module(plan, "old") == module(plan, "train_policy")


def test_frozen_models_of_one_base_share_and_others_do_not() -> None:
    rollout = sampled()
    first, second = (logprobs(Model(name, "tiny"), rollout) for name in ("first", "second"))
    wide = logprobs(Model("wide", "tiny", dtype="bfloat16"), rollout)
    advantage = scored(rollout)
    terms = [clipped_policy_loss(advantage, reference=r, beta=0.1) for r in (first, second, wide)]
    plan = planned(Graph("g", train(policy, rollout, loss=terms[0] + terms[1] + terms[2], lr=1e-3)))
    assert module(plan, "first") == module(plan, "second") != module(plan, "wide")
    assert module(plan, "first") != module(plan, "train_policy"), (
        "weights that are trained are nobody's frozen ones"
    )
    counted = {n.name for n in plan.nodes if "weights" in n.estimate.bytes}
    assert counted in ({"first", "wide", "train_policy"}, {"second", "wide", "train_policy"})


def test_readers_in_another_worker_share_one_copy() -> None:
    rollout = sampled()
    loss = clipped_policy_loss(scored(rollout), old=logprobs(policy, rollout, name="old"))
    graph = Graph("g", train(policy, rollout, loss=loss, lr=1e-3, minibatches=2))
    plan = placed(graph, pin={"rollout": ("far",), "old": ("far",)})
    assert module(plan, "rollout") == module(plan, "old") == "policy copy"
    assert plan.models[0].aliases == ()
    held = [n.name for n in plan.nodes if "weights" in n.estimate.bytes]
    assert sorted(held) == ["rollout", "train_policy"], "once in each Worker"
    assert plan.node("train_policy").estimate.bytes["snapshot"] == 2 * 4 * 452_480
    assert "snapshot" not in planned(graph).node("train_policy").estimate.bytes


def test_a_follower_is_one_module_in_each_worker() -> None:
    rollout = sampled(max_lag=1)
    target = Model("target", "tiny", follows=policy, every=4)
    loss = clipped_policy_loss(
        scored(rollout), reference=logprobs(target, rollout, name="ref"), beta=0.1
    )
    plan = placed(Graph("g", train(policy, rollout, loss=loss, lr=1e-3)))
    assert module(plan, "ref") == "target"
    assert plan.stateful == {"train"}
    with pytest.raises(
        PlanError, match=r"replicas: ref=2, but it is a reader of 'target'.* Fix: ref=1"
    ):
        placed(Graph("g", train(policy, rollout, loss=loss, lr=1e-3)), replicas={"ref": 2})


# --- what is refused ------------------------------------------------------------------------------

REFUSED: dict[str, dict[str, Any]] = {
    "place: pin: expected a node of the plan, found 'rolout'. Fix: rollout.": {
        "pin": {"rolout": ("a",)}
    },
    "place: together: expected a node of the plan, found 'scor'. Fix: score.": {
        "together": (("scor", "rollout"),)
    },
    "place: pin: 'rollout' on '../gen', which is no name of a Worker.": {
        "pin": {"rollout": ("../gen",)}
    },
    "place: pin: 'rollout' on a,a, one of them twice.": {"pin": {"rollout": ("a", "a")}},
    "place: pin: rollout on g has 2 replicas. Fix: rollout=g,g-1.": {
        "pin": {"rollout": ("g",)},
        "replicas": {"rollout": 2},
    },
    "place: replicas: prompts=2, but it is a source": {"replicas": {"prompts": 2}},
    "place: replicas: train_policy=2, but it is a train node. Fix: ranks: train_policy=2.": {
        "replicas": {"train_policy": 2}
    },
    "place: replicas: rollout=0. Fix: rollout=1.": {"replicas": {"rollout": 0}},
    "place: ranks: rollout=2, but only train nodes have ranks. Fix: replicas: rollout=2.": {
        "ranks": {"rollout": 2}
    },
    "place: ranks: train_policy=17, and a minibatch has 16 prompts (64 in 4). Fix: train_policy=16.": {
        "ranks": {"train_policy": 17}
    },
    "place: tensor: rollout=2, but only train nodes have tensor ranks.": {"tensor": {"rollout": 2}},
    "place: tensor: expected a node of the plan, found 'train_polic'. Fix: train_policy.": {
        "tensor": {"train_polic": 2}
    },
    "place: tensor: train_policy=0. Fix: train_policy=1.": {"tensor": {"train_policy": 0}},
    "place: tensor: train_policy=2 with shard, and weights are split in one way only.": {
        "tensor": {"train_policy": 2},
        "shard": True,
    },
    "place: tensor: train_policy=3, and its Model has 4 heads, 4 key heads, which are not divisible.": {
        "tensor": {"train_policy": 3}
    },
    "place: pin: train_policy on a,b,c has 4 ranks. Fix: train_policy=a,b,c,a-1": {
        "tensor": {"train_policy": 2},
        "pin": {"train_policy": ("a", "b", "c")},
    },
    "place: chunks: train_policy=2, but it is of batch scope. Fix: train_policy=1.": {
        "chunks": {"train_policy": 2}
    },
    "chunks: rollout: 65 chunks of 64 prompts. Fix: chunks: rollout=64, or": {
        "chunks": {"rollout": 65}
    },
    "place: together: rollout,score, but rollout is pinned to a and score to b. Fix: one pin, rollout=a.": {
        "together": (("rollout", "score"),),
        "pin": {"rollout": ("a",), "score": ("b",)},
    },
    "place: together: score is in two groups.": {
        "together": (("rollout", "score"), ("score", "advantage"))
    },
    "turns: mian,gen: expected a worker, found 'mian'. Fix: main.": {
        "turns": (("mian", "gen"),),
        "pin": {"rollout": ("gen",)},
    },
    "turns: main,gen: gen is in two groups.": {
        "turns": (("gen", "score"), ("main", "gen")),
        "pin": {"rollout": ("gen",), "score": ("score",)},
    },
    "turns: main: one worker": {"turns": (("main",),)},
    "turns: main,main-1: these are ranks of train_policy, which act together.": {
        "turns": (("main", "main-1"),),
        "ranks": {"train_policy": 2},
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_refused_with_the_nearest_fix(message: str) -> None:
    with pytest.raises(PlanError) as caught:
        placed(grpo_of(minibatches=4), **REFUSED[message])
    assert message in str(caught.value)
    assert all("Fix: " in line for line in str(caught.value).splitlines())


def test_one_process_is_in_one_world() -> None:
    graph = ppo("tiny", "train.parquet", exact)
    with pytest.raises(
        PlanError,
        match="worlds: train_policy has ranks on main,main-1, train_critic on main,main-1,main-",
    ):
        placed(graph, ranks={"train_policy": 2, "train_critic": 3})
    with pytest.raises(
        PlanError, match="worlds: train_policy has tensor 2, train_critic 1, on the same workers"
    ):
        placed(graph, ranks={"train_critic": 2}, tensor={"train_policy": 2})
    both = placed(graph, tensor={"train_policy": 2, "train_critic": 2})
    assert (
        both.node("train_policy").workers == both.node("train_critic").workers == ("main", "main-1")
    )


def test_batch_scope_is_never_divided() -> None:
    with pytest.raises(PlanError, match="replicas: whiten=2, but it is of batch scope"):
        placed(ppo("tiny", "train.parquet", exact), replicas={"whiten": 2})


def test_workers_of_a_host_add_up_and_leased_ones_take_turns() -> None:
    room = 7 * 2**27
    asked: dict[str, Any] = {"workers": "apart", "memory": room}
    with pytest.raises(
        PlanError, match=r"memory: prompts, rollout, .* together need .* or fewer workers"
    ):
        placed(grpo_of(), **asked)
    assert placed(grpo_of(), turns=(("rollout", "train_policy"),), **asked).turns == (
        ("rollout", "train_policy"),
    )


def test_replicas_and_ranks_do_a_part_each() -> None:
    one, many = placed(grpo_of(), threads=1), placed(grpo_of(), threads=1, replicas={"rollout": 4})
    rollout, part = one.node("rollout").estimate, many.node("rollout").estimate
    assert part.bytes["outbox"] * 4 == rollout.bytes["outbox"]
    assert rollout.seconds is not None
    assert part.seconds == pytest.approx(rollout.seconds / 4, rel=0.8), (
        "fewer rows at once reach less"
    )
    assert part.seconds < rollout.seconds
    ranks = {"train_policy": 2}
    replicated, sharded = (
        placed(grpo_of(), ranks=ranks, shard=shard).node("train_policy") for shard in (False, True)
    )
    whole = one.node("train_policy").estimate.bytes
    assert (
        replicated.estimate.bytes["optimizer"]
        == whole["optimizer"]
        == 2 * sharded.estimate.bytes["optimizer"]
    )


def test_tensor_ranks_have_the_same_rows_and_a_part_of_the_matrices() -> None:
    whole = placed(grpo_of(), threads=1).node("train_policy")
    plan = placed(grpo_of(), threads=1, ranks={"train_policy": 2}, tensor={"train_policy": 2})
    node = plan.node("train_policy")
    assert node.workers == ("main", "main-1", "main-2", "main-3")
    assert (node.ranks, node.layout.data, node.layout.tensor, node.layout.partial) == (
        4,
        2,
        2,
        True,
    )
    assert plan.models[0].aliases == (), (
        "a rank that has a part of the weights cannot generate with it"
    )
    assert "2 x 2 ranks (data x tensor)" in explain(plan)
    shape = model_cost("tiny").shape
    assert shape is not None
    split = 4 * (shape.matrices - shape.matrices // 2)
    parts, all_ = node.estimate.bytes, whole.estimate.bytes
    assert {n: all_[n] - parts[n] for n in ("weights", "gradients", "optimizer")} == {
        "weights": split, "gradients": split, "optimizer": 2 * split,
    }  # fmt: skip
    assert parts["activations"] < all_["activations"]
    pinned = placed(
        grpo_of(), tensor={"train_policy": 2}, pin={"train_policy": ("a", "b", "c", "d")}
    )
    assert pinned.node("train_policy").layout.data == 2
    apart = placed(
        grpo_of(), threads=1, tensor={"train_policy": 2}, pin={"rollout": ("gen",)}
    ).node("train_policy")
    assert apart.estimate.bytes["snapshot"] == 2 * all_["weights"], "versions are published whole"


# --- all of it ------------------------------------------------------------------------------------


def asked_of(names: Sequence[str]) -> st.SearchStrategy[dict[str, Any]]:
    name, count = st.sampled_from(names), st.integers(1, 3)
    counts = st.dictionaries(name, count, max_size=2)
    pins = st.dictionaries(
        name, st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True).map(tuple)
    )
    groups = st.lists(
        st.lists(name, min_size=2, max_size=3, unique=True).map(tuple), max_size=1
    ).map(tuple)
    return st.fixed_dictionaries(
        {"workers": st.sampled_from(["one", "auto", "apart"])},
        optional={
            "pin": pins,
            "together": groups,
            "replicas": counts,
            "ranks": counts,
            "tensor": counts,
            "chunks": counts,
        }
        | {"shard": st.booleans(), "inproc": st.booleans()},
    )


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_is_asked_for_is_refused_or_holds(data: st.DataObject) -> None:
    make: Callable[[], Graph] = data.draw(st.sampled_from(RIGHT))
    graph = make()
    asked = data.draw(asked_of([n.name for n in graph.nodes]))
    try:
        plan = placed(graph, cores=8, memory=2**50, **asked)
    except PlanError:
        return
    writers = {m.name: plan.node(m.writer) for m in plan.models if m.writer}
    for node in plan.nodes:
        assert len(node.workers) == len(set(node.workers)) == node.layout.replicas * node.ranks
        assert node.work != "train" or node.layout.replicas == node.chunks == 1
        for use in node.models:
            if use.module in writers and use.param != "tokenizer" and node.work != "evaluate":
                assert set(node.workers) <= set(writers[use.module].workers)
    for m in plan.models:
        assert set(m.aliases) == {r for r in m.readers if m.writer and module(plan, r) == m.name}
    assert plan.recorder in plan.workers
    for worker in plan.workers:
        mine = {n.layout.threads for n in plan.nodes if worker in n.workers and n.traits.computes}
        assert len(mine) <= 1, "all that a Worker computes has the same threads"
    if asked.get("inproc"):
        assert plan.workers == ("main",)
    text = explain(plan)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert all(worker in text for worker in plan.workers)
