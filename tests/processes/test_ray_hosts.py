"""Runs on the nodes of a Ray cluster on this machine: rows, deaths, errors, room, what is refused.

test_ray_losses.py has nodes and processes that are lost, tests/chaos/namespaces.py networks that
are cut.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import zmq

from dataflow.errors import DataError, KernelError, PlanError, RunError
from engine.api import plan
from engine.channels.zmq.curve_keys import Address
from engine.keep.checkpoint.cut import read_waiting_rows
from engine.keep.run_folder import RunFolder
from engine.plan.options import RunOptions
from engine.plan.plan import Plan
from engine.protocol import messages as m
from engine.protocol.workers import Save
from engine.run.control import host_messages as hm
from engine.run.launch.supervisor import CONTROL_BYTES
from tests.kit import host_plans
from tests.kit.processes import call_python, ended, kill
from tests.kit.ray_clusters import RayNodes, groups_left, needs_ray, ray_cluster
from tests.kit.run_graphs import small
from tests.kit.strangers import stranger
from tests.kit.tiny_runs import TinyRuns

needs_ray()
from engine.run.hosts.hosts import HostsWorkers  # noqa: E402  (it imports Ray)
from engine.run.hosts.ray import Bundle, ClusterReservation, cluster, join_cluster  # noqa: E402

pytestmark = [pytest.mark.timeout(120), pytest.mark.hosts]
Start = Callable[..., contextlib.AbstractContextManager[HostsWorkers]]
SOON = 30.0
APART = {"source": "a", "host": "b"}
BACK = {"source": "b", "host": "a"}


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """Nodes a and b, which serve one test after another."""
    with ray_cluster(num_cpus=2) as found:
        yield found


@pytest.fixture
def connected(nodes: RayNodes) -> RayNodes:
    """Nodes a and b, to whose cluster this process belongs."""
    join_cluster("ray")
    return nodes


@pytest.fixture
def start(tmp_path: Path, connected: RayNodes) -> Iterator[Start]:
    """Opens a plan's Workers on hosts a and b; afterwards Ray keeps nothing for them."""

    @contextlib.contextmanager
    def started(
        where: dict[str, str],
        planned: Plan | None = None,
        *,
        lease: float = 10.0,
        name: str = "run",
        private: bool = False,
    ) -> Iterator[HostsWorkers]:
        there = cluster([], lease=lease, private=private)
        spread = replace(planned or host_plans.plan(), cluster=there, hosts=where)
        with RunFolder.create(name, tmp_path) as folder:
            folder.write_text("plan.json", spread.to_json())
            workers = HostsWorkers(spread, folder, RunOptions(cluster="ray", wait=60.0))
            try:
                workers.opened = list(workers.open())  # type: ignore[attr-defined]
                yield workers
            finally:
                workers.close()

    yield started
    assert groups_left() == []


def told_of_a_death(workers: HostsWorkers) -> m.WorkerLost:
    """The event of a Worker that ends while all are idle."""
    end = time.monotonic() + SOON
    while time.monotonic() < end:
        event = workers.next(SOON)
        if isinstance(event, m.WorkerLost):
            return event
        workers._changed.wait(0.2)
    pytest.fail("nobody told of it")


@pytest.mark.parametrize(
    "where,private",
    [
        pytest.param(APART, False, id="from here", marks=pytest.mark.long),
        pytest.param(BACK, True, id="to here, plainly"),
    ],
)
def test_rows_go_from_host_to_host(
    start: Start, where: dict[str, str], private: bool, tmp_path: Path
) -> None:
    with start(where, private=private) as workers:
        opened = [each.event for each in workers.opened]  # type: ignore[attr-defined]
        assert {type(event) for event in opened} == {m.SourceOpened, m.WorkerOpened}
        ref = host_plans.produced_block(workers)
        workers.tell(host_plans.chunk_of(2, ref))
        produced, done = host_plans.until(workers, m.ChunkDone)
        assert done.node == "doubled"
        rewards = host_plans.gathered(produced.ref, "reward", producer="doubled")
        (tmp_path / "rows").mkdir()
        save = Save(directory=tmp_path, rows={"doubled": (ref.keys, rewards)})
        nothing = {"host": None, "source": None}
        assert workers.ask({"source": save, "host": Save(directory=tmp_path)}) == nothing
        saved = read_waiting_rows(tmp_path / "rows" / "doubled.arrow").flat("reward")
        assert saved.tolist() == [0.0, 2.0, 4.0, 6.0]
        for block in (ref, produced.ref):
            workers.tell(m.Release(worker=block.worker, blocks=(block.block,)))
        assert workers.next() is None
        assert not workers.busy
        require_reports(workers)
        assert {"source/numbers", "host/doubled"} <= {span.track for span in workers.spans()}
        assert {doing.worker for doing in workers.doing()} == {"source", "host"}


