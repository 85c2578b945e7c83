"""Several hosts in one process: cluster files, labels, pins, plans, options."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dataflow.errors import PlanError
from engine.api import run
from engine.plan import options as run_options
from engine.plan.cluster import Cluster, Host, detect, with_first
from engine.plan.cluster_file import read_cluster
from engine.plan.cost.devices import Link, device, kind_of
from engine.plan.cost.transfers import NETWORK_DELAY
from engine.plan.explain import explain
from engine.plan.options import RunOptions
from engine.plan.placement import resolve_labels
from engine.plan.plan import Plan
from engine.protocol.reports import SpanOf
from engine.run.hosts.hosts import of_this_clock
from tests.kit.graphs import small_grpo
from tests.kit.plans import planned_on

pytestmark = pytest.mark.usefixtures("tiny")
HOSTS = (
    Host(name="a", cores=4, memory=24 * 2**30),
    Host(name="b", cores=8, memory=3 * 2**30),
)
CLUSTER = with_first(HOSTS)
LIVE = with_first([replace(host, node=host.name * 8) for host in HOSTS])
"""As of a Ray cluster."""


def test_spans_of_another_host_are_shown_in_this_ones_time() -> None:
    said = {"track": "gen/rollout", "name": "rollout", "task": 1, "block": 3, "rows": 8}
    spans = [SpanOf(start=10.0, end=12.5, **said)]
    assert of_this_clock(spans, 90.0) == [SpanOf(start=100.0, end=102.5, **said)]
    assert of_this_clock(spans, float("inf")) == spans


# --- cluster files --------------------------------------------------------------------------------

HOST_A = "[hosts.a]\ncores = 4\nmemory_gib = 8\n"


def test_a_cluster_file(tmp_path: Path) -> None:
    path = tmp_path / "pair.toml"
    gpus = 'gpus = 2\ngpu_memory_gib = 80\nlabels = { gpu = "H100", zone = "x" }\n'
    path.write_text(f"{HOST_A}[hosts.b]\ncores = 32\nmemory_gib = 2.5\n{gpus}")
    cluster = read_cluster(path)
    memory, gpus = 5 * 2**29, (80 * 2**30,) * 2
    assert cluster.hosts == (
        Host(name="a", cores=4, memory=8 * 2**30),
        Host(name="b", cores=32, memory=memory, gpus=gpus, labels={"gpu": "H100", "zone": "x"}),
    )
    assert (cluster.cores, cluster.memory, cluster.gpus) == (4, 8 * 2**30, ())
    assert not cluster.live
    assert cluster.on("b") == Cluster(cores=32, memory=memory, gpus=gpus)


FLEET = """
[hosts.cpu]
cores = 8
memory_gib = 64
region = "west"

[hosts.h]
count = 2
cores = 192
memory_gib = 2048
devices = "8xH100"
region = "east"
price = 98.5

[[links]]
between = ["east", "west"]
gigabits = 10
delay_ms = 30

[[links]]
between = ["h", "h"]
gigabits = 3200
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Cluster:
    (tmp_path / "fleet.toml").write_text(FLEET)
    return read_cluster(tmp_path / "fleet.toml")


def test_a_cluster_file_with_kinds_of_devices(fleet: Cluster) -> None:
    assert [host.name for host in fleet.hosts] == ["cpu", "h-0", "h-1"]
    assert fleet.host("h-1") == Host(
        name="h-1",
        cores=192,
        memory=2048 * 2**30,
        gpus=(81559 * 2**20,) * 8,
        labels={"gpu": "H100"},
        kind="H100",
        region="east",
        price=98.5,
        table="h",
    )
    assert fleet.on("h-1").describe().endswith("8 H100 GPU (80 GiB each)")


def test_ways_between_hosts(fleet: Cluster) -> None:
    assert fleet.way("cpu", "h-1") == fleet.way("h-0", "cpu") == Link(rate=1.25e9, delay=0.03)
    assert fleet.way("h-0", "h-1") == Link(rate=400e9, delay=NETWORK_DELAY)
    unknown = with_first(fleet.hosts)
    assert unknown.way("h-0", "cpu") == Link(rate=device("cpu").network, delay=NETWORK_DELAY)
    assert unknown.way("h-0", "h-1").rate == 8 * device("H100").network


