"""Code that never returns, holds the interpreter's lock or ends the process is named; runs end."""

from __future__ import annotations

import signal
import subprocess
from functools import partial
from typing import Any

import pytest

from dataflow.errors import KernelError
from tests.kit.processes import call_python, ended, limited, start_python
from tests.kit.run_graphs import leaves, leaves_in_its_loss, with_score
from tests.kit.tiny_runs import TinyRuns

pytestmark = pytest.mark.timeout(180)

STUCK = "nothing has moved for 1 s: main is in {} (chunk 3, 8 rows), in code that {}. "
HOLDS = """
import re, sys
from engine.run.loop import watchdog
from dataflow.activity import show

watchdog._LOCKED = 1.0

def holds():
    re.match("(a+)+$", "a" * 60 + "b")

with watchdog.Watchdog(0.5, lambda: ""):
    show("main is in holds (chunk 3, 8 rows)")
    print("begun", flush=True)
    holds()
"""

CANNOT_BE_INTERRUPTED = """
import ctypes
from engine.run.loop import watchdog
from dataflow.activity import show

class Patient(watchdog.OutsideWatch):
    def note_interrupt(self):
        super().note_interrupt()
        print("interrupted", flush=True)

watchdog.OutsideWatch, watchdog.TO_END = Patient, 1.0

def waits():
    while True:  # it gives the lock away, and takes every signal for nothing
        try:
            while ctypes.CDLL(None).pause():
                pass
        except KeyboardInterrupt:
            pass

with watchdog.Watchdog(0.5, lambda: "who waits for whom"):
    show("main is in waits (chunk 3, 8 rows)")
    waits()
"""


@pytest.mark.long
def test_what_holds_the_interpreters_lock_is_named_from_outside_and_ended() -> None:
    done = call_python("-c", HOLDS)
    assert done.stdout == "begun\n"
    assert done.returncode == -signal.SIGKILL
    assert STUCK.format("holds", "holds the interpreter's lock") in done.stderr
    assert "in holds\n" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_what_cannot_be_interrupted_is_ended_from_outside() -> None:
    done = call_python("-c", CANNOT_BE_INTERRUPTED)
    assert done.stdout == "interrupted\n"
    assert done.returncode == -signal.SIGKILL
    assert "nothing has moved for 0.5 s; who waits for whom" in done.stderr
    assert STUCK.format("waits", "cannot be interrupted") in done.stderr


LEAVES_NO_WATCHER = """
import os, time
from engine.run.loop.watchdog import STACK_SIGNAL, Watchdog

with Watchdog(1.0, lambda: ''):
    os.kill(os.getpid(), STACK_SIGNAL)
os.kill(os.getpid(), STACK_SIGNAL)
try:
    os.waitpid(-1, 0)
except ChildProcessError:
    print('alone')
"""


@pytest.mark.usefixtures("own_interpreters")
def test_a_run_that_ends_leaves_no_watcher_and_none_of_its_signals_ends_the_process() -> None:
    done = call_python("-c", LEAVES_NO_WATCHER)
    assert (done.returncode, done.stdout) == (0, "alone\n")
    assert done.stderr.count("(most recent call first)") == 1, "the first went to the watcher"


STOPPED = """
import os, pathlib, signal
from engine.run.loop.watchdog import OutsideWatch

watch = OutsideWatch(60.0, kills=False)
process = pathlib.Path(f"/proc/{watch._process.pid}")
while "_ctypes" not in (process / "maps").read_text():
    pass  # it still starts
while (process / "stat").read_text().rpartition(")")[2].split()[0] != "S":
    pass
os.kill(watch._process.pid, signal.SIGSTOP)
print(watch._process.pid, flush=True)
input()
watch.close()
"""


@pytest.mark.long
@pytest.mark.usefixtures("own_interpreters")
@pytest.mark.parametrize("killed", [False, True], ids=["ends", "is killed"])
def test_a_watcher_that_is_stopped_ends_with_the_run(killed: bool) -> None:
    process = start_python("-c", STOPPED, stdin=subprocess.PIPE)
    with limited(process):
        assert process.stdout is not None
        watcher = int(process.stdout.readline())
        if killed:
            process.kill()
        process.communicate("go on\n" if not killed else None)
    assert ended(watcher, 20)


@pytest.mark.parametrize("make,told,inproc", [
    (partial(with_score, change=leaves), "leaves: ", False),
    (partial(with_score, loss_of=leaves_in_its_loss), "train_policy: step 1", True),
], ids=["operator", "loss, in this process"])  # fmt: skip
def test_an_exit_in_the_users_code_is_an_error_of_its_node(
    tiny: TinyRuns, make: Any, told: str, inproc: bool
) -> None:
    with pytest.raises(KernelError, match=rf"(?s){told}.*raised SystemExit: .*run_graphs\.py"):
        tiny.run(make, 2, inproc=inproc)
