"""Look-ups by Worker of a whole plan say what the plan says of each Worker."""

from __future__ import annotations

import pytest

from engine.plan.cluster import Host, with_first
from engine.plan.worker_index import nodes_by_worker, workers_by_host
from tests.kit.graphs import small_grpo
from tests.kit.plans import placed, plan_of, planned_node, planned_on

pytestmark = pytest.mark.usefixtures("tiny")
HOSTS = with_first([Host(name=n, cores=8, memory=2**36, gpus=(2**36,) * 8) for n in "abcd"])


def test_look_ups_by_worker_are_those_of_each_worker() -> None:
    turns = (("t0", "g1"), ("t1", "g5"))
    pin = {"rollout": "g0@a,g1@b,g2@c,g3@d,g5@b", "train_policy": "t0@b,t1@b"}
    plan = planned_on(HOSTS, small_grpo(max_lag=1), pin=pin, turns=turns)
    nodes, found = nodes_by_worker(plan.nodes), plan.turns_by_worker
    assert nodes.keys() == set(plan.workers)
    for worker in plan.workers:
        assert nodes[worker] == plan.nodes_on(worker)
        assert found.get(worker, ()) == plan.turns_of(worker)
    hosts = workers_by_host(plan, plan.workers)
    for host, here in hosts.items():
        assert list(here) == [w for w in plan.workers if plan.host_of(w) == host]
    assert list(hosts) == list(dict.fromkeys(map(plan.host_of, plan.workers)))


def test_a_worker_in_two_groups_has_the_first_as_in_a_plan() -> None:
    plan = plan_of(planned_node("a", workers=("x", "y", "z")), turns=(("x", "y"), ("y", "z")))
    assert plan.turns_by_worker["y"] == plan.turns_of("y") == ("x", "y")


def test_threads_of_workers_on_one_host_are_shared_among_those_there() -> None:
    graph = small_grpo(max_lag=1)
    plan = placed(graph, cores=8, pin={"rollout": ("g0", "g1", "g2"), "train_policy": ("train",)})
    assert {plan.node(n).layout.threads for n in ("rollout", "train_policy")} == {2}