@pytest.mark.parametrize("name,kind", [
    ("NVIDIA H100 80GB HBM3", "H100"),
    ("NVIDIA A100-SXM4-80GB", "A100"),
    ("NVIDIA L40S", "L40S"),
    ("NVIDIA L40", ""),
    ("NVIDIA GeForce RTX 4090", ""),
])  # fmt: skip
def test_what_a_gpu_calls_itself(name: str, kind: str) -> None:
    assert kind_of(name) == kind


TWO_HOSTS_A = HOST_A + "count = 2\n"


@pytest.mark.parametrize("text,told", [
    ("", "expected hosts, found none"),
    (HOST_A + 'devices = "8xB7"', r"toml:4: host a: devices: .*, found 'B7'\. Fix: .*profile"),
    (HOST_A + 'devices = "H100"', r"toml:4: host a: devices: expected a number and a kind of GPU"),
    (HOST_A + 'devices = "1xH100"\ngpus = 1', "expected devices or gpus, found both"),
    (HOST_A + "count = 0", r"toml:4: host a: count: expected a number of hosts, .* found 0"),
    (HOST_A + "price = -1", "price: expected a price an hour, above 0, found -1"),
    (HOST_A + "[links]\na = 1", "links: expected tables"),
    (HOST_A + '[[links]]\nbetween = ["a", "c"]', "between: expected hosts or regions .* found 'c'"),
    (HOST_A + '[[links]]\nbetween = ["a", "a"]', r"links: gigabits: .*|gigabits: expected Gb"),
    (HOST_A + '[[links]]\nbetwen = ["a", "a"]', "unknown key 'betwen'. Fix: between"),
    ("hosts = 3", "expected tables, found 3"),
    ("links = [1, 2]\n" + HOST_A, r"toml:1: links: expected tables, found 1\. Fix: \[\[links"),
    (TWO_HOSTS_A + HOST_A.replace("s.a]", "s.a-0]"), r"toml:6: host a-0: .* found a-0 in hosts.a"),
    (HOST_A + 'region = "a"', r"toml:4: host a: region: expected another name than .* found 'a'"),
    (HOST_A + "core = 2", r"cluster\.toml:4: unknown key 'core'\. Fix: cores\."),
    ("[hosts.a]\ncores = 4", r"cluster\.toml: host a: memory_gib: expected GiB .*, found None"),
    (HOST_A + "gpus = 2", r"host a: gpu_memory_gib: expected GiB of memory of each GPU.*None\. "),
    (HOST_A + "labels = 3", r"cluster\.toml:4: host a: labels: expected texts by name, found 3"),
    ("[hosts", r"cluster\.toml: expected TOML: "),
])  # fmt: skip
def test_a_cluster_file_that_cannot_be(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "cluster.toml").write_text(text)
    with pytest.raises(PlanError, match=told):
        read_cluster(tmp_path / "cluster.toml")


# --- pins and labels ------------------------------------------------------------------------------


def test_pins_with_hosts() -> None:
    pin = {"rollout": "g0@a, g1@gpu:H200", "score": "g1", "train_policy": "train"}
    placing = run_options.make_placing(RunOptions(pin=pin))
    assert placing.pin == {"rollout": ("g0", "g1"), "score": ("g1",), "train_policy": ("train",)}
    assert placing.hosts == {"g0": "a", "g1": "gpu:H200"}


def labelled(name: str, refused: str = "", **labels: str) -> Host:
    return Host(name=name, cores=4, memory=2**34, labels=labels, refused=refused, node=name * 8)


THREE = with_first([
    labelled("a"),
    labelled("b", gpu="H200", zone="x"),
    labelled("c", gpu="H200", zone="y"),
    labelled("d", "it lacks torch", gpu="H200", zone="x"),
])  # fmt: skip


