"""The parent's end of one reward process: start, ask, wait, kill.

    waits for                          unblocked by
    an answer, room to send, output    the function's process; its end, by its keeper; a deadline

Owns: a keeper and the function's process below it, the sockets to both, the pipe of what they
print. Does not own: the child's inside (scoring_child.py), how everything below the keeper ends
(scoring_keeper.py), frames (scoring_frames.py).

The child is a fresh interpreter, not a spawn of multiprocessing, which would import the parent's
main module again. Waiting uses poll: descriptors may have any number.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import IO

import pyarrow as pa

from dataflow.errors import KernelError
from dataflow.import_order import interpreter
from dataflow.signals import hold_back_signals
from operators.kernels.scoring_child import STACK_SIGNAL
from operators.kernels.scoring_frames import (
    HEADER,
    MARK,
    Answers,
    FaultKind,
    Garbled,
    ScoringFault,
    ScoringOutcome,
    decode_answer,
)
from operators.kernels.scoring_keeper import sweep
from operators.kernels.scoring_output import Output

_log = logging.getLogger(__name__)

_GOODBYE_SECONDS = 2.0
_KEEPER_SECONDS = 8.0
"""Within this time a keeper has ended everything, and itself."""
_STACK_SECONDS = 0.3
"""After this much silence a requested stack is complete, or does not come."""
_STACK_LINES = 200
_MARK = "DATAFLOW_REWARD"
_READ = 1 << 16
_BOOTSTRAP = "from operators.kernels.scoring_keeper import main; main(*map(int, sys.argv[3:]))"


def await_outcomes(children: Sequence[Child], deadline: float) -> None:
    """Wait until each has an outcome; one that has none at the deadline has timed out."""
    while waiting := [child for child in children if child.outcome is None]:
        poll = select.poll()
        handlers: dict[int, tuple[Child, Callable[[], None]]] = {}
        for child in waiting:
            for descriptor, events, handler in child.events():
                poll.register(descriptor, events)
                handlers[descriptor] = child, handler
        seconds_left = deadline - time.monotonic()
        for descriptor, _ in poll.poll(max(0.0, seconds_left) * 1e3):
            child, handler = handlers[descriptor]
            if child.outcome is None:  # else the event just before closed all its descriptors
                handler()
        if seconds_left <= 0:
            for child in waiting:
                child.time_out()


class Child:
    """One function's process and its keeper.

    outcome: of the last request; None while unknown. pid: the function's process, once known.
    process: the keeper.
    """

    def __init__(self, name: str, shipped: bytes) -> None:
        self._name = name
        self._shipped = shipped
        self.process: subprocess.Popen[bytes] | None = None
        self.pid = 0
        self.running = False
        self.outcome: ScoringOutcome | None = None
        self._output = Output(name)
        self._number = 0
        self._due = 0
        self._unsent = memoryview(b"")
        self._code: int | None = None
        self._start_error = 0
        """Why the keeper could start no process, as an errno; 0 if it could."""
        self._keeper_line = b""
        """What has come of a line of the keeper's that is not complete."""
        self._sock = _closed_socket()
        self._life = _closed_socket()
        self._printed = -1

    def start(self) -> None:
        """Start a fresh interpreter and send it the function; the outcome says if that is loaded.

        Raises KernelError if no process can be started.
        """
        try:
            with contextlib.ExitStack() as undo:
                self._open(undo)
                undo.pop_all()
        except OSError as error:
            raise self._not_started(str(error)) from error
        for end in (self._sock, self._life):
            end.setblocking(False)
        os.set_blocking(self._printed, False)
        self._answers = Answers()
        self.running = True
        self.pid = 0
        self._number = 0
        self._code = None
        self._keeper_line = b""
        self._start_error = 0
        self.ask(self._shipped, 0)

    def _not_started(self, why: str) -> KernelError:
        return KernelError(
            f"reward {self._name!r}: expected its process to start, found: {why}. Fix: allow"
            " more processes and open files (ulimit -u, ulimit -n)."
        )

    def _open(self, undo: contextlib.ExitStack) -> None:
        """Open sockets, a pipe and the keeper; undo: closes them if one of them fails."""
        self._sock, theirs = socket.socketpair()
        undo.callback(self._sock.close)
        with theirs:
            self._life, their_life = socket.socketpair()
            undo.callback(self._life.close)
            with their_life:
                self._printed, printing = os.pipe()
                undo.callback(os.close, self._printed)
                with os.fdopen(printing, "wb") as output:
                    self.process = self._start_keeper(theirs.fileno(), their_life.fileno(), output)

    def _start_keeper(self, answers: int, life: int, output: IO[bytes]) -> subprocess.Popen[bytes]:
        self._mark = f"{_MARK}={secrets.token_hex(16)}"
        arguments = [str(answers), str(life), str(os.getpid())]
        with hold_back_signals():
            return subprocess.Popen(
                interpreter(_BOOTSTRAP, "operators.kernels.scoring_keeper", *arguments),
                pass_fds=(answers, life),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | dict([self._mark.split("=")]),
                start_new_session=True,
            )

    def is_ready(self, *, or_killed: bool) -> bool:
        """Whether the function is loaded; False if `or_killed` and a signal ended its process.

        Raises KernelError, with the child's traceback, if it cannot be loaded.
        """
        fault = self.take().fault
        if fault is None:
            return True
        self.kill()
        if self._start_error:
            raise self._not_started(os.strerror(self._start_error))
        was_killed = self._code is None or self._code < 0
        if or_killed and fault.kind == "died" and was_killed:
            return False
        raise KernelError(
            f"reward {self._name!r}: its process could not load it: {fault.text}. "
            f"Fix: what the function imports has to be importable from sys.path.\n{fault.detail}"
        )

    def ask(self, payload: bytes | pa.Buffer, due: int) -> None:
        """Queue a request; it is sent, and the outcome received, in `await_outcomes`. due: the
        number of values that its answer must have.
        """
        self._number += 1
        self._due = due
        header = HEADER.pack(MARK, 0, self._number, len(memoryview(payload)))
        self._unsent = memoryview(header + bytes(payload))
        self.outcome = None
        self._output.forget()

    def take(self) -> ScoringOutcome:
        """Take the outcome of the last request, which must be there."""
        assert self.outcome is not None, "taken before it was awaited"
        if self.running:
            self._hear_output()  # what was printed before the answer
        self._output.settle()
        return self.outcome

    def events(self) -> list[tuple[int, int, Callable[[], None]]]:
        """What to wait for: (descriptor, events, function to call)."""
        sending = select.POLLOUT if self._unsent else 0
        events: list[tuple[int, int, Callable[[], None]]] = [
            (self._life.fileno(), select.POLLIN, self._hear_keeper),
            (self._printed, select.POLLIN, self._hear_output),
        ]
        if self.pid:  # answers must come from that process
            events.append((self._sock.fileno(), select.POLLIN | sending, self._talk))
        return events

    def hang_up(self) -> None:
        """Close the connection: an idle child then ends by itself."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Wait for the function's process to end, and kill it if it does not."""
        if not self.running:
            return
        with contextlib.suppress(OSError):
            self._answers.add(self._sock.recv(_READ))
        if self.outcome is not None and len(self._answers):
            _log.warning(
                "reward %r: %d bytes came after its last answer", self._name, len(self._answers)
            )
        self.hang_up()
        self._await_code(_GOODBYE_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End the child and everything that it started."""
        if not self.running or self.process is None:
            return
        self.running = False
        with contextlib.suppress(OSError):
            self._life.shutdown(socket.SHUT_RDWR)  # the keeper notices
        self.process.send_signal(signal.SIGCONT)
        try:
            self.process.wait(_KEEPER_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.returncode != 0:  # the keeper ended before it could end the others
            sweep(self._mark)
        self._hear_output()
        self._output.settle()
        self._sock.close()
        self._life.close()
        os.close(self._printed)

    def time_out(self) -> None:
        """Ask where the function is, as its time is up, then kill it."""
        if self.outcome is not None:
            return
        stack = self._read_stack()  # before the kill: only a live process can print it
        self.kill()
        self.outcome = _fault_outcome("timeout", "timed out", stack or self._printed_last())

    def _talk(self) -> None:
        """Send as much as there is room for, and take what has come."""
        if self.outcome is not None:
            return
        try:
            if self._unsent:
                sent = self._sock.send(self._unsent, socket.MSG_NOSIGNAL)
                self._unsent = self._unsent[sent:]
            received = self._sock.recv(_READ)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            received = b""
        if not received:
            self._die()
            return
        self._answers.add(received)
        try:
            payload = self._answers.take(self.pid, self._number)
            if payload is not None:
                self.outcome = decode_answer(payload, self._due)
        except Garbled as garbled:
            self.kill()
            problem = f"broke the connection to its process: {garbled}"
            self.outcome = _fault_outcome("answer", problem, self._printed_last())

    def _hear_keeper(self) -> None:
        keeper_lives = self._read_keeper()
        if self.outcome is None and (not keeper_lives or self._code is not None):
            self._talk()  # the function may have answered before its end
            if self.outcome is None:
                self._die()

    def _read_keeper(self) -> bool:
        """Read what the keeper has sent; False if it is gone."""
        try:
            received = self._life.recv(4096)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False
        *lines, self._keeper_line = (self._keeper_line + received).split(b"\n")
        for line in lines:
            what, _, number = line.partition(b" ")
            if what == b"pid":
                self.pid = int(number)
            elif what == b"failed":
                self._start_error = int(number)
            else:
                self._code = int(number)
        return bool(received)

    def _hear_output(self) -> None:
        """Read what is there, but not forever if something prints without end."""
        for _ in range(16):
            try:
                printed = os.read(self._printed, _READ)
            except BlockingIOError:
                return
            if not printed:
                return
            self._output.add(printed)

    def _die(self) -> None:
        """Set the outcome of a process that can no longer answer, and kill what is left of it."""
        keeper_lives = self._await_code(_GOODBYE_SECONDS)
        self.kill()
        if keeper_lives and self._code is None:
            text = "closed the connection to its process, or left it to another one"
        elif self._code is None:
            text = "lost its process, as the one that watches over it was killed"
        else:
            text = f"lost its process, which {describe_end(self._code)}"
        self.outcome = _fault_outcome("died", text, self._printed_last())

    def _await_code(self, seconds: float) -> bool:
        """Wait until the keeper reports the end of the function's process; False if it is gone."""
        deadline = time.monotonic() + seconds
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)  # the function may have stopped the keeper
        poll = select.poll()
        for descriptor in (self._life.fileno(), self._printed):
            poll.register(descriptor, select.POLLIN)
        while self._code is None and (seconds_left := deadline - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(seconds_left * 1e3):
                if descriptor == self._printed:
                    self._hear_output()  # a process that waits for room in the pipe cannot end
                elif not self._read_keeper():
                    return False
        return True

    def _read_stack(self) -> str:
        """The stack of the function's main thread, requested by a signal; empty if none comes."""
        if not self.pid:
            return ""
        self._hear_output()
        poll = select.poll()
        poll.register(self._printed, select.POLLIN)
        with self._output.capture() as lines:
            with contextlib.suppress(OSError):
                os.kill(self.pid, STACK_SIGNAL)
            while len(lines) < _STACK_LINES and poll.poll(_STACK_SECONDS * 1e3):
                self._hear_output()
        frames = [line for line in lines if line.startswith("  File ")]
        # From the first frame of ours on are those that called the function.
        user_frames = list(takewhile(lambda frame: "scoring_child.py" not in frame, frames))
        if not user_frames:
            return ""
        return "It stood at (the innermost call first):\n" + "\n".join(user_frames)

    def _printed_last(self) -> str:
        """What it printed before its end: for a crash the stack, without this package's frames."""
        package = os.path.dirname(__file__)
        lines: list[str] = []
        for line in self._output.last():
            if not (line.startswith("  File ") and package in line):
                lines.append(f"  | {line}")
        return "\n".join(["It printed last:", *lines]) if lines else ""


def _fault_outcome(kind: FaultKind, text: str, detail: str = "") -> ScoringOutcome:
    return ScoringOutcome(fault=ScoringFault(kind=kind, text=text, detail=detail))


def describe_end(code: int) -> str:
    """How a process ended, by its exit code: negative for a signal."""
    if code < 0:
        return f"was killed by {_signal_name(-code)}"
    return f"ended with exit code {code}"


def _signal_name(number: int) -> str:
    """The name of a signal; real-time ones have none."""
    if number in set(signal.Signals):
        return signal.Signals(number).name
    return f"signal {number}"


def _closed_socket() -> socket.socket:
    """A socket in place of one that is not open yet: closing it once more does nothing."""
    closed = socket.socket()
    closed.close()
    return closed
