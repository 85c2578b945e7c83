"""Plans in which weights of forward nodes wait on the host: bytes, seconds, choices, refusals."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from dataflow.errors import PlanError
from dataflow.graph import Graph
from dataflow.kernel import Layout
from dataflow.model import Model
from dataflow.safe_text import shown_bytes
from engine.plan.checks.memory import find_memory_rooms
from engine.plan.cluster import Cluster, Host
from engine.plan.cost.decode_curve import RowDistributions
from engine.plan.cost.devices import device
from engine.plan.cost.distribution import constant_length
from engine.plan.cost.lengths import Lengths
from engine.plan.cost.memory import Work
from engine.plan.cost.node_price import NodeWork, node_cost
from engine.plan.explain import explain
from engine.plan.plan import Plan, PlannedNode
from operators.advantage import kl_in_reward
from operators.forward import logprobs
from operators.losses import clipped_policy_loss
from tests.kit.graphs import (
    BASE,
    compared,
    graph_of,
    grpo_graph,
    policy,
    sampled,
    scored,
    small_grpo,
    small_ppo,
)
from tests.kit.plans import planned_on
from tests.unit.test_cost_decode import MODEL

pytestmark = pytest.mark.usefixtures("tiny")

GIB = 2**30
WEIGHTS = 4 * 452_480
WAYS: tuple[Any, ...] = ("none", "weights")
MOST = Work(lengths=Lengths(prompt=100, completion=200), prompts=64, rows=64)
LENGTHS = RowDistributions(constant_length(100), constant_length(200))


def plan_with(memory: int, graph: Graph | None = None, kind: str = "H100", **wishes: Any) -> Plan:
    """A plan with generation on a GPU of its own, all else on one with so many bytes."""
    cluster = Cluster(cores=4, memory=24 * GIB, gpus=(80 * GIB, memory), kind=kind)
    return planned_on(cluster, graph or small_grpo(), pin={"rollout": "gen"}, **wishes)


def need_of(plan: Plan, worker: str = "main") -> int:
    """The bytes of what is on the GPU of a Worker."""
    assert plan.cluster is not None
    [need] = [room.need for room in find_memory_rooms(plan, plan.cluster) if worker in room.workers]
    return need


def reference(plan: Plan) -> PlannedNode:
    return plan.node("reference")


def waiting_nodes(plan: Plan) -> set[str]:
    return {node.name for node in plan.nodes if node.layout.offload == "weights"}


def test_weights_count_on_the_host_and_while_the_node_runs() -> None:
    usual = plan_with(80 * GIB)
    waiting = plan_with(80 * GIB, offload={"reference": "weights"})
    parts, usual_parts = reference(waiting).estimate.bytes, reference(usual).estimate.bytes
    assert usual_parts["weights"] == parts["loaded"] == WEIGHTS
    assert parts["offloaded"] == 1.5 * WEIGHTS
    assert "weights" not in parts
    # Training has the most beside what is always there.
    assert need_of(usual) - need_of(waiting) == WEIGHTS
    assert "offload: weights" in explain(waiting)
    assert "of rows and offloaded state" in explain(waiting)


def test_a_copy_of_weights_is_seconds_of_each_chunk() -> None:
    seconds: dict[tuple[str, int], float] = {}
    for choice in ("none", "weights"):
        for chunks in (1, 4):
            wishes = {"offload": {"reference": choice}, "chunks": {"reference": chunks}}
            planned = reference(plan_with(80 * GIB, **wishes))
            assert planned.estimate.seconds is not None
            seconds[choice, chunks] = planned.estimate.seconds
    assert seconds["none", 1] == seconds["none", 4]
    one_copy = seconds["weights", 1] - seconds["none", 1]
    assert one_copy == pytest.approx(WEIGHTS / device("H100").host_link, rel=0.5)
    assert seconds["weights", 4] - seconds["none", 4] == pytest.approx(4 * one_copy)


def test_the_price_of_a_layout_has_both() -> None:
    work = NodeWork(kind="forward", most=MOST, lengths=LENGTHS)
    costs = [node_cost(MODEL, device("H100"), Layout(offload=way), work) for way in WAYS]
    (seconds, size), (waiting_seconds, waiting_size) = costs
    assert waiting_size == size, "a pass has its weights on the device"
    assert waiting_seconds > seconds
    on_cpu = [node_cost(MODEL, device("cpu"), Layout(offload=way), work) for way in WAYS]
    assert on_cpu[0] == on_cpu[1]


def test_on_a_cpu_nothing_waits() -> None:
    cluster = Cluster(cores=4, memory=24 * GIB)
    plans = [planned_on(cluster, small_grpo(), offload={"reference": way}) for way in WAYS]
    assert reference(plans[0]).estimate == reference(plans[1]).estimate


@pytest.mark.parametrize("kind", ["H100", ""])
def test_weights_wait_where_memory_asks_for_it_the_frozen_ones_first(kind: str) -> None:
    """Recompute of the trained layers is declined, and the optimizer is worth more bytes."""
    declined = {"train_policy": "none"}
    wishes: dict[str, Any] = {"recompute": declined, "offload": declined, "kind": kind}
    graph = small_grpo(minibatches=2)
    need = need_of(plan_with(80 * GIB, graph, **wishes))
    assert not waiting_nodes(plan_with(need, graph, **wishes))
    plan = plan_with(need - 1, graph, **wishes)
    assert waiting_nodes(plan) == {"reference"}
    assert [note for note in plan.notes if note.startswith("reference: offload: weights, since")]
    with pytest.raises(PlanError, match="main needs"):
        plan_with(need - WEIGHTS - 1, graph, **wishes)


def test_what_is_declined_is_named() -> None:
    declined = {"train_policy": "none", "reference": "none"}
    wishes: dict[str, Any] = {"recompute": {"train_policy": "none"}, "offload": declined}
    need = need_of(plan_with(80 * GIB, **wishes))
    with pytest.raises(PlanError, match="Fix: --offload reference=weights, or --recompute train_p"):
        plan_with(need - 1, **wishes)


@pytest.mark.parametrize(("wish", "message"), [
    ({"rollout": "weights"},
     "offload: rollout=weights, but only those of log-probs, values and scores by torch wait on the"
     " host. Fix: leave it out."),
    ({"train_policy": "weights"}, "Fix: train_policy=optimizer."),
    ({"reference": "optimizer"},
     "offload: reference=optimizer, but only train nodes have such state. Fix: reference=weights."),
    ({"values": "weights"},
     "offload: values=weights, but train_critic computes with the same weights. Fix: leave out"
     " values."),
])  # fmt: skip
def test_wishes_that_cannot_be_are_refused(wish: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        plan_with(80 * GIB, small_ppo(), offload=wish)


def beside(memory: int, **wishes: Any) -> Plan:
    """A plan with all forward nodes, each with weights of its own, on one GPU with so many bytes,
    of which no seconds are known.
    """
    cluster = Cluster(cores=4, memory=24 * GIB, gpus=(80 * GIB, memory, 80 * GIB))
    pins = {"rollout": "gen"} | dict.fromkeys(("reference", "values", "old"), "side")
    return planned_on(cluster, small_ppo(), pin=pins, **wishes)


def test_of_weights_that_wait_those_that_nobody_trains_are_the_first() -> None:
    need = need_of(beside(80 * GIB), "side")
    assert not waiting_nodes(beside(need))
    # The weights of the one that runs are there: with one that waits nothing is spared.
    two = waiting_nodes(beside(need - 1))
    assert len(two) == 2
    assert "reference" in two
    assert waiting_nodes(beside(need - WEIGHTS - 1)) == {"reference", "values", "old"}
    with pytest.raises(PlanError, match="side needs"):
        beside(need - 2 * WEIGHTS - 1)


def test_where_there_are_many_those_of_one_kind_of_work_are_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.plan.passes.memory_fit._MOST_COMBINATIONS", 4)
    need = need_of(beside(80 * GIB), "side")
    assert waiting_nodes(beside(need - 1)) == {"reference", "values", "old"}


def test_nobody_chooses_that_shared_weights_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and old log-probs compute with those that train; all nodes have the same choice."""
    monkeypatch.setattr("engine.plan.passes.memory_fit._MOST_COMBINATIONS", 1)
    declined = dict.fromkeys(("train_policy", "train_critic"), "none")
    wishes: dict[str, Any] = {"recompute": declined, "offload": declined}
    need = need_of(plan_with(80 * GIB, small_ppo(), **wishes))
    assert waiting_nodes(plan_with(need - 1, small_ppo(), **wishes)) == {"reference"}


