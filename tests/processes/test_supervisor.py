"""The Supervisor and its Workers' processes: what they are told, how they end, and that nothing of
them is left.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import resource
import select
import selectors
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from host_plans import (
    Bomb,
    chunk,
    chunk_of,
    dies,
    environment,
    exits,
    garbles,
    hangs,
    holds,
    plan,
    refuses,
)

from dataflow.batch import Batch, Keys
from dataflow.errors import DataError, KernelError, RunError
from dataflow.schema import Prompt
from engine.checkpoint.cut import read_rows, write_rows
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
from engine.launch.control import Open
from engine.launch.local import CONTROL_BYTES, Supervisor
from engine.launch.wire import encode
from engine.observe.runfolder import RunFolder
from engine.options import RunOptions
from engine.plan.plan import Plan
from engine.run.workers import KeepRows, Save, WorkerGone
from operators.kernels.scoring_process import Children
from tests.kit.processes import ROOT, children

pytestmark = pytest.mark.timeout(180)
Start = Callable[..., contextlib.AbstractContextManager[Supervisor]]
SOON = 20.0
MARK = "DATAFLOW_TEST_MARK"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Opens a Supervisor; afterwards asserts that no process, no descriptor and no name of it is
    left.
    """
    before = descriptors()
    names = set(os.listdir("/dev/shm"))

    @contextlib.contextmanager
    def started(
        planned: Plan, *, opened: list[Any] | None = None, **options: Any
    ) -> Iterator[Supervisor]:
        with RunFolder.create("run", tmp_path) as folder:
            supervisor = Supervisor(planned, folder, RunOptions(**options))
            try:
                events = list(supervisor.open())
                if opened is not None:
                    opened += events
                yield supervisor
            finally:
                supervisor.close()

    yield started
    assert not children()
    assert descriptors() == before
    assert set(os.listdir("/dev/shm")) == names
    assert not [p for p in tmp_path.rglob("*") if p.is_socket() or p.is_fifo()]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def until(supervisor: Supervisor, *kinds: type) -> list[Any]:
    """What comes, without its wrapping, up to the first of one of these kinds."""
    found: list[Any] = []
    while not found or not isinstance(found[-1], kinds):
        event = supervisor.next(SOON)
        assert event is not None, f"nothing came after {found}"
        found.append(event.event if isinstance(event, From) else event)
    return found


def kill(supervisor: Supervisor, worker: str) -> WorkerLost:
    """Kill a Worker; what is told of it, and that it is told once."""
    os.kill(supervisor.pids()[worker], signal.SIGKILL)
    return lost(supervisor, worker)


def lost(supervisor: Supervisor, worker: str) -> WorkerLost:
    """What is told of a Worker that ends, however idle it was."""
    assert supervisor._children[worker].over.wait(SOON)
    found = until(supervisor, WorkerLost)[-1]
    assert found.worker == worker
    assert supervisor.next(0.1) is None, "the end was told of twice"
    return found


def made(supervisor: Supervisor, number: int = 1, rows: range = range(4)) -> Any:
    """A block of the source."""
    supervisor.tell(chunk(number, rows))
    reported, produced, _ = until(supervisor, ChunkDone)
    assert reported == Reported(
        id=number, worker="source", metrics=(("numbers/made", 1.0, float(len(rows))),)
    )
    return produced.ref


