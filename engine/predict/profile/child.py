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
_TASK, _OUTPUTS = "task", "outputs"
"""The files of a process: what it does, and what it has told so far."""
_TAIL = 2000
_SHARE = 0.8
"""Of the available memory that a process may take: others want some meanwhile."""
_GROUP = Path("/sys/fs/cgroup")
Task = Callable[[], Iterator[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildResult:
    """What a process told. out_of_memory: whether it was killed, for want of memory."""

    outputs: tuple[Any, ...]
    out_of_memory: bool = False


def run_in_child(task: Task, *, threads: int, needed: Mapping[str, str], title: str) -> ChildResult:
    """Run a task in a fresh interpreter with so many threads. needed: of its environment. Raises
    what the task raises, and RunError for a process that ends otherwise.
    """
    with tempfile.TemporaryDirectory(prefix="dataflow-profile-") as folder:
        log = Path(folder) / "log"
        (Path(folder) / _TASK).write_bytes(cloudpickle.dumps(task))
        (Path(folder) / _OUTPUTS).touch()
        command = interpreter(_BOOTSTRAP, _MODULE, folder, str(os.getpid()))
        with open(log, "wb", opener=open_own_file) as output:
            code = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(threads, needed=needed),
                check=False,
            ).returncode
        outputs = tuple(_read_outputs(Path(folder) / _OUTPUTS))
        if outputs and isinstance(outputs[-1], BaseException):
            raise outputs[-1]
        # So the operating system ends a process for want of memory.
        if code == -signal.SIGKILL:
            return ChildResult(outputs=outputs, out_of_memory=True)
        if code:
            end = log.read_bytes()[-_TAIL:].decode(errors="replace").strip()
            problem = f"its process ended with exit code {code}"
            raise RunError(f"profile: {title}: {problem}. Fix: see its last lines.\n{end}")
        return ChildResult(outputs=outputs)


def _read_outputs(path: Path) -> Iterator[Any]:
    with open(path, "rb") as file:
        while file.peek(1):
            yield cloudpickle.load(file)


def main(folder: str) -> None:
    """The process: run the task, and tell what it yields."""
    task = cloudpickle.loads((Path(folder) / _TASK).read_bytes())
    _limit_memory()
    with open(Path(folder) / _OUTPUTS, "wb") as file:
        try:
            for output in task():
                _tell(file, output)
        except DataflowError as error:
            _tell(file, error)
            sys.exit(1)


def _tell(file: BinaryIO, output: Any) -> None:
    cloudpickle.dump(output, file)
    # At once: a process that is killed later has told it.
    file.flush()


def _limit_memory() -> None:
    """Let an allocation that the host has no memory for fail here, before the operating system ends
    some process for it.
    """
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10  # from KiB
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = int(_SHARE * _available_bytes()) + used
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _available_bytes() -> int:
    """Bytes that processes can still have, of the host or of the group that it limits."""
    available = proc_bytes(MEMINFO, "MemAvailable")
    limit_file = _GROUP / "memory.max"
    # A group without a limit says `max`.
    if limit_file.is_file() and (limit := limit_file.read_text().strip()).isdigit():
        used = int((_GROUP / "memory.current").read_text())
        available = min(available, int(limit) - used)
    return max(0, available)
