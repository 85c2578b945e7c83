"""What the plan chooses where training does not fit: layers computed again, state on the host."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest

from dataflow.check import check
from dataflow.errors import PlanError
from dataflow.graph import Graph
from dataflow.program import Program
from engine.plan.checks.memory import find_memory_rooms
from engine.plan.cluster import Cluster
from engine.plan.cost import training_memory
from engine.plan.cost.devices import catalogue_place, coefficients, device
from engine.plan.cost.memory import lasting, optimizer_bytes
from engine.plan.cost.model_passes import Sizes
from engine.plan.cost.models import Shape
from engine.plan.cost.training import Microbatches, train_time
from engine.plan.explain import explain
from engine.plan.placement import Placing
from engine.plan.plan import Plan, PlannedNode
from engine.plan.program_plan import make_program_plan
from graphs.sft import sft
from tests.kit.comparison import require_golden
from tests.kit.graphs import grpo_graph, small_ppo
from tests.kit.plans import CLUSTER, headers, planned_on

pytestmark = pytest.mark.usefixtures("tiny")

GIB = 2**30
SHAPE = Shape(
    layers=4,
    hidden=64,
    intermediate=128,
    heads=4,
    kv_heads=4,
    head_dim=16,
    vocabulary=98,
    context=512,
    tied=True,
)
LAYOUTS = list(product(("none", "layers"), ("none", "optimizer")))
Wish = tuple[str, str]
"""recompute and offload of a train node."""


def supervised() -> Graph:
    return sft("tiny", "demos.jsonl")


def plan_with(
    memory: int, *, graph: Graph | None = None, kind: str = "H100", **wishes: Any
) -> Plan:
    """A plan for one GPU with so many bytes."""
    cluster = Cluster(cores=4, memory=24 * GIB, gpus=(memory,), kind=kind)
    return planned_on(cluster, graph or supervised(), **wishes)


def training(plan: Plan) -> PlannedNode:
    return plan.node("train_policy")


def layout_of(node: PlannedNode) -> Wish:
    return node.layout.recompute, node.layout.offload


@cache
def all_needs() -> dict[Wish, tuple[int, float]]:
    """The bytes and the seconds of each layout, where there is room for all."""
    needs: dict[Wish, tuple[int, float]] = {}
    for recompute, offload in LAYOUTS:
        wishes = {"recompute": {"train_policy": recompute}, "offload": {"train_policy": offload}}
        plan = plan_with(80 * GIB, **wishes)
        assert layout_of(training(plan)) == (recompute, offload)
        assert plan.cluster is not None
        [room] = find_memory_rooms(plan, plan.cluster)
        needs[recompute, offload] = room.need, training(plan).estimate.seconds or 0.0
    return needs


def test_layers_and_state_are_bytes_and_seconds() -> None:
    needs = all_needs()
    assert needs["layers", "none"][0] < 0.8 * needs["none", "none"][0]
    for again, waits in product(("none", "layers"), repeat=2):
        assert needs[again, "optimizer"][0] < needs[waits, "none"][0] or again != waits
    fastest = needs["none", "none"][1]
    assert all(seconds > fastest for layout, (_, seconds) in needs.items() if any_of(layout))


def any_of(layout: Wish) -> bool:
    """Whether it spares anything."""
    return layout != ("none", "none")


@pytest.mark.parametrize("wish", LAYOUTS, ids="-".join)
def test_the_fastest_that_fits_is_chosen(wish: Wish) -> None:
    needs = all_needs()
    room = needs[wish][0]
    fitting = {layout: seconds for layout, (size, seconds) in needs.items() if size <= room}
    plan = plan_with(room)
    assert layout_of(training(plan)) == min(fitting, key=fitting.__getitem__)
    assert training(plan).estimate.seconds == needs[layout_of(training(plan))][1]
    reasons = [note for note in plan.notes if "since otherwise" in note]
    assert len(reasons) == any_of(layout_of(training(plan)))
    assert plan == plan_with(room), "the same plan for the same inputs"


def test_where_seconds_are_unknown_computing_again_comes_first() -> None:
    needs = all_needs()
    one_less = needs["none", "none"][0] - 1
    assert layout_of(training(plan_with(one_less, kind=""))) == ("layers", "none")
    least = needs["layers", "optimizer"][0]
    assert layout_of(training(plan_with(least, kind=""))) == ("layers", "optimizer")


def test_where_nothing_is_enough_nothing_is_chosen() -> None:
    least = all_needs()["layers", "optimizer"][0]
    with pytest.raises(
        PlanError, match=r"; recompute and offload do not make it fit\. Fix: shorter"
    ):
        plan_with(least - 1)


@pytest.mark.parametrize(("wishes", "fix"), [
    ({"recompute": {"train_policy": "none"}}, r"Fix: --recompute train_policy=layers, or shorter"),
    (
        {"recompute": {"train_policy": "none"}, "offload": {"train_policy": "none"}},
        "Fix: --recompute train_policy=layers, or --offload train_policy=optimizer, or",
    ),
])  # fmt: skip
def test_what_is_declined_is_not_chosen_but_named(wishes: dict[str, Any], fix: str) -> None:
    room = all_needs()["layers", "none"][0]
    assert layout_of(training(plan_with(room)))[0] == "layers"
    with pytest.raises(PlanError, match=fix):
        plan_with(room, **wishes)


def test_of_several_nodes_only_those_change_that_have_to() -> None:
    """Both train on the same rows; the policy has logits besides. Generation has another GPU."""

    def fitted(memory: int) -> Plan:
        cluster = Cluster(cores=4, memory=24 * GIB, gpus=(80 * GIB, memory))
        return planned_on(cluster, small_ppo(), pin={"rollout": "gen"})

    plan = fitted(80 * GIB)
    assert plan.cluster is not None
    assert plan.devices == {"gen": (0,), "main": (1,)}
    [need] = [r.need for r in find_memory_rooms(plan, plan.cluster) if "main" in r.workers]
    passing: dict[str, int] = {}
    for name in ("train_policy", "train_critic"):
        parts = plan.node(name).estimate.bytes
        passing[name] = sum(parts.values()) - lasting(parts)
    logits = passing["train_policy"] - passing["train_critic"]
    assert logits > 0
    assert spared_nodes(fitted(need)) == set()
    assert spared_nodes(fitted(need - 1)) == {"train_policy"}
    assert spared_nodes(fitted(need - logits - 1)) == {"train_policy", "train_critic"}


def spared_nodes(plan: Plan) -> set[str]:
    """The nodes for which something was chosen."""
    return {node.name for node in plan.nodes if any_of(layout_of(node))}


def test_on_a_cpu_layers_are_computed_again_and_nothing_is_offloaded() -> None:
    def on_cpu(memory: int, **wishes: Any) -> Plan:
        return planned_on(Cluster(cores=4, memory=memory), supervised(), **wishes)

    plan = on_cpu(24 * GIB)
    assert plan.cluster is not None
    [room] = find_memory_rooms(plan, plan.cluster)
    assert layout_of(training(plan)) == ("none", "none")
    assert layout_of(training(on_cpu(room.need - 1))) == ("layers", "none")
    asked = on_cpu(24 * GIB, offload={"train_policy": "optimizer"})
    assert training(asked).estimate == training(plan).estimate
    here = on_cpu(24 * GIB, inproc=True, recompute={"train_policy": "layers"})
    assert layout_of(training(here)) == ("layers", "none")


def test_offloaded_state_counts_on_the_host() -> None:
    plan = plan_with(80 * GIB, offload={"train_policy": "optimizer"})
    parts = training(plan).estimate.bytes
    assert "optimizer" not in parts
    assert parts["offloaded"] == 1.5 * optimizer_bytes(452_480, "float32")
    assert "of rows and offloaded state, of" in explain(plan)
    cluster = Cluster(cores=4, memory=4 * 2**20, gpus=(80 * GIB,), kind="H100")
    wishes = {"offload": {"train_policy": "optimizer"}}
    with pytest.raises(PlanError, match=r"rows and offloaded state of .* Fix: offload none, or"):
        planned_on(cluster, supervised(), **wishes)


def test_golden_of_a_plan_that_was_fitted() -> None:
    plan = plan_with(all_needs()["layers", "optimizer"][0])
    require_golden("explain/fitted.txt", explain(replace(plan, digest="0123456789abcdef")))


@pytest.mark.parametrize(("wishes", "message"), [
    ({"recompute": {"train_polic": "layers"}},
     "recompute: expected a node of the plan, found 'train_polic'. Fix: train_policy."),
    ({"offload": {"rollout": "optimizer"}},
     "offload: rollout=optimizer, but only train nodes have such state. Fix: leave it out."),
    ({"recompute": {"train_policy": "layer"}},
     "recompute: train_policy=layer, expected none or layers. Fix: train_policy=layers."),
    ({"offload": {"train_policy": "cpu"}},
     "offload: train_policy=cpu, expected none, optimizer or weights. Fix: train_policy="
     "optimizer."),
    ({"compiled": "all"}, "compiled: expected auto, none or layers, found 'all'. Fix: "),
])  # fmt: skip
def test_wishes_that_cannot_be_are_refused(wishes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        plan_with(80 * GIB, graph=grpo_graph(), **wishes)


def compiled_nodes(plan: Plan) -> Iterator[str]:
    return (node.name for node in plan.nodes if node.layout.compiled)


def test_layers_are_compiled_on_gpus_or_where_asked_for() -> None:
    cpu = Cluster(cores=4, memory=24 * GIB)
    graph = grpo_graph(beta=0.1)
    computing = {"rollout", "reference", "train_policy"}
    assert set(compiled_nodes(plan_with(80 * GIB, graph=graph))) == computing
    assert not set(compiled_nodes(plan_with(80 * GIB, graph=graph, compiled="none")))
    assert not set(compiled_nodes(planned_on(cpu, graph)))
    assert set(compiled_nodes(planned_on(cpu, graph, compiled="layers"))) == computing


def test_state_goes_to_the_gpu_and_back_in_each_update() -> None:
    model = Sizes(parameters=10**9, shape=SHAPE)
    fed = Microbatches(tokens=100.0, keys=0.0, predicted=100.0, passes=1, rows=4)

    def link_bytes(name: str, **split: Any) -> float:
        where = catalogue_place(device(name), **split)
        still, moved = (
            train_time(model, where, fed, updates=3, offloaded=offloaded)
            for offloaded in (False, True)
        )
        assert moved.seconds - still.seconds == pytest.approx(moved.link - still.link)
        rate = where.device.host_link * coefficients(where.device)["train"].link
        return (moved.link - still.link) * rate

    state = optimizer_bytes(10**9, "bfloat16")
    assert link_bytes("H100") == pytest.approx(3 * 2 * state)
    assert link_bytes("A100", data=4, shard=True) == pytest.approx(3 * 2 * state / 4, rel=1e-6)
    assert link_bytes("cpu") == 0.0


def test_a_bucket_counts_as_far_as_no_activations_were_there_before() -> None:
    parts = {"optimizer": 100, "activations": 2**30, "logits": 2**20}
    many = 4 * training_memory.BUCKET
    offloaded = training_memory.offload_parts(parts, many, None, "bfloat16")
    assert offloaded == {"activations": 2**30, "logits": 2**20, "offloaded": 150}
    alone = training_memory.offload_parts({"optimizer": 100}, many, None, "bfloat16")
    assert alone["bucket"] == 12 * training_memory.BUCKET
    wide = replace(SHAPE, vocabulary=2**22)  # 2 ** 28 embeddings, in one weight
    split = training_memory.offload_parts({"optimizer": 100}, 2**27, wide, "float32")
    assert split["bucket"] == 8 * 2**27


def test_a_wish_counts_in_the_phases_of_a_program_that_have_its_node() -> None:
    program = Program((supervised(), 2), (small_ppo(), 2))
    wishes = Placing(recompute={"train_critic": "layers", "train_policy": "none"})
    plan = make_program_plan(check(program, headers), seed=0, placing=wishes, cluster=CLUSTER)
    first, second = plan.phases
    assert layout_of(training(first)) == layout_of(training(second)) == ("none", "none")
    assert layout_of(second.node("train_critic")) == ("layers", "none")


def test_many_train_nodes_are_changed_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were more combinations of two than are tried."""
    monkeypatch.setattr("engine.plan.passes.memory_fit._MOST_COMBINATIONS", 4)

    def chosen(mib: int, **wishes: Any) -> set[str]:
        cluster = Cluster(cores=4, memory=24 * GIB, gpus=(80 * GIB, mib * 2**20))
        return spared_nodes(planned_on(cluster, small_ppo(), pin={"rollout": "gen"}, **wishes))

    # One by one, train_policy alone would do.
    assert chosen(525) == {"train_policy", "train_critic"}
    with pytest.raises(PlanError, match="Fix: --recompute train_critic=layers, or"):
        chosen(490, recompute={"train_critic": "none"})