def require_reports(workers: HostsWorkers) -> None:
    """What went between the hosts is measured as that."""
    reports = {name: value for name, value, _ in workers.reports()}
    assert {"time/doubled", CONTROL_BYTES} <= set(reports)
    assert reports["edge/zmq/bytes"] > 0
    assert "edge/shm/bytes" not in reports


@pytest.mark.long
def test_what_the_dead_owner_of_another_host_had_is_known_to_be_gone(
    start: Start, nodes: RayNodes
) -> None:
    with start(BACK) as workers:
        old = host_plans.produced_block(workers)
        kill([nodes.workers()["source"]])
        lost = told_of_a_death(workers)
        assert (lost.worker, lost.epoch) == ("source", 0)
        assert "SIGKILL" in lost.error
        workers.respawn(["source"])
        begun = m.WorkerOpened(worker="source", epoch=1)
        assert host_plans.until(workers, m.WorkerOpened)[-1] == begun
        workers.tell(host_plans.chunk_of(3, old))
        began = time.monotonic()
        assert host_plans.until(workers, m.FetchFailed)[-1].peer == "source"
        assert time.monotonic() - began < 5.0, "word of it came before the end of the lease"
        new = host_plans.produced_block(workers, 4)
        workers.tell(host_plans.chunk_of(5, new))
        assert isinstance(host_plans.until(workers, m.ChunkDone)[0], m.Produced)


@pytest.mark.long
def test_an_error_of_another_host_arrives_as_what_it_was(start: Start) -> None:
    with start(APART, host_plans.plan(host_plans.refuses)) as workers:
        workers.tell(host_plans.chunk_of(1, host_plans.produced_block(workers), node="refuses"))
        with pytest.raises(KernelError, match=r"refuses.*LookupError: nothing of the kind"):
            host_plans.until(workers, m.ChunkDone)
    with (
        pytest.raises(DataError, match="closed today"),
        start(BACK, host_plans.plan(source=host_plans.ClosedToday), name="2"),
    ):
        pytest.fail("it opened")


@pytest.mark.long
def test_a_host_that_is_not_heard_of_is_lost_with_the_lease(start: Start, nodes: RayNodes) -> None:
    """It does not go on once it wakes up."""
    with start(APART, lease=5.0) as workers:
        worker, stopped = nodes.workers()["host"], nodes.host_of("host")
        kill([stopped], signal.SIGSTOP)
        lost = told_of_a_death(workers)
        assert lost.worker == "host"
        assert re.match(r"host b: not heard of for \d+ s \(the lease is 5 s\)$", lost.error)
        kill([stopped], signal.SIGCONT)
        assert ended(worker, 20.0), "its Worker goes on"
        assert ended(stopped, 20.0), "it goes on"


@pytest.mark.long
@pytest.mark.parametrize("change,found", [
    ({"folder": Path("/nowhere")}, "none"),
    ({"planned": "another plan"}, "another one"),
])  # fmt: skip
def test_a_run_folder_a_host_does_not_see(
    start: Start, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], found: str
) -> None:
    begin = hm.Begin
    monkeypatch.setattr(hm, "Begin", lambda **said: begin(**said | change))
    told = rf"host [ab]: expected the run folder .* share, found {found}\. Fix: "
    with pytest.raises(RunError, match=told), start(APART):
        pytest.fail("it opened")


@pytest.mark.long
def test_a_plan_is_for_what_the_nodes_have(connected: RayNodes, tiny: TinyRuns) -> None:
    connected.wait_until_free(cores=4.0)
    planned = plan(small(tiny.folder), tiny.options(1, pin={"rollout": "gen@b"}, cluster="ray"))
    assert planned.cluster is not None
    assert [(host.name, host.cores) for host in planned.cluster.hosts[:2]] == [("a", 2), ("b", 2)]
    assert planned.hosts == {"main": "a", "gen": "b"}
    assert {edge.route for edge in planned.edges} == {"inproc", "zmq"}
    assert not list(tiny.runs.iterdir()), "the file that every node has to see is gone"


