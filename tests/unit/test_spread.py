"""Workers that no pin puts on a host are spread over the hosts that are there, by one rule.

`GOLDEN=write pytest tests/unit/test_spread.py` writes the golden texts anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.errors import PlanError
from engine.plan.cluster import Cluster, Host, with_first
from engine.plan.explain import explain
from engine.plan.plan import Plan
from tests.kit.comparison import require_golden
from tests.kit.graphs import small_grpo, small_ppo
from tests.kit.plans import planned_on
from tests.kit.turns import example_count
from tests.unit import test_device_columns as device_columns

pytestmark = pytest.mark.usefixtures("tiny")
GIB = 2**30


def hosts_of(*gpus: int, cores: int = 16, kind: str = "H100", prefix: str = "") -> list[Host]:
    """Hosts a, b, ... with so many GPUs of a kind each."""
    return [
        Host(
            name=f"{prefix}{'abcdefgh'[i]}",
            cores=cores,
            memory=256 * GIB,
            gpus=(80 * GIB,) * count,
            kind=kind if count else "",
        )
        for i, count in enumerate(gpus)
    ]


def spread(hosts: Sequence[Host], max_lag: int = 1, **options: Any) -> Plan:
    """A plan of GRPO on these hosts."""
    return planned_on(with_first(hosts), small_grpo(max_lag=max_lag), **options)


def of(plan: Plan, node: str) -> list[str]:
    """The host of each Worker of a node."""
    return [plan.host_of(worker) for worker in plan.node(node).workers]


# --- golden plans ---------------------------------------------------------------------------------


def three_hosts() -> Plan:
    """PPO on three hosts without GPUs, with replicas of generation and of the reward."""
    cluster = with_first(hosts_of(0, 0, 0))
    replicas = {"rollout": 3, "score": 3}
    return planned_on(cluster, small_ppo(max_lag=1), replicas=replicas, ranks={"train_policy": 2})


PLANS = {
    "two_hosts": lambda: spread(hosts_of(4, 4), replicas={"rollout": 5}, ranks={"train_policy": 2}),
    "three_hosts": three_hosts,
}


@pytest.mark.parametrize("name", PLANS)
def test_golden(name: str) -> None:
    text = explain(replace(PLANS[name](), digest="0123456789abcdef"))
    require_golden(f"explain/{name}.txt", text)


# --- the rule -------------------------------------------------------------------------------------


def test_one_host_is_as_it_was() -> None:
    for hosts in (hosts_of(4), hosts_of(0)):
        assert spread(hosts, replicas={"rollout": 3}).hosts == {}
    assert spread(hosts_of(4, 4), inproc=True).hosts == {}


def test_generation_and_training_are_apart() -> None:
    plan = spread(hosts_of(8, 8))
    assert (of(plan, "train_policy"), of(plan, "rollout"), of(plan, "score")) == (
        *(["a"], ["b"], ["a"]),
    )


def test_replicas_go_round_and_the_host_of_training_has_its_turn_last() -> None:
    plan = spread(hosts_of(8, 8, 8), replicas={"rollout": 5})
    assert of(plan, "rollout") == ["b", "c", "a", "b", "c"]


def test_a_host_without_a_free_device_is_passed_over() -> None:
    plan = spread(hosts_of(2, 1, 4), replicas={"rollout": 4}, ranks={"train_policy": 2})
    assert of(plan, "train_policy") == ["a", "a"]
    assert of(plan, "rollout") == ["b", "c", "c", "c"]


def test_where_no_device_is_free_replicas_share() -> None:
    plan = spread(hosts_of(1, 1), replicas={"rollout": 4})
    assert Counter(of(plan, "rollout")) == {"a": 2, "b": 2}


def test_replicas_are_on_devices_of_one_kind_with_room_for_all() -> None:
    hosts = [*hosts_of(2), *hosts_of(8, kind="L40S", prefix="l")]
    plan = spread(hosts, replicas={"rollout": 4})
    assert of(plan, "train_policy") == ["a"]
    assert of(plan, "rollout") == ["la"] * 4


def test_what_computes_is_on_gpus_and_columns_on_the_first_host() -> None:
    plan = spread([*hosts_of(0), *hosts_of(2, 2, prefix="g")])
    assert (of(plan, "train_policy"), of(plan, "rollout"), of(plan, "score")) == (
        *(["ga"], ["gb"], ["a"]),
    )


def test_ranks_are_on_one_host_where_they_fit() -> None:
    assert of(spread(hosts_of(2, 4), ranks={"train_policy": 4}), "train_policy") == ["b"] * 4
    split = spread(hosts_of(2, 4), ranks={"train_policy": 5})
    assert of(split, "train_policy") == [*"aa", *"bbb"]


def test_tensor_ranks_of_a_share_are_on_one_host() -> None:
    options = {"ranks": {"train_policy": 2}, "tensor": {"train_policy": 2}}
    assert of(spread(hosts_of(3, 3), **options), "train_policy") == [*"aa", *"bb"]


def test_workers_that_take_turns_are_on_one_host_and_count_once() -> None:
    turns = (("train", "rollout-0"),)
    plan = spread(hosts_of(1, 2), replicas={"rollout": 3}, turns=turns)
    assert of(plan, "train_policy") == ["a"]
    assert of(plan, "rollout") == ["a", "b", "b"]


def test_rewards_balance() -> None:
    plan = spread(hosts_of(0, 0, 4), replicas={"score": 6})
    assert Counter(of(plan, "score")) == dict.fromkeys("abc", 2)


def test_a_reader_of_device_columns_is_on_the_host_of_their_maker() -> None:
    hosts = (Host(name="x", cores=8, memory=2**36), Host(name="y", cores=8, memory=2**36))
    plan = device_columns.planned(hosts=hosts, pin=device_columns.APART)
    assert {plan.host_of(worker) for worker in ("a", "b", "c", "train")} == {"x"}
    assert plan.host_of("gen") == "y"


def test_a_pin_goes_before_the_rule() -> None:
    plan = spread(hosts_of(2, 2), pin={"rollout": "gen@a"})
    assert (of(plan, "rollout"), of(plan, "train_policy")) == (["a"], ["b"])
    plan = spread(hosts_of(2, 2), pin={"train_policy": "t0,t1@b"}, ranks={"train_policy": 2})
    assert of(plan, "train_policy") == ["a", "b"], "a pin without a host is the first host"


def test_a_host_that_is_refused_has_no_worker() -> None:
    first, other, last = hosts_of(4, 4, 4)
    plan = spread([replace(first, refused="it lacks torch"), other, last])
    assert set(plan.hosts.values()) == {"b", "c"}


def test_threads_that_were_asked_for_count_as_cores() -> None:
    options = {"replicas": {"rollout": 3}, "threads": 8}
    cluster = with_first(hosts_of(0, 0, cores=16))
    plan = planned_on(cluster, small_grpo(max_lag=1), **options)
    assert Counter(of(plan, "rollout")) == {"a": 1, "b": 2}


def test_spare_replicas_have_hosts_of_their_own() -> None:
    plan = spread(hosts_of(4, 4), replicas={"rollout": "2..3"})
    assert of(plan, "rollout") == ["b", "a", "rollout-2"]
    assert plan.cluster.host("rollout-2") == replace(plan.cluster.host("b"), name="rollout-2")


def test_a_note_says_so_where_it_has_an_effect() -> None:
    def told(**options: Any) -> list[str]:
        plan = spread(hosts_of(4, 4), **options)
        return [note for note in plan.notes if "spread over the hosts" in note]

    assert [note.partition(":")[0] for note in told()] == [
        "3 Workers without a pin, spread over the hosts"
    ]
    assert not told(workers="one")
    everywhere = {"rollout": "gen@b", "train_policy": "train@a", "score": "data@a"}
    assert not told(pin=everywhere | {"advantage": "data", "prompts": "gen"})


def test_a_host_that_is_too_small_is_named_with_a_pin_to_a_larger_one() -> None:
    small = replace(hosts_of(0, 0)[1], memory=2**20)
    told = r"rollout needs .*, host b has 0\.0 GiB: .*, or a pin to a larger host \(rollout@a\)\."
    with pytest.raises(PlanError, match=told):
        spread([hosts_of(0)[0], small])
    both = {"rollout": "rollout@a", "train_policy": "train@a"}
    assert spread([hosts_of(0)[0], small], pin=both).hosts == {}


# --- what always holds ----------------------------------------------------------------------------


@settings(max_examples=example_count(60), deadline=None)
@given(
    gpus=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    replicas=st.integers(1, 6),
    ranks=st.sampled_from([1, 2, 4]),
    rewards=st.integers(1, 4),
)
def test_nothing_is_beyond_a_hosts_capacity_and_no_host_stays_empty(
    gpus: list[int], replicas: int, ranks: int, rewards: int
) -> None:
    numbers = {"rollout": replicas, "score": rewards}
    plan = spread(hosts_of(*gpus), replicas=numbers, ranks={"train_policy": ranks})
    train, rollout = of(plan, "train_policy"), of(plan, "rollout")
    if ranks <= max(gpus):
        assert len(set(train)) == 1
    taken = Counter((plan.host_of(w), n) for w, own in plan.devices.items() for n in own)
    if replicas + ranks <= sum(gpus):
        assert max(taken.values()) == 1
    room = {host.name: len(host.gpus) - train.count(host.name) for host in plan.cluster.hosts}
    empty = [name for name, free in room.items() if free > 0 and name not in rollout]
    assert not empty or max(Counter(rollout).values()) == 1
    columns = Counter(of(plan, "score"))
    assert max(columns.values()) - min(columns[h.name] for h in plan.cluster.hosts) <= 1


def test_a_cluster_is_not_needed() -> None:
    alone = Cluster(cores=8, memory=64 * GIB)
    assert planned_on(alone, small_grpo(max_lag=1), replicas={"rollout": 2}).hosts == {}
