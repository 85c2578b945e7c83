"""The Supervisor and its Workers' processes: instructions, their ends, nothing left."""

from __future__ import annotations

import os
import pickle
import re
import resource
import select
import selectors
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dataflow.batch import Batch, Keys
from dataflow.errors import DataError, KernelError, RunError
from dataflow.schema import Prompt
from dataflow.user import OperatorDeclaration
from engine.keep.checkpoint.cut import write_waiting_rows
from engine.plan.plan import Plan
from engine.protocol import messages as m
from engine.protocol.reports import FLOW
from engine.protocol.workers import KeepRows, Save, WorkerGone
from engine.run.control.control import Open
from engine.run.control.wire import encode_message
from engine.run.launch.supervisor import CONTROL_BYTES, Supervisor
from engine.run.worker.timing import ENGINE
from operators.kernels.scoring_process import Children
from tests.kit import host_plans
from tests.kit.nothing_left import descriptors
from tests.kit.processes import await_stopped, kill
from tests.kit.supervisors import Start

pytestmark = pytest.mark.timeout(180)
SOON = 20.0


def kill_worker(supervisor: Supervisor, worker: str) -> m.WorkerLost:
    """Kill a Worker; returns its loss, which is reported once."""
    os.kill(supervisor.pids()[worker], signal.SIGKILL)
    return await_loss(supervisor, worker)


def respawned(supervisor: Supervisor, worker: str, epoch: int) -> None:
    """Begin it again, and wait until it is open."""
    supervisor.respawn([worker])
    assert supervisor.busy
    opened = host_plans.until(supervisor, m.WorkerOpened)
    assert opened == [m.WorkerOpened(worker=worker, epoch=epoch)]


def await_loss(supervisor: Supervisor, worker: str) -> m.WorkerLost:
    """The event of a Worker that ends, even an idle one."""
    assert supervisor._io.children[worker].over.wait(SOON)
    death = host_plans.until(supervisor, m.WorkerLost)[-1]
    assert death.worker == worker
    assert supervisor.next(0.1) is None, "the end was told of twice"
    return death


def tell_operator(supervisor: Supervisor, node: str) -> None:
    """Give it a block of the source."""
    supervisor.tell(host_plans.chunk_of(1, host_plans.produced_block(supervisor), node=node))


def log(supervisor: Supervisor, worker: str) -> str:
    return supervisor._folder.log(worker).read_text()


def test_rows_go_from_worker_to_worker(start: Start) -> None:
    with start(host_plans.plan()) as supervisor:
        events = [each.event for each in supervisor.wait_until_open]  # type: ignore[attr-defined]
        assert {type(event) for event in events} == {m.SourceOpened, m.WorkerOpened}
        # Not with the next heartbeat, before which a short run ends.
        assert f"{FLOW}memory/host" in [name for name, *_ in supervisor.reports()]
        ref = host_plans.produced_block(supervisor)
        assert (ref.worker, ref.keys.position.tolist()) == ("source", [0, 1, 2, 3])
        assert len(ref.digest) == 4
        supervisor.tell(host_plans.chunk_of(2, ref))
        produced, done = host_plans.until(supervisor, m.ChunkDone)
        assert isinstance(produced, m.Produced)
        assert done == m.ChunkDone(id=2, node="doubled", seconds=done.seconds)
        supervisor.tell(m.Release(worker="source", blocks=(ref.block,)))
        supervisor.tell(m.Release(worker="host", blocks=(produced.ref.block,)))
        assert supervisor.next() is None
        assert not supervisor.busy
        reports = {name for name, _, _ in supervisor.reports()}
        assert {"time/numbers", "time/doubled", "edge/shm/bytes", CONTROL_BYTES} <= reports
        assert {"source/numbers", "host/doubled"} <= {span.track for span in supervisor.spans()}
        assert {name for name, _, _ in supervisor.reports()} <= {CONTROL_BYTES, ENGINE}
        assert "doubling 4 rows" in log(supervisor, "host")
    assert "numbers closed" in log(supervisor, "source")


