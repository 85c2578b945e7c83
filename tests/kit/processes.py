"""Processes: start Python with a time limit, follow its output, find and end what it started."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.kit.forked import MODULE as FORK_SERVER
from tests.kit.forked import ForkedPython

ROOT = Path(__file__).resolve().parents[2]
COMMAND_LINE = "import sys; from engine.cli import main; sys.exit(main())"
"""`python -c` with this is `dataflow`."""
_WORKER, _TEMPLATE = (
    "engine.run.worker_process.worker_process",
    "engine.run.worker_process.template_process",
)
_SERVERS = (FORK_SERVER, "multiprocessing.resource_tracker", "multiprocessing.forkserver")
MARK = "DATAFLOW_TEST_MARK"
"""A variable in the environment of a process, which all that it starts inherit."""


def start_python(
    *words: object, env: Mapping[str, str] | None = None, path: Iterable[Path] = (), **how: Any
) -> subprocess.Popen[str]:
    """Start Python with one thread, forked where that changes nothing (forked.py). env, path: added
    for it (path: folders to import from).
    """
    folders = os.pathsep.join(map(str, (ROOT, *path)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": folders, **(env or {})}
    usual = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, *map(str, words)]
    return ForkedPython(command, env=environment, errors="replace", **usual | how)


def call_python(
    *words: object, timeout: float = 220.0, **how: Any
) -> subprocess.CompletedProcess[str]:
    """`start_python` to its end; killed if it takes longer."""
    with limited(start_python(*words, **how), timeout) as process:
        out, err = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@contextmanager
def limited(
    process: subprocess.Popen[str], seconds: float = 150.0
) -> Iterator[subprocess.Popen[str]]:
    """The process, killed after the limit; it has ended afterwards in any case."""
    late = threading.Timer(seconds, process.kill)
    late.start()
    try:
        yield process
    finally:
        late.cancel()
        if process.poll() is None:
            process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def wait_for(process: subprocess.Popen[str], line: str) -> None:
    """Read its output up to this line."""
    assert process.stdout is not None
    for said in process.stdout:
        if said.strip() == line:
            return
    errors = process.stderr.read() if process.stderr else ""
    raise AssertionError(f"the run ended before {line!r}: {errors}")


def wait_for_error(process: subprocess.Popen[str], words: str) -> None:
    """Read its standard error up to a line with these words."""
    assert process.stderr is not None
    if not any(words in line for line in process.stderr):
        raise AssertionError(f"the run ended, and never said {words!r}")


def go_on(process: subprocess.Popen[str]) -> None:
    """Let a process continue that waits for a line."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def ended_within(process: subprocess.Popen[str], seconds: float) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
        return True
    return False


def _fields(process: Path) -> list[str]:
    """Fields of /proc/PID/stat from the state on: state, parent, process group, session."""
    return (process / "stat").read_text().rpartition(")")[2].split()


def _matching(holds: Any) -> list[int]:
    """Processes whose folder in /proc satisfies this."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if holds(process):
                pids.append(int(process.name))
    return pids


def parent_of(pid: int) -> int:
    """Its parent; of what a fork server forked, the process that the server serves."""
    parent = int(_fields(Path(f"/proc/{pid}"))[1])
    words = command_of(parent)
    return int(words[words.index(FORK_SERVER) + 2]) if FORK_SERVER in words else parent


def await_stopped(pid: int) -> None:
    """Until a process that was sent SIGSTOP stands still, our child or not."""
    while _fields(Path(f"/proc/{pid}"))[0] not in "tT":
        os.sched_yield()


def ticks(pid: int) -> int:
    """Hundredths of a second that a process has computed."""
    fields = _fields(Path(f"/proc/{pid}"))
    return int(fields[11]) + int(fields[12])


def command_of(pid: int) -> list[str]:
    """Its words, without empty ones; none if it is gone."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        return [word for word in words if word]
    return []


def shown(pid: int) -> str:
    """A process in a line: number, program, state and parent, then its words; a zombie has none."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        process = Path(f"/proc/{pid}")
        state, parent = _fields(process)[:2]
        program = (process / "comm").read_text().strip()
        return f"{pid} {program} {state} of {parent}: {' '.join(command_of(pid))[:120]}"
    return f"{pid} (gone)"


def children(parent: int | None = None) -> list[int]:
    """The children of this process (or another), including zombies.

    Without what stays forever once a test has needed it: servers of forks, whose own children count
    instead, and the tracker of multiprocessing.
    """
    of = parent or os.getpid()
    pids = _matching(lambda process: int(_fields(process)[1]) == of)
    commands = {pid: " ".join(command_of(pid)) for pid in pids}
    servers = [pid for pid, words in commands.items() if any(s in words for s in _SERVERS)]
    forked = [pid for server in servers for pid in children(server)]
    return [*(pid for pid in pids if pid not in servers), *forked]


def descendants(pid: int) -> list[int]:
    """The children of a process, theirs, and so on."""
    return [each for child in children(pid) for each in (child, *descendants(child))]


def family(pid: int) -> list[int]:
    """A process and all that come of it."""
    return [pid, *descendants(pid)]


def workers(mark: str | None = None) -> dict[str, int]:
    """The processes of a run's Workers, by name, their last argument: of those that come of this
    process, or have this mark.
    """
    found = descendants(os.getpid()) if mark is None else marked(mark)
    commands = {pid: command_of(pid) for pid in found if is_worker(pid)}
    return {words[-1]: pid for pid, words in commands.items() if words}  # one may just have ended


def is_worker(pid: int) -> bool:
    """Whether it is a Worker's process. What a user's function forks in one is none."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return _WORKER in command_of(pid) and _WORKER not in command_of(parent_of(pid))
    return False


def host_of(pid: int) -> int:
    """The process whose Supervisor started a Worker's: its parent, or that of its template."""
    parent = parent_of(pid)
    return parent_of(parent) if _TEMPLATE in command_of(parent) else parent


def of_session(session: int) -> list[int]:
    """Processes of a session that have not ended, but for servers of forks."""
    pids = _matching(lambda process: int(_fields(process)[3]) == session and _runs(process))
    return [pid for pid in pids if FORK_SERVER not in command_of(pid)]


def marked(mark: str) -> list[int]:
    """Processes with this mark that have not ended, this one excepted."""
    wanted = f"{MARK}={mark}".encode()
    pids = _matching(lambda p: wanted in (p / "environ").read_bytes().split(b"\0") and _runs(p))
    return [pid for pid in pids if pid != os.getpid()]


def _runs(process: Path) -> bool:
    return _fields(process)[0] not in "ZX"


def new_mark() -> str:
    return uuid.uuid4().hex


def ended(pid: int, seconds: float) -> bool:
    """Whether a process, our child or not, ends in time."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with os.fdopen(handle) as opened:
        return bool(select.select([opened], [], [], max(0.0, seconds))[0])


def kill(pids: Iterable[int], number: int = signal.SIGKILL) -> None:
    """Send it to each that is there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class KillWorkers:
    """For `on_step`: kills Workers once, at their Step. of: Step -> names, separated by blanks."""

    def __init__(self, of: Mapping[int, str]) -> None:
        self._left = dict(of)
        self.killed: list[int] = []

    def __call__(self, row: Mapping[str, float]) -> None:
        pids = [workers()[name] for name in self._left.pop(int(row["step"]), "").split()]
        kill(pids)
        self.killed += pids
