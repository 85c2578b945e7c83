"""Runs on several hosts (loopback addresses): rows, deaths, errors, leases, authentication.

test_namespaces.py has two hosts that are network namespaces.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zmq

from dataflow.errors import DataError, KernelError, RunError
from dataflow.graph import Graph
from engine.api import plan as plan_of
from engine.channels.zmq.curve_keys import CurveKeyPair
from engine.checkpoint.cut import read_rows
from engine.coordinator import messages as m
from engine.launch import hostlink
from engine.launch.control_socket import ControlSocket
from engine.launch.hostlink import HostLink
from engine.launch.hosts import HostsWorkers
from engine.launch.keyfile import read_keys
from engine.launch.supervisor import CONTROL_BYTES
from engine.observe.runfolder import RunFolder
from engine.options import RunOptions
from engine.plan.cluster import read_cluster
from engine.plan.plan import Plan
from engine.run.workers import Save
from graphs.grpo import grpo
from tests.kit import host_plans
from tests.kit.host_processes import HostProcess, cluster_file, host, with_lease
from tests.kit.nothing_left import descriptors
from tests.kit.processes import command_of, ended, kill
from tests.kit.run_graphs import vowels
from tests.kit.runs import metrics, require_same_numbers
from tests.kit.tiny_runs import PROMPTS, TinyRuns

pytestmark = pytest.mark.timeout(240)
Start = Callable[..., contextlib.AbstractContextManager[HostsWorkers]]
SOON = 30.0
APART = {"source": "a", "host": "b"}
BACK = {"source": "b", "host": "a"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cluster_file(tmp_path_factory.mktemp("cluster"))


@pytest.fixture(scope="module")
def host_b(cluster: Path) -> Iterator[HostProcess]:
    """Host b, which serves one test after another."""
    with host(cluster) as process:
        yield process


@pytest.fixture
def start(tmp_path: Path, cluster: Path, host_b: HostProcess) -> Iterator[Start]:
    """Opens a plan's Workers on hosts a and b; afterwards no descriptor of them is left."""

    @contextlib.contextmanager
    def started(
        where: dict[str, str],
        planned: Plan | None = None,
        *,
        lease: float = 10.0,
        name: str = "run",
        **how: bool,
    ) -> Iterator[HostsWorkers]:
        read = read_cluster(with_lease(cluster, lease, **how))
        spread = replace(planned or host_plans.plan(), cluster=read, hosts=where)
        with RunFolder.create(name, tmp_path) as folder:
            folder.write_text("plan.json", spread.to_json())
            workers = HostsWorkers(spread, folder, RunOptions())
            try:
                workers.opened = list(workers.open())  # type: ignore[attr-defined]
                yield workers
            finally:
                workers.close()

    before = descriptors()
    yield started
    assert descriptors() == before


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
    "where,private", [(APART, False), (BACK, True)], ids=["from here", "to here, plainly"]
)
def test_rows_go_from_host_to_host(
    start: Start, where: dict[str, str], private: bool, tmp_path: Path
) -> None:
    began = time.monotonic()
    with start(where, private=private) as workers:
        require_opened([each.event for each in workers.opened])  # type: ignore[attr-defined]
        ref = host_plans.produced_block(workers)
        workers.tell(host_plans.chunk_of(2, ref))
        produced, done = host_plans.until(workers, m.ChunkDone)
        assert isinstance(produced, m.Produced)
        assert done.node == "doubled"
        rewards = host_plans.gathered(produced.ref, "reward", producer="doubled")
        (tmp_path / "rows").mkdir()
        save = Save(directory=tmp_path, rows={"doubled": (ref.keys, rewards)})
        nothing = {"host": None, "source": None}
        assert workers.ask({"source": save, "host": Save(directory=tmp_path)}) == nothing
        saved = read_rows(tmp_path / "rows" / "doubled.arrow").flat("reward")
        assert saved.tolist() == [0.0, 2.0, 4.0, 6.0]
        for block in (ref, produced.ref):
            workers.tell(m.Release(worker=block.worker, blocks=(block.block,)))
        assert workers.next() is None
        assert not workers.busy
        require_reports(workers)
        spans = workers.spans()
        assert {"source/numbers", "host/doubled"} <= {span.track for span in spans}
        now = time.monotonic()
        assert all(began - 5.0 < span.start <= span.end < now + 1.0 for span in spans)
        assert {doing.worker for doing in workers.doing()} == {"source", "host"}


def require_opened(events: list[Any]) -> None:
    """Both Workers, and the source."""
    assert {type(event) for event in events} == {m.SourceOpened, m.WorkerOpened}
    opened = {event.worker for event in events if isinstance(event, m.WorkerOpened)}
    assert opened == {"source", "host"}