def ended(pid: int, seconds: float) -> bool:
    """Whether a process (no child of ours) ends in time."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with os.fdopen(handle) as opened:
        return bool(select.select([opened], [], [], seconds)[0])


def log(supervisor: Supervisor, worker: str) -> str:
    return supervisor._folder.log(worker).read_text()


def test_rows_go_from_worker_to_worker(start: Start) -> None:
    opened: list[Any] = []
    with start(plan(), opened=opened) as supervisor:
        told = [e.event for e in opened]
        assert {type(e) for e in told} == {SourceOpened, WorkerOpened}
        assert {e.worker for e in told if isinstance(e, WorkerOpened)} == {"source", "host"}
        ref = made(supervisor)
        assert (ref.worker, ref.keys.position.tolist(), len(ref.digest)) == (
            "source",
            [0, 1, 2, 3],
            4,
        )
        supervisor.tell(chunk_of(2, ref))
        produced, done = until(supervisor, ChunkDone)
        assert isinstance(produced, Produced)
        assert done == ChunkDone(id=2, node="doubled")
        supervisor.tell(Release(worker="source", blocks=(ref.block,)))
        supervisor.tell(Release(worker="host", blocks=(produced.ref.block,)))
        assert supervisor.next() is None
        assert not supervisor.busy
        reports = {name for name, _, _ in supervisor.reports()}
        assert {"time/numbers", "time/doubled", "edge/shm/bytes", CONTROL_BYTES} <= reports
        assert {"source/numbers", "host/doubled"} <= {track for track, *_ in supervisor.spans()}
        assert {name for name, _, _ in supervisor.reports()} <= {CONTROL_BYTES}
        assert "doubling 4 rows" in log(supervisor, "host")
    assert "numbers closed" in log(supervisor, "source")


def test_rows_from_a_file_and_rows_to_a_file(start: Start, tmp_path: Path) -> None:
    keys = Keys.of([5, 6])
    write_rows(tmp_path / "numbers.arrow", Batch.make(keys, {"prompt": ["5", "6"]}, Prompt))
    with start(plan()) as supervisor:
        ref = supervisor.ask({"source": KeepRows(file=tmp_path / "numbers.arrow")})["source"]
        assert ref.keys.position.tolist() == [5, 6]
        gather = chunk_of(1, ref).inputs["prompt"][0]
        (tmp_path / "rows").mkdir()
        save = Save(directory=tmp_path, rows={"numbers": (keys, gather)})
        assert supervisor.ask({"host": save, "source": Save(directory=tmp_path)}) == {
            "host": None,
            "source": None,
        }
        assert (tmp_path / "rows" / "numbers.arrow").is_file()


def test_threads_are_in_the_environment_before_torch_can_be(start: Start) -> None:
    with start(plan(environment, threads=3)) as supervisor:
        supervisor.tell(chunk_of(1, made(supervisor), node="environment"))
        ref = until(supervisor, ChunkDone)[0].ref
        back = supervisor._folder.path / "back"
        (back / "rows").mkdir(parents=True)
        gather = chunk_of(2, ref).inputs["prompt"][0]
        gather = type(gather)(
            producer="environment",
            columns=("reward",),
            refs=gather.refs,
            block=gather.block,
            row=gather.row,
        )
        supervisor.ask({"source": Save(directory=back, rows={"environment": (ref.keys, gather)})})
        assert read_rows(back / "rows" / "environment.arrow").flat("reward").tolist()[:2] == [
            3.0,
            0.0,
        ]


def test_an_error_arrives_as_what_it_was(start: Start) -> None:
    with start(plan(refuses)) as supervisor:
        supervisor.tell(chunk_of(1, made(supervisor), node="refuses"))
        with pytest.raises(KernelError) as caught:
            until(supervisor, ChunkDone)
        for part in ("refuses", "(0, 0, 0)", "LookupError: nothing of the kind", "host_plans.py"):
            assert part in str(caught.value), part
        with pytest.raises(KernelError):
            supervisor.ask({"source": Save(directory=Path("nowhere"))})


def test_a_kernel_that_refuses_to_open(start: Start) -> None:
    with (
        pytest.raises(DataError, match="numbers: closed today"),
        start(plan(source="host_plans:Closed")),
    ):
        pytest.fail("it opened")


def test_a_worker_that_is_killed_is_told_of_once_and_begins_again(start: Start) -> None:
    with start(plan()) as supervisor:
        old = made(supervisor)
        supervisor.tell(chunk_of(2, old))
        until(supervisor, ChunkDone)
        end = kill(supervisor, "source")
        assert end.epoch == 0
        assert "was killed by SIGKILL" in end.error
        supervisor.tell(chunk_of(3, old))
        missing = until(supervisor, FetchFailed)[0]
        assert (missing.peer, missing.id) == ("source", 3)
        with pytest.raises(WorkerGone, match="source"):
            supervisor.ask({"source": Save(directory=Path("nowhere"))})

        supervisor.respawn(["source"])
        assert supervisor.busy
        assert until(supervisor, WorkerOpened)[-1] == WorkerOpened(worker="source", epoch=1)
        new = made(supervisor, 4)
        assert new.block == 1 << 32
        assert new.digest.tolist() == old.digest.tolist()
        supervisor.tell(chunk_of(5, new))
        assert isinstance(until(supervisor, ChunkDone)[0], Produced)
        supervisor.tell(chunk_of(6, old))
        assert until(supervisor, FetchFailed)[0].id == 6, "a block of the incarnation that is gone"


def test_who_is_asked_before_it_reads_its_first_word_answers(start: Start, tmp_path: Path) -> None:
    with start(plan()) as supervisor:
        supervisor.respawn(["host"])
        assert supervisor.ask({"host": Save(directory=tmp_path)}) == {"host": None}
        assert isinstance(until(supervisor, WorkerOpened)[-1], WorkerOpened)


class EndsFirst(selectors.DefaultSelector):
    """Tells of the link and the end of a process that dies at once, the end before the link."""

    def select(self, timeout: float | None = None) -> list[Any]:
        found = super().select(timeout)
        for key, _ in found:
            if key.data is not None and self.killed == key.data[1].process.pid:
                select.select([key.data[1].ends], [], [], SOON)
                return sorted(
                    super().select(0), key=lambda each: each[0].data[0].__name__ != "_on_end"
                )
        return found

    killed = 0


def test_a_death_may_be_told_of_before_what_was_said_last(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selectors.DefaultSelector", EndsFirst)
    with start(plan()) as supervisor:
        monkeypatch.setattr(EndsFirst, "killed", supervisor.pids()["host"])
        kill(supervisor, "host")
        supervisor.respawn(["host"])
        assert isinstance(until(supervisor, WorkerOpened)[-1], WorkerOpened)


def test_a_live_worker_can_be_begun_again(start: Start) -> None:
    """What is killed on purpose is not told of as lost."""
    with start(plan(hangs)) as supervisor:
        supervisor.tell(chunk_of(1, made(supervisor), node="hangs"))
        first = supervisor.pids()
        supervisor.respawn(["host"])
        assert until(supervisor, WorkerOpened) == [WorkerOpened(worker="host", epoch=1)]
        assert supervisor.next() is None
        assert supervisor.pids()["source"] == first["source"]
        assert supervisor.pids()["host"] != first["host"]


@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)]
)
def test_kills_at_random_moments_of_traffic(start: Start, seed: int) -> None:
    """Rows go round and round; each end is told once, no event of another incarnation comes, none
    is missing.
    """
    draw = random.Random(seed)
    with start(plan()) as supervisor:
        epochs, heard = {"source": 0, "host": 0}, {"source": 2, "host": 1}
        count = descriptors()
        for number in range(1, 7):
            supervisor.tell(chunk(number, range(8)))
            for _ in range(draw.randrange(40)):
                around(supervisor, supervisor.next(SOON), epochs, heard)
            worker = draw.choice(["source", "host"])
            os.kill(supervisor.pids()[worker], signal.SIGKILL)
            while not isinstance(event := supervisor.next(0.2), WorkerLost):
                around(supervisor, event, epochs, heard)
            assert (event.worker, event.epoch) == (worker, epochs[worker])
            supervisor.respawn([worker])
            epochs[worker], heard[worker] = epochs[worker] + 1, 0
            while (event := supervisor.next(SOON)) is not None:
                around(supervisor, event, epochs, heard, goes_on=False)
            assert descriptors() == count


def around(
    supervisor: Supervisor,
    event: Any,
    epochs: dict[str, int],
    heard: dict[str, int],
    *,
    goes_on: bool = True,
) -> None:
    """Check an event's number; rows of one node are given to the other."""
    if event is None:
        return
    assert (event.epoch, event.number) == (epochs[event.worker], heard[event.worker])
    heard[event.worker] += 1
    if goes_on and isinstance(made := event.event, Produced):
        supervisor.tell(
            chunk_of(made.id, made.ref) if made.node == "numbers" else chunk(made.id, range(8))
        )


