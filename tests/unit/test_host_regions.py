"""Which hosts are in one region, and what a version's way into a region is priced at."""

from __future__ import annotations

import pytest

from engine.plan.cluster import Cluster, ClusterLink, Host, with_first
from engine.plan.cost.devices import CPU, device
from engine.plan.host_regions import list_regions
from engine.plan.plan import Plan
from engine.run.hosts.host_requirements import Looked
from engine.run.hosts.node_hosts import host_of
from tests.kit.graphs import small_grpo
from tests.kit.plans import planned_on

pytestmark = pytest.mark.usefixtures("tiny")

WEST = ("b", "c", "d")
RATE = device(CPU).network


def make_host(name: str, region: str = "") -> Host:
    return Host(name=name, cores=4, memory=24 * 2**30, region=region)


def make_link(one: str, other: str, share: float, delay: float = 0.0) -> ClusterLink:
    """share: of the rate of network cards."""
    return ClusterLink(between=(one, other), rate=share * RATE, delay=delay)


def test_a_named_region_counts_and_others_are_parted_by_slow_links() -> None:
    hosts = [make_host("a"), make_host("b"), make_host("c", "west"), make_host("d")]
    links = (make_link("a", "west", 0.1), make_link("b", "west", 0.9), make_link("a", "d", 0.4))
    cluster = with_first([*hosts, make_host("e", "west")], links=links)
    assert list_regions("abcde", cluster) == {
        "a": "beside a",
        "b": "west",
        "c": "west",
        "d": "west",
        "e": "west",
    }
    assert list_regions("ab", with_first(hosts)) == {"a": "beside a", "b": "beside a"}


def test_a_node_is_in_the_region_of_its_label() -> None:
    node = {"NodeID": "1", "Resources": {"CPU": 1}}
    node["Labels"] = {"ray.io/availability-region": "west"}
    assert host_of(node, "b", Looked(memory=1, gpus=()), {}).region == "west"


def plan_across(*links: ClusterLink, region: str = "west") -> Plan:
    """Training on a, four replicas of the rollout on b, c, d and beside it on d."""
    hosts = [make_host("a", "east"), *(make_host(name, region) for name in WEST)]
    cluster: Cluster = with_first(hosts, links=links)
    pin = {"rollout": "g0@b,g1@c,g2@d,g3@d", "train_policy": "train@a"}
    return planned_on(cluster, small_grpo(beta=0.0, max_lag=1), pin=pin)


def weight_seconds(plan: Plan) -> float:
    (model,) = plan.models
    assert model.seconds is not None
    return model.seconds


def test_workers_are_in_the_regions_of_their_hosts() -> None:
    regions = plan_across().regions
    assert {regions[worker] for worker in ("g0", "g1", "g2", "g3")} == {"west"}
    assert regions["train"] == "east"


def test_a_version_crosses_once_and_goes_by_a_tree_within() -> None:
    """On a link of a hundredth of the network the way is the crossing, and that counts once."""
    slow = weight_seconds(plan_across(make_link("east", "west", 0.01)))
    slower = weight_seconds(plan_across(make_link("east", "west", 0.005)))
    parted = [make_link("a", name, 0.01) for name in WEST]
    one_reader = plan_across(*parted)
    crossing = slower - slow
    assert crossing == pytest.approx(452_480 * 4 / (0.01 * RATE))
    # On b and d the version is from the first, which has it after the crossing alone.
    assert weight_seconds(one_reader) == pytest.approx(slow)
    assert slow < 1.5 * crossing