def require_reports(workers: HostsWorkers) -> None:
    """What went between the hosts is measured as that."""
    reports = {name: value for name, value, _ in workers.reports()}
    assert {"time/doubled", "edge/zmq/bytes", CONTROL_BYTES} <= set(reports)
    assert reports["edge/zmq/bytes"] > 0
    assert "edge/shm/bytes" not in reports


@pytest.mark.parametrize("where", [APART, BACK], ids=["the reader's", "the owner's"])
def test_a_worker_of_a_host_that_dies_is_begun_again(
    start: Start, host_b: HostProcess, where: dict[str, str]
) -> None:
    far, near = ("host", "source") if where is APART else ("source", "host")
    with start(where) as workers:
        old = host_plans.produced_block(workers)
        (pid,) = host_b.workers()
        kill([pid])
        lost = told_of_a_death(workers)
        assert (lost.worker, lost.epoch) == (far, 0)
        assert "SIGKILL" in lost.error
        workers.respawn([far])
        assert host_plans.until(workers, m.WorkerOpened)[-1] == m.WorkerOpened(worker=far, epoch=1)
        workers.tell(host_plans.chunk_of(3, old))
        if near == "host":
            began = time.monotonic()
            assert host_plans.until(workers, m.FetchFailed)[-1].peer == "source"
            waited = time.monotonic() - began
            assert waited < 5.0, "word that it is gone came before the end of the lease"
        else:
            assert isinstance(host_plans.until(workers, m.ChunkDone)[0], m.Produced)
        new = host_plans.produced_block(workers, 4)
        workers.tell(host_plans.chunk_of(5, new))
        assert isinstance(host_plans.until(workers, m.ChunkDone)[0], m.Produced)


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


def test_a_run_folder_a_host_does_not_see(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunFolder, "write_text", lambda *_: None)
    told = r"host b: expected the run folder .* share, found none\. Fix: "
    with pytest.raises(RunError, match=told), start(APART):
        pytest.fail("it opened")


def test_a_host_serves_one_run_at_a_time(start: Start) -> None:
    told = r"host b: .*within 3 s.*serves another run.*Fix: "
    second = partial(start, APART, lease=3.0, name="second")
    with start(APART), pytest.raises(RunError, match=told), second():
        pytest.fail("it opened")


@pytest.mark.long
def test_a_run_that_is_not_heard_of_is_ended_by_the_host(start: Start, host_b: HostProcess) -> None:
    with start(APART, lease=5.0) as workers:
        (pid,) = host_b.workers()
        workers._remotes["b"].link.close()
        host_b.until("nothing was heard of the run", 15.0)
        assert ended(pid, 15.0), "its Worker is there still"


@pytest.mark.long
def test_a_host_that_is_not_heard_of_fails_the_run(start: Start, host_b: HostProcess) -> None:
    told = r"host b: not heard of for \d+ s \(the lease is 5 s\)\. Fix: "
    with start(APART, lease=5.0) as workers:
        ref = host_plans.produced_block(workers)
        serving = host_b.serving
        os.kill(serving, signal.SIGSTOP)
        workers.tell(host_plans.chunk_of(2, ref))
        with pytest.raises(RunError, match=told):
            host_plans.until(workers, m.ChunkDone)
    os.kill(serving, signal.SIGCONT)
    assert ended(serving, 20.0), "it goes on"


def test_a_host_that_is_not_there(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostlink, "endpoint", lambda _: "tcp://127.0.0.3:9")
    told = r"host b: expected an answer at .* within 2 s, found none\. Fix: dataflow host"
    with pytest.raises(RunError, match=told), start(APART, lease=2.0):
        pytest.fail("it opened")


def test_strangers_get_nothing(
    start: Start, cluster: Path, host_b: HostProcess, tmp_path: Path
) -> None:
    """At the host's port and a Worker's: without a key, with a wrong one, by a weaker mechanism."""
    frames = (pickle.dumps(host_plans.PickleBomb("x")), b"", b"\x94\xc4\x00\x00\x00\xc4\x00" * 9)
    with start(APART) as workers, contextlib.ExitStack() as stack:
        read = read_cluster(cluster)
        control = (hostlink.endpoint(read.host("b")), read_keys(read.keys).host("b").public)
        (peer,) = workers._remotes["b"].update.endpoints
        poller = zmq.Poller()
        for endpoint, server in (control, (peer.endpoint, peer.key)):
            for kind in ("no key", "plain", "a wrong key"):
                asks = stack.enter_context(stranger(endpoint, server, kind))
                poller.register(asks, zmq.POLLIN)
                for frame in frames:
                    asks.send(frame, zmq.NOBLOCK)
        assert not poller.poll(1500), "somebody answered"
        workers.tell(host_plans.chunk_of(2, host_plans.produced_block(workers)))
        produced = host_plans.until(workers, m.ChunkDone)[0]
        assert isinstance(produced, m.Produced), "and nobody is disturbed"
    host_b.until(f"{tmp_path / 'run'} has ended")
    assert int(host_b.until("\n").rpartition(":")[2]) >= 3, "each was counted"


