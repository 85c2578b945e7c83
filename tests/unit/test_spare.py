"""Plans in which replicas come and go: which Workers are spare, what is refused, what is said."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from dataflow.errors import PlanError
from engine.plan.cluster import Cluster, Host
from engine.plan.explain import explain
from engine.plan.options import RunOptions, decode_options, encode_options, make_placing
from engine.plan.plan import Plan
from engine.plan.replica_ranges import elastic_nodes, least_replicas, movable_workers
from tests.kit.graphs import small_grpo
from tests.kit.plans import placed, planned_on

pytestmark = pytest.mark.usefixtures("tiny")
ROLLOUT = ("rollout-0", "rollout-1", "rollout-2")


def ranged(most: int = 3, few: int = 1, **asked: Any) -> Plan:
    return placed(small_grpo(), replicas={"rollout": most}, least={"rollout": few}, **asked)


def test_a_range_has_a_place_for_each_and_begins_with_the_least() -> None:
    plan = ranged(few=2)
    rollout = plan.node("rollout")
    assert rollout.workers == ROLLOUT
    assert plan.spare == ROLLOUT[2:]
    assert [n.name for n in elastic_nodes(plan)] == ["rollout"]
    assert least_replicas(plan, rollout) == 2
    assert movable_workers(plan) == set(ROLLOUT)
    fixed = placed(small_grpo(), replicas={"rollout": 3})
    assert plan.nodes == fixed.nodes, "threads and chunks as of three"
    assert fixed.spare == ()


def test_explain_says_it_in_a_line_and_plan_json_names_them() -> None:
    plan = ranged()
    assert json.loads(plan.to_json())["spare"] == list(ROLLOUT[1:])
    for planned, told in (
        (plan, "1 to 3 replicas; rollout-1 to rollout-2 are spare Workers, which join and leave"),
        (ranged(most=2), "rollout-1 is a spare Worker, which joins and leaves"),
    ):
        assert told in " ".join(explain(planned).split())


def test_nodes_together_come_and_go_together() -> None:
    plan = ranged(together=(("rollout", "score"),))
    assert plan.node("score").workers == ROLLOUT
    assert [n.name for n in elastic_nodes(plan)] == ["rollout", "score"]


def test_a_worker_that_others_need_is_none_that_leaves() -> None:
    plan = ranged(together=(("rollout", "prompts"),))
    assert plan.node("prompts").workers == ROLLOUT[:1]
    assert movable_workers(plan) == set(ROLLOUT[1:])


def test_in_one_process_only_the_chunks_are_left() -> None:
    plan = ranged(inproc=True)
    assert plan.spare == ()
    assert plan.node("rollout").chunks == 3


def test_equal_ends_are_a_number() -> None:
    assert ranged(most=3, few=3).spare == ()


REFUSED = [
    ("replicas: rollout=0..3: expected 1 replica or more at the beginning. Fix: rollout=1..3.",
        {"few": 0}),
    ("replicas: rollout=5..3: expected the least first. Fix: rollout=3..5.", {"few": 5}),
    ("replicas: score is on rollout-1, which joins and leaves with rollout. Fix: together:"
        " rollout,score.", {"pin": {"score": ("rollout-1",)}}),
    ("turns: rollout-1 joins and leaves, and cannot take turns with devices. Fix: a number of"
        " replicas, no range.", {"turns": (("rollout-1", "main"),)}),
]  # fmt: skip


@pytest.mark.parametrize(("told", "asked"), REFUSED, ids=[told[:40] for told, _ in REFUSED])
def test_what_cannot_come_and_go(told: str, asked: dict[str, Any]) -> None:
    with pytest.raises(PlanError) as caught:
        ranged(**asked)
    assert f"place: {told}" in str(caught.value)


@pytest.mark.parametrize(("most", "few", "told"), [
    (3, 2, "rollout=1..3 and score=2..3 share their Workers. Fix: score=1..3"),
    (2, 1, "score=1..2 share their Workers. Fix: score=1..3"),
])  # fmt: skip
def test_two_ranges_of_nodes_together_are_one(most: int, few: int, told: str) -> None:
    together, least = (("rollout", "score"),), {"rollout": 1, "score": few}
    with pytest.raises(PlanError, match=told):
        placed(small_grpo(), replicas={"rollout": 3, "score": most}, least=least, together=together)


def test_on_several_hosts_a_spare_worker_has_a_host_of_its_own() -> None:
    """As the first replica's: wherever there is room for it when it joins; unless it is pinned."""
    hosts = tuple(Host(name=n, cores=4, memory=2**34, node=n * 8) for n in ("a", "b"))
    cluster = Cluster(cores=4, memory=2**34, hosts=hosts)
    pin = {"rollout": "r0@b,r1,r2@a"}
    planned = planned_on(cluster, small_grpo(), replicas={"rollout": "1..3"}, pin=pin)
    assert planned.spare == ("r1", "r2")
    assert [planned.hosts[worker] for worker in ("r0", "r1", "r2")] == ["b", "r1", "a"]
    host = planned.cluster.host("r1")
    assert (host, host.node) == (replace(hosts[1], name="r1"), "")


@pytest.mark.parametrize(("text", "most", "few"), [
    ("2..8", {"rollout": 8}, {"rollout": 2}), (3, {"rollout": 3}, {}), ("3", {"rollout": 3}, {}),
])  # fmt: skip
def test_a_range_is_a_text_in_python_too(text: Any, most: Any, few: Any) -> None:
    options = RunOptions(replicas={"rollout": text})
    assert (make_placing(options).replicas, make_placing(options).least) == (most, few)
    assert decode_options(encode_options(options), {})[0].replicas == {"rollout": text}


@pytest.mark.parametrize("text", ["2-8", "..8", "2..", "many", "-1"])
def test_what_is_no_range_is_refused(text: str) -> None:
    told = rf"replicas: rollout: expected a number or a range such as 2..8, found '{text}'"
    with pytest.raises(PlanError, match=told):
        make_placing(RunOptions(replicas={"rollout": text}))