def test_rows_from_a_file_and_rows_to_a_file(start: Start, tmp_path: Path) -> None:
    keys = Keys.of([5, 6])
    write_waiting_rows(tmp_path / "numbers.arrow", Batch.make(keys, {"prompt": ["5", "6"]}, Prompt))
    with start(host_plans.plan()) as supervisor:
        ref = supervisor.ask({"source": KeepRows(file=tmp_path / "numbers.arrow")})["source"]
        assert ref.keys.position.tolist() == [5, 6]
        (tmp_path / "rows").mkdir()
        save = Save(directory=tmp_path, rows={"numbers": (keys, host_plans.gathered(ref))})
        assert supervisor.ask({"host": save}) == {"host": None}
        assert (tmp_path / "rows" / "numbers.arrow").is_file()


@pytest.mark.usefixtures("own_interpreters")
def test_a_process_has_its_threads_from_its_start(start: Start) -> None:
    """Torch reads them once, as it is imported."""
    with start(host_plans.plan(threads=3)) as supervisor:
        environment = Path(f"/proc/{supervisor.pids()['host']}/environ").read_bytes()
        assert b"OMP_NUM_THREADS=3" in environment.split(b"\0")


def test_an_error_arrives_as_what_it_was(start: Start) -> None:
    with start(host_plans.plan(host_plans.refuses)) as supervisor:
        tell_operator(supervisor, "refuses")
        with pytest.raises(KernelError) as caught:
            host_plans.until(supervisor, m.ChunkDone)
        for part in ("refuses", "(0, 0, 0)", "LookupError: nothing of the kind", "host_plans.py"):
            assert part in str(caught.value)
        with pytest.raises(KernelError):
            supervisor.ask({"source": Save(directory=Path("nowhere"))})


CLOSED = host_plans.plan(source=host_plans.ClosedToday)
NOT_STARTED = r"worker source: expected its process to start.*Fix: "
LOCKED = replace(host_plans.plan(), notes=(threading.Lock(),))  # type: ignore[arg-type]


