"""What a Step costs: whole hosts, for as long as it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.plan.cluster import Host, with_first
from engine.plan.explain import explain
from engine.plan.step_cost import step_cost
from tests.kit.graphs import small_grpo
from tests.kit.plans import planned_on

pytestmark = pytest.mark.usefixtures("tiny")

PRICES = {"a": 36.0, "b": 72.0, "c": 1000.0}
HOSTS = [Host(name=n, cores=4, memory=24 * 2**30, price=p) for n, p in PRICES.items()]
PINS = {"rollout": "gen@b", "train_policy": "train@a"}


def test_the_hosts_that_are_used_are_paid_whole() -> None:
    cluster = with_first(HOSTS)
    plan = planned_on(cluster, small_grpo(max_lag=1), pin=PINS)
    cost = step_cost(plan, cluster, 50.0)
    assert (cost.hosts, cost.hour, cost.step) == (2, 108.0, 1.5)
    assert "a Step: 2 hosts at 108.00 an hour" in " ".join(explain(plan).split())


def test_one_price_that_is_not_known_leaves_all_unknown() -> None:
    cluster = with_first([HOSTS[0], replace(HOSTS[1], price=0.0)])
    plan = planned_on(cluster, small_grpo(max_lag=1), pin=PINS)
    cost = step_cost(plan, cluster, 50.0)
    assert (cost.step, cost.unpriced) == (0.0, ("b",))
    assert "an hour" not in explain(plan)


def test_a_machine_without_a_cluster_file_has_no_price() -> None:
    plan = planned_on(with_first(HOSTS), small_grpo())
    assert step_cost(plan, None, 50.0).unpriced == ("this machine",)