def named(**pin: str) -> tuple[dict[str, str], Cluster]:
    """The host of each Worker, by these pins."""
    placing, cluster = resolve_labels(run_options.make_placing(RunOptions(pin=pin)), THREE)
    return dict(placing.hosts), cluster


def test_a_label_in_a_pin_is_a_host_that_has_it() -> None:
    hosts, cluster = named(rollout="gen@zone:y", score="ops@a")
    assert hosts == {"gen": "c", "ops": "a"}
    assert cluster.host("c").label == ("zone", "y"), "so that another node with it may follow"
    assert [cluster.host(name).label for name in "abd"] == [None] * 3


def test_a_label_of_several_hosts_spreads_the_workers() -> None:
    hosts, _ = named(rollout="g0@gpu:H200, g1@gpu:H200, g2@gpu:H200, g3@gpu:H200")
    assert hosts == {"g0": "b", "g1": "c", "g2": "b", "g3": "c"}, "d is refused"
    hosts, _ = named(rollout="g0@b, g1@gpu:H200")
    assert hosts == {"g0": "b", "g1": "c"}


def test_a_host_that_is_refused_is_not_the_first() -> None:
    first = with_first([labelled("d", "it lacks torch"), labelled("a"), labelled("b")])
    assert set(planned(first, gen="b").hosts.values()) == {"a", "b"}


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cluster", [None, "ray", "ray:local", "pair.toml"])
def test_a_cluster_file_is_found_from_any_folder(cluster: str | None) -> None:
    text = run_options.encode_options(RunOptions(cluster=cluster))
    options = run_options.decode_options(text, {})[0]
    assert options.cluster == (os.path.abspath(cluster) if cluster == "pair.toml" else cluster)
    assert not run_options.is_on_ray(RunOptions(cluster="ray/pair.toml"))


def test_an_impossible_wait_is_refused() -> None:
    with pytest.raises(PlanError, match=r"options: --wait: expected 0 or more, found "):
        run_options.make_placing(RunOptions(wait=-1.0))


def test_a_run_with_a_cluster_file_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    options = RunOptions(cluster="pair.toml", runs=tmp_path / "runs")
    told = r"--cluster: a run takes ray or ray:local, found 'pair\.toml'.*Fix: --cluster ray"
    with pytest.raises(PlanError, match=told):
        run(small_grpo(beta=0.0), options)
    assert not (tmp_path / "runs").exists()


# --- plans ----------------------------------------------------------------------------------------


def planned(cluster: Cluster = CLUSTER, gen: str = "b", max_lag: int = 0, **options: Any) -> Plan:
    """Generation is pinned to the Worker `gen` on this host."""
    options = {"pin": {"rollout": f"gen@{gen}"}} | options
    return planned_on(cluster, small_grpo(beta=0.0, max_lag=max_lag), **options)


def test_a_plan_on_two_hosts() -> None:
    plan = planned(pin={"rollout": "gen@b", "train_policy": "train"}, max_lag=1)
    assert plan.hosts == {w: "b" if w == "gen" else "a" for w in plan.workers}
    routes = {(e.producer, e.consumer): e.route for e in plan.edges}
    assert routes["rollout", "score"] == "zmq"
    assert routes["score", "advantage"] in ("inproc", "shm")
    threads = [plan.node(name).layout.threads for name in ("rollout", "train_policy")]
    assert threads == [8, 4], "each has its host's cores for itself"
    text = explain(plan)
    for part in ("grpo on ", "b: 8 cores, 3.0 GiB", "8 threads on b: ", "pulled from train by zmq"):
        assert part in text, part


ALL_ON_A = {"pin": {"rollout": "gen@a", "train_policy": "main@a"}}


def test_all_on_the_first_host_is_no_plan_on_hosts() -> None:
    assert planned(**ALL_ON_A).hosts == {}
    for cluster in (CLUSTER, LIVE):
        assert planned(cluster, inproc=True).hosts == {}


def test_on_a_ray_cluster_every_worker_has_a_host() -> None:
    plan = planned(LIVE, **ALL_ON_A)
    assert plan.hosts == dict.fromkeys(plan.workers, "a")
    assert planned(LIVE, gen="a").hosts == {"main": "b", "gen": "a"}, "b is free"


