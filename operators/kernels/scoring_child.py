"""The inside of a reward process: one user's function, called chunk after chunk.

Owns: turning columns into the keywords of TRL's signature, calling, judging what comes back, and the child's loop and
end. Does not own: the parent's end (scoring_process.py), what a fault leads to (scoring.py). Imports no torch: that
is left to the user's function. Also runs in the kernel's own process, for breakpoints (inproc).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import io
import itertools
import math
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Literal

import cloudpickle
import msgspec
import pyarrow as pa

from dataflow.signals import left_to_the_run
from operators.rewards import RewardFn, wants

CONVERSATIONAL = b"conversational"
"""Schema metadata: prompts are message lists, so completions are to be as well."""

_LARGEST = 3.4028234663852886e38  # of float32, the type that rewards travel as
_HEADER = struct.Struct("<Q")

FaultKind = Literal["raised", "type", "length", "value", "timeout", "died"]


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong in one call. detail: a traceback, where there is one."""

    kind: FaultKind
    text: str
    detail: str = ""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one call gave: values (None: does not apply) and metrics, or a fault."""

    values: list[float | None] = []
    metrics: list[tuple[str, float]] = []
    fault: Fault | None = None


class Caught:
    """Keeps an exception of the user's code as a Fault. Only Exception: an exit still ends the process."""

    def __init__(self) -> None:
        self.fault: Fault | None = None

    def __enter__(self) -> Caught:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception) or trace is None:
            return False
        text = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
        detail = "".join(traceback.format_exception(type(error), error, _users_part(trace)))
        self.fault = Fault(kind="raised", text=f"raised {text}", detail=detail)
        return True


class Scorer:
    """Calls one function; keeps an event loop for those that are async."""

    def __init__(self, fn: RewardFn) -> None:
        self._fn, self._wants = fn, wants(fn)
        self._runner: asyncio.Runner | None = None
        self._thread: ThreadPoolExecutor | None = None
        """For async functions where this thread has a loop that runs already, as a notebook's has."""

    def score(self, records: pa.RecordBatch) -> Outcome:
        """One call on these rows: `completion`, and of prompt, completion_ids and dataset columns what there is."""
        metrics: list[tuple[str, float]] = []
        keywords = {name: value for name, value in as_keywords(records).items() if self._wants.takes(name)}
        if "log_metric" in self._wants.names:
            keywords["log_metric"] = lambda name, value: metrics.append((str(name), float(value)))
        if "log_extra" in self._wants.names:
            keywords["log_extra"] = _ignore_extra
        with Caught() as caught:
            made = self._call(keywords)
            return judged(made, records.num_rows, metrics)
        return Outcome(fault=caught.fault)

    def _call(self, keywords: dict[str, Any]) -> Any:
        made = self._fn(**keywords)
        if not inspect.isawaitable(made):
            return made
        self._runner = self._runner or asyncio.Runner()
        if self._thread is None and _has_running_loop():
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward")
        if self._thread is not None:
            return self._thread.submit(self._runner.run, _awaited(made)).result()
        return self._runner.run(_awaited(made))

    def close(self) -> None:
        """End the event loop, if there is one."""
        if self._runner is not None and self._thread is not None:
            self._thread.submit(self._runner.close).result()
        elif self._runner is not None:
            self._runner.close()
        if self._thread is not None:
            self._thread.shutdown()


def _has_running_loop() -> bool:
    return asyncio._get_running_loop() is not None


async def _awaited(made: Awaitable[Any]) -> Any:
    return await made


def _ignore_extra(column: str, values: Sequence[Any]) -> None:
    """TRL's extra columns of its table of completions; accepted and not kept."""


def as_keywords(records: pa.RecordBatch) -> dict[str, Any]:
    """The columns as TRL hands them to a function: plain Python lists by keyword."""
    found: dict[str, Any] = {}
    for name, column in zip(records.column_names, records.columns, strict=True):
        keyword = {"prompt": "prompts", "completion": "completions"}.get(name)
        found[keyword or name] = _as_list(name, column)
    if CONVERSATIONAL in (records.schema.metadata or {}):
        found["completions"] = [[{"role": "assistant", "content": text}] for text in found["completions"]]
    return found


