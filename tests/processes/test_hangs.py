"""Code that never returns, holds the interpreter's lock, or ends the process: it is named, and the
run ends.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_graphs import leaves, leaves_in_its_loss, with_score
from run_processes import ENVIRONMENT

from dataflow.errors import KernelError
from engine.api import run
from tests.kit.processes import children

Options = Callable[..., Any]
pytestmark = pytest.mark.timeout(180)

HOLDS = """
import re, sys
from engine.run import stop
from engine.run.outside import show

stop._OUTSIDE = 1.0

def holds():
    re.match("(a+)+$", "a" * 60 + "b")

with stop.Stop(0.5, lambda: ""):
    show("main is in holds (chunk 3, 8 rows)")
    print("begun", flush=True)
    holds()
"""

CANNOT_BE_INTERRUPTED = """
import ctypes
from engine.run import outside, stop
from engine.run.outside import show

class Patient(stop.Outside):
    def interrupted(self):
        super().interrupted()
        print("interrupted", flush=True)

stop.Outside, outside.TO_END = Patient, 1.0

def waits():
    while True:  # it gives the lock away, and takes every signal for nothing
        try:
            while ctypes.CDLL(None).pause():
                pass
        except KeyboardInterrupt:
            pass

with stop.Stop(0.5, lambda: "who waits for whom"):
    show("main is in waits (chunk 3, 8 rows)")
    waits()
"""


def script(text: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", text],
        env=ENVIRONMENT | changes,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.long
@pytest.mark.timeout(180)
def test_what_holds_the_interpreters_lock_is_named_from_outside_and_ended() -> None:
    done = script(HOLDS)
    assert done.stdout == "begun\n"
    assert done.returncode == -signal.SIGKILL
    said = (
        "nothing has moved for 1 s: main is in holds (chunk 3, 8 rows), in code that holds the"
        " interpreter's lock. "
    )
    assert said in done.stderr
    assert "in holds\n" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
@pytest.mark.timeout(180)
def test_what_cannot_be_interrupted_is_ended_from_outside() -> None:
    done = script(CANNOT_BE_INTERRUPTED)
    assert done.stdout == "interrupted\n"
    assert done.returncode == -signal.SIGKILL
    assert "nothing has moved for 0.5 s; who waits for whom" in done.stderr
    assert (
        "nothing has moved for 1 s: main is in waits (chunk 3, 8 rows), in code that cannot be"
        " interrupted. " in done.stderr
    )


def test_a_run_that_ends_leaves_no_watcher_and_none_of_its_signals_ends_the_process() -> None:
    done = script(
        "import os, time\n"
        "from engine.run.outside import STACK_SIGNAL\n"
        "from engine.run.stop import Stop\n"
        "with Stop(1.0, lambda: ''):\n"
        "    os.kill(os.getpid(), STACK_SIGNAL)\n"
        "os.kill(os.getpid(), STACK_SIGNAL)\n"
        "try:\n"
        "    os.waitpid(-1, 0)\n"
        "except ChildProcessError:\n"
        "    print('alone')\n"
    )
    assert (done.returncode, done.stdout) == (0, "alone\n")
    assert done.stderr.count("(most recent call first)") == 1, "the first went to the watcher"


@pytest.mark.parametrize(
    "make, told",
    [
        (lambda folder: with_score(folder, leaves), "leaves: "),
        (lambda folder: with_score(folder, None, leaves_in_its_loss), "train_policy: step 1"),
    ],
    ids=["operator", "loss"],
)
@pytest.mark.parametrize("inproc", [False, True])
def test_an_exit_in_the_users_code_is_an_error_of_its_node(
    tiny: Path, options: Options, make: Any, told: str, inproc: bool
) -> None:
    with pytest.raises(KernelError) as caught:
        run(make(tiny), options(2, inproc=inproc))
    for part in (told, "raised SystemExit: ", "run_graphs.py"):
        assert part in str(caught.value), part
    assert not children()
