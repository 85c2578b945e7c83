"""What Ctrl-C, SIGTERM and SIGHUP do to a process; each test has its own process."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE

import pytest

from tests.kit.processes import ROOT, go_on, wait_for, wait_for_error

pytestmark = pytest.mark.timeout(60)

RUN = """
import signal, sys, threading
from contextlib import nullcontext
from engine.run.loop.signals import Signalled, StopSignals, code, ending_command
grace, command = float(sys.argv[1]), sys.argv[2] == "command"
if sys.argv[2] == "deaf script":
    send, sent = signal.pthread_kill, []
    signal.pthread_kill = lambda *to: send(*to) if sent else sent.append(to)
with ending_command() if command else nullcontext():
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        with StopSignals(grace, lambda: "step 7") as signals:
            print("running", flush=True)
            for line in sys.stdin:
                if line == "end of the step\\n":
                    break
            else:
                threading.Event().wait()
        print(signals.reason, flush=True)
    except Signalled as ended:
        print("raised", ended.number, ended, flush=True)
    sys.exit(code(signals.number) if signals.number else 0)
"""


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Who runs the tests under nohup ignores SIGHUP, and so would what they start."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


class SignalledProcess(subprocess.Popen[str]):
    """A process that behaves as that of a run."""

    def __init__(self, grace: float = 60.0, kind: str = "command", **streams: int) -> None:
        command = [sys.executable, "-c", RUN, str(grace), kind]
        pipes = {"stdin": PIPE, "stdout": PIPE, "stderr": PIPE} | streams
        super().__init__(command, cwd=ROOT, text=True, **pipes)  # type: ignore[call-overload]

    def end_step(self) -> None:
        self.stdin.write("end of the step\n")
        self.stdin.flush()

    def begin(self) -> None:
        go_on(self)
        wait_for(self, "running")

    def signalled(self, number: int) -> None:
        """It has had this signal, and has said that it stops."""
        self.send_signal(number)
        wait_for_error(self, "stopping after this Step")

    def ended(self) -> tuple[int, str, str]:
        """Its exit status, and what it said since on either stream."""
        out, err = self.communicate()
        return self.returncode, out, err


@contextmanager
def process(
    grace: float = 60.0, kind: str = "command", *, nohup: bool = False, begun: bool = True
) -> Iterator[SignalledProcess]:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN) if nohup else None
    try:
        run = SignalledProcess(grace, kind)
    finally:
        if nohup:
            signal.signal(signal.SIGHUP, before)
    try:
        wait_for(run, "ready")
        if begun:
            run.begin()
        yield run
    finally:
        run.kill()
        run.communicate()


@pytest.mark.parametrize("number,name,again", [
    (2, "Ctrl-C", "Ctrl-C again"),
    (15, "SIGTERM", "another signal"),
    (1, "SIGHUP", "another signal"),
])  # fmt: skip
def test_the_first_asks_and_says_so_however_soon_the_run_ends(
    number: int, name: str, again: str
) -> None:
    with process() as run:
        run.send_signal(number)
        run.end_step()
        message = f"stopping after this Step with a checkpoint, within 60 s; {again} to stop now"
        assert run.ended() == (128 + number, f"stopped by {name}\n", f"\n{name}: {message}\n")


def test_the_second_ends_at_once() -> None:
    with process() as run:
        run.signalled(2)
        run.send_signal(2)
        assert run.ended() == (130, "", "ended at once by Ctrl-C; safe: step 7\n")


def test_what_comes_at_once_is_one_request() -> None:
    with process() as run:
        for number in (15, 15, 1):
            run.send_signal(number)
        run.signalled(15)
        run.end_step()
        assert run.ended()[1] in ("stopped by SIGTERM\n", "stopped by SIGHUP\n")


def test_after_the_grace_it_ends_without_a_checkpoint() -> None:
    with process(0.2) as run:
        run.send_signal(15)
        status, _, err = run.ended()
        assert status == 143
        assert "took longer than --grace 0.2 s; safe: step 7" in err.splitlines()[-1]


@pytest.mark.parametrize("grace", [0.0, 60.0])
def test_a_process_that_is_no_command_s_own_is_told_by_an_exception(grace: float) -> None:
    with process(grace, "script") as run:
        run.signalled(15)
        if grace:
            run.send_signal(15)
        assert run.ended()[1].startswith("raised 15 ended")


def test_an_interrupt_that_wakes_nobody_is_repeated() -> None:
    # A signal between Python's look for signals and its wait for a lock does not end the wait.
    with process(60.0, "deaf script") as run:
        run.signalled(15)
        run.send_signal(15)
        assert run.ended()[1].startswith("raised 15 ended")


def test_before_a_run_begins_a_command_ends_at_once() -> None:
    with process(begun=False) as run:
        run.send_signal(15)
        assert run.ended() == (143, "", "ended by SIGTERM\n")


def test_under_nohup_a_hangup_is_nothing() -> None:
    with process(nohup=True) as run:
        run.send_signal(1)
        assert not select.select([run.stderr], [], [], 0.3)[0]
        run.end_step()
        assert run.ended()[:2] == (0, "\n")


def test_a_terminal_that_is_gone_stops_no_output() -> None:
    ours, theirs = os.openpty()
    run = SignalledProcess(stdout=theirs, stderr=theirs)
    os.close(theirs)
    go_on(run)
    shown = ""
    # A part of the line would be read while the rest is still written.
    while not shown.endswith("running\r\n"):
        shown += os.read(ours, 1000).decode()
    os.close(ours)  # and whatever is written to theirs fails from now on
    run.send_signal(1)
    run.end_step()
    assert run.communicate(timeout=300) == (None, None)
    assert run.returncode == 129


CHILD = """
import os, signal, subprocess, sys
from dataflow.signals import hold_back_signals, leave_signals_to_the_run
if sys.argv[1] == "parent":
    with hold_back_signals():
        child = subprocess.Popen([sys.executable, "-c", sys.argv[2], "child", sys.argv[2]])
    for number in (2, 15, 1):
        os.kill(child.pid, number)
    sys.exit(child.wait())
