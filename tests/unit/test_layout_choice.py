"""Plans whose layouts a search chooses: what it may choose, what it leaves, and what is said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dataflow.errors import PlanError
from dataflow.graph import Graph
from engine.plan.cluster import Cluster, Host
from engine.plan.explain import explain
from engine.plan.plan import Plan
from engine.plan.step_cost import step_cost
from tests.kit import plans
from tests.kit.graphs import grpo_graph, small_ppo

pytestmark = pytest.mark.usefixtures("tiny")
GIB = 2**30
GPUS = (80 * GIB,) * 4
ONE_HOST = Cluster(cores=32, memory=256 * GIB, gpus=GPUS, kind="H100")


def planned_on(cluster: Cluster, graph: Graph, **options: Any) -> Plan:
    return plans.planned_on(cluster, graph, **{"search": "auto"} | options)


def hosts_of(*kinds: str, price: float = 0.0) -> Cluster:
    """A host of four GPUs for each kind."""
    hosts: list[Host] = []
    for number, kind in enumerate(kinds):
        host = Host(
            name=f"{kind}-{number}",
            cores=32,
            memory=256 * GIB,
            gpus=GPUS,
            kind=kind,
            price=price * (1 + number),
        )
        hosts.append(host)
    return replace(ONE_HOST, hosts=tuple(hosts), kind=kinds[0])


def grpo(**params: Any) -> Graph:
    """Enough rows for several GPUs."""
    return grpo_graph(batch=256, n=8, max_tokens=400, **params)


def count_gpus(plan: Plan, *nodes: str) -> int:
    """Different GPUs of these nodes, or of all."""
    gpus: set[tuple[str, int]] = set()
    for node in plan.nodes:
        if not nodes or node.name in nodes:
            for worker in node.workers:
                host = plan.host_of(worker)
                gpus.update((host, gpu) for gpu in plan.devices.get(worker, ()))
    return len(gpus)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_plan_uses_the_devices_that_pay(lag: int) -> None:
    plan = planned_on(ONE_HOST, grpo(max_lag=lag))
    ruled = planned_on(ONE_HOST, grpo(max_lag=lag), search="off")
    assert count_gpus(plan) > count_gpus(ruled)
    assert plan.considered[0].split("(")[1].startswith("taken")
    assert any("by rule" in line for line in plan.considered)
    assert any(note.startswith("layouts by search: a Step is ") for note in plan.notes)


@pytest.mark.parametrize(("gib", "slots"), [(0.75, 128), (1, 256), (3, 512)])
def test_rows_that_decode_at_once_are_as_many_as_pay_and_fit(gib: float, slots: int) -> None:
    cluster = replace(ONE_HOST, gpus=(int(gib * GIB),) * 2)
    plan = planned_on(cluster, grpo())
    assert plan.node("rollout").layout.slots == slots
    assert f"{slots} slots" in explain(plan)
    asked = planned_on(cluster, grpo(), slots={"rollout": 64})
    assert asked.node("rollout").layout.slots == 64


def test_sharded_ranks_train_more_tokens_at_once_where_these_fit() -> None:
    tokens: list[int] = []
    for gib in (1, 3):
        plan = planned_on(replace(ONE_HOST, gpus=(gib * GIB,) * 2), grpo())
        tokens.append(plan.node("train_policy").layout.tokens)
    assert tokens == [16384, 32768]


def test_what_was_asked_for_is_kept() -> None:
    asked: dict[str, Any] = {"replicas": {"rollout": 3}, "ranks": {"train_policy": 2}}
    plan = planned_on(ONE_HOST, grpo(), **asked)
    assert plan.node("rollout").layout.replicas == 3
    assert plan.node("train_policy").layout.data == 2
    assert plan.considered


@pytest.mark.parametrize(
    ("lag", "pinned", "free"), [(0, "rollout", "train_policy"), (1, "train_policy", "rollout")]
)
def test_pins_bound_the_search(lag: int, pinned: str, free: str) -> None:
    graph, pin = grpo(max_lag=lag), {pinned: "g0,g1"}
    plan = planned_on(ONE_HOST, graph, pin=pin)
    ruled = planned_on(ONE_HOST, graph, pin=pin, search="off")
    assert plan.node(pinned).workers == ("g0", "g1")
    assert len(ruled.node(free).workers) == 1 < len(plan.node(free).workers)
    assert plan.considered


def test_nodes_pinned_apart_stay_apart() -> None:
    pin = {"rollout": "g0,g1", "train_policy": "t0"}
    plan = planned_on(ONE_HOST, small_ppo(), pin=pin)
    assert plan.node("rollout").workers == ("g0", "g1")
    assert plan.node("train_policy").workers == ("t0",)
    devices = {worker: plan.devices[worker] for worker in ("g0", "g1", "t0")}
    assert len({str(each) for each in devices.values()}) == 3


def test_nodes_together_share_devices() -> None:
    plan = planned_on(ONE_HOST, grpo(max_lag=1), together=(("rollout", "train_policy", "score"),))
    rollout, trained = plan.node("rollout").workers, plan.node("train_policy").workers
    shorter, longer = sorted((rollout, trained), key=len)
    assert longer[: len(shorter)] == shorter
    assert plan.node("score").workers[0] in longer
    assert count_gpus(plan) > 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"search": "off"}, ""),
        ({"workers": "one"}, "--workers one says where nodes are"),
        ({"pin": {"rollout": "a", "train_policy": "b"}}, "--pin says where nodes are"),
        ({"replicas": {"rollout": "1..2"}}, "a range of --replicas says where nodes are"),
    ],
)
def test_whoever_places_nodes_has_placed_them(options: dict[str, Any], why: str) -> None:
    plan = planned_on(ONE_HOST, grpo(), **options)
    expected = (f"no layouts were searched: {why}",) if why else ()
    assert plan.considered == expected


def test_one_device_and_cpus_that_nobody_measured_have_nothing_to_choose() -> None:
    one = planned_on(replace(ONE_HOST, gpus=GPUS[:1]), grpo())
    assert one.considered == ("no layouts were searched: there is one device",)
    cpus = planned_on(Cluster(cores=8, memory=64 * GIB), grpo())
    assert "on CPUs a profile of this machine" in cpus.considered[0]


def test_each_group_is_on_one_kind_of_device() -> None:
    plan = planned_on(hosts_of("H100", "L40S"), grpo(max_lag=1))
    for node in plan.nodes:
        if node.traits.computes:
            assert len({plan.host_of(worker).split("-")[0] for worker in node.workers}) == 1


def test_the_least_cost_takes_longer_and_costs_less() -> None:
    cluster = hosts_of("H100", "H100", price=8.0)
    both = [planned_on(cluster, grpo(), objective=what) for what in ("seconds", "cost")]
    assert count_gpus(both[1]) < count_gpus(both[0])
    seconds = [float(plan.considered[0].split()[0]) for plan in both]
    pairs = zip(both, seconds, strict=True)
    costs = [step_cost(plan, plan.cluster, taken).step for plan, taken in pairs]
    assert 0.0 < costs[1] <= costs[0]


def test_cost_without_prices_is_refused() -> None:
    with pytest.raises(PlanError, match=r"objective: cost, and the price of H100-0 is not known"):
        planned_on(hosts_of("H100", "H100"), grpo(), objective="cost")


def test_explain_says_why() -> None:
    plan = planned_on(ONE_HOST, small_ppo())
    assert "layouts that were compared" not in explain(plan)
    text = explain(plan, why=True)
    assert "layouts that were compared" in text
    assert "groupings were priced in" in text