def test_a_worker_that_stands_still_is_killed(start: Start) -> None:
    with start(plan(hangs), heartbeat=3.0) as supervisor:
        ref = made(supervisor)
        os.kill(supervisor.pids()["source"], signal.SIGSTOP)
        os.waitid(
            os.P_PID, supervisor.pids()["source"], os.WSTOPPED | os.WNOWAIT
        )  # else it may still answer
        supervisor.tell(chunk_of(1, ref, node="hangs"))
        heard = until(
            supervisor, WorkerLost, FetchFailed
        )  # host waits for the source's answer, and hears its end, too
        heard += until(supervisor, *({WorkerLost, FetchFailed} - {type(heard[-1])}))
        ends = {type(event): event for event in heard}
        assert ends[WorkerLost].worker == ends[FetchFailed].peer == "source"
        assert "nothing was heard of it for" in ends[WorkerLost].error


def test_what_hangs_is_named_and_closed(start: Start) -> None:
    with start(
        plan(hangs), heartbeat=2.5
    ) as supervisor:  # a heartbeat comes each second, whatever a kernel does
        ref = made(supervisor)
        for number in (2, 3, 4):
            supervisor.tell(chunk_of(number, ref, node="hangs"))
        assert supervisor.next(3.0) is None
        host = next(each for each in supervisor.doing() if each.worker == "host")
        assert (host.node, host.what) == ("hangs", "chunk 2, 4 rows")
        supervisor.forget()
        assert supervisor.next(0.5) is None
        assert supervisor.busy, "the chunk that runs was forgotten"
        assert supervisor._children["host"].ended == 2


