"""Several hosts in one process: cluster and key files, pins, plans, lossy connections."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.errors import PlanError, RunError
from engine import options as run_options
from engine.channels.zmq.curve_keys import CurveKeyPair
from engine.cli import main
from engine.launch.hosts import of_this_clock
from engine.launch.keyfile import make_keys, read_keys
from engine.launch.line import Line, aside, opened
from engine.observe.reports import SpanOf
from engine.options import RunOptions
from engine.plan.cluster import PORT, Cluster, Host, read_cluster
from engine.plan.explain import explain
from engine.plan.plan import Plan
from tests.kit.graphs import small_grpo
from tests.kit.plans import planned_on

HOSTS = (
    Host(name="a", address="10.0.0.1", cores=4, memory=24 * 2**30),
    Host(name="b", address="10.0.0.2", cores=8, memory=2 * 2**30),
)
CLUSTER = Cluster(cores=4, memory=24 * 2**30, hosts=HOSTS)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), messages=st.integers(1, 25), lost=st.floats(0.0, 0.7))
def test_whatever_a_network_does_each_message_comes_once_and_in_order(
    seed: int, messages: int, lost: float
) -> None:
    dice = random.Random(seed)
    ends = (Line(b"run"), Line(b"run"))
    said, came, way = (([], []) for _ in range(3))
    now = 0.0
    for turn in range(4000):
        now += 0.5
        calm = turn > 200
        for me in (0, 1):
            frames = [*ends[me].again(now), ends[me].aside(b"beat")]
            if len(said[me]) < messages and dice.random() < 0.5:
                said[me].append(b"%d" % len(said[me]))
                frames.append(ends[me].say(said[me][-1], now))
            for frame in frames:
                copies = 1 if calm else dice.choices((0, 1, 2), (lost, 1.0, 0.3))[0]
                way[me].extend([frame] * copies)
            dice.shuffle(way[me])
            for _ in range(len(way[me]) if calm else dice.randint(0, len(way[me]))):
                bodies, beat = ends[1 - me].take(opened(way[me].pop()), now)
                assert beat in (b"", b"beat")
                came[1 - me].extend(bodies)
        if all(len(s) == messages for s in said) and all(end.settled for end in ends):
            break
    assert came == (said[1], said[0])
    assert all(end.settled for end in ends)


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x04K\x01.", aside(b"run", b"x")[:-3], b"\x94" * 100_000]
)
def test_what_is_no_envelope_is_refused(data: bytes) -> None:
    with pytest.raises(RunError, match="expected a message between hosts"):
        opened(data)


def test_spans_of_another_host_are_shown_in_this_ones_time() -> None:
    said = {"track": "gen/rollout", "name": "rollout", "task": 1, "block": 3, "rows": 8}
    spans = [SpanOf(start=10.0, end=12.5, **said)]
    assert of_this_clock(spans, 90.0) == [SpanOf(start=100.0, end=102.5, **said)]
    assert of_this_clock(spans, float("inf")) == spans


HOST_A = '[hosts.a]\naddress = "10.0.0.1"\n'


def test_a_cluster_file(tmp_path: Path) -> None:
    path = tmp_path / "pair.toml"
    path.write_text(f'{HOST_A}[hosts.b]\naddress = "10.0.0.2"\nmemory_gib = 2.5\nport = 99\n')
    cluster = read_cluster(path)
    first, second = cluster.hosts
    assert (first.name, first.port, first.known) == ("a", PORT, True), "the first is this one"
    assert (second.name, second.port, second.memory, second.known) == ("b", 99, 5 * 2**29, False)
    assert (cluster.lease, cluster.keys) == (30.0, tmp_path / "pair.keys")
    assert cluster.cores == first.cores


@pytest.mark.parametrize("text,told", [
    ("", "expected hosts, found none"),
    ("hosts = 3", "expected tables, found 3"),
    ("[hosts.a]", "host a: expected the IP address by which others reach it, found None"),
    ('[hosts.a]\naddress = "nowhere"', "found 'nowhere'"),
    (HOST_A + "core = 2", r"unknown key 'core'\. Fix: cores\."),
    (
        HOST_A + "port = 70000",
        r"cluster\.toml:3: host a: port: expected a port, 1 to 65535, found 70000",
    ),
    (HOST_A.replace("a", '"a b"', 1), "host a b: expected a table of that name"),
    ('lease = "long"\n' + HOST_A, r"toml:1: lease: expected seconds, 1 to 86400, found 'long'"),
    ("private = 1\n" + HOST_A, "private: expected true or false, found 1"),
    ("[hosts", r"cluster\.toml: expected TOML: "),
])  # fmt: skip
def test_a_cluster_file_that_cannot_be(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "cluster.toml").write_text(text)
    with pytest.raises(PlanError, match=told):
        read_cluster(tmp_path / "cluster.toml")


def test_a_key_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    keys = make_keys(path, ["a", "b"])
    assert read_keys(path) == keys
    assert path.stat().st_mode & 0o777 == 0o600
    assert keys.run.secret.decode() not in repr(keys)
    assert len({keys.run.public, *(k.public for k in keys.hosts.values())}) == 3
    with pytest.raises(RunError, match=r"cannot be made: .*Fix: name another"):
        make_keys(path, ["a"])
    with pytest.raises(RunError, match=r"expected keys of host 'c', found those of a, b\. Fix: "):
        keys.host("c")
    path.chmod(0o640)
    with pytest.raises(RunError, match=r"others can read it \(mode 640\)\. Fix: chmod 600"):
        read_keys(path)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"run": 1}', '{"run": {"public": "x", "secret": "y"}, "hosts": {}}']
)
def test_what_is_no_key_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(RunError, match=r"expected what `dataflow keys` makes.*Fix: "):
        read_keys(tmp_path / "keys")


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(HOST_A)
    assert main(["keys", str(path)]) == 0
    assert isinstance(read_keys(tmp_path / "cluster.keys").run, CurveKeyPair)
    assert main(["keys", str(path)]) == 3
    assert main(["keys"]) == 2
    assert main(["host", str(path)]) == 2
    assert main(["host", str(path), "c"]) == 1
    told = "expected a host of the cluster file, found 'c'. Fix: one of a"
    assert told in capsys.readouterr().err


def test_a_host_does_not_answer_at_an_address_that_is_not_its_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(HOST_A.replace("10.0.0.1", "192.0.2.1"))
    assert main(["keys", str(path)]) == 0
    assert main(["host", str(path), "a"]) == 3
    assert "host a: cannot answer at tcp://192.0.2.1:7373" in capfd.readouterr().err


def test_pins_with_hosts() -> None:
    pin = {"rollout": "g0@a, g1@b", "score": "g1", "train_policy": "train"}
    placing = run_options.placing(RunOptions(pin=pin))
    assert placing.pin == {"rollout": ("g0", "g1"), "score": ("g1",), "train_policy": ("train",)}
    assert placing.hosts == {"g0": "a", "g1": "b"}
    with pytest.raises(PlanError, match=r"pin: g is on a and on b\. Fix: g@b everywhere"):
        run_options.placing(RunOptions(pin={"rollout": "g@a", "score": "g@b"}))


def test_options_with_a_cluster_come_back(tmp_path: Path) -> None:
    for options in (
        RunOptions(cluster=tmp_path / "cluster.toml", pin={"rollout": "gen@b"}),
        RunOptions(),
    ):
        assert run_options.from_json(run_options.to_json(options), {})[0] == options


def planned(cluster: Cluster = CLUSTER, gen: str = "b", max_lag: int = 0, **options: Any) -> Plan:
    """Generation is pinned to the Worker `gen` on this host."""
    options = {"pin": {"rollout": f"gen@{gen}"}} | options
    return planned_on(cluster, small_grpo(beta=0.0, max_lag=max_lag), **options)


@pytest.mark.usefixtures("tiny")
def test_a_plan_on_two_hosts() -> None:
    pin = {"rollout": "gen@b", "train_policy": "train"}
    plan = planned(pin=pin, max_lag=1)
    assert plan.hosts == {w: "b" if w == "gen" else "a" for w in plan.workers}
    routes = {(e.producer, e.consumer): e.route for e in plan.edges}
    assert routes["rollout", "score"] == "zmq"
    assert routes["score", "advantage"] in ("inproc", "shm")
    threads = [plan.node(name).layout.threads for name in ("rollout", "train_policy")]
    assert threads == [8, 4], "each has its host's cores for itself"
    text = explain(plan)
    for part in (
        *("grpo on ", "b: 8 cores, 2.0 GiB", "8 threads on b: "),
        *("pulled from train by zmq", "of 2.0 GiB"),
    ):
        assert part in text, part
    assert plan.to_json() == planned(pin=pin, max_lag=1).to_json()


@pytest.mark.usefixtures("tiny")
def test_all_on_the_first_host_is_no_plan_on_hosts() -> None:
    assert planned(gen="a").hosts == {}
    assert planned(inproc=True).hosts == {}


SMALL = replace(CLUSTER, hosts=(HOSTS[0], replace(HOSTS[1], cores=1, memory=2**20)))
RANKS = {"pin": {"train_policy": "t0,t1@b"}, "ranks": {"train_policy": 2}}
GPU = replace(CLUSTER, hosts=(HOSTS[0], replace(HOSTS[1], gpus=(80 * 2**30,))))
TENSOR = {"pin": {"train_policy": "t0,t1@b"}, "tensor": {"train_policy": 2}}
TURNS = {"pin": {"rollout": "gen@b", "train_policy": "train"}, "turns": (("gen", "train"),)}
SHARES = {"ranks": {"train_policy": 2}, "tensor": {"train_policy": 2}}


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("shard", [False, True])
def test_ranks_with_rows_of_their_own_may_be_on_several_hosts(shard: bool) -> None:
    plan = planned(shard=shard, **RANKS)
    assert {w: plan.host_of(w) for w in ("t0", "t1")} == {"t0": "a", "t1": "b"}
    train = plan.node("train_policy")
    assert (train.layout.data, train.layout.shard, train.layout.threads) == (2, shard, 4)
    routes = {(e.producer, e.consumer): e.route for e in plan.edges}
    assert routes["rollout", "train_policy"] == "zmq"
    assert "4 threads on b: train_policy (rank 1 of 2)" in explain(plan)
    turned = replace(CLUSTER, hosts=(replace(HOSTS[0], cores=8), replace(HOSTS[1], cores=4)))
    plan = planned(turned, shard=shard, **RANKS)
    assert plan.node("train_policy").layout.threads == 4
    assert not [note for note in plan.notes if "a part of" in note], "nobody computes meanwhile"


@pytest.mark.usefixtures("tiny")
def test_each_share_of_tensor_ranks_is_on_one_host() -> None:
    plan = planned(pin={"train_policy": "t0,t1,t2@b,t3@b"}, **SHARES)
    assert plan.node("train_policy").shares == (("t0", "t1"), ("t2", "t3"))
    with pytest.raises(PlanError, match=r"t0,t1 are on a, b, and have to be on one host") as told:
        planned(pin={"train_policy": "t0,t1@b,t2,t3@b"}, **SHARES)
    assert "t2,t3 are on a, b, and have to be on one host" in str(told.value)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(("cluster", "asked", "told"), [
    (
        CLUSTER,
        {"gen": "c"},
        r"pin: 'gen' expected a host of the cluster, found 'c'\. Fix: one of a, b",
    ),
    (Cluster(cores=1, memory=2**34), {}, r"no hosts are known\. Fix: --cluster"),
    (CLUSTER, TENSOR, r"t0,t1 are on a, b, and have to be on one host\. Fix: t0@a t1@a"),
    (
        CLUSTER,
        TURNS,
        r"turns: gen,train are on b, a, and have to be on one host\. Fix: gen@b train@b",
    ),
    (GPU, RANKS, r"train_policy: t1 have a GPU and t0 have none, and ranks .* Fix: t0@b\."),
    (SMALL, {}, r"gen needs .*, host b has 0\.0 GiB"),
], ids=["unknown", "no hosts", "tensor ranks", "turns", "one GPU", "too small"])  # fmt: skip
def test_hosts_that_cannot_be(cluster: Cluster, asked: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        planned(cluster, **asked)