SMALL = replace(CLUSTER, hosts=(HOSTS[0], replace(HOSTS[1], cores=1, memory=2**20)))
RANKS = {"pin": {"train_policy": "t0,t1@b"}, "ranks": {"train_policy": 2}}
GPU = replace(CLUSTER, hosts=(HOSTS[0], replace(HOSTS[1], gpus=(80 * 2**30,))))
TENSOR = {"pin": {"train_policy": "t0,t1@b"}, "tensor": {"train_policy": 2}}
TURNS = {"pin": {"rollout": "gen@b", "train_policy": "train"}, "turns": (("gen", "train"),)}
SHARES = {"ranks": {"train_policy": 2}, "tensor": {"train_policy": 2}}


@pytest.mark.parametrize("shard", [False, True])
def test_ranks_with_rows_of_their_own_may_be_on_several_hosts(shard: bool) -> None:
    plan = planned(shard=shard, **RANKS)
    assert [plan.host_of(worker) for worker in ("t0", "t1")] == ["a", "b"]
    train = plan.node("train_policy")
    assert (train.layout.data, train.layout.shard, train.layout.threads) == (2, shard, 4)
    routes = {(e.producer, e.consumer): e.route for e in plan.edges}
    assert routes["rollout", "train_policy"] == "zmq"
    assert "4 threads on b: train_policy (rank 1 of 2)" in explain(plan)
    turned = replace(CLUSTER, hosts=(replace(HOSTS[0], cores=8), replace(HOSTS[1], cores=4)))
    plan = planned(turned, shard=shard, **RANKS)
    assert plan.node("train_policy").layout.threads == 4
    assert not [note for note in plan.notes if "a part of" in note], "nobody computes meanwhile"


def test_each_share_of_tensor_ranks_is_on_one_host() -> None:
    plan = planned(pin={"train_policy": "t0,t1,t2@b,t3@b"}, **SHARES)
    assert plan.node("train_policy").shares == (("t0", "t1"), ("t2", "t3"))


@pytest.mark.parametrize(("cluster", "asked", "told"), [
    (THREE, {"gen": "d"}, r"pin: 'gen' on host d: it lacks torch"),
    (
        CLUSTER,
        SHARES | {"pin": {"train_policy": "t0,t1@b,t2,t3@b"}},
        r"(?s)t0,t1 are on a, b, and have to be on one host.*t2,t3 are on a, b, and have to be",
    ),
    (CLUSTER, TENSOR, r"t0,t1 are on a, b, and have to be on one host\. Fix: t0@a t1@a"),
    (
        CLUSTER,
        TURNS,
        r"turns: gen,train are on b, a, and have to be on one host\. Fix: gen@b train@b",
    ),
    (GPU, RANKS, r"train_policy: t1 have a GPU and t0 have none, and ranks .* Fix: t0@b\."),
    (SMALL, {}, r"gen needs .*, host b has 0\.0 GiB"),
])  # fmt: skip
def test_hosts_that_cannot_be(cluster: Cluster, asked: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        planned(cluster, **asked)


def test_what_runs_in_this_process_is_on_no_other_host() -> None:
    pin = {"rollout": "g0@a, g1@gpu:H200", "score": "g1"}
    here = run_options.on_this_host(RunOptions(cluster="ray", pin=pin, threads=3))
    assert here == RunOptions(pin={"rollout": "g0, g1", "score": "g1"}, threads=3)


@pytest.mark.parametrize("names,kind", [
    (["NVIDIA H100 80GB HBM3"] * 2, "H100"),
    (["NVIDIA GeForce RTX 4090"], "NVIDIA GeForce RTX 4090"),
    (["NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090"], ""),
])  # fmt: skip
def test_gpus_that_are_here_have_a_kind_that_a_profile_can_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], kind: str
) -> None:
    tool = tmp_path / "nvidia-smi"
    lines = "\n".join(f"24564, {name}" for name in names)
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{lines}\nEND\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = detect()
    assert (found.gpus, found.kind) == ((24564 * 2**20,) * len(names), kind)
