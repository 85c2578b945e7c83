"""Runs on several hosts, which are loopback addresses here: rows, deaths, errors, leases, and who
is let in.

tests/processes/test_namespaces.py has two hosts that are network namespaces.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zmq
from host_plans import Bomb, Closed, chunk, chunk_of, plan, refuses
from host_processes import HostProcess, cluster_file, host, with_lease
from run_graphs import vowels

from dataflow.errors import DataError, KernelError, RunError
from dataflow.graph import Graph
from engine.api import plan as planned
from engine.api import run
from engine.channels.zmq.curve_keys import CurveKeyPair as KeyPair
from engine.checkpoint.cut import read_rows
from engine.coordinator.messages import (
    ChunkDone,
    FetchFailed,
    From,
    Produced,
    Release,
    Reported,
    SourceOpened,
    WorkerLost,
    WorkerOpened,
)
from engine.launch import hostlink
from engine.launch.control_socket import ControlSocket
from engine.launch.hostlink import HostLink
from engine.launch.hosts import HostsWorkers
from engine.launch.keyfile import read_keys
from engine.launch.local import CONTROL_BYTES
from engine.observe.runfolder import RunFolder
from engine.options import RunOptions
from engine.plan.cluster import read_cluster
from engine.plan.plan import Plan
from engine.run.workers import Save
from graphs.grpo import grpo
from tests.kit.processes import children
from tests.kit.runs import metrics, timeless, weights

pytestmark = pytest.mark.timeout(240)
Start = Callable[..., contextlib.AbstractContextManager[HostsWorkers]]
SOON = 30.0
APART = {"source": "a", "host": "b"}
BACK = {"source": "b", "host": "a"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cluster_file(tmp_path_factory.mktemp("cluster"))


@pytest.fixture(scope="module")
def there(cluster: Path) -> Iterator[HostProcess]:
    """Host b, which serves one test after another."""
    with host(cluster) as found:
        yield found


@pytest.fixture
def start(tmp_path: Path, cluster: Path, there: HostProcess) -> Iterator[Start]:
    """Opens the Workers of a plan on hosts a and b; afterwards asserts that nothing of them is left
    here.
    """
    before = set(children())
    files = len(os.listdir("/proc/self/fd"))

    @contextlib.contextmanager
    def started(
        where: dict[str, str],
        made: Plan | None = None,
        *,
        lease: float = 10.0,
        name: str = "run",
        **how: bool,
    ) -> Iterator[HostsWorkers]:
        read = read_cluster(with_lease(cluster, lease, **how))
        spread = replace(made or plan(), cluster=read, hosts=where)
        with RunFolder.create(name, tmp_path) as folder:
            folder.write_text("plan.json", spread.to_json())
            workers = HostsWorkers(spread, folder, RunOptions())
            try:
                workers.opened = list(workers.open())  # type: ignore[attr-defined]
                yield workers
            finally:
                workers.close()

    yield started
    assert set(children()) <= before
    assert len(os.listdir("/proc/self/fd")) == files


def until(workers: HostsWorkers, *kinds: type) -> list[Any]:
    """What comes, without its wrapping, up to the first of one of these kinds."""
    found: list[Any] = []
    while not found or not isinstance(found[-1], kinds):
        event = workers.next(SOON)
        assert event is not None, f"nothing came after {found}"
        found.append(event.event if isinstance(event, From) else event)
    return found


def told_of_a_death(workers: HostsWorkers) -> WorkerLost:
    """What is told of a Worker that ends, however idle all of them are."""
    end = time.monotonic() + SOON
    while time.monotonic() < end:
        event = workers.next(SOON)
        if isinstance(event, WorkerLost):
            return event
        workers._changed.wait(0.2)
    pytest.fail("nobody told of it")


def made(workers: HostsWorkers, number: int = 1, rows: range = range(4)) -> Any:
    """A block of the source."""
    workers.tell(chunk(number, rows))
    reported, produced, _ = until(workers, ChunkDone)
    assert reported == Reported(
        id=number, worker="source", metrics=(("numbers/made", 1.0, float(len(rows))),)
    )
    return produced.ref


@pytest.mark.parametrize(
    "where,private", [(APART, False), (BACK, True)], ids=["from here", "to here, plainly"]
)
def test_rows_go_from_host_to_host(
    start: Start, where: dict[str, str], private: bool, tmp_path: Path
) -> None:
    began = time.monotonic()
    with start(where, private=private) as workers:
        told = [e.event for e in workers.opened]  # type: ignore[attr-defined]
        assert {type(e) for e in told} == {SourceOpened, WorkerOpened}
        assert {e.worker for e in told if isinstance(e, WorkerOpened)} == {"source", "host"}
        ref = made(workers)
        workers.tell(chunk_of(2, ref))
        produced, done = until(workers, ChunkDone)
        assert isinstance(produced, Produced)
        assert done.node == "doubled"
        gather = replace(
            chunk_of(3, produced.ref).inputs["prompt"][0], producer="doubled", columns=("reward",)
        )
        (tmp_path / "rows").mkdir()
        save = Save(directory=tmp_path, rows={"doubled": (ref.keys, gather)})
        assert workers.ask({"source": save, "host": Save(directory=tmp_path)}) == {
            "host": None,
            "source": None,
        }
        assert read_rows(tmp_path / "rows" / "doubled.arrow").flat("reward").tolist() == [
            0.0,
            2.0,
            4.0,
            6.0,
        ]
        for block in (ref, produced.ref):
            workers.tell(Release(worker=block.worker, blocks=(block.block,)))
        assert workers.next() is None
        assert not workers.busy
        reports = {name: value for name, value, _ in workers.reports()}
        assert {"time/doubled", "edge/zmq/bytes", CONTROL_BYTES} <= set(reports)
        assert reports["edge/zmq/bytes"] > 0
        assert "edge/shm/bytes" not in reports
        spans = workers.spans()
        assert {"source/numbers", "host/doubled"} <= {track for track, *_ in spans}
        assert all(
            began - 5.0 < begin <= end < time.monotonic() + 1.0 for _, _, begin, end in spans
        )
        assert {d.worker for d in workers.doing()} == {"source", "host"}


@pytest.mark.parametrize("where", [APART, BACK], ids=["the reader's", "the owner's"])
def test_a_worker_of_a_host_that_dies_is_begun_again(
    start: Start, there: HostProcess, where: dict[str, str]
) -> None:
    far, near = ("host", "source") if where is APART else ("source", "host")
    with start(where) as workers:
        old = made(workers)
        (pid,) = there.workers()
        os.kill(pid, signal.SIGKILL)
        lost = told_of_a_death(workers)
        assert (lost.worker, lost.epoch) == (far, 0)
        assert "SIGKILL" in lost.error
        workers.respawn([far])
        assert until(workers, WorkerOpened)[-1] == WorkerOpened(worker=far, epoch=1)
        workers.tell(chunk_of(3, old))
        if near == "host":
            began = time.monotonic()
            assert until(workers, FetchFailed)[-1].peer == "source"
            assert time.monotonic() - began < 5.0, (
                "word that it is gone came before the end of the lease"
            )
        else:
            assert isinstance(until(workers, ChunkDone)[0], Produced)
        new = made(workers, 4)
        workers.tell(chunk_of(5, new))
        assert isinstance(until(workers, ChunkDone)[0], Produced)


def test_an_error_of_another_host_arrives_as_what_it_was(start: Start) -> None:
    with start(APART, plan(refuses)) as workers:
        workers.tell(chunk_of(1, made(workers), node="refuses"))
        with pytest.raises(KernelError, match=r"refuses.*LookupError: nothing of the kind"):
            until(workers, ChunkDone)
    with (
        pytest.raises(DataError, match="closed today"),
        start(BACK, plan(source=f"host_plans:{Closed.__name__}"), name="2"),
    ):
        pytest.fail("it opened")


def test_a_run_folder_that_a_host_does_not_see(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunFolder, "write_text", lambda *_: None)
    with (
        pytest.raises(
            RunError, match=r"host b: expected the run folder .* share, found none\. Fix: "
        ),
        start(APART),
    ):
        pytest.fail("it opened")


def test_a_host_serves_one_run_at_a_time(start: Start) -> None:
    with (
        start(APART),
        pytest.raises(RunError, match=r"host b: .*within 3 s.*serves another run.*Fix: "),
        start(APART, lease=3.0, name="second"),
    ):
        pytest.fail("it opened")


@pytest.mark.long
def test_a_run_that_is_not_heard_of_is_ended_by_the_host(start: Start, there: HostProcess) -> None:
    with start(APART, lease=5.0) as workers:
        (pid,) = there.workers()
        handle = os.pidfd_open(pid)
        workers._remotes["b"].link.close()
        there.until("nothing was heard of the run", 15.0)
        assert select_one(handle, 15.0), "its Worker is there still"
        os.close(handle)


def select_one(handle: int, seconds: float) -> bool:
    """Whether a process, by its pidfd, ends in time."""
    poll = zmq.Poller()
    poll.register(handle, zmq.POLLIN)
    return bool(poll.poll(int(seconds * 1e3)))


@pytest.mark.long
def test_a_host_that_is_not_heard_of_fails_the_run(start: Start, there: HostProcess) -> None:
    with start(APART, lease=5.0) as workers:
        ref = made(workers)
        serving = there.serving
        handle = os.pidfd_open(serving)
        os.kill(serving, signal.SIGSTOP)
        workers.tell(chunk_of(2, ref))
        with pytest.raises(
            RunError, match=r"host b: not heard of for \d+ s \(the lease is 5 s\)\. Fix: "
        ):
            until(workers, ChunkDone)
    os.kill(serving, signal.SIGCONT)
    assert select_one(handle, 20.0), "it goes on"
    os.close(handle)


def test_a_host_that_is_not_there(
    start: Start, there: HostProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostlink, "endpoint", lambda _: "tcp://127.0.0.3:9")
    told = r"host b: expected an answer at .* within 2 s, found none\. Fix: dataflow host"
    with pytest.raises(RunError, match=told), start(APART, lease=2.0):
        pytest.fail("it opened")


# --- who is let in --------------------------------------------------------------------------------


def test_strangers_get_nothing(
    start: Start, cluster: Path, there: HostProcess, tmp_path: Path
) -> None:
    """At the host's port and at a Worker's: those without a key, with a wrong one, and who speak in
    a weaker way.
    """
    with start(APART) as workers, contextlib.ExitStack() as stack:
        read = read_cluster(cluster)
        control = (hostlink.endpoint(read.host("b")), read_keys(read.keys).host("b").public)
        ((_, data, _),) = workers._remotes["b"].told.endpoints
        poller = zmq.Poller()
        for endpoint, server in (control, (data, workers._networks["host"].public)):
            for kind in ("no key", "plain", "a wrong key"):
                asks = stack.enter_context(stranger(endpoint, server, kind))
                poller.register(asks, zmq.POLLIN)
                for frame in (pickle.dumps(Bomb("x")), b"", b"\x94\xc4\x00\x00\x00\xc4\x00" * 9):
                    asks.send(frame, zmq.NOBLOCK)
        assert not poller.poll(1500), "somebody answered"
        workers.tell(chunk_of(2, made(workers)))
        assert isinstance(until(workers, ChunkDone)[0], Produced), "and nobody is disturbed"
    there.until(f"{tmp_path / 'run'} has ended")
    assert int(there.until("\n").rpartition(":")[2]) >= 3, "each was counted"


@contextlib.contextmanager
def stranger(endpoint: str, server: bytes, kind: str) -> Iterator[zmq.Socket]:
    """Somebody who connects without being of the run."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    if kind == "a wrong key":
        own = KeyPair.make()
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