@pytest.mark.parametrize("planned,executable,kind,told", [
    (CLOSED, sys.executable, DataError, "numbers: closed today"),
    (host_plans.plan(), "/nowhere/python", RunError, NOT_STARTED),
    (LOCKED, sys.executable, RunError, r"cannot be sent to another process.*lock"),
], ids=["a kernel refuses", "no process can start", "a plan that cannot be sent"])  # fmt: skip
def test_what_cannot_open_says_why(
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    planned: Plan,
    executable: str,
    kind: type[Exception],
    told: str,
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(kind, match=told), start(planned):
        pytest.fail("it opened")


def test_a_worker_that_is_killed_is_told_of_once_and_begins_again(start: Start) -> None:
    with start(host_plans.plan()) as supervisor:
        old = host_plans.produced_block(supervisor)
        supervisor.tell(host_plans.chunk_of(2, old))
        host_plans.until(supervisor, m.ChunkDone)
        death = kill_worker(supervisor, "source")
        assert death.epoch == 0
        assert "was killed by SIGKILL" in death.error
        supervisor.tell(host_plans.chunk_of(3, old))
        missing = host_plans.until(supervisor, m.FetchFailed)[0]
        assert (missing.peer, missing.id) == ("source", 3)
        with pytest.raises(WorkerGone, match="source"):
            supervisor.ask({"source": Save(directory=Path("nowhere"))})

        supervisor.respawn(["source"])
        opened = host_plans.until(supervisor, m.WorkerOpened)[-1]
        assert opened == m.WorkerOpened(worker="source", epoch=1)
        new = host_plans.produced_block(supervisor, 4)
        assert new.block == 1 << 32
        assert new.digest.tolist() == old.digest.tolist()
        supervisor.tell(host_plans.chunk_of(5, new))
        assert isinstance(host_plans.until(supervisor, m.ChunkDone)[0], m.Produced)
        supervisor.tell(host_plans.chunk_of(6, old))  # a block of the incarnation that is gone
        assert host_plans.until(supervisor, m.FetchFailed)[0].id == 6


def test_who_is_asked_before_it_reads_its_first_word_answers(start: Start, tmp_path: Path) -> None:
    with start(host_plans.plan()) as supervisor:
        supervisor.respawn(["host"])
        assert supervisor.ask({"host": Save(directory=tmp_path)}) == {"host": None}
        assert isinstance(host_plans.until(supervisor, m.WorkerOpened)[-1], m.WorkerOpened)


class EndsFirst(selectors.DefaultSelector):
    """Tells of the link and the end of a process that dies at once, the end before the link."""

    killed = 0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(timeout)
        for key, _ in ready:
            if key.data is not None and self.killed == key.data[1].process.pid:
                select.select([key.data[1].ends], [], [], SOON)
                later = lambda each: each[0].data[0].__name__ != "_on_end"
                return sorted(super().select(0), key=later)
        return ready


def test_a_death_may_be_told_of_before_what_was_said_last(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selectors.DefaultSelector", EndsFirst)
    with start(host_plans.plan()) as supervisor:
        count = descriptors()
        monkeypatch.setattr(EndsFirst, "killed", supervisor.pids()["host"])
        kill_worker(supervisor, "host")
        respawned(supervisor, "host", 1)
        assert descriptors() == count


@pytest.mark.long
def test_a_spare_worker_joins_leaves_and_joins_again(start: Start) -> None:
    """Whatever it does, its end is no loss; a kernel that never ends is killed."""
    planned = replace(host_plans.plan(host_plans.hangs), spare=("host",))
    with start(planned) as supervisor:
        assert supervisor.pids().keys() == {"source"}
        respawned(supervisor, "host", 0)
        tell_operator(supervisor, "hangs")
        first = supervisor._io.children["host"]
        supervisor.retire(["host"])
        assert first.over.wait(SOON)
        assert supervisor.next() is None
        assert [each.worker for each in supervisor.doing()] == ["source"]
        respawned(supervisor, "host", 1)
        supervisor.retire(["host"])
        respawned(supervisor, "host", 2)  # before it has ended


@pytest.mark.long
def test_a_worker_that_does_not_end_when_it_leaves_is_killed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.run.launch.supervisor.GRACE", 0.0)
    with start(host_plans.plan()) as supervisor:
        child = supervisor._io.children["host"]
        kill([child.process.pid], signal.SIGSTOP)
        supervisor.retire(["host"])
        assert supervisor.next(0.1) is None
        assert child.over.wait(SOON)
        assert supervisor.next(0.1) is None


def test_a_live_worker_can_be_begun_again(start: Start) -> None:
    """What is killed on purpose is not told of as lost."""
    with start(host_plans.plan(host_plans.hangs)) as supervisor:
        tell_operator(supervisor, "hangs")
        first = supervisor.pids()
        respawned(supervisor, "host", 1)
        assert supervisor.next() is None
        assert supervisor.pids()["source"] == first["source"]
        assert supervisor.pids()["host"] != first["host"]


@pytest.mark.long
def test_a_worker_that_stands_still_is_killed(start: Start) -> None:
    with start(host_plans.plan(host_plans.hangs), heartbeat=3.0) as supervisor:
        ref, source = host_plans.produced_block(supervisor), supervisor.pids()["source"]
        os.kill(source, signal.SIGSTOP)
        await_stopped(source)  # else it may still answer
        supervisor.tell(host_plans.chunk_of(1, ref, node="hangs"))
        # host waits for the source's answer, and hears its end, too
        ends: dict[type, Any] = {}
        while not {m.WorkerLost, m.FetchFailed} <= ends.keys():
            event = host_plans.until(supervisor, m.WorkerLost, m.FetchFailed)[-1]
            ends[type(event)] = event
        assert ends[m.WorkerLost].worker == ends[m.FetchFailed].peer == "source"
        assert "nothing was heard of it for" in ends[m.WorkerLost].error


def test_what_hangs_is_named_and_closed(start: Start) -> None:
    # a heartbeat comes each second, whatever a kernel does
    with start(host_plans.plan(host_plans.hangs), heartbeat=2.5) as supervisor:
        ref = host_plans.produced_block(supervisor)
        for number in (2, 3, 4):
            supervisor.tell(host_plans.chunk_of(number, ref, node="hangs"))
        assert supervisor.next(3.0) is None
        host = next(each for each in supervisor.doing() if each.worker == "host")
        assert (host.node, host.what) == ("hangs", "chunk 2, 4 rows")
        supervisor.forget()
        assert supervisor.next(0.5) is None
        assert supervisor.busy, "the chunk that runs was forgotten"
        assert supervisor._io.children["host"].ended == 2


@pytest.mark.long
def test_who_stood_still_does_not_count_the_silence_of_others(start: Start) -> None:
    with start(host_plans.plan()) as supervisor:
        with supervisor._io.changed:
            for child in supervisor._io.children.values():
                child.heard -= 100.0
            supervisor._io.look_for_silence(time.monotonic() - 50.0)
        assert len(host_plans.produced_block(supervisor).keys) == 4


@pytest.mark.long
@pytest.mark.parametrize("operator,told", [
    (host_plans.dies, ["ended with exit code 7", "about to die"]),
    (host_plans.garbles, ["no message"]),
], ids=["ends its process", "sends a pickle"])  # fmt: skip
def test_the_loss_of_a_worker_says_what_its_kernel_did(
    start: Start, operator: OperatorDeclaration, told: list[str]
) -> None:
    with start(host_plans.plan(operator)) as supervisor:
        tell_operator(supervisor, operator.operator.name)
        error = host_plans.until(supervisor, m.WorkerLost)[-1].error
        assert [part for part in told if part not in error] == []


def test_a_kernel_that_calls_exit_has_failed(start: Start) -> None:
    with start(host_plans.plan(host_plans.exits)) as supervisor:
        tell_operator(supervisor, "exits")
        with pytest.raises(KernelError, match=r"(?s)exits: .*raised SystemExit: 7.*host_plans.py"):
            host_plans.until(supervisor, m.WorkerLost)
        assert "about to leave" in log(supervisor, "host")


@pytest.mark.long
def test_what_holds_the_interpreters_lock_is_killed_and_named(start: Start) -> None:
    with start(host_plans.plan(host_plans.holds), heartbeat=2.5) as supervisor:
        tell_operator(supervisor, "holds")
        error = host_plans.until(supervisor, m.WorkerLost)[-1].error
        assert "nothing was heard of it for" in error
        assert "or is in code that holds the interpreter's lock" in error
        assert re.search(r"(?m)it stood at:\s+.*/re/(.|\n)*host_plans\.py.* in holds$", error)


def test_descriptors_may_have_any_number(start: Start) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with start(host_plans.plan()) as supervisor:
            assert supervisor._io.children["host"].link.fileno() > 1023
            tell_operator(supervisor, "doubled")
            host_plans.until(supervisor, m.ChunkDone)
        functions = Children(["f"], [lambda completions: [1.0]], 20.0)
        records = pa.RecordBatch.from_pydict({"completion": ["x"]})
        assert functions.score({0: records})[0].values == [1.0]
        functions.close()
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


BOMB = pickle.dumps(host_plans.PickleBomb("x"))


@pytest.mark.parametrize("frame", [
    BOMB, encode_message(Open(worker="host", epoch=0, plan=BOMB, outbox=1 << 20)),
], ids=["bare", "as a plan, a second time"])  # fmt: skip
def test_a_pickle_to_a_worker_is_refused(start: Start, frame: bytes) -> None:
    with start(host_plans.plan()) as supervisor:
        supervisor._io.children["host"].link.send(frame)
        error = await_loss(supervisor, "host").error
        assert "exit code 1" in error
        assert "expected one of the table" in error


def test_ctrl_c_does_not_end_a_worker(start: Start) -> None:
    with start(host_plans.plan()) as supervisor:
        kill(supervisor.pids().values(), signal.SIGINT)
        assert len(host_plans.produced_block(supervisor).keys) == 4
