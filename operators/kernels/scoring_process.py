"""The parent's end of reward processes: start, ask, wait, kill.

Owns: one child process for each function, the socket to it, and time limits. Does not own: the child's inside
(scoring_child.py), and what follows from a fault (scoring.py).

Columns go out as an Arrow IPC stream, numbers come back as msgpack. The only pickle is the function itself, sent once
at the start of a child. The child is a fresh interpreter and not a spawn of multiprocessing, which would import the
parent's main module again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from typing import Protocol

import cloudpickle
import msgspec
import pyarrow as pa

from dataflow.errors import KernelError
from dataflow.importing import interpreter
from dataflow.shipping import by_value
from dataflow.signals import held_back
from operators.kernels.scoring_child import Caught, Fault, Outcome, Scorer, receive_frame, send_frame
from operators.rewards import RewardFn

_START_SECONDS = 120.0
"""For a child to import what its function imports; torch alone takes seconds."""
_GOODBYE_SECONDS = 2.0
_BOOTSTRAP = "from operators.kernels.scoring_child import main; main(int(sys.argv[3]))"


class Scorers(Protocol):
    """Several functions that can be called on different rows at once."""

    def score(self, calls: Mapping[int, pa.RecordBatch]) -> dict[int, Outcome]:
        """Call function i on calls[i]; never raises for what the functions do."""
        ...

    def replace(self, index: int) -> None:
        """Give function i a fresh process, for a failure may have left the old one in any state."""
        ...

    def close(self) -> None: ...


class InProcess:
    """The functions called directly, one after another: breakpoints work, time limits do not."""

    def __init__(self, fns: Sequence[RewardFn]) -> None:
        self._scorers = [Scorer(fn) for fn in fns]

    def score(self, calls: Mapping[int, pa.RecordBatch]) -> dict[int, Outcome]:
        """See Scorers."""
        return {index: self._scorers[index].score(records) for index, records in calls.items()}

    def replace(self, index: int) -> None:
        """There is only this process."""

    def close(self) -> None:
        """End the event loops of async functions."""
        for scorer in self._scorers:
            scorer.close()


class Children:
    """Each function in a child process of its own. A child that failed a time limit, or died, is replaced."""

    def __init__(self, names: Sequence[str], fns: Sequence[RewardFn], timeout: float) -> None:
        """Start all children at once. Raises KernelError where a function cannot be shipped or loaded."""
        # The kernel kills a child when the *thread* that started it ends, so all are started by one that stays.
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward-processes")
        self._timeout = timeout
        self._children: list[Child] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            shipped = [ship(name, fn) for name, fn in zip(names, fns, strict=True)]
            self._children = [Child(name, code) for name, code in zip(names, shipped, strict=True)]
            self._start(self._children)
            undo.pop_all()

    def score(self, calls: Mapping[int, pa.RecordBatch]) -> dict[int, Outcome]:
        """See Scorers. timeout seconds for all of them together, since they run at the same time."""
        self._start([self._children[index] for index in calls if not self._children[index].running])
        deadline = time.monotonic() + self._timeout
        outcomes: dict[int, Outcome] = {}
        for index, records in calls.items():
            lost = self._children[index].ask(_stream(records), deadline)
            if lost is not None:
                outcomes[index] = lost
        waiting = {self._children[index].sock: index for index in calls if index not in outcomes}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            for sock in ready or list(waiting):
                index = waiting.pop(sock)  # type: ignore[call-overload]
                outcomes[index] = self._children[index].answer(deadline)
        return outcomes

    def replace(self, index: int) -> None:
        """Kill the child; the next call starts another."""
        self._children[index].kill()

    def close(self) -> None:
        """End all children; those still busy are killed."""
        for child in self._children:
            child.hang_up()
        for child in self._children:
            child.end()
        self._starter.shutdown()

    def pids(self) -> list[int]:
        """Of the children that run now, in the order of the functions."""
        return [child.process.pid for child in self._children if child.running and child.process is not None]

    def _start(self, children: Sequence[Child]) -> None:
        """All at once; one that somebody killed while it started is started once more."""
        deadline = time.monotonic() + _START_SECONDS
        for again in (True, False):
            for child in children:
                self._starter.submit(child.start).result()
            children = [child for child in children if not child.is_ready(deadline, or_killed=again)]


class Child:
    """One process with one function."""

    def __init__(self, name: str, shipped: bytes) -> None:
        self._name, self._shipped = name, shipped
        self.process: subprocess.Popen[bytes] | None = None
        self.sock = socket.socket()
        self.sock.close()
        self.running = False

    def start(self) -> None:
        """A fresh interpreter, and the function on its way to it."""
        self.sock, theirs = socket.socketpair()
        with theirs, held_back():
            self.process = subprocess.Popen(
                interpreter(_BOOTSTRAP, "operators.kernels.scoring_child", str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.running = True

    def is_ready(self, deadline: float, *, or_killed: bool) -> bool:
        """Wait until the function is loaded. False where a signal ended the process before, and `or_killed` allows it.

        Raises KernelError, with the child's traceback, where it cannot be loaded.
        """
        lost = self._send(self._shipped, deadline)
        fault = (lost or self.answer(deadline)).fault
        if fault is None:
            return True
        self.end()
        if or_killed and fault.kind == "died" and self.process is not None and self.process.returncode < 0:
            return False
        raise KernelError(
            f"reward {self._name!r}: its process could not load it: {fault.text}. "
            f"Fix: what the function imports has to be importable from sys.path.\n{fault.detail}"
        )

    def ask(self, request: pa.Buffer, deadline: float) -> Outcome | None:
        """Send one chunk; an Outcome only where that failed."""
        return self._send(request, deadline)

    def answer(self, deadline: float) -> Outcome:
        """The reply to the last question; a fault, and the child killed, where there is none in time."""
        try:
            self.sock.settimeout(max(1e-3, deadline - time.monotonic()))
            frame = receive_frame(self.sock)
        except TimeoutError:
            return self._timed_out()
        except ConnectionError:
            return self._died()
        return self._died() if frame is None else msgspec.msgpack.decode(frame, type=Outcome)

    def hang_up(self) -> None:
        """Close the socket: an idle child ends by itself."""
        self.sock.close()

    def end(self) -> None:
        """Wait for the child's end, and kill it where it does not come."""
        self.hang_up()
        if self.process is not None and self.running:
            try:
                self.process.wait(_GOODBYE_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()
        self.running = False

    def _send(self, payload: bytes | pa.Buffer, deadline: float) -> Outcome | None:
        try:
            self.sock.settimeout(max(1e-3, deadline - time.monotonic()))
            send_frame(self.sock, payload)
        except TimeoutError:
            return self._timed_out()
        except ConnectionError:
            return self._died()
        return None

    def _timed_out(self) -> Outcome:
        self.kill()
        return Outcome(fault=Fault(kind="timeout", text="timed out"))

    def _died(self) -> Outcome:
        self.kill(grace=_GOODBYE_SECONDS)
        code = self.process.returncode if self.process is not None else 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return Outcome(fault=Fault(kind="died", text=f"lost its process, which {how}"))

    def kill(self, grace: float = 0.0) -> None:
        """Kill the child and what it started; grace: seconds to end by itself, so that its exit code is its own."""
        self.sock.close()
        self.running = False
        if self.process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace)
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def ship(name: str, fn: RewardFn) -> bytes:
    """A function as bytes: by name where its module can be imported afresh, by value where it cannot.

    Raises KernelError where it holds something that cannot be sent to another process.
    """
    with by_value(), Caught() as caught:
        return cloudpickle.dumps(fn)
    raise KernelError(
        f"reward {name!r}: cannot be sent to a process of its own: {caught.fault.text if caught.fault else ''}. "
        "Fix: make locks, connections and files inside the function, or run with inproc."
    )


def _stream(records: pa.RecordBatch) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, records.schema) as writer:
        writer.write_batch(records)
    return sink.getvalue()