def two_references(**follower: Any) -> Graph:
    """Log-probs by two Models with the weights of the base, or one that follows the policy."""
    rollout = sampled()
    score = scored(rollout)
    for name in ("one", "other"):
        reference = logprobs(Model(name, BASE, **follower), rollout, name=name)
        score = kl_in_reward(rollout, score, reference, beta=0.1, name=f"less_{name}")
    return graph_of(rollout, clipped_policy_loss(compared(rollout, score)))


def test_all_who_share_a_module_leave_its_weights_on_the_host_or_none() -> None:
    graph = two_references()
    with pytest.raises(PlanError, match=re.escape(
        "offload: one=weights, but other computes with the same weights. Fix: other=weights, too,"
    )):  # fmt: skip
        plan_with(80 * GIB, graph, offload={"one": "weights"})
    both = plan_with(80 * GIB, graph, offload={"one": "weights", "other": "weights"})
    host_bytes = [both.node(name).estimate.bytes.get("offloaded", 0) for name in ("one", "other")]
    assert host_bytes == [1.5 * WEIGHTS, 0]
    assert all(both.node(name).estimate.bytes["loaded"] == WEIGHTS for name in ("one", "other"))


def test_weights_that_move_towards_others_stay_on_the_device() -> None:
    follower = {"follows": policy, "rate": 0.1}
    with pytest.raises(PlanError, match=r"offload: one=weights, but 'one' moves towards another"):
        plan_with(80 * GIB, two_references(**follower), offload={"one": "weights"})