leave_signals_to_the_run()
for number in (2, 15, 1):
    os.kill(os.getpid(), number)
ending = "import os, signal; os.kill(os.getpid(), 15)"
sys.exit(subprocess.call([sys.executable, "-c", ending]) == -15 and 7)
"""


def status_of(code: str, *arguments: str) -> int:
    """How a process of this code ends."""
    return subprocess.call([sys.executable, "-c", code, *arguments], cwd=ROOT, timeout=300)


def test_a_process_of_a_run_leaves_them_alone_from_its_very_start() -> None:
    status = status_of(CHILD, "parent", CHILD)
    assert status == 7, "what it starts itself is not to leave them alone"


FORKS = """
import multiprocessing, sys, threading
from engine.run.loop.signals import StopSignals
from dataflow.signals import leave_signals_to_the_run
fork, kind = multiprocessing.get_context("fork"), sys.argv[1]
leave_signals_to_the_run() if kind == "worker" else None
with StopSignals() if kind == "run" else fork.Lock() as signals:
    child = fork.Process(target=threading.Event().wait)
    child.start()
    child.terminate()
    child.join()
    sys.exit(child.exitcode != -15 or (kind == "run" and signals.is_stop_requested))
"""


@pytest.mark.parametrize("kind", ["run", "worker"])
def test_a_forked_child_ends_by_them_and_asks_nothing_of_the_run(kind: str) -> None:
    assert status_of(FORKS, kind) == 0


def test_ctrl_c_while_the_command_is_imported_is_one_line(tmp_path: Path) -> None:
    # In the place of a Ctrl-C just then.
    (tmp_path / "numpy.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from engine.start import main;"
    command = [sys.executable, "-c", code + " sys.exit(main())", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