def test_who_stood_still_does_not_count_the_silence_of_others(start: Start) -> None:
    with start(plan()) as supervisor:
        with supervisor._changed:
            for child in supervisor._children.values():
                child.heard -= 100.0
            supervisor._look_for_silence(time.monotonic() - 50.0)
        assert len(made(supervisor).keys) == 4


def test_a_process_that_cannot_start(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with (
        pytest.raises(RunError, match=r"worker source: expected its process to start.*Fix: "),
        start(plan()),
    ):
        pytest.fail("it opened")


def test_a_kernel_that_ends_its_process(start: Start) -> None:
    with start(plan(dies)) as supervisor:
        supervisor.tell(chunk_of(1, made(supervisor), node="dies"))
        end = until(supervisor, WorkerLost)[-1]
        assert "ended with exit code 7" in end.error
        assert "about to die" in end.error


def test_a_kernel_that_calls_exit_has_failed(start: Start) -> None:
    with start(plan(exits)) as supervisor:
        supervisor.tell(chunk_of(1, made(supervisor), node="exits"))
        with pytest.raises(KernelError, match=r"(?s)exits: .*raised SystemExit: 7.*host_plans.py"):
            until(supervisor, WorkerLost)
        assert "about to leave" in log(supervisor, "host")


def test_what_holds_the_interpreters_lock_is_killed_and_named(start: Start) -> None:
    with start(plan(holds), heartbeat=2.5) as supervisor:
        supervisor.tell(chunk_of(1, made(supervisor), node="holds"))
        error = until(supervisor, WorkerLost)[-1].error
        assert "nothing was heard of it for" in error
        assert ", in holds" in error
        assert "or is in code that holds the interpreter's lock" in error
        first, *rest = error.partition("it stood at:")[2].strip().splitlines()
        assert "/re/" in first
        assert any("host_plans.py" in line and line.endswith("in holds") for line in rest)


def test_descriptors_may_have_any_number(start: Start) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with start(plan()) as supervisor:
            assert supervisor._children["host"].link.fileno() > 1023
            supervisor.tell(chunk_of(2, made(supervisor), node="doubled"))
            until(supervisor, ChunkDone)
        children_ = Children(["f"], [lambda completions: [1.0]], 20.0)
        assert children_.score({0: pa.RecordBatch.from_pydict({"completion": ["x"]})})[
            0
        ].values == [1.0]
        children_.close()
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_pickle_from_a_worker_is_refused(start: Start) -> None:
    with start(plan(garbles)) as supervisor:
        supervisor.tell(chunk_of(1, made(supervisor), node="garbles"))
        assert "no message" in until(supervisor, WorkerLost)[-1].error


@pytest.mark.parametrize(
    "frame",
    [
        pickle.dumps(Bomb("x")),
        encode(Open(worker="host", epoch=0, plan=pickle.dumps(Bomb("x")), outbox=1 << 20)),
    ],
    ids=["bare", "as a plan, a second time"],
)
def test_a_pickle_to_a_worker_is_refused(start: Start, frame: bytes) -> None:
    with start(plan()) as supervisor:
        supervisor._children["host"].link.send(frame)
        error = lost(supervisor, "host").error
        assert "exit code 1" in error
        assert "expected one of the table" in error


def test_ctrl_c_does_not_end_a_worker(start: Start) -> None:
    with start(plan()) as supervisor:
        for pid in supervisor.pids().values():
            os.kill(pid, signal.SIGINT)
        assert len(made(supervisor).keys) == 4


def test_a_child_of_a_killed_worker_ends_too(start: Start) -> None:
    with start(plan(source="host_plans:WithChild")) as supervisor:
        worker = supervisor.pids()["source"]
        (child,) = children(worker)  # the keeper of its reward function
        supervisor.tell(chunk(1, range(2)))
        os.kill(worker, signal.SIGKILL)
        until(supervisor, WorkerLost)
        assert ended(child, 10.0)


def test_a_plan_that_cannot_be_sent(start: Start) -> None:
    with (
        pytest.raises(RunError, match=r"cannot be sent to another process.*lock"),
        start(replace(plan(), notes=(threading.Lock(),))),
    ):  # type: ignore[arg-type]
        pytest.fail("it opened")


# --- the process of the run ends ------------------------------------------------------------------


def marked(mark: str) -> list[int]:
    """Processes that run with this mark in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes() and state not in "ZX":
                found.append(int(entry.name))
    return found


@contextlib.contextmanager
def script(tmp_path: Path, lines: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that has a Supervisor over a kernel with a child of its own."""
    mark = uuid.uuid4().hex
    code = f"""
import sys
from pathlib import Path
from host_plans import plan, chunk
from engine.launch.local import Supervisor
from engine.observe.runfolder import RunFolder
from engine.options import RunOptions
folder = RunFolder.create("run", Path({str(tmp_path)!r}))
supervisor = Supervisor(plan(source="host_plans:WithChild"), folder, RunOptions())
{lines}
"""
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    made = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {MARK: mark, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield made, mark
    finally:
        made.kill()
        made.wait()
        assert made.stdout is not None
        made.stdout.close()
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)


def gone(mark: str) -> bool:
    return all(ended(pid, 10.0) for pid in marked(mark)) and not marked(mark)


def test_no_orphan_when_the_process_of_the_run_is_killed(tmp_path: Path) -> None:
    busy = (
        "list(supervisor.open()); supervisor.tell(chunk(1, range(2))); print('open', flush=True);"
        " supervisor.next()"
    )
    with script(tmp_path, busy) as (run, mark):
        assert run.stdout is not None
        assert run.stdout.readline() == "open\n"
        assert len(marked(mark)) == 5, (
            "the run, two Workers, a reward function of one, and its keeper"
        )
        run.kill()
        run.wait()
        assert gone(mark)
        assert not [p for p in tmp_path.rglob("*") if p.is_socket()]


@pytest.mark.parametrize("others", [0, 1, 2])
def test_no_orphan_when_it_is_killed_while_it_starts_them(tmp_path: Path, others: int) -> None:
    with script(
        tmp_path, "print('start', flush=True); list(supervisor.open()); supervisor.next()"
    ) as (run, mark):
        assert run.stdout is not None
        run.stdout.readline()
        while len(marked(mark)) < 1 + others:
            assert run.poll() is None
        run.kill()
        run.wait()
        assert gone(mark)
