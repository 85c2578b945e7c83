"""The route of weights and each Worker's GPU: the plan's choice, its refusals, explain."""

from __future__ import annotations

from typing import Any

import pytest

from dataflow.errors import PlanError
from dataflow.graph import Graph
from dataflow.model import Model
from engine.plan.cluster import Cluster, Host
from engine.plan.explain import explain
from engine.plan.plan import Plan
from engine.run.launch.child import environment
from operators.forward import logprobs
from operators.losses import clipped_policy_loss
from tests.kit.graphs import compared, graph_of, policy, sampled
from tests.kit.plans import planned_on

GPU = 2**34
APART = {"rollout": "gen", "train_policy": "train"}


pytestmark = pytest.mark.usefixtures("tiny")


def graph() -> Graph:
    """A policy that is generated with, and a slow copy of it that a node of its own reads."""
    rollout = sampled(n=4, batch=8, max_tokens=16)
    reference = logprobs(Model("target", "tiny", follows=policy, every=2), rollout, name="ref")
    return graph_of(rollout, clipped_policy_loss(compared(rollout), reference=reference, beta=0.1))


def planned(gpus: int = 0, hosts: tuple[Host, ...] = (), **options: Any) -> Plan:
    cluster = Cluster(cores=8, memory=2**36, gpus=(GPU,) * gpus, hosts=hosts)
    return planned_on(cluster, graph(), **options)


def routes(plan: Plan) -> dict[str, str]:
    return {m.name: m.route for m in plan.models}


PULL, SENT = {"policy": "pull", "target": "pull"}, {"policy": "collective", "target": "collective"}
CHOSEN = {
    "one process": ({"gpus": 2, "workers": "one"}, PULL, {"main": 0}),
    "without GPUs": ({"pin": APART}, PULL, {}),
    "on one GPU": ({"gpus": 1, "pin": APART}, PULL, {"gen": 0, "main": 0, "train": 0}),
    "a GPU each": ({"gpus": 3, "pin": APART}, SENT, {"gen": 0, "main": 1, "train": 2}),
    "a reader on the writer's GPU": (
        {"gpus": 2, "pin": APART}, PULL, {"gen": 0, "main": 1, "train": 0},
    ),
    "replicas": (
        {"gpus": 4, "replicas": {"rollout": 2}}, SENT, {"rollout-0": 0, "rollout-1": 1, "main": 2},
    ),
    "by turns": (
        {"gpus": 4, "pin": APART | {"ref": "train"}, "turns": (("gen", "train"),)},
        PULL, {"gen": 0, "train": 0},
    ),
    "pull was asked for": (
        {"gpus": 3, "pin": APART, "weights": "pull"}, PULL, {"gen": 0, "main": 1, "train": 2},
    ),
    "collectives were asked for": ({"pin": APART, "weights": "collective"}, SENT, {}),
    "asked for where nothing moves": ({"workers": "one", "weights": "collective"}, PULL, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOSEN)
def test_the_plan_chooses(name: str) -> None:
    asked, expected, devices = CHOSEN[name]
    plan = planned(**asked)
    assert routes(plan) == expected
    assert plan.devices == {worker: (number,) for worker, number in devices.items()}
    assert bool(plan.worlds) == (expected == SENT)


def test_worlds_are_pairs_of_workers() -> None:
    plan = planned(replicas={"rollout": 2}, pin={"ref": "slow"}, weights="collective")
    assert plan.worlds == {("main", "rollout-0"), ("main", "rollout-1"), ("main", "slow")}


def test_explain_says_the_route_and_where_copies_are() -> None:
    shown = explain(planned(pin=APART, weights="collective"))
    assert "train_policy -> rollout: copy in gen, sent by collectives from train; lag 0" in shown
    assert "copies" in shown
    assert "snapshot" not in shown
    assert "copy in gen, pulled from train" in explain(planned(pin=APART))
    assert "on GPU 2" in explain(planned(gpus=3, pin=APART))


def test_what_collectives_cannot_do_is_refused() -> None:
    turns = r"routes: .*'policy' between train and gen, which take turns.* Fix: weights=p"
    with pytest.raises(PlanError, match=turns):
        planned(pin=APART, turns=(("gen", "train"),), weights="collective")
    hosts = tuple(Host(name=name, cores=8, memory=2**36) for name in "ab")
    far = {"rollout": "gen@b", "train_policy": "train"}
    assert routes(planned(hosts=hosts, pin=far)) == PULL
    apart = r"from train on a and gen on b, and collectives stay on one host. Fix: weight"
    with pytest.raises(PlanError, match=apart):
        planned(hosts=hosts, pin=far, weights="collective")


def test_memory_is_that_of_each_gpu() -> None:
    most = max(n.estimate.total for n in planned(gpus=1, workers="one").nodes)
    cluster = Cluster(cores=8, memory=2**36, gpus=(GPU, most // 2, GPU))
    with pytest.raises(PlanError, match="GPU 1 has"):
        planned_on(cluster, graph(), pin={"train_policy": "train"})


@pytest.mark.parametrize(
    ("seen", "device", "expected"),
    [(None, 2, "2"), ("4,6", 1, "6"), ("GPU-a,GPU-b", 0, "GPU-a"), ("3", 1, "3"), ("", 0, "")],
)
def test_a_worker_sees_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch, seen: str | None, device: int, expected: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    assert environment(1).get("CUDA_VISIBLE_DEVICES") == seen
    assert environment(1, (device,))["CUDA_VISIBLE_DEVICES"] == expected


def test_what_the_user_set_stays_in_a_workers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLIBC_TUNABLES", "GOMP_SPINCOUNT", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    assert "non_temporal_threshold" in environment(3)["GLIBC_TUNABLES"]
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=0")
    monkeypatch.setenv("OMP_NUM_THREADS", "9")
    wanted = {
        "GLIBC_TUNABLES": "glibc.malloc.check=0", "OMP_NUM_THREADS": "3", "GOMP_SPINCOUNT": "10000",
    }  # fmt: skip
    assert environment(3).items() >= wanted.items()
