"""Several hosts without any: the cluster file, the key file, pins, plans, and lines that lose,
double and reorder.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.check import check
from dataflow.errors import PlanError, RunError
from engine import options as run_options
from engine.channels.zmq.curve_keys import CurveKeyPair
from engine.cli import main
from engine.launch.hosts import of_this_clock
from engine.launch.keyfile import make_keys, read_keys
from engine.launch.line import Line, aside, opened
from engine.options import RunOptions
from engine.plan.cluster import PORT, Cluster, Host, read_cluster
from engine.plan.explain import explain
from engine.plan.placing import Placing
from engine.plan.planner import make_plan
from graphs.grpo import grpo
from tests.kit.plans import headers, save_tiny_header
from tests.kit.rewards import exact

HOSTS = (
    Host(name="a", address="10.0.0.1", cores=4, memory=24 * 2**30),
    Host(name="b", address="10.0.0.2", cores=8, memory=2 * 2**30),
)
CLUSTER = Cluster(cores=4, memory=24 * 2**30, hosts=HOSTS)


# --- lines ----------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), messages=st.integers(1, 25), lost=st.floats(0.0, 0.7))
def test_whatever_a_network_does_each_message_comes_once_and_in_order(
    seed: int, messages: int, lost: float
) -> None:
    dice = random.Random(seed)
    ends = (Line(b"run"), Line(b"run"))
    said: tuple[list[bytes], list[bytes]] = ([], [])
    came: tuple[list[bytes], list[bytes]] = ([], [])
    way: tuple[list[bytes], list[bytes]] = ([], [])
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
                way[me].extend(
                    [frame] * (1 if calm else dice.choices((0, 1, 2), (lost, 1.0, 0.3))[0])
                )
            dice.shuffle(way[me])
            for frame in [
                way[me].pop()
                for _ in range(len(way[me]) if calm else dice.randint(0, len(way[me])))
            ]:
                bodies, beat = ends[1 - me].take(opened(frame), now)
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
    spans = [("gen/rollout", "chunk 1", 10.0, 12.5)]
    assert of_this_clock(spans, 90.0) == [("gen/rollout", "chunk 1", 100.0, 102.5)]
    assert of_this_clock(spans, float("inf")) == spans


# --- files ----------------------------------------------------------------------------------------


def test_a_cluster_file(tmp_path: Path) -> None:
    path = tmp_path / "pair.toml"
    path.write_text(
        '[hosts.a]\naddress = "10.0.0.1"\n[hosts.b]\naddress = "10.0.0.2"\nmemory_gib = 2.5\nport ='
        " 99\n"
    )
    cluster = read_cluster(path)
    first, second = cluster.hosts
    assert (first.name, first.port, first.known) == ("a", PORT, True), "the first is this one"
    assert (second.name, second.port, second.memory, second.known) == ("b", 99, 5 * 2**29, False)
    assert (cluster.lease, cluster.keys) == (30.0, tmp_path / "pair.keys")
    assert cluster.cores == first.cores


@pytest.mark.parametrize(
    "text,told",
    [
        ("", "expected hosts, found none"),
        ("hosts = 3", "expected tables, found 3"),
        ("[hosts.a]", "host a: expected the IP address by which others reach it, found None"),
        ('[hosts.a]\naddress = "nowhere"', "found 'nowhere'"),
        ('[hosts.a]\naddress = "10.0.0.1"\ncore = 2', r"unknown key 'core'\. Fix: cores\."),
        (
            '[hosts.a]\naddress = "10.0.0.1"\nport = 70000',
            r"cluster\.toml:3: host a: port: expected a port, 1 to 65535, found 70000",
        ),
        ('[hosts."a b"]\naddress = "10.0.0.1"', "host a b: expected a table of that name"),
        (
            'lease = "long"\n[hosts.a]\naddress = "10.0.0.1"',
            r"toml:1: lease: expected seconds, 1 to 86400, found 'long'",
        ),
        (
            'private = 1\n[hosts.a]\naddress = "10.0.0.1"',
            "private: expected true or false, found 1",
        ),
        ("[hosts", r"cluster\.toml: expected TOML: "),
    ],
)
def test_a_cluster_file_that_cannot_be(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "cluster.toml").write_text(text)
    with pytest.raises(PlanError, match=told):
        read_cluster(tmp_path / "cluster.toml")


def test_a_key_file_is_its_owners_alone(tmp_path: Path) -> None:
    made = make_keys(tmp_path / "keys", ["a", "b"])
    assert read_keys(tmp_path / "keys") == made
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o600
    assert made.run.secret.decode() not in repr(made)
    assert len({made.run.public, *(k.public for k in made.hosts.values())}) == 3
    with pytest.raises(RunError, match=r"cannot be made: .*Fix: name another"):
        make_keys(tmp_path / "keys", ["a"])
    with pytest.raises(RunError, match=r"expected keys of host 'c', found those of a, b\. Fix: "):
        made.host("c")
    (tmp_path / "keys").chmod(0o640)
    with pytest.raises(RunError, match=r"others can read it \(mode 640\)\. Fix: chmod 600"):
        read_keys(tmp_path / "keys")


@pytest.mark.parametrize(
    "text", ["", "[]", '{"run": 1}', '{"run": {"public": "x", "secret": "y"}, "hosts": {}}']
)
def test_what_is_no_key_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(RunError, match=r"expected what `dataflow keys` makes.*Fix: "):
        read_keys(tmp_path / "keys")


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('[hosts.a]\naddress = "10.0.0.1"\n')
    assert main(["keys", str(path)]) == 0
    assert isinstance(read_keys(tmp_path / "cluster.keys").run, CurveKeyPair)
    assert main(["keys", str(path)]) == 3
    assert main(["keys"]) == 2
    assert main(["host", str(path)]) == 2
    assert main(["host", str(path), "c"]) == 1
    assert (
        "expected a host of the cluster file, found 'c'. Fix: one of a" in capsys.readouterr().err
    )


def test_a_host_does_not_answer_at_an_address_that_is_not_its_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('[hosts.a]\naddress = "192.0.2.1"\n')
    assert main(["keys", str(path)]) == 0
    assert main(["host", str(path), "a"]) == 3
    assert "host a: cannot answer at tcp://192.0.2.1:7373" in capfd.readouterr().err


# --- plans ----------------------------------------------------------------------------------------


def test_pins_with_hosts() -> None:
    placing = run_options.placing(
        RunOptions(pin={"rollout": "g0@a, g1@b", "score": "g1", "train_policy": "train"})
    )
    assert placing.pin == {"rollout": ("g0", "g1"), "score": ("g1",), "train_policy": ("train",)}
    assert placing.hosts == {"g0": "a", "g1": "b"}
    with pytest.raises(PlanError, match=r"pin: g is on a and on b\. Fix: g@b everywhere"):
        run_options.placing(RunOptions(pin={"rollout": "g@a", "score": "g@b"}))


def test_options_with_a_cluster_come_back(tmp_path: Path) -> None:
    made = RunOptions(cluster=tmp_path / "cluster.toml", pin={"rollout": "gen@b"})
    assert run_options.from_json(run_options.to_json(made), {})[0] == made
    assert run_options.from_json(run_options.to_json(RunOptions()), {})[0] == RunOptions()


@pytest.fixture
def placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    save_tiny_header(tmp_path)
    monkeypatch.chdir(tmp_path)

    def make(cluster: Cluster = CLUSTER, **asked: object):  # type: ignore[no-untyped-def]
        graph = grpo("tiny", "train.parquet", exact, max_lag=int(asked.pop("max_lag", 0)))  # type: ignore[call-overload]
        return make_plan(check(graph, headers), seed=0, placing=Placing(**asked), cluster=cluster)  # type: ignore[arg-type]

    return make


def test_a_plan_on_two_hosts(placed) -> None:  # type: ignore[no-untyped-def]
    plan = placed(
        pin={"rollout": ("gen",), "train_policy": ("train",)}, hosts={"gen": "b"}, max_lag=1
    )
    assert plan.hosts == {w: "b" if w == "gen" else "a" for w in plan.workers}
    routes = {(e.producer, e.consumer): e.route for e in plan.edges}
    assert routes["rollout", "score"] == "zmq"
    assert routes["score", "advantage"] in ("inproc", "shm")
    threads = {n.name: n.layout.threads for n in plan.nodes}
    assert (threads["rollout"], threads["train_policy"]) == (
        8,
        4,
    ), "each has its host's cores for itself"
    text = explain(plan)
    for part in (
        "grpo on ",
        "b: 8 cores, 2.0 GiB",
        "8 threads on b: ",
        "pulled from train by zmq",
        "of 2.0 GiB",
    ):
        assert part in text, part
    assert (
        plan.to_json()
        == placed(
            pin={"rollout": ("gen",), "train_policy": ("train",)}, hosts={"gen": "b"}, max_lag=1
        ).to_json()
    )


def test_all_on_the_first_host_is_no_plan_on_hosts(placed) -> None:  # type: ignore[no-untyped-def]
    assert placed(pin={"rollout": ("gen",)}, hosts={"gen": "a"}).hosts == {}
    assert placed(pin={"rollout": ("gen",)}, hosts={"gen": "b"}, inproc=True).hosts == {}


def test_hosts_that_cannot_be(placed) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(
        PlanError, match=r"pin: 'gen' expected a host of the cluster, found 'c'\. Fix: one of a, b"
    ):
        placed(pin={"rollout": ("gen",)}, hosts={"gen": "c"})
    with pytest.raises(PlanError, match=r"no hosts are known\. Fix: --cluster"):
        placed(Cluster(cores=1, memory=2**34), pin={"rollout": ("gen",)}, hosts={"gen": "b"})
    with pytest.raises(
        PlanError, match=r"t0,t1 are on a, b, and have to be on one host\. Fix: t0@a t1@a"
    ):
        placed(pin={"train_policy": ("t0", "t1")}, ranks={"train_policy": 2}, hosts={"t1": "b"})
    small = Cluster(
        cores=4,
        memory=2**34,
        hosts=(HOSTS[0], Host(name="b", address="10.0.0.2", cores=1, memory=2**20)),
    )
    with pytest.raises(PlanError, match=r"gen needs .*, host b has 0\.0 GiB"):
        placed(small, pin={"rollout": ("gen",)}, hosts={"gen": "b"})
