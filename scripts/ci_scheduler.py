"""Runs parts of the continuous integration in lanes: of each lane one part at a time, all lanes
beside each other, each part when those that it needs have passed.

Owns: the order; the processes of parts, their output and what they take; that none is left, also
after a failure or a signal. Does not own: which parts there are (ci_parts.py). It runs before there
is an environment, so it needs nothing but the standard library and Linux.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import selectors
import shlex
import signal
import socket
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE = 30.0
"""Seconds that an interrupted part has to end what it started, before it is killed."""
MARK = "CI_MARK"
"""A variable in the environment of all that a part starts: a process that has left the part's
session is still found by it.
"""
NAME = "CI_PART"
"""A variable that tells a part its name."""
THIRDS = 3
PASSED, FAILED, STOPPED = "passed", "failed", "stopped"
_FIRST_TIMES, _IDLE = 8, slice(3, 5)
"""Of a line of /proc/stat: the times that exclude each other; of them, those without work."""
_DEFAULT_IN_PARTS = (*STOP_SIGNALS, signal.SIGQUIT, signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that a part does not ignore, although Python or who started it may."""
_PYTEST_ENDS = re.compile(r"^.*\b\d+ passed\b.* in \d.*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CiPart:
    """A command, started in the current folder without a shell.

    needs: names of parts that stand before it and must have passed. third: it runs in every third
    turn, in those that leave this remainder; in all turns if None. always_ends: it is waited for
    where others are stopped, as stopping it would leave the machine half changed.
    """

    name: str
    command: str
    lane: str
    needs: tuple[str, ...] = ()
    third: int | None = None
    always_ends: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTimes:
    """What a part took. wall and cpu: seconds; cpu of its process and all that it waited for.
    idle: the share of the time of all cores that nobody used while it ran.
    """

    name: str
    lane: str
    outcome: str
    wall: float
    cpu: float
    idle: float

    @property
    def busy_cores(self) -> float:
        """On average, by this part."""
        return self.cpu / self.wall if self.wall else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CiTimes:
    """What all parts took, in the order in which they ended, and what the whole did."""

    turn: int
    parts: tuple[PartTimes, ...]
    whole: PartTimes

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> CiTimes:
        fields = json.loads(path.read_text())
        parts = tuple(PartTimes(**each) for each in fields["parts"])
        return CiTimes(turn=fields["turn"], parts=parts, whole=PartTimes(**fields["whole"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Instant:
    """idle, total: ticks of all cores since the machine started."""

    seconds: float
    idle: int
    total: int

    @staticmethod
    def now() -> _Instant:
        line = Path("/proc/stat").read_text().partition("\n")[0]
        ticks = [int(field) for field in line.split()[1:]][:_FIRST_TIMES]
        return _Instant(seconds=time.monotonic(), idle=sum(ticks[_IDLE]), total=sum(ticks))


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunningPart:
    """handle: a descriptor that is readable once the process has ended."""

    part: CiPart
    pid: int
    handle: int
    begin: _Instant


def due_parts(parts: Iterable[CiPart], turn: int) -> tuple[CiPart, ...]:
    """Leave out parts that belong to another turn; none of the others waits for them."""
    due = [part for part in parts if part.third in (None, turn % THIRDS)]
    names = {part.name for part in due}
    return tuple(
        replace(part, needs=tuple(need for need in part.needs if need in names)) for part in due
    )


def require_order(parts: Iterable[CiPart]) -> None:
    """Raise ValueError unless each part needs only parts that stand before it: then none waits for
    itself, and the first that waits can always start once nothing runs.
    """
    earlier: set[str] = set()
    for part in parts:
        missing = set(part.needs) - earlier
        if missing or part.name in earlier:
            what = f"to need parts before it, found {sorted(missing)}" if missing else "once"
            raise ValueError(f"part {part.name!r}: expected {what}.")
        earlier.add(part.name)


class Scheduler:
    """Runs parts once. folder: receives what each part prints, in NAME.txt. keep_going: whether a
    part that fails ends only those that need it.
    """

    def __init__(
        self,
        parts: Sequence[CiPart],
        folder: Path,
        environment: Mapping[str, str],
        *,
        keep_going: bool = False,
    ) -> None:
        require_order(parts)
        self._keep_going = keep_going
        self._folder = folder
        self._mark = uuid.uuid4().hex
        self._environment = {**environment, MARK: self._mark}
        self._waiting = list(parts)
        self._running: list[_RunningPart] = []
        self._ended: list[PartTimes] = []
        self._selector = selectors.DefaultSelector()
        self._begin = _Instant.now()
        self._stop_signals: list[int] = []
        self._stopping = False

    def run(self) -> int:
        """Run the parts until all have ended, one has failed (unless it keeps going) or a signal
        came.

        Afterwards no process of a part is left. Returns the exit code.
        """
        with self._selector, _received_signals() as signals:
            self._selector.register(signals, selectors.EVENT_READ)
            try:
                self._start_ready()
                while self._running and not self._is_over():
                    self._await_event()
                    self._start_ready()
            finally:
                self._stopping = True
                self._stop_running()
                self._kill_leftovers()
        if self._failed():
            return 1
        return 128 + self._stop_signals[0] if self._stop_signals else 0

    def times(self, turn: int) -> CiTimes:
        """What the parts took that have ended."""
        total_cpu = sum(each.cpu for each in self._ended)
        all_passed = all(each.outcome == PASSED for each in self._ended)
        outcome = PASSED if all_passed and not self._waiting else FAILED
        whole = _part_times("whole", "", outcome, self._begin, total_cpu)
        return CiTimes(turn=turn, parts=tuple(self._ended), whole=whole)

    def print_failures(self) -> None:
        """The whole output of each part that failed, then its name: a reader begins at the end."""
        for part in self._failed():
            print(f"ci: {part.name}: all of its output:")
            print(self._output(part.name))
            _say(f"{part.name}: failed after {part.wall:.0f} s; its output stands above")

    def _is_over(self) -> bool:
        """Whether no further part starts and those that run are stopped."""
        return bool(self._stop_signals or (self._failed() and not self._keep_going))

    def _failed(self) -> list[PartTimes]:
        return [each for each in self._ended if each.outcome == FAILED]

    def _output(self, name: str) -> str:
        return self._output_path(name).read_text(errors="replace")

    def _output_path(self, name: str) -> Path:
        return self._folder / f"{name}.txt"

    def _start_ready(self) -> None:
        """Start in each free lane the first part whose needs have passed."""
        if self._is_over():
            return
        passed = {each.name for each in self._ended if each.outcome == PASSED}
        for part in tuple(self._waiting):
            busy_lanes = {each.part.lane for each in self._running}
            if part.lane not in busy_lanes and passed.issuperset(part.needs):
                self._waiting.remove(part)
                self._start(part)

    def _start(self, part: CiPart) -> None:
        words = shlex.split(part.command)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        pid = os.posix_spawnp(
            words[0],
            words,
            self._environment | {NAME: part.name},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(self._output_path(part.name)), flags, 0o644),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,  # Ctrl-C in a terminal is ours, and we pass it on
            setsigdef=_DEFAULT_IN_PARTS,
        )
        running = _RunningPart(part=part, pid=pid, handle=os.pidfd_open(pid), begin=_Instant.now())
        self._running.append(running)
        self._selector.register(running.handle, selectors.EVENT_READ, running)
        _say(f"{part.name}: started: {part.command}")

    def _await_event(self, timeout: float | None = None) -> None:
        """Wait for the end of a part or for a signal, and note all that have come."""
        for key, _ in self._selector.select(timeout):
            if isinstance(key.data, _RunningPart):
                self._note_end(key.data)
            elif isinstance(key.fileobj, socket.socket):
                numbers = key.fileobj.recv(64)
                self._stop_signals += [each for each in numbers if each in STOP_SIGNALS]

    def _note_end(self, running: _RunningPart) -> None:
        self._selector.unregister(running.handle)
        os.close(running.handle)
        self._running.remove(running)
        _, status, usage = os.wait4(running.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        outcome = PASSED if code == 0 else STOPPED if self._stopping else FAILED
        part = running.part
        cpu = usage.ru_utime + usage.ru_stime
        times = _part_times(part.name, part.lane, outcome, running.begin, cpu)
        self._ended.append(times)
        _say(f"{part.name}: {outcome} in {times.wall:.0f} s" + (f" ({code})" if code else ""))
        if outcome == PASSED:
            for line in ending_lines(self._output(part.name)):
                print(f"    {line}", flush=True)

    def _stop_running(self) -> None:
        """Interrupt what runs, as Ctrl-C would; kill it after a while, or at a second signal."""
        self._signal_running(signal.SIGINT)
        signals_before = len(self._stop_signals)
        deadline = time.monotonic() + GRACE
        while self._may_be_stopped() and len(self._stop_signals) == signals_before:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                break
            self._await_event(remaining)
        self._signal_running(signal.SIGKILL)
        while self._running:
            self._await_event()

    def _may_be_stopped(self) -> bool:
        return any(not running.part.always_ends for running in self._running)

    def _signal_running(self, number: int) -> None:
        # The leader of a group has not been waited for, so the number of the group is still its.
        for running in self._running:
            if not running.part.always_ends:
                os.killpg(running.pid, number)

    def _kill_leftovers(self) -> None:
        """Kill what has outlived its part: it may have left its session, but has the mark."""
        variable = f"{MARK}={self._mark}"
        # One look misses a process that is just executing its program: it has no environment then.
        while leftovers := _processes_with(variable) or _processes_with(variable):
            for pid, command in leftovers.items():
                _say(f"killing process {pid}, which a part has left: {command}")
                _kill(pid)


def ending_lines(output: str) -> list[str]:
    """What pytest says at its end, as often as it ran; the last line where it did not."""
    endings = [line.strip("= ") for line in _PYTEST_ENDS.findall(output)]
    return endings or output.strip().splitlines()[-1:]


def times_table(parts: Iterable[PartTimes]) -> str:
    """Lines of text, each as long as it has to be."""
    lines = [f"{'part':14} {'outcome':8} {'wall s':>8} {'CPU s':>8} {'cores busy':>10} {'idle':>6}"]
    for each in parts:
        what = f"{each.name:14} {each.outcome:8} {each.wall:8.1f} {each.cpu:8.1f}"
        lines.append(f"{what} {each.busy_cores:10.2f} {each.idle:6.0%}")
    return "\n".join(lines)


def _say(text: str) -> None:
    print(f"ci: {text}", flush=True)


def _part_times(name: str, lane: str, outcome: str, begin: _Instant, cpu: float) -> PartTimes:
    end = _Instant.now()
    ticks = end.total - begin.total
    return PartTimes(
        name=name,
        lane=lane,
        outcome=outcome,
        wall=round(end.seconds - begin.seconds, 2),
        cpu=round(cpu, 2),
        idle=round((end.idle - begin.idle) / ticks, 4) if ticks else 0.0,
    )


@contextlib.contextmanager
def _received_signals() -> Iterator[socket.socket]:
    """A socket that receives the number of each signal.

    A handler alone would not do: a signal that comes just before we wait is handled after waiting.
    """
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)
        previous_descriptor = signal.set_wakeup_fd(writer.fileno())
        previous_handlers: dict[int, Any] = {}
        for number in STOP_SIGNALS:
            # nohup, or a shell that starts us in the background, may have it ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                previous_handlers[number] = signal.signal(number, lambda number, frame: None)
        try:
            yield reader
        finally:
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(previous_descriptor)


def _processes_with(variable: str) -> dict[int, str]:
    """The processes that have this variable in their environment, and their command lines."""
    processes = {}
    for entry in Path("/proc").glob("[0-9]*"):
        # It may end while we look, or be another user's.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if variable.encode() in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                processes[int(entry.name)] = command.decode(errors="replace")[:200]
    return processes


def _kill(pid: int) -> None:
    """Kill a process and wait for its end; it need not be our child."""
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            os.kill(pid, signal.SIGKILL)
            select.select([handle], [], [])
        finally:
            os.close(handle)