# --- a whole run ----------------------------------------------------------------------------------

MARKER = "zqzqzqzq"


def graph(folder: Path) -> Graph:
    """GRPO on prompts that carry a text which nothing else has."""
    return grpo(
        str(folder / "model"),
        str(folder / "marked.parquet"),
        vowels,
        n=4,
        batch=4,
        max_tokens=6,
        lr=1e-3,
    )


@pytest.fixture(scope="module")
def marked(tiny: Path) -> Path:
    """`tiny`, with the prompts of `graph`."""
    asked = [MARKER + a + b for a in "abcdefgh" for b in "xyz"]
    pq.write_table(pa.table({"prompt": asked}), tiny / "marked.parquet")
    return tiny


def kill_once(there: HostProcess, row: Mapping[str, float]) -> None:
    """Kill the Worker that generates, after the second Step."""
    if row["step"] == 2:
        (pid,) = [
            p
            for p in there.workers()
            if b"gen" in Path(f"/proc/{p}/cmdline").read_bytes().split(b"\0")
        ]
        os.kill(pid, signal.SIGKILL)


@pytest.mark.long
def test_a_run_on_two_hosts(
    marked: Path,
    cluster: Path,
    there: HostProcess,
    options: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bits of one process, although a Worker of the other host dies; rows by both routes, and
    none through the coordinator.
    """
    one = run(graph(marked), options(4, name="one"))
    heard: list[bytes] = []
    receive, take = ControlSocket.receive, HostLink._take

    def received(link: ControlSocket) -> Any:
        frames = receive(link)
        heard.extend(frame.payload for frame in frames or ())
        return frames

    def taken(link: HostLink, data: bytes) -> bool:
        heard.append(data)
        return take(link, data)

    monkeypatch.setattr(ControlSocket, "receive", received)
    monkeypatch.setattr(HostLink, "_take", taken)
    pin = {"rollout": "gen@b", "score": "ops@b", "train_policy": "train"}
    two = run(
        graph(marked),
        options(4, name="two", pin=pin, cluster=cluster),
        on_step=[lambda row: kill_once(there, row)],
    )
    assert timeless(metrics(two.folder)) == timeless(metrics(one.folder))
    assert weights(two) == weights(one)
    row = metrics(two.folder)[-1]
    assert min(row["edge/shm/bytes"], row["edge/zmq/bytes"], row["coordinator/bytes"]) > 0
    assert len(heard) > 50
    assert "Worker gen was lost" in (two.folder / "logs" / "coordinator.log").read_text()
    marker = MARKER.encode()
    assert not [frame for frame in heard if marker in frame]
    assert any(marker in path.read_bytes() for path in (two.folder / "samples").iterdir()), (
        "where rows are, it is"
    )


@pytest.mark.long
def test_a_host_that_is_asked_to_stop_lets_the_run_end_its_step(
    marked: Path, tmp_path: Path, options: Callable[..., Any]
) -> None:
    """The run stops with a checkpoint and says which host it was; the host is there until then, and
    not longer.
    """
    cluster = cluster_file(tmp_path)
    with host(cluster) as there:
        pin = {"rollout": "gen@b", "score": "ops@b", "train_policy": "train"}
        asked = [lambda row: there.process.terminate() if row["step"] == 2 else None]
        found = run(graph(marked), options(100_000, pin=pin, cluster=cluster), on_step=asked)
        assert (found.signal, found.reason) == (signal.SIGTERM, "host b was asked to stop")
        assert found.checkpoint == found.folder / "checkpoints" / f"step_{found.step}"
        assert there.process.wait(SOON) == 128 + signal.SIGTERM
    with host(cluster) as there:  # which serves nobody
        there.process.terminate()
        assert there.process.wait(SOON) == 128 + signal.SIGTERM


def test_what_a_cluster_file_does_not_say_the_host_is_asked_for(
    marked: Path, cluster: Path, there: HostProcess, options: Callable[..., Any]
) -> None:
    made = planned(graph(marked), options(1, pin={"rollout": "gen@b"}, cluster=cluster))
    assert made.cluster is not None
    assert made.cluster.host("b").cores == len(os.sched_getaffinity(0))
    assert made.hosts == {"main": "a", "gen": "b"}
    assert {edge.route for edge in made.edges} == {"inproc", "zmq"}