def test_workers_of_a_host_map_a_version_that_one_of_them_has_fetched() -> None:
    """Two are counted, where one may be loaded as the next one comes; by the writer none is."""
    hosts = tuple(Host(name=name, cores=8, memory=24 * GIB) for name in ("a", "b"))
    cluster = Cluster(cores=8, memory=24 * GIB, hosts=hosts)
    for count in (1, 2, 3):
        workers = ",".join(f"g{number}@b" for number in range(count))
        plan = planned_on(cluster, grpo_graph(), pin={"rollout": workers, "train_policy": "main@a"})
        version = plan.node("rollout").estimate.bytes["fetched"]
        assert count_fetched(plan, cluster) == {"host a": 0, "host b": min(count, 2) * version}
    near = {"rollout": "g0@a,g1@a", "train_policy": "main@a"}
    assert not any(count_fetched(planned_on(cluster, grpo_graph(), pin=near), cluster).values())


def test_what_all_workers_need_has_a_version_that_they_map_once() -> None:
    cluster = Cluster(cores=8, memory=24 * GIB)
    pins = {"rollout": "g0,g1,g2", "train_policy": "main"}
    # Few rows, and no processes: else the version would be lost in what is shown.
    plan = planned_on(cluster, grpo_graph(batch=4, n=2, max_tokens=8), pin=pins)
    plan = replace(plan, processes={})
    [room] = find_memory_rooms(plan, cluster)
    assert f"all workers: at most {shown_bytes(room.need)} on this host" in explain(plan)


def count_fetched(plan: Plan, cluster: Cluster) -> dict[str, int]:
    """Bytes of fetched versions, by host."""
    counts: dict[str, int] = {}
    for room in find_memory_rooms(plan, cluster):
        counts[room.where] = sum(node.estimate.bytes.get("fetched", 0) for node in room.nodes)
    return counts
