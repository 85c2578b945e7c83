"""What cannot be placed, the cost of a part of a node, and what holds for every placement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.errors import PlanError
from engine.plan.cost.models import model_cost
from engine.plan.explain import WIDTH, explain
from tests.kit.graphs import small_grpo, small_ppo
from tests.kit.plans import module_of, placed, workers_of
from tests.kit.turns import example_count
from tests.right_graphs import RIGHT

pytestmark = pytest.mark.usefixtures("tiny")


PLACE = {
    "together: expected a node of the plan, found 'scor'. Fix: score.":
        {"together": (("scor", "rollout"),)},
    "pin: 'rollout' on '../gen', which cannot name a Worker.": {"pin": {"rollout": ("../gen",)}},
    "pin: 'rollout' on a,a, one of them twice.": {"pin": {"rollout": ("a", "a")}},
    "pin: rollout on g has 2 replicas. Fix: rollout=g,g-1.":
        {"pin": {"rollout": ("g",)}, "replicas": {"rollout": 2}},
    "replicas: prompts=2, but it is a source": {"replicas": {"prompts": 2}},
    "replicas: train_policy=2, but it is a train node. Fix: ranks: train_policy=2.":
        {"replicas": {"train_policy": 2}},
    "replicas: rollout=0. Fix: rollout=1.": {"replicas": {"rollout": 0}},
    "ranks: rollout=2, but only train nodes have ranks. Fix: replicas: rollout=2.":
        {"ranks": {"rollout": 2}},
    "ranks: train_policy=17, and a minibatch has 16 prompts (64 in 4). Fix: train_policy=16.":
        {"ranks": {"train_policy": 17}},
    "tensor: rollout=3, and its Model has 4 heads, 4 key heads, which are not divisible.":
        {"tensor": {"rollout": 3}},
    "tensor: score=2, but reward has no tensor ranks. Fix: replicas: score=2.":
        {"tensor": {"score": 2}},
    "tensor: expected a node of the plan, found 'train_polic'. Fix: train_policy.":
        {"tensor": {"train_polic": 2}},
    "tensor: train_policy=0. Fix: train_policy=1.": {"tensor": {"train_policy": 0}},
    "tensor: train_policy=3, and its Model has 4 heads, 4 key heads, which are not divisible.":
        {"tensor": {"train_policy": 3}},
    "pin: train_policy on a,b,c has 4 ranks. Fix: train_policy=a,b,c,a-1":
        {"tensor": {"train_policy": 2}, "pin": {"train_policy": ("a", "b", "c")}},
    "chunks: train_policy=2, but it is of batch scope. Fix: train_policy=1.":
        {"chunks": {"train_policy": 2}},
    "together: rollout,score, but rollout is pinned to a and score to b. Fix: one pin, rollout=a.":
        {"together": (("rollout", "score"),), "pin": {"rollout": ("a",), "score": ("b",)}},
    "microbatch: score=9, and nodes that run no Model have no micro-batches.":
        {"microbatch": {"score": 9}},
    "microbatch: train_policy=0. Fix: train_policy=16384.": {"microbatch": {"train_policy": 0}},
    "slots: reference=9, and only generations have rows in slots. Fix: rollout=9.":
        {"slots": {"reference": 9}},
    "slots: rollout=0. Fix: rollout=256.": {"slots": {"rollout": 0}},
    "together: score is in two groups.":
        {"together": (("rollout", "score"), ("score", "advantage"))},
}  # fmt: skip
REFUSED = {f"place: {message}": asked for message, asked in PLACE.items()} | {
    "chunks: rollout: 65 chunks of 64 prompts. Fix: chunks: rollout=64, or":
        {"chunks": {"rollout": 65}},
    "turns: mian,gen: expected a worker, found 'mian'. Fix: main.":
        {"turns": (("mian", "gen"),), "pin": {"rollout": ("gen",)}},
    "turns: main,gen: gen is in two groups.":
        {"turns": (("gen", "score"), ("main", "gen")),
         "pin": {"rollout": ("gen",), "score": ("score",)}},
    "turns: main: one worker": {"turns": (("main",),)},
    "turns: mian,gen: expected a worker, found 'gen'. Fix: one of main.":
        {"turns": (("mian", "gen"),)},
    "turns: main,main-1: these are ranks of train_policy, which act together.":
        {"turns": (("main", "main-1"),), "ranks": {"train_policy": 2}},
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_refused_with_the_nearest_fix(message: str) -> None:
    with pytest.raises(PlanError) as caught:
        placed(small_grpo(minibatches=4), **REFUSED[message])
    assert message in str(caught.value)
    assert all("Fix: " in line for line in str(caught.value).splitlines())


def test_one_process_is_in_one_world_and_what_sees_all_rows_is_whole() -> None:
    graph, two = small_ppo(), {"train_policy": 2}
    with pytest.raises(PlanError, match="worlds: train_policy has ranks on main,main-1, train_cri"):
        placed(graph, ranks=two | {"train_critic": 3})
    with pytest.raises(PlanError, match="worlds: train_policy has tensor 2, train_critic 1, on th"):
        placed(graph, ranks={"train_critic": 2}, tensor=two)
    with pytest.raises(PlanError, match="replicas: whiten=2, but it is of batch scope"):
        placed(graph, replicas={"whiten": 2})
    both = placed(graph, tensor=two | {"train_critic": 2})
    assert workers_of(both, "train_policy", "train_critic") == ("main", "main-1")


def test_workers_of_a_host_add_up_but_for_those_that_take_turns() -> None:
    asked = {"workers": "apart", "memory": 17 * 2**27, "recompute": {"train_policy": "none"}}
    message = r"memory: prompts, rollout, .* together need .* or fewer workers"
    with pytest.raises(PlanError, match=message):
        placed(small_grpo(), **asked)
    turns = (("rollout", "train_policy"),)
    assert placed(small_grpo(), turns=turns, **asked).turns == turns


def test_replicas_and_ranks_do_a_part_each() -> None:
    one, many = (
        placed(small_grpo(), threads=1, replicas={"rollout": count}).node("rollout").estimate
        for count in (1, 4)
    )
    assert many.bytes["outbox"] * 4 == one.bytes["outbox"]
    # Fewer rows at once reach less.
    assert 0.05 * one.seconds < many.seconds < 0.45 * one.seconds
    two = {"ranks": {"train_policy": 2}}
    whole, *parts = (
        placed(small_grpo(), **asked).node("train_policy").estimate.bytes["optimizer"]
        for asked in ({}, two, two | {"shard": True})
    )
    assert parts == [whole, whole / 2]


def test_slots_bound_what_is_decoded_at_once() -> None:
    plans = [placed(small_grpo(), **asked) for asked in ({}, {"slots": {"rollout": 16}})]
    usual, few = (plan.node("rollout") for plan in plans)
    assert (usual.layout.slots, few.layout.slots) == (256, 16)
    assert few.estimate.bytes["kv_cache"] < usual.estimate.bytes["kv_cache"]
    # More passes, each with fewer rows.
    assert few.estimate.seconds > usual.estimate.seconds
    assert "16 slots" in explain(plans[1])
    here = placed(small_grpo(), slots={"rollout": 16}, inproc=True)
    assert here.node("rollout").layout.slots == 16


def test_a_microbatch_is_of_the_node_that_is_named() -> None:
    usual = placed(small_grpo())
    plan = placed(small_grpo(), microbatch={"train_policy": 64})
    assert plan.node("train_policy").layout.tokens == 64
    assert plan.node("rollout").layout.tokens == usual.node("rollout").layout.tokens
    fewer = plan.node("train_policy").estimate.bytes["activations"]
    assert fewer < usual.node("train_policy").estimate.bytes["activations"]
    here = placed(small_grpo(), microbatch={"train_policy": 64}, inproc=True)
    assert here.node("train_policy").layout.tokens == 64


def test_tensor_ranks_have_the_same_rows_and_a_part_of_the_matrices() -> None:
    two = {"train_policy": 2}
    whole = placed(small_grpo(), threads=1).node("train_policy").estimate.bytes
    plan = placed(small_grpo(), threads=1, ranks=two, tensor=two)
    node = plan.node("train_policy")
    assert node.workers == ("main", "main-1", "main-2", "main-3")
    assert (node.ranks, node.layout.data, node.layout.tensor) == (4, 2, 2)
    assert plan.models[0].aliases == (), "a rank with a part of them cannot generate"
    assert "2 x 2 ranks (data x tensor)" in explain(plan)
    cost = model_cost("tiny")
    split = 4 * (cost.parameters - cost.part(2).parameters)
    parts, less = node.estimate.bytes, {"weights": split, "gradients": split}
    less["optimizer"] = 2 * split
    assert {name: whole[name] - parts[name] for name in less} == less
    assert parts["activations"] < whole["activations"]


def test_tensor_ranks_publish_versions_whole() -> None:
    one, two = (
        placed(
            small_grpo(), tensor={"train_policy": ranks}, threads=1, pin={"rollout": ("gen",)}
        ).node("train_policy")
        for ranks in (1, 2)
    )
    assert two.estimate.bytes["snapshot"] == one.estimate.bytes["snapshot"]


def asked_of(names: Sequence[str]) -> st.SearchStrategy[dict[str, Any]]:
    name, count = st.sampled_from(names), st.integers(1, 3)
    counts = st.dictionaries(name, count, max_size=2)
    pins = st.dictionaries(
        name, st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True).map(tuple)
    )
    group = st.lists(name, min_size=2, max_size=3, unique=True).map(tuple)
    optional = {"pin": pins, "together": st.lists(group, max_size=1).map(tuple)}
    optional |= dict.fromkeys(("replicas", "ranks", "tensor", "chunks"), counts)
    optional |= {"shard": st.booleans(), "inproc": st.booleans()}
    workers = st.sampled_from(["one", "auto", "apart"])
    return st.fixed_dictionaries({"workers": workers}, optional=optional)


@pytest.mark.long
@settings(max_examples=example_count(150))
@given(st.data())
def test_whatever_is_asked_for_is_refused_or_holds(data: st.DataObject) -> None:
    graph = data.draw(st.sampled_from(RIGHT))()
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
        assert set(m.aliases) == {r for r in m.readers if m.writer and module_of(plan, r) == m.name}
    assert plan.recorder in plan.workers
    for worker in plan.workers:
        mine = [n for n in plan.nodes if worker in n.workers and n.traits.computes]
        same = len({n.layout.threads for n in mine}) <= 1
        assert same, "all that a Worker computes has the same threads"
    if asked.get("inproc"):
        assert plan.workers == ("main",)
    text = explain(plan)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert all(worker in text for worker in plan.workers)
