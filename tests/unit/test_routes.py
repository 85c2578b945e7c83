"""The route of weights and each Worker's GPU: the plan's choice, its refusals, explain."""

from __future__ import annotations

from typing import Any

import pytest

from dataflow.errors import PlanError
from dataflow.graph import Graph
from dataflow.model import Model
from engine.plan.checks.memory import find_memory_rooms
from engine.plan.cluster import Cluster, Host
from engine.plan.drawing import planned_notes
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


def needs(plan: Plan) -> list[int]:
    """Bytes that Workers need of each GPU."""
    assert plan.cluster is not None
    return [room.need for room in find_memory_rooms(plan, plan.cluster)]


def routes(plan: Plan) -> dict[str, str]:
    return {m.name: m.route for m in plan.models}


PULL, SENT = {"policy": "pull", "target": "pull"}, {"policy": "collective", "target": "collective"}
IPC = {"policy": "ipc", "target": "ipc"}
CHOSEN = {
    "one process": ({"gpus": 2, "workers": "one"}, PULL, {"main": 0}),
    "without GPUs": ({"pin": APART}, PULL, {}),
    "on one GPU": ({"gpus": 1, "pin": APART}, IPC, {"gen": 0, "main": 0, "train": 0}),
    "a GPU each": ({"gpus": 3, "pin": APART}, SENT, {"gen": 0, "main": 1, "train": 2}),
    "a reader on the writer's GPU": (
        {"gpus": 2, "pin": APART}, PULL, {"gen": 0, "main": 1, "train": 0},
    ),
    "replicas": (
        {"gpus": 4, "replicas": {"rollout": 2}}, SENT, {"rollout-0": 0, "rollout-1": 1, "main": 2},
    ),
    "by turns": (
        {"gpus": 4, "pin": APART | {"ref": "train"}, "turns": (("gen", "train"),)},
        IPC, {"gen": 0, "train": 0},
    ),
    "pull was asked for": (
        {"gpus": 3, "pin": APART, "weights": "pull"}, PULL, {"gen": 0, "main": 1, "train": 2},
    ),
    "pull was asked for on one GPU": (
        {"gpus": 1, "pin": APART, "weights": "pull"}, PULL, {"gen": 0, "main": 0, "train": 0},
    ),
    "IPC was asked for": ({"pin": APART, "weights": "ipc"}, IPC, {}),
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
    on_one = planned(gpus=1, pin=APART)
    assert "copy in gen, read by IPC from the memory of train" in explain(on_one)
    assert "copies" in on_one.node("train_policy").estimate.bytes
    assert "read by IPC" in planned_notes(on_one)["policy->rollout"][0]


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


def test_memory_of_another_device_or_host_is_never_mapped() -> None:
    expected = "from train on GPU 1 and gen on GPU 0, and memory is mapped on the one device"
    with pytest.raises(PlanError, match=f"'policy' {expected}.* Fix: weights=p"):
        planned(
            gpus=2, pin={"rollout": "gen", "train_policy": "train", "ref": "gen"}, weights="ipc"
        )
    hosts = tuple(Host(name=name, cores=8, memory=2**36) for name in "ab")
    far = {"rollout": "gen@b", "train_policy": "train"}
    expected = "from train on a and gen on b, and no process maps memory of another host"
    with pytest.raises(PlanError, match=f"{expected}. Fix: weights=p"):
        planned(hosts=hosts, pin=far, weights="ipc")


def test_weights_on_one_device_come_sooner_than_through_the_host() -> None:
    cluster = Cluster(cores=8, memory=2**36, gpus=(GPU,), kind="H100")
    seconds: dict[str, float] = {}
    for route in ("ipc", "pull"):
        (model, _) = planned_on(cluster, graph(), pin=APART, weights=route).models
        assert model.seconds is not None
        seconds[route] = model.seconds
    assert seconds["ipc"] < seconds["pull"]


def test_copies_that_do_not_fit_on_the_gpu_are_not_made() -> None:
    def sized(size: int, **options: Any) -> Plan:
        cluster = Cluster(cores=8, memory=2**36, gpus=(size,))
        return planned_on(cluster, graph(), pin=APART, **options)

    (most,) = needs(sized(GPU))
    assert routes(sized(most)) == IPC
    smaller = sized(most - 1)
    assert routes(smaller) == PULL
    assert "copies" not in smaller.node("train_policy").estimate.bytes
    (note,) = [each for each in smaller.notes if "weights are pulled" in each]
    assert note.startswith("policy: weights are pulled, since with copies ")
    spares_nothing = {"train_policy": "none"}
    with pytest.raises(PlanError, match="together need"):
        sized(most - 1, weights="ipc", recompute=spares_nothing, offload=spares_nothing)


def test_copies_stay_on_the_gpu_while_their_worker_sleeps() -> None:
    turns = {"pin": APART | {"ref": "train"}, "turns": (("gen", "train"),)}
    (by_ipc,) = needs(planned(gpus=1, **turns))
    (by_pull,) = needs(planned(gpus=1, weights="pull", **turns))
    copies = planned(gpus=1, **turns).node("train_policy").estimate.bytes["copies"]
    assert by_ipc - by_pull == copies


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
