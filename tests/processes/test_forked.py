"""A command that is forked cannot be told from one that has an interpreter of its own.

Each case is run as both, and the two ends are compared: so a test of the product means the same.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.kit import forked
from tests.kit.nothing_left import require_ended
from tests.kit.processes import (
    MARK,
    ROOT,
    call_python,
    children,
    command_of,
    limited,
    marked,
    new_mark,
    parent_of,
    start_python,
    wait_for,
)

pytestmark = pytest.mark.skipif(os.environ.get("TEST_FORKS") == "0", reason="nothing is forked")

PATH = "import sys; print(sys.path)"
SIGNALS = """
import signal
names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGPIPE", "SIGCHLD", "SIGUSR1")
print([str(signal.getsignal(getattr(signal, name))) for name in names])
print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""
OPEN = "import os; print(sorted(int(n) for n in os.listdir('/proc/self/fd'))[:-1])"
LATE = """
import atexit, threading
atexit.register(print, "at exit")
ended = threading.Event()
threading.Thread(target=lambda: ended.wait() and print("the thread has ended")).start()
print("the main thread has ended")
ended.set()
"""
COMMANDS: dict[str, tuple[str, ...]] = {
    "words": ("-c", "import sys; print(sys.argv, __name__, __file__)", "one", ""),
    "a path": ("-c", PATH),
    "a safe path": ("-P", "-c", PATH),
    "a module": ("-m", "json.tool", "--help"),
    "a module's path": ("-m", "tests.kit.shown_path"),
    "a script": (str(ROOT / "tests" / "kit" / "shown_path.py"), "one"),
    "input": ("-c", "print(input() * 2); print(input())"),
    "a code": ("-c", "raise SystemExit(7)"),
    "a code above a byte": ("-c", "raise SystemExit(259)"),
    "words at the end": ("-c", "raise SystemExit('why')"),
    "an error": ("-c", "def f():\n    1 / 0\nf()"),
    "an error in a module": ("-m", "tests.kit.nowhere"),
    "an interrupt": ("-c", "raise KeyboardInterrupt"),
    "a signal": ("-c", "import os; os.kill(os.getpid(), 15)"),
    "an end at once": ("-c", "import os; print('never seen'); os._exit(3)"),
    "what runs late": ("-c", LATE),
    "signals": ("-c", SIGNALS),
    "descriptors": ("-c", OPEN),
    "a folder": ("-c", "import os; print(os.getcwd())"),
    "variables": ("-c", f"import os; print(os.environ['{MARK}'], os.environ.get('ROOM'))"),
    "a child of its own": ("-c", "import os; print(os.system(f'kill -0 {os.getpid()}'))"),
}


@pytest.fixture(scope="module", autouse=True)
def forks_are_asked_for() -> None:
    assert forked.forks(["-c", ""], dict(os.environ))


def _end(words: tuple[str, ...], folder: Path, mark: str) -> tuple[int, str, str]:
    with limited(start_python(*words, cwd=folder, env={MARK: mark}, stdin=-1)) as process:
        out, err = process.communicate("once\nand again\n")
    return process.returncode, out, err


@pytest.mark.parametrize("name", COMMANDS)
def test_a_fork_ends_as_an_interpreter_does(name: str, tmp_path: Path) -> None:
    mark = new_mark()
    fork = _end(COMMANDS[name], tmp_path, mark)
    with forked.own_interpreters():
        assert fork == _end(COMMANDS[name], tmp_path, mark)


def test_a_fork_is_seen_as_what_it_is() -> None:
    mark, code = new_mark(), "import time; print('here', flush=True); time.sleep(200)"
    with limited(start_python("-c", code, "last", env={MARK: mark})) as process:
        wait_for(process, "here")
        assert marked(mark) == [process.pid]
        assert children() == [process.pid]
        assert parent_of(process.pid) == os.getpid()
        assert command_of(process.pid)[1:] == ["-c", code, "last"]
        assert process.poll() is None
        process.terminate()
        assert process.wait(20) == -signal.SIGTERM
    assert children() == []


STARTS_ONE = """
import sys
from tests.kit.processes import parent_of, start_python
other = start_python("-c", "import time; print(1, flush=True); time.sleep(200)", stderr=None)
other.stdout.readline()
print(other.pid, parent_of(other.pid), flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_fork_has_forked_is_its_child_and_ends_with_it(number: signal.Signals) -> None:
    with limited(start_python("-c", STARTS_ONE, stdin=-1, stderr=None)) as process:
        assert process.stdout is not None
        child, parent = map(int, process.stdout.readline().split())
        assert parent == process.pid
        assert children(process.pid) == [child]
        process.send_signal(number)
        process.wait(20)
        require_ended([child])


def test_descriptors_arrive_with_their_numbers() -> None:
    code = "import os, sys; os.write(int(sys.argv[1]), b'told')"
    reading, writing = os.pipe()
    with os.fdopen(reading) as told:
        done = call_python("-c", code, writing, pass_fds=[writing])
        os.close(writing)
        assert (done.returncode, told.read()) == (0, "told")


def test_a_wait_has_an_end() -> None:
    with limited(start_python("-c", "input()", stdin=-1)) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        assert process.poll() is None
        process.communicate("\n")
        assert process.poll() == 0


@pytest.mark.parametrize("change", [
    {"env": {"PYTHONOPTIMIZE": "1"}},
    {"env": {"LD_LIBRARY_PATH": "/nowhere"}},
    {"preexec_fn": os.getpid},
], ids=str)  # fmt: skip
def test_what_a_fork_cannot_have_an_interpreter_has(change: dict[str, Any]) -> None:
    code = "import sys; print('torch' in sys.modules)"
    assert call_python("-c", code).stdout == "True\n"
    assert call_python("-c", code, **change).stdout == "False\n"
