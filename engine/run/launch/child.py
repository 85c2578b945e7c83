"""One Worker process as the Supervisor sees it: one incarnation, from start to end.

Owns: its control socket, its log file, its environment. Does not own: messages (control.py), how it
is started (starter.py) and when (supervisor.py), when it is read and reaped (worker_io.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from dataflow.import_order import interpreter
from dataflow.storage import writing
from engine.keep.own_files import open_own_file
from engine.protocol.reports import Doing
from engine.run.control.control_socket import ControlSocket
from engine.run.control.wire import encode_message
from engine.run.launch.process_handle import FreshProcess, StartedProcess
from engine.run.loop.watchdog import STACK_SIGNAL

_MODULE = "engine.run.worker_process.worker_process"
# The first import is of the standard library alone, so that this process does not outlive its
# starter while it imports the rest (control/lifeline.py).
_BOOTSTRAP = (
    "import gc; gc.disable();"  # imports make no garbage; the Worker turns it on
    " from engine.run.control.lifeline import die_with; die_with(int(sys.argv[4]));"
    f" from {_MODULE} import main; main(int(sys.argv[3]))"
)
_SPINS = "10000"
_COPIES = "glibc.cpu.x86_non_temporal_threshold=0x200000"
"""Copies of 2 MiB and more bypass the cache, since another process reads the rows later: 16 MiB
take 2.0 to 2.3 ms instead of 2.8 (benchmarks/data_plane.py). Only glibc on x86 reads this.
"""
_ON_DEMAND = "0"
"""Of MIMALLOC_ARENA_EAGER_COMMIT: Arrow's allocator takes memory as it is used, not 4 MiB of huge
pages for its first array. Of hundreds of Workers on a host that counts.
"""
_NOTHING: Mapping[str, str] = MappingProxyType({})
_TAIL_LINES = 20
_TAIL_BYTES = 4096
_STACK_BYTES = 1 << 16
_STACK_LINES = 12


Start = Callable[[int, BinaryIO], StartedProcess]
"""Starts a process with this descriptor, its end of the control socket, and this output."""


def start_fresh(
    worker: str, descriptor: int, output: BinaryIO, environment: Mapping[str, str]
) -> FreshProcess:
    """Start a Worker's process with an interpreter of its own."""
    command = interpreter(_BOOTSTRAP, _MODULE, str(descriptor), str(os.getpid()), worker)
    return FreshProcess(command, descriptor, output, environment)


