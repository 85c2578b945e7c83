"""What Ctrl-C, SIGTERM and SIGHUP do to a process, one after another; each in a process of its own."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(60)

RUN = """
import sys, threading
from contextlib import nullcontext
from engine.run.signals import Signalled, StopSignals, code, ending_command
grace, command = float(sys.argv[1]), sys.argv[2] == "command"
with ending_command() if command else nullcontext():
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        with StopSignals(grace, lambda: "go on from step 7") as signals:
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


@contextmanager
def process(
    grace: float = 60.0, kind: str = "command", *, nohup: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """One that behaves as the process of a run."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN) if nohup else None
    try:
        made = subprocess.Popen(
            [sys.executable, "-c", RUN, str(grace), kind],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        if nohup:
            signal.signal(signal.SIGHUP, before)
    try:
        until(made, made.stdout, "ready")
        yield made
    finally:
        made.kill()
        made.communicate()


def until(made: subprocess.Popen[str], stream: object, words: str) -> None:
    for line in stream:  # type: ignore[attr-defined]
        if words in line:
            return
    raise AssertionError(f"it ended with {made.wait()} before {words!r}")


def say(made: subprocess.Popen[str], line: str) -> None:
    assert made.stdin is not None
    made.stdin.write(f"{line}\n")
    made.stdin.flush()


def running(made: subprocess.Popen[str]) -> None:
    say(made, "begin")
    until(made, made.stdout, "running")


def told(made: subprocess.Popen[str]) -> None:
    until(made, made.stderr, "stopping after this Step")


@pytest.mark.parametrize("number,name", [(2, "Ctrl-C"), (15, "SIGTERM"), (1, "SIGHUP")])
def test_the_first_asks_and_the_second_ends_at_once(number: int, name: str) -> None:
    with process() as made:
        running(made)
        made.send_signal(number)
        told(made)
        say(made, "end of the step")
        out, _ = made.communicate()
        assert (made.returncode, out) == (128 + number, f"stopped by {name}\n")
    with process() as made:
        running(made)
        made.send_signal(number)
        told(made)
        made.send_signal(number)
        _, err = made.communicate()
        assert made.returncode == 128 + number
        assert err == f"ended at once by {name}; go on from step 7\n"


def test_what_comes_at_once_is_one_request() -> None:
    with process() as made:
        running(made)
        for number in (15, 15, 1, 15):
            made.send_signal(number)
        told(made)
        say(made, "end of the step")
        assert made.communicate()[0] in ("stopped by SIGTERM\n", "stopped by SIGHUP\n")


def test_what_a_signal_does_is_said_however_soon_the_run_ends() -> None:
    with process() as made:
        running(made)
        made.send_signal(15)
        say(made, "end of the step")
        out, err = made.communicate()
        assert (made.returncode, out) == (143, "stopped by SIGTERM\n")
        assert (
            err
            == "\nSIGTERM: stopping after this Step with a checkpoint, within 60 s; another signal"
            " to stop now\n"
        )


def test_after_the_grace_it_ends_without_a_checkpoint() -> None:
    with process(0.2) as made:
        running(made)
        made.send_signal(15)
        _, err = made.communicate()
        assert made.returncode == 143
        assert "took longer than --grace 0.2 s; go on from step 7" in err.splitlines()[-1]


@pytest.mark.parametrize("grace", [0.0, 60.0])
def test_a_process_that_is_no_command_s_own_is_told_by_an_exception(grace: float) -> None:
    with process(grace, "script") as made:
        running(made)
        made.send_signal(15)
        told(made)
        if grace:
            made.send_signal(15)
        out, _ = made.communicate()
        assert out.startswith("raised 15 ended")


def test_before_a_run_begins_a_command_ends_at_once() -> None:
    with process() as made:
        made.send_signal(15)
        _, err = made.communicate()
        assert (made.returncode, err) == (143, "ended by SIGTERM\n")


def test_under_nohup_a_hangup_is_nothing() -> None:
    with process(nohup=True) as made:
        running(made)
        made.send_signal(1)
        assert not select.select([made.stderr], [], [], 0.3)[0]
        say(made, "end of the step")
        assert made.communicate()[0] == "\n"
        assert made.returncode == 0


def test_a_terminal_that_is_gone_stops_no_output() -> None:
    ours, theirs = os.openpty()
    made = subprocess.Popen(
        [sys.executable, "-c", RUN, "60", "command"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=theirs,
        stderr=theirs,
        text=True,
    )
    os.close(theirs)
    said = ""
    say(made, "begin")
    while not said.endswith(
        "running\r\n"
    ):  # a part of the line would be read while the rest is still written
        said += os.read(ours, 1000).decode()
    os.close(ours)  # and whatever is written to theirs fails from now on
    made.send_signal(1)
    say(made, "end of the step")
    assert made.communicate(timeout=30) == (None, None)
    assert made.returncode == 129


CHILD = """
import os, signal, subprocess, sys
from dataflow.signals import held_back, left_to_the_run
if sys.argv[1] == "parent":
    with held_back():
        child = subprocess.Popen([sys.executable, "-c", sys.argv[2], "child", sys.argv[2]])
    for number in (2, 15, 1):
        os.kill(child.pid, number)
    sys.exit(child.wait())
left_to_the_run()
for number in (2, 15, 1):
    os.kill(os.getpid(), number)
sys.exit(subprocess.call([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), 15)"]) == -15 and 7)
"""


def test_a_process_of_a_run_leaves_them_alone_from_its_very_start() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, "parent", CHILD], cwd=ROOT, check=False, timeout=50
    )
    assert done.returncode == 7, "what it starts itself is not to leave them alone"


FORKS = """
import multiprocessing, sys
from engine.run.signals import StopSignals
from dataflow.signals import left_to_the_run
import threading
left_to_the_run() if sys.argv[1] == "worker" else None
with StopSignals() if sys.argv[1] == "run" else multiprocessing.get_context("fork").Lock() as signals:
    child = multiprocessing.get_context("fork").Process(target=threading.Event().wait)
    child.start()
    child.terminate()
    child.join()
    sys.exit(child.exitcode != -15 or (sys.argv[1] == "run" and signals.requested))
"""


@pytest.mark.parametrize("kind", ["run", "worker"])
def test_a_forked_child_ends_by_them_and_asks_nothing_of_the_run(kind: str) -> None:
    assert not subprocess.run(
        [sys.executable, "-c", FORKS, kind], cwd=ROOT, check=False, timeout=50
    ).returncode


def test_ctrl_c_while_the_command_is_imported_is_one_line(tmp_path: Path) -> None:
    slow = (  # in the place of a Ctrl-C just then
        "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    )
    (tmp_path / "numpy.py").write_text(slow)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from engine.start import main;"
        " sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--version"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


HOST = """
import os, signal, subprocess, sys, threading
from pathlib import Path
from engine.launch import host
from engine.run.signals import StopSignals

heard, start = threading.Event(), subprocess.Popen

class Told(StopSignals):
    def __init__(self, grace, kept, asked, doing):
        super().__init__(grace, kept, lambda: (asked(), heard.set()), doing)

def asked_just_before(*arguments, **options):
    os.kill(os.getpid(), signal.SIGTERM)
    heard.wait()
    return start([sys.executable, "-c", "import sys; sys.stdin.read()"], **options)

host._own_host, host.StopSignals, subprocess.Popen = lambda *_: None, Told, asked_just_before
sys.exit(host.serve(Path("cluster.toml"), "a"))
"""


def test_a_host_that_is_asked_to_stop_while_it_begins_to_serve_stops() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOST], cwd=ROOT, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 143, done.stderr
