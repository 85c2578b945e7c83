"""Measurements in processes of their own, so that none has another's memory or threads.

Owns: starting such a process, what it is told and what it answers. Does not own: what it measures.

A process tells each thing as soon as it knows it. One that the kernel of the operating system kills
for want of memory has told the cells before; the others are cells without enough memory.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import cloudpickle

from dataflow.errors import DataflowError, RunError
from dataflow.import_order import interpreter
from engine.keep.own_files import open_own_file
from engine.plan.cost.machine import MEMINFO, proc_bytes
from engine.run.launch.child import environment

_MODULE = "engine.predict.profile.child"
_BOOTSTRAP = (
    "from engine.run.control.lifeline import die_with; die_with(int(sys.argv[4]));"
    f" from {_MODULE} import main; main(sys.argv[3])"
)
_TAIL = 2000
_SHARE = 0.8
"""Of the available memory that a process may take: others want some meanwhile."""
_GROUP = Path("/sys/fs/cgroup")
Task = Callable[[], Iterator[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildResult:
    """What a process told. short: whether it ended for want of memory."""

    told: tuple[Any, ...]
    short: bool = False


def in_child(task: Task, *, threads: int, needed: Mapping[str, str], title: str) -> ChildResult:
    """Run a task in a fresh interpreter with so many threads. needed: of its environment. Raises
    what the task raises, and RunError for a process that ends otherwise.
    """
    with tempfile.TemporaryDirectory(prefix="dataflow-profile-") as folder:
        asked, said, log = (Path(folder) / name for name in ("task", "said", "log"))
        asked.write_bytes(cloudpickle.dumps(task))
        said.touch()
        with open(log, "wb", opener=open_own_file) as output:
            code = subprocess.run(
                interpreter(_BOOTSTRAP, _MODULE, folder, str(os.getpid())),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(threads, needed=needed),
                check=False,
            ).returncode
        told = tuple(_read(said))
        if told and isinstance(told[-1], BaseException):
            raise told[-1]
        if code == -signal.SIGKILL:
            return ChildResult(told=told, short=True)
        if code:
            end = log.read_bytes()[-_TAIL:].decode(errors="replace").strip()
            problem = f"its process ended with exit code {code}"
            raise RunError(f"profile: {title}: {problem}. Fix: see its last lines.\n{end}")
        return ChildResult(told=told)


def _read(path: Path) -> Iterator[Any]:
    with open(path, "rb") as file:
        while file.peek(1):
            yield cloudpickle.load(file)


def main(folder: str) -> None:
    """The process: run the task, and tell what it yields."""
    task = cloudpickle.loads((Path(folder) / "task").read_bytes())
    _limit_memory()
    with open(Path(folder) / "said", "wb") as said:
        try:
            for each in task():
                _tell(said, each)
        except DataflowError as error:
            _tell(said, error)
            sys.exit(1)


def _tell(file: BinaryIO, value: Any) -> None:
    cloudpickle.dump(value, file)
    file.flush()


def _limit_memory() -> None:
    """Let an allocation that the host has no memory for fail here, before the operating system ends
    some process for it.
    """
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(_SHARE * _available()) + used, hard))


def _available() -> int:
    """Bytes that processes can still have, of the host or of the group that it limits."""
    free, most, taken = (
        proc_bytes(MEMINFO, "MemAvailable"),
        _GROUP / "memory.max",
        _GROUP / "memory.current",
    )
    if most.is_file() and (limit := most.read_text().strip()).isdigit():
        free = min(free, int(limit) - int(taken.read_text()))
    return max(0, free)