class ChildProcess:
    """A started process, guarded by the Supervisor's lock.

    commands: how many it was sent; to_end: those whose end it reports, of which `ended` so far.
    opened: its kernels are open. lost: it can no longer be reached. replaced: its end is wanted, so
    it is not reported. endpoint, meeting: where other hosts reach its channel and, of a
    first rank, its store. key: its public one. over: it has been reaped.
    heard: when something last came (its start, until it `spoke`).
    """

    def __init__(self, name: str, epoch: int, *, start: Start, log: Path) -> None:
        """Start it. It is killed when the calling thread ends."""
        self.name = name
        self.epoch = epoch
        self._log = log
        mine, theirs = socket.socketpair()
        with contextlib.ExitStack() as undo, theirs, open_log(log) as output:
            undo.callback(mine.close)
            self._log_start = output.tell()
            self.process = start(theirs.fileno(), output)
            undo.pop_all()
        mine.setblocking(False)
        self.link = ControlSocket(mine)
        self.heard = now = time.monotonic()
        self.doing = Doing(
            worker=name, node="its start", what="its interpreter", since=now, computes=False
        )
        self.spoke = self.opened = self.lost = self.replaced = False
        self.to_end = self.ended = 0
        self.error = ""
        self.under_way: deque[str] = deque()
        """The node, else the class, of each instruction that it has not ended, in order."""
        self.stack_asked = 0.0
        self._stack_at = -1
        self.connected: set[tuple[str, int]] = set()
        self.endpoint, self.meeting, self.key = "", "", b""
        self.over = threading.Event()

    @property
    def ends(self) -> int:
        """A descriptor that can be read once it has ended."""
        return self.process.ends

    @property
    def busy(self) -> bool:
        """Whether it is starting, has instructions to end, or is lost and not yet reported."""
        return not self.over.is_set() and (self.lost or not self.opened or self.to_end > self.ended)

    @property
    def gone(self) -> bool:
        """Whether it has ended, or nobody can reach it any more."""
        return self.lost or self.over.is_set()

    def send(self, message: Any, descriptors: tuple[int, ...] = ()) -> None:
        """Never blocks; closes the descriptors. The I/O thread notices a process that is gone."""
        body = encode_message(message)
        with contextlib.suppress(OSError):
            self.link.send(body, descriptors)

    def kill(self) -> None:
        """Send SIGKILL, which also ends a stopped process."""
        if not self.over.is_set():
            self.process.send_signal(signal.SIGKILL)

    def ask_for_stack(self, now: float) -> None:
        """Let it write its threads' stacks to its log, which takes no interpreter lock."""
        self.stack_asked, self._stack_at = now, self._log.stat().st_size
        if self.spoke and not self.over.is_set():  # before, the signal could kill it
            self.process.send_signal(STACK_SIGNAL)

    def where(self) -> str:
        """What it is doing, by its last heartbeat or else its first unfinished instruction."""
        if self.doing.node:
            return f", in {self.doing.node} ({self.doing.what})"
        if self.under_way:
            return f", in {self.under_way[0]}"
        return ""

    def reap(self) -> str:
        """Once it has ended: close its sockets and say how it ended."""
        code = self.process.wait()
        self.link.close()
        if self.error:
            how = self.error
        elif code < 0:
            how = f"was killed by {_signal_name(-code)}"
        else:
            how = f"ended with exit code {code}"
        stack = self.stack()
        where = f"\n  it{stack}" if stack else self._last_lines()
        return f"process {self.process.pid} {how}{where}"

    def stack(self) -> str:
        """Its main thread's stack, innermost call first; empty if it did not write one."""
        if self._stack_at < 0:
            return ""
        with open(self._log, "rb") as file:
            file.seek(self._stack_at)
            text = file.read(_STACK_BYTES).decode(errors="replace")
        main = text.split("(most recent call first):")[-1]
        frames = [line.strip() for line in main.splitlines() if line.startswith("  File ")]
        if not frames:
            return ""
        return f" stood at:{_quote_lines(frames[:_STACK_LINES])}"

    def _last_lines(self) -> str:
        """The end of its log."""
        with open(self._log, "rb") as file:
            file.seek(max(self._log_start, self._log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        return _quote_lines(lines[-_TAIL_LINES:])


def _quote_lines(lines: Sequence[str]) -> str:
    """Format these lines below an error."""
    return "".join(f"\n  | {line}" for line in lines)


def wait_until_over(children: Sequence[ChildProcess], seconds: float) -> list[ChildProcess]:
    """Wait until all have been reaped, together at most so long. Returns those that have not."""
    end = time.monotonic() + seconds
    for child in children:
        child.over.wait(max(0.0, end - time.monotonic()))
    return [child for child in children if not child.over.is_set()]


def read_stacks(children: Sequence[ChildProcess], seconds: float) -> list[str]:
    """The main thread's stack of each one that writes it within so many seconds."""
    for child in children:
        child.ask_for_stack(time.monotonic())
    wait_until_over(children, seconds)  # the time to write; one that ends writes no more
    shown: list[str] = []
    for child in children:
        if stack := child.stack():
            shown.append(f"{child.name}, process {child.process.pid},{stack}")
    return shown


def _signal_name(number: int) -> str:
    """The name of a signal. Those between SIGRTMIN and SIGRTMAX have none."""
    if number in set(signal.Signals):
        return signal.Signals(number).name
    return f"signal {number}"


def open_log(log: Path) -> BinaryIO:
    """Open a Worker's log, to write at its end."""
    with writing("the log of a Worker", log):
        return open(log, "ab", opener=open_own_file)


def environment(
    threads: int, devices: Sequence[int] = (), needed: Mapping[str, str] = _NOTHING
) -> dict[str, str]:
    """The environment of a Worker's process. These cannot be set later: glibc reads them when the
    process starts, OpenMP and CUDA when torch is imported. The user's values stay, except the
    planned number of threads. devices: the only GPUs, of those seen here, that the Worker sees.
    needed: what its kernels need.
    """
    # Waiting threads spin briefly and then sleep, since other processes want the cores.
    defaults = {
        "GOMP_SPINCOUNT": _SPINS,
        "GLIBC_TUNABLES": _COPIES,
        "MIMALLOC_ARENA_EAGER_COMMIT": _ON_DEMAND,
        **needed,
    }
    variables = defaults | os.environ | {"OMP_NUM_THREADS": str(threads)}
    if devices:
        # The plan numbers the GPUs that this process sees, which may be some of the machine's.
        names = [str(number) for number in range(max(devices) + 1)]
        if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
            names = visible.split(",")
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(names[i % len(names)] for i in devices)
    return variables