@contextlib.contextmanager
def stranger(endpoint: str, server: bytes, kind: str) -> Iterator[zmq.Socket]:
    """A peer that connects without belonging to the run."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    if kind == "a wrong key":
        own = CurveKeyPair.make()
        socket.setsockopt(zmq.CURVE_SERVERKEY, server)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
    elif kind == "plain":
        socket.setsockopt(zmq.PLAIN_USERNAME, b"run")
        socket.setsockopt(zmq.PLAIN_PASSWORD, b"run")
    socket.connect(endpoint)
    try:
        yield socket
    finally:
        context.destroy(linger=0)


MARKER = "zqzqzqzq"
PIN = {"rollout": "gen@b", "score": "ops@b", "train_policy": "train"}


@pytest.fixture(scope="module")
def graph(tiny_folder: Path) -> Graph:
    """GRPO on prompts that contain a unique text."""
    data = tiny_folder / "marked.parquet"
    pq.write_table(pa.table({"prompt": [MARKER + prompt for prompt in PROMPTS]}), data)
    base = str(tiny_folder / "model")
    return grpo(base, str(data), vowels, n=4, batch=4, max_tokens=6, lr=1e-3)


@pytest.mark.long
def test_a_run_on_two_hosts(
    graph: Graph,
    tiny: TinyRuns,
    cluster: Path,
    host_b: HostProcess,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One process's bits although a remote Worker dies; no row through the coordinator."""
    one = tiny.run(graph, 4, name="one")
    heard: list[bytes] = []
    receive, take = ControlSocket.receive, HostLink._take

    def received(link: ControlSocket) -> Any:
        frames = receive(link)
        heard.extend(frame.payload for frame in frames or ())
        return frames

    def taken(link: HostLink, data: bytes) -> bool:
        heard.append(data)
        return take(link, data)

    def kill_the_generator(row: Mapping[str, float]) -> None:
        if row["step"] == 2:
            (pid,) = [pid for pid in host_b.workers() if "gen" in command_of(pid)]
            kill([pid])

    monkeypatch.setattr(ControlSocket, "receive", received)
    monkeypatch.setattr(HostLink, "_take", taken)
    two = tiny.run(graph, 4, name="two", pin=PIN, cluster=cluster, on_step=[kill_the_generator])
    require_same_numbers(two, one)
    row = metrics(two)[-1]
    assert min(row["edge/shm/bytes"], row["edge/zmq/bytes"], row["coordinator/bytes"]) > 0
    assert len(heard) > 50
    assert "Worker gen was lost" in (two.folder / "logs" / "coordinator.log").read_text()
    marker = MARKER.encode()
    assert not [frame for frame in heard if marker in frame]
    files = [path.read_bytes() for path in (two.folder / "samples").iterdir()]
    assert any(marker in file for file in files), "where rows are, it is"


@pytest.mark.long
def test_a_host_that_is_asked_to_stop_lets_the_run_end_its_step(
    graph: Graph, tiny: TinyRuns, tmp_path: Path
) -> None:
    """The run stops with a checkpoint and names the host, which stays until then and no longer."""
    cluster = cluster_file(tmp_path)
    with host(cluster) as host_b:
        asked = [lambda row: host_b.process.terminate() if row["step"] == 2 else None]
        result = tiny.run(graph, 100_000, pin=PIN, cluster=cluster, on_step=asked)
        assert (result.signal, result.reason) == (signal.SIGTERM, "host b was asked to stop")
        assert result.checkpoint == result.folder / "checkpoints" / f"step_{result.step}"
        assert host_b.process.wait(SOON) == 128 + signal.SIGTERM
    with host(cluster) as host_b:  # which serves nobody
        host_b.process.terminate()
        assert host_b.process.wait(SOON) == 128 + signal.SIGTERM


@pytest.mark.usefixtures("host_b")
def test_what_a_cluster_file_does_not_say_the_host_is_asked_for(
    graph: Graph, tiny: TinyRuns, cluster: Path
) -> None:
    planned = plan_of(graph, tiny.options(1, pin={"rollout": "gen@b"}, cluster=cluster))
    assert planned.cluster is not None
    assert planned.cluster.host("b").cores == len(os.sched_getaffinity(0))
    assert planned.hosts == {"main": "a", "gen": "b"}
    assert {edge.route for edge in planned.edges} == {"inproc", "zmq"}
