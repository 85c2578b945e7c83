"""Clusters with other numbers of devices, and options for other numbers of Workers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from dataflow.check import check
from dataflow.errors import PlanError
from engine.plan.cluster import Cluster, ClusterLink, Host, with_first
from engine.plan.options import RunOptions, make_placing
from engine.plan.placement import resolve_labels
from engine.plan.planner import make_plan
from engine.predict.cluster_scaling import scale_cluster
from engine.predict.option_scaling import list_scalable, scale_devices, scale_workers
from tests.kit.graphs import grpo_graph, small_grpo, small_ppo
from tests.kit.plans import headers, planned_on

pytestmark = pytest.mark.usefixtures("tiny")

GIB = 2**30


def hosts_of(table: str, count: int, gpus: int, kind: str = "H100", region: str = "") -> list[Host]:
    names = [table] if count == 1 else [f"{table}-{i}" for i in range(count)]
    return [
        Host(
            name=name,
            cores=64,
            memory=512 * GIB,
            gpus=(80 * GIB,) * gpus,
            kind=kind,
            labels={"gpu": kind},
            region=region,
            price=8.0,
            table="" if name == table else table,
        )
        for name in names
    ]


def six() -> Cluster:
    """2 hosts that train and 4 that generate, 8 GPUs each, and one without."""
    plain = Host(name="desk", cores=8, memory=64 * GIB)
    hosts = [plain, *hosts_of("train", 2, 8), *hosts_of("gen", 4, 8, "L40S", region="west")]
    return with_first(hosts, links=(ClusterLink(between=("train", "west"), rate=1e9),))


def test_a_cluster_grows_by_whole_hosts_of_every_table() -> None:
    cluster = scale_cluster(six(), 96)
    names = [host.name for host in cluster.hosts]
    assert names == ["desk", *(f"train-{i}" for i in range(4)), *(f"gen-{i}" for i in range(8))]
    assert cluster.way("train-3", "gen-7").rate == 1e9, "new hosts have their table's links"
    assert scale_cluster(six(), 48) == six()
    assert [h.name for h in scale_cluster(six(), 24).hosts] == ["desk", "train-0", "gen-0", "gen-1"]


def test_one_host_becomes_several_and_a_part_of_one() -> None:
    one = with_first(hosts_of("a", 1, 8))
    more = scale_cluster(one, 24)
    assert [host.name for host in more.hosts] == ["a", "a-1", "a-2"]
    assert {host.table for host in more.hosts[1:]} == {"a"}
    (part,) = scale_cluster(one, 2).hosts
    assert (len(part.gpus), part.cores, part.memory, part.price) == (2, 16, 128 * GIB, 2.0)


@pytest.mark.parametrize(
    "cluster, devices, told",
    [
        (six(), 64, "expected whole hosts, found 8/3 x train, 16/3 x gen .* Fix: --devices 72"),
        (six(), 0, "expected a number of devices, 1 to .*, found 0. Fix: --devices 48"),
        (with_first(hosts_of("a", 1, 8)), 12, "found 3/2 x a .* Fix: --devices 16"),
        (with_first([Host(name="a", cores=8, memory=GIB)]), 2, "expected a cluster file with GPUs"),
    ],
)
def test_devices_that_make_no_whole_hosts(cluster: Cluster, devices: int, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        scale_cluster(cluster, devices)


# --- Workers --------------------------------------------------------------------------------------


def grown(name: str, count: int, **options: Any) -> RunOptions:
    return scale_workers(grpo_graph(), RunOptions(**options), name, count)


def test_a_node_without_a_pin_has_replicas_or_ranks() -> None:
    assert grown("rollout", 4).replicas == {"rollout": 4}
    assert grown("train_policy", 2, ranks={"train_policy": 8}).ranks == {"train_policy": 2}


def test_a_pin_goes_on_with_its_hosts_in_turn() -> None:
    found = grown("rollout", 5, pin={"rollout": "g@b,h@c"}, replicas={"rollout": 2})
    assert found.pin["rollout"] == "g@b,h@c,g-1@b,g-2@c,g-3@b"
    assert found.replicas == {}, "the pin says how many"
    assert grown("rollout", 1, pin={"rollout": "g@b,h@c"}).pin["rollout"] == "g@b"
    tensor = grown("train_policy", 2, pin={"train_policy": "t@a,u@a"}, tensor={"train_policy": 2})
    assert tensor.pin["train_policy"] == "t@a,u@a,t-1@a,t-2@a", "each rank is two Workers"


def test_nodes_on_the_same_workers_grow_together() -> None:
    pins = {"prompts": "gen", "rollout": "gen", "score": "data"}
    assert grown("gen", 2, pin=pins).pin == {**pins, "rollout": "gen,gen-1"}
    assert grown("rollout", 2, pin=pins) == grown("gen", 2, pin=pins)
    both = grown("rollout", 3, pin={"rollout": "a,b", "score": "a,b"})
    assert both.pin["rollout"] == both.pin["score"] == "a,b,a-1"


def test_names_that_have_no_number_of_workers() -> None:
    assert "prompts" not in list_scalable(grpo_graph(), RunOptions())
    with pytest.raises(PlanError, match=r"found rolout\. Fix: rollout\."):
        grown("rolout", 2)
    with pytest.raises(PlanError, match="rollout: expected 1 Worker or more, found 0"):
        grown("rollout", 0)


# --- devices --------------------------------------------------------------------------------------


def with_more(devices: int, **options: Any) -> RunOptions:
    before = six()
    return scale_devices(
        grpo_graph(), RunOptions(**options), before, scale_cluster(before, devices)
    )


def test_workers_grow_with_the_devices() -> None:
    pins = {"rollout": "g@gpu:L40S,h@gpu:L40S", "train_policy": "t@train-0,u@train-1", "score": "d"}
    found = with_more(96, pin=pins)
    assert found.pin["rollout"].count("@gpu:L40S") == 4
    assert found.pin["train_policy"] == "t@train-0,u@train-1,t-1@train-2,t-2@train-3"
    assert found.pin["score"] == "d", "one Worker of columns stays one"
    assert with_more(24, pin=pins).pin["train_policy"] == "t@train-0"
    assert with_more(48, pin=pins).pin == pins


def test_a_grown_plan_is_on_the_grown_hosts() -> None:
    before, after = six(), scale_cluster(six(), 96)
    pins = {"rollout": "g@gpu:L40S,h@gpu:L40S", "train_policy": "t@train-0,u@train-1"}
    graph = grpo_graph(max_lag=1, batch=64)
    options = scale_devices(graph, RunOptions(pin=pins), before, after)
    asked, cluster = resolve_labels(make_placing(options), after)
    plan = make_plan(check(graph, headers), seed=0, placing=asked, cluster=cluster)
    assert len(plan.node("train_policy").workers) == 4
    hosts = {plan.host_of(worker) for worker in plan.node("rollout").workers}
    assert hosts == {f"gen-{i}" for i in range(4)}


def test_numbers_grow_on_several_hosts() -> None:
    before, after = (with_first(hosts_of("a", count, 4)) for count in (2, 4))
    asked = RunOptions(replicas={"rollout": 4}, ranks={"train_policy": 2})
    options = scale_devices(small_grpo(max_lag=1), asked, before, after)
    plan = planned_on(after, small_grpo(max_lag=1), replicas=options.replicas, ranks=options.ranks)
    hosts = Counter(plan.host_of(worker) for worker in plan.node("rollout").workers)
    assert hosts == {"a-1": 3, "a-2": 3, "a-3": 2}, "training has a-0"


def test_numbers_grow_on_one_host() -> None:
    before = with_first(hosts_of("a", 1, 2))
    asked = RunOptions(replicas={"rollout": 2, "score": "1..2"}, ranks={"train_policy": 1})
    found = scale_devices(small_ppo(), asked, scale_cluster(before, 1), before)
    assert found.replicas == {"rollout": 4, "score": "1..2"}
    assert found.ranks == {"train_policy": 2}


@pytest.mark.parametrize(
    "devices, options, told",
    [
        (96, {}, r"found no pin and no number. Fix: --pin rollout=rollout@gpu:H100 train_policy="),
        (
            72,
            {"pin": {"rollout": "g@gpu:L40S"}},
            "rollout on g.*: expected whole Workers, found 3/2",
        ),
    ],
)
def test_workers_that_cannot_grow(devices: int, options: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        with_more(devices, **options)