# --- room -----------------------------------------------------------------------------------------


@pytest.mark.long
def test_two_runs_at_one_time(start: Start) -> None:
    """And none has anything of the other's."""
    with start(APART) as one, start(APART, name="second") as two:
        for workers in (one, two):
            workers.tell(host_plans.chunk_of(2, host_plans.produced_block(workers)))
        for workers in (one, two):
            assert isinstance(host_plans.until(workers, m.ChunkDone)[0], m.Produced)


def room_for(*names: str) -> ClusterReservation:
    """Two cores, so all, of each of these nodes."""
    return ClusterReservation([Bundle(host=name, cores=2) for name in names], 60.0)


@pytest.mark.long
@pytest.mark.usefixtures("connected")
def test_a_run_for_which_there_is_no_room_says_so_and_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with contextlib.ExitStack() as after:
        first = after.enter_context(contextlib.closing(room_for("a", "b")))
        assert first._settled.wait(SOON)
        caplog.clear()  # a busy machine may be so slow that it says that it waits
        began = time.monotonic()
        second = after.enter_context(contextlib.closing(room_for("c", "d")))
        while not caplog.records:
            assert not second._settled.wait(0.05), "there is no room"
        assert time.monotonic() - began < 10.0
        told, _, there = caplog.records[0].getMessage().partition("there: ")
        assert told == (
            "waiting for room in the Ray cluster: wanted c (2 CPU), d (2 CPU); "
            "nowhere free: c (2 CPU), d (2 CPU); "
        )
        assert {"a 0 of 2 CPU free", "b 0 of 2 CPU free"} <= set(there.split("; "))
        first.close()
        assert second._settled.wait(SOON)
        assert second._failure is None
    assert groups_left() == []


@pytest.mark.usefixtures("connected")
def test_a_breakpoint_is_not_given_to_ray() -> None:
    assert "PYTHONBREAKPOINT" not in os.environ


@pytest.mark.long
@pytest.mark.usefixtures("connected")
def test_what_finds_no_room_fails_after_the_wait() -> None:
    room = ClusterReservation(
        [Bundle(host="a", cores=1), Bundle(host="big", cores=64, gpus=8)], 1.0
    )
    wanted = r"wanted a \(1 CPU\), big \(64 CPU, 8 GPU\); nowhere free: big \(64 CPU, 8 GPU\)"
    told = rf"no room within 1 s: {wanted}; there: .*b 2 of 2 CPU.*Fix: more nodes, .*--wait"
    with pytest.raises(RunError, match=told):
        room.dial("big", "big")(threading.Event())
    room.close()
    assert groups_left() == []


@pytest.mark.long
@pytest.mark.usefixtures("connected")
def test_nobody_waits_for_room_any_more_once_the_run_ends() -> None:
    room, stop = ClusterReservation([Bundle(host="big", cores=64)], 60.0), threading.Event()
    stop.set()
    assert room.dial("big", "big")(stop) is None
    room.close()
    assert groups_left() == []


# --- what is refused ------------------------------------------------------------------------------

CONNECT = """
from functools import cache
from ray._private import services
services.find_gcs_addresses = cache(lambda: set())  # which looks at all processes of the machine
from engine.run.hosts.ray import join_cluster
join_cluster("ray")
"""


@pytest.mark.parametrize("address", ["", "127.0.0.1:9"])
def test_where_no_cluster_is(tmp_path: Path, address: str) -> None:
    where = {"RAY_ADDRESS": address, "RAY_TMPDIR": str(tmp_path)}
    told = call_python("-c", CONNECT, env=where).stderr.splitlines()[-1]
    assert "RunError: --cluster ray: expected a Ray cluster" in told
    assert "Fix: `ray start --head`, or `ray symmetric-run`, starts one" in told


@pytest.mark.parametrize(
    ("raised", "expected", "message"),
    [
        (Exception("It timed out.\n"), RunError, "expected a Ray cluster, found none: It timed"),
        (KeyError("of ours"), KeyError, "of ours"),
    ],
)
def test_a_node_that_does_not_start(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, expected: type[Exception], message: str
) -> None:
    """Of which Ray raises an Exception of no kind."""
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", Mock(side_effect=raised))
    with pytest.raises(expected, match=message):
        join_cluster("ray:local")


