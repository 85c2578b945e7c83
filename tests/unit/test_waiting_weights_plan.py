"""Plans in which weights of forward nodes wait on the host: bytes, seconds, the choice, refusals."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dataflow.errors import PlanError
from dataflow.graph import Graph
from dataflow.kernel import Layout
from engine.plan.checks.memory import find_memory_rooms
from engine.plan.cluster import Cluster
from engine.plan.cost.decode_curve import RowDistributions
from engine.plan.cost.devices import device
from engine.plan.cost.distribution import constant_length
from engine.plan.cost.lengths import Lengths
from engine.plan.cost.memory import Work
from engine.plan.cost.node_price import NodeWork, node_cost
from engine.plan.explain import explain
from engine.plan.plan import Plan, PlannedNode
from tests.kit.graphs import small_grpo, small_ppo
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


def need_of(plan: Plan) -> int:
    """The bytes of what is on the second GPU."""
    assert plan.cluster is not None
    [need] = [room.need for room in find_memory_rooms(plan, plan.cluster) if "main" in room.workers]
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
    kept = {"train_policy": "none"}
    wishes: dict[str, Any] = {"recompute": kept, "offload": kept, "kind": kind}
    graph = small_grpo(minibatches=2)
    need = need_of(plan_with(80 * GIB, graph, **wishes))
    assert not waiting_nodes(plan_with(need, graph, **wishes))
    plan = plan_with(need - 1, graph, **wishes)
    assert waiting_nodes(plan) == {"reference"}
    assert [note for note in plan.notes if note.startswith("reference: offload: weights, since")]
    with pytest.raises(PlanError, match="main needs"):
        plan_with(need - WEIGHTS - 1, graph, **wishes)


def test_what_is_declined_is_named() -> None:
    kept = {"train_policy": "none", "reference": "none"}
    wishes: dict[str, Any] = {"recompute": {"train_policy": "none"}, "offload": kept}
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
     "offload: values=weights, but train_critic computes with the same weights. Fix: leave out values."),
])  # fmt: skip
def test_wishes_that_cannot_be_are_refused(wish: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        plan_with(80 * GIB, small_ppo(), offload=wish)