def _as_list(name: str, column: pa.Array) -> list[Any]:
    if name != "completion_ids":
        return column.to_pylist()
    offsets = column.offsets.to_pylist()
    ids = column.values.to_numpy().tolist()
    return [ids[start:end] for start, end in itertools.pairwise(offsets)]


def judged(made: Any, rows: int, metrics: list[tuple[str, float]]) -> Outcome:
    """What a function returned as an Outcome: a fault unless it is one finite number, or None, for each row."""
    if isinstance(made, str | bytes | dict) or not hasattr(made, "__len__") or not hasattr(made, "__getitem__"):
        return _faulty("type", f"returned {type(made).__name__}, expected a list with a number for each completion")
    if len(made) != rows:
        return _faulty("length", f"returned {len(made)} values for {rows} completions")
    values = [None if value is None else _number(value) for value in made]
    for index, value in enumerate(values):
        if isinstance(value, str):
            return _faulty("value", f"returned {value} as value {index} of {rows}")
    return Outcome(values=values, metrics=metrics)  # type: ignore[arg-type]


def _number(value: Any) -> float | str:
    """The value as a float, or how to show what is none."""
    if not hasattr(value, "__float__"):
        return f"{value!r:.60}"
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return f"{value!r:.60}"
    return number if math.isfinite(number) and abs(number) <= _LARGEST else repr(number)


def _faulty(kind: FaultKind, text: str) -> Outcome:
    return Outcome(fault=Fault(kind=kind, text=text))


def _users_part(trace: TracebackType) -> TracebackType:
    """The frames after the last one of this file: those of the user's function."""
    at: TracebackType | None = trace
    users: TracebackType | None = None
    while at is not None:
        users = at.tb_next if at.tb_frame.f_code.co_filename == __file__ else users
        at = at.tb_next
    return users or trace


# Frames: 8 bytes of length, then as many bytes.


def send_frame(sock: socket.socket, payload: bytes | memoryview | pa.Buffer) -> None:
    """One frame; with a time-out on the socket, TimeoutError when the peer does not read in time."""
    view = memoryview(payload)
    sock.sendall(_HEADER.pack(view.nbytes))
    sock.sendall(view)


def receive_frame(sock: socket.socket) -> bytearray | None:
    """One frame, or None where the peer has closed."""
    header = _receive(sock, _HEADER.size)
    return None if header is None else _receive(sock, _HEADER.unpack(header)[0])


def _receive(sock: socket.socket, size: int) -> bytearray | None:
    buffer = bytearray(size)
    view, got = memoryview(buffer), 0
    while got < size:
        read = sock.recv_into(view[got:])
        if not read:
            return None
        got += read
    return buffer


# The process


def main(descriptor: int) -> None:
    """The child: take the function, then score chunks until the parent's end closes."""
    die_with_parent()
    left_to_the_run()
    if isinstance(sys.stdout, io.TextIOWrapper):  # None where the run has no standard output
        sys.stdout.reconfigure(line_buffering=True)
    sock = socket.socket(fileno=descriptor)
    sock.set_inheritable(False)
    shipped = receive_frame(sock)
    if shipped is None:
        return
    scorer = None
    with Caught() as loading:
        scorer = Scorer(cloudpickle.loads(shipped))
    with contextlib.suppress(ConnectionError):  # the parent is gone, and so is whoever would read a complaint
        _reply(sock, Outcome(fault=loading.fault))
        if scorer is not None:
            _serve(sock, scorer)


def _serve(sock: socket.socket, scorer: Scorer) -> None:
    while (frame := receive_frame(sock)) is not None:
        _reply(sock, scorer.score(pa.ipc.open_stream(frame).read_next_batch()))
    scorer.close()


def _reply(sock: socket.socket, outcome: Outcome) -> None:
    send_frame(sock, msgspec.msgpack.encode(outcome))


def die_with_parent() -> None:
    """On Linux: SIGKILL for this process when its parent ends, even in the middle of a call that never returns."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)