@pytest.mark.long
@pytest.mark.usefixtures("connected")
def test_what_a_node_does_not_see_is_refused_by_name() -> None:
    """A path that only this process has."""
    mine = f"/proc/self/task/{os.getpid()}/comm"
    with pytest.raises(RunError, match="no node of the Ray cluster can be used:") as caught:
        cluster([mine])
    for name in "ab":
        expected = (
            rf"host {name}: expected {mine} as here \(file of 0 bytes, .*\), found nothing. Fix"
        )
        assert re.search(expected, str(caught.value))


@pytest.mark.long
@pytest.mark.usefixtures("connected")
def test_another_content_at_the_same_path_is_refused_by_name() -> None:
    """A path at which each process has something else, of the same size."""
    with pytest.raises(RunError, match="no node of the Ray cluster can be used:") as caught:
        cluster(["/proc/self/cmdline"])
    expected = (
        r"host a: expected /proc/self/cmdline as here \(file of 0 bytes, content \w+\), found"
    )
    assert re.search(rf"{expected} file of 0 bytes, content", str(caught.value))


# --- strangers, GPUs ------------------------------------------------------------------------------


@pytest.mark.long
def test_strangers_get_nothing(start: Start) -> None:
    """At a Worker's port: without a key, with a wrong one, by a weaker mechanism."""
    bomb = pickle.dumps(host_plans.PickleBomb("x"))
    with start(APART) as workers, contextlib.ExitStack() as stack:
        (there,) = workers._remotes["b"].endpoints
        address = Address(endpoint=there.endpoint, key=there.key)
        poller = zmq.Poller()
        for kind in ("no key", "plain", "a wrong key"):
            asks = stack.enter_context(stranger(address, kind))
            poller.register(asks, zmq.POLLIN)
            asks.send(bomb, zmq.NOBLOCK)
        assert not poller.poll(1500), "somebody answered"
        workers.tell(host_plans.chunk_of(2, host_plans.produced_block(workers)))
        produced = host_plans.until(workers, m.ChunkDone)[0]
        assert isinstance(produced, m.Produced), "and nobody is disturbed"


@pytest.mark.long
def test_workers_see_the_gpus_that_ray_gives_their_host(
    start: Start, nodes: RayNodes, tmp_path: Path
) -> None:
    """A node that believes it has two, of many."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 81920\necho 81920\n")
    tool.chmod(0o755)
    seen = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "5,7"}
    nodes.add("g", env=seen, num_gpus=2, labels={"ray.io/accelerator-type": "H200"})
    try:
        planned = replace(host_plans.plan(), devices={"source": (0,), "host": (1,)})
        with start(dict.fromkeys(("source", "host"), "g"), planned) as workers:
            host = workers._cluster.host("g")
            assert (host.gpus, host.labels["gpu"]) == ((80 * 2**30,) * 2, "H200")
            devices = sorted(map(devices_seen_by, nodes.workers().values()))
        assert devices == ["5", "7"], "one each, in Ray's order"
    finally:
        nodes.end("g")


def devices_seen_by(pid: int) -> str:
    environment = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    (line,) = (each for each in environment if each.startswith("CUDA_VISIBLE_DEVICES="))
    return line.partition("=")[2]


@pytest.mark.long
def test_a_node_with_other_versions_is_refused_by_name(
    connected: RayNodes, tiny: TinyRuns, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    info = tmp_path / "c" / "dataflow_rl-9.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: dataflow_rl\nVersion: 9.9\n")
    connected.add("c", env={"PYTHONPATH": str(tmp_path / "c")})
    try:
        options = tiny.options(1, cluster="ray", pin={"rollout": "gen@c"})
        told = r"pin: 'gen' on host c: expected dataflow-rl \S+ as here, found 9\.9\. Fix: "
        with pytest.raises(PlanError, match=told):
            plan(small(tiny.folder), options)
        assert {said.partition(":")[0] for said in caplog.messages} == {"host c is left out"}
        assert not tiny.runs.exists() or not list(tiny.runs.iterdir())
    finally:
        connected.end("c")
