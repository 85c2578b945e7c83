"""The inside of a reward process: one user's function, called chunk after chunk.

Owns: the call, checks of what it returns, the child's loop and end. Does not own: columns as
keywords of TRL's signature (scoring_keywords.py), frames (scoring_frames.py), the parent's end
(scoring_parent.py), processes that the function starts (scoring_keeper.py), the consequences of a
fault (scoring.py). Imports no torch. Also runs in the kernel's own process, for breakpoints
(inproc).
"""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import io
import itertools
import os
import signal
import socket
import sys
import traceback
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any

import cloudpickle
import msgspec
import numpy as np
import pyarrow as pa

from dataflow import processor_time
from dataflow.arrow_without_pandas import keep_pandas_out
from dataflow.safe_text import printable
from dataflow.signals import leave_signals_to_the_run
from operators.kernels.scoring_frames import (
    HEADER,
    MARK,
    FaultKind,
    ScoringFault,
    ScoringOutcome,
    abridge,
    describe_value,
    find_metric_problem,
    is_reward,
)
from operators.kernels.scoring_keywords import STEPS, keywords_for
from operators.rewards import RewardFn, wants

if TYPE_CHECKING:  # as in operators/rewards.py
    import asyncio

STACK_SIGNAL = signal.SIGRTMIN + 5 if sys.platform == "linux" else signal.SIGUSR2
"""Makes a reward process print its main thread's stack, even if that holds the GIL."""
_TEXT, _DETAIL = 300, 20_000
"""Most characters of an exception's text, and of its traceback."""
_CUT_OFF = 1
"""Exit code of a process whose function closed the socket for its answers."""


class Caught:
    """Turns what user code raises into a fault, exits included: no function ends a run.

    interrupts: KeyboardInterrupt too, if no Ctrl-C can be the cause.
    """

    def __init__(self, *, interrupts: bool = False) -> None:
        self.fault: ScoringFault | None = None
        self.error: BaseException | None = None
        self._passes = (GeneratorExit,) if interrupts else (GeneratorExit, KeyboardInterrupt)

    def __enter__(self) -> Caught:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None or trace is None or isinstance(error, self._passes):
            return False
        self.error = error
        self.fault = ScoringFault(
            kind="raised",
            text=f"raised {summarize_error(error)}",
            detail=_format_traceback(error, _user_frames(trace)),
        )
        return True


def _format_traceback(error: BaseException, trace: TracebackType) -> str:
    """The traceback with the error's text; without that if it is too long."""
    lines = traceback.format_tb(trace)
    if len(_error_text(error)) <= _DETAIL:
        lines = traceback.format_exception(type(error), error, trace)
    return printable(abridge("".join(lines), _DETAIL))


def _error_text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:  # the user's class
        return f"(its str raised {type(second).__name__})"


def summarize_error(error: BaseException) -> str:
    """`ValueError: boom`: the class, and the first line of the text that is not blank."""
    name = type(error).__qualname__.rpartition(".")[2]
    lines = (line.strip() for line in _error_text(error)[:_DETAIL].split("\n"))
    first_line = next(filter(None, lines), "")
    summary = f"{name}: {first_line}" if first_line else name
    return printable(abridge(summary, _TEXT))


class MetricRefused(ValueError):
    """log_metric was called with something that cannot be a metric."""


class Metrics:
    """What a function logs during one call."""

    def __init__(self) -> None:
        self.logged: list[tuple[str, float]] = []
        self.fault: ScoringFault | None = None
        """Kept because the function may catch what `log` raises."""

    def log(self, name: Any, value: Any) -> None:
        """log_metric(name, value), which functions may call with these keywords. Raises
        MetricRefused.
        """
        problem = find_metric_problem(name, value, len(self.logged))
        if problem:
            if self.fault is None:
                text = f"logged a metric that {problem}"
                self.fault = ScoringFault(kind="metric", text=text)
            raise MetricRefused(f"log_metric: this {problem}")
        self.logged.append((name, float(value)))


class Scorer:
    """Calls one function; keeps an event loop for async ones."""

    def __init__(self, fn: RewardFn, *, interrupts: bool = False) -> None:
        """interrupts: a KeyboardInterrupt is the function's own."""
        self._fn = fn
        self._wants = wants(fn)
        self._interrupts = interrupts
        self.raised: BaseException | None = None
        """What it raised in the last call, for a debugger; in a process of its own nothing is kept.
        """
        self._runner: asyncio.Runner | None = None
        self._thread: ThreadPoolExecutor | None = None
        """For async functions, if this thread already runs a loop, as in a notebook."""

    def score(self, records: pa.RecordBatch) -> ScoringOutcome:
        """Call the function on these rows: `completion`, and the other columns that are there."""
        metrics = Metrics()
        outcome = None
        with Caught(interrupts=self._interrupts) as caught:
            keywords = keywords_for(self._wants, records)
            if "log_metric" in self._wants.names:
                keywords["log_metric"] = metrics.log
            if "log_extra" in self._wants.names:
                keywords["log_extra"] = _ignore_extra
            returned = self._call(keywords)
            outcome = judge(returned, records, metrics.logged)
        self.raised = None if self._interrupts else caught.error
        fault = metrics.fault or caught.fault
        if outcome is None or fault is not None:
            return ScoringOutcome(fault=fault)
        return outcome

    def _call(self, keywords: dict[str, Any]) -> Any:
        returned = self._fn(**keywords)
        if not inspect.isawaitable(returned):
            return returned
        import asyncio

        self._runner = self._runner or asyncio.Runner()
        if self._thread is None and _has_running_loop():
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward")
        if self._thread is not None:
            return self._thread.submit(self._runner.run, _await(returned)).result()
        return self._runner.run(_await(returned))

    def close(self) -> None:
        """End the event loop, if there is one."""
        if self._runner is not None and self._thread is not None:
            self._thread.submit(self._runner.close).result()
        elif self._runner is not None:
            self._runner.close()
        if self._thread is not None:
            self._thread.shutdown()


def _has_running_loop() -> bool:
    import asyncio

    return asyncio._get_running_loop() is not None


async def _await(returned: Awaitable[Any]) -> Any:
    return await returned


def _ignore_extra(column: str, values: Sequence[Any]) -> None:
    """For TRL's extra columns of its table of completions: accepted and ignored."""


def values_due(records: pa.RecordBatch) -> int:
    """How many numbers a call on these rows returns: one for each row, or for each step."""
    steps = _count_steps(records)
    return records.num_rows if steps is None else sum(steps)


def _count_steps(records: pa.RecordBatch) -> list[int] | None:
    """How many steps each completion has; None if its steps are not asked for."""
    if STEPS not in (records.schema.metadata or {}):
        return None
    offsets = records.column("steps").offsets.to_numpy()
    return np.diff(offsets).tolist()


def judge(
    returned: Any, records: pa.RecordBatch, metrics: list[tuple[str, float]]
) -> ScoringOutcome:
    """Judge a returned value: a fault unless one finite number or None per row; with steps, a list
    of them for each row.
    """
    steps = _count_steps(records)
    if steps is None:
        numbers = _judge_list(returned, records.num_rows, "completion")
    else:
        numbers = _judge_steps(returned, steps)
    if isinstance(numbers, ScoringOutcome):
        return numbers
    return ScoringOutcome(values=numbers, metrics=metrics)


def _judge_steps(returned: Any, steps: Sequence[int]) -> list[float | None] | ScoringOutcome:
    """The numbers of all rows' steps, one row after another, or a fault."""
    rows = len(steps)
    if not _is_list(returned):
        return _not_a_list(returned, "with a list of its steps' numbers for each completion")
    if len(returned) != rows:
        return _faulty("length", f"returned {len(returned)} lists for {rows} completions")
    lists = list(itertools.islice(returned, rows + 1))
    if len(lists) != rows:
        kind = type(returned).__name__
        return _faulty("length", f"returned {kind} of length {rows} with another number of lists")
    numbers: list[float | None] = []
    for index, (row_list, count) in enumerate(zip(lists, steps, strict=True)):
        row_numbers = _judge_list(row_list, count, "step")
        if isinstance(row_numbers, ScoringOutcome):
            assert row_numbers.fault is not None
            kind = row_numbers.fault.kind
            text = row_numbers.fault.text
            return _faulty(kind, f"{text}, of completion {index}")
        numbers += row_numbers
    return numbers


def _judge_list(returned: Any, count: int, what: str) -> list[float | None] | ScoringOutcome:
    """One finite number or None for each completion or step, or a fault."""
    if not _is_list(returned):
        return _not_a_list(returned, f"with a number for each {what}")
    if len(getattr(returned, "shape", (0,))) != 1:
        shape = tuple(returned.shape)
        return _faulty("type", f"returned an array of shape {shape}, expected ({count},)")
    if len(returned) != count:
        return _faulty("length", f"returned {len(returned)} values for {count} {what}s")
    # One more than there should be: a user's class may have another length than it says.
    numbers = [_read_number(element) for element in itertools.islice(returned, count + 1)]
    if len(numbers) != count:
        kind = type(returned).__name__
        return _faulty("length", f"returned {kind} of length {count} with another number of values")
    for index, number in enumerate(numbers):
        if isinstance(number, str):
            return _faulty("value", f"returned {number} as value {index} of {count}")
    return numbers  # type: ignore[return-value]


def _not_a_list(returned: Any, of: str) -> ScoringOutcome:
    return _faulty("type", f"returned {type(returned).__name__}, expected a list {of}")


def _is_list(returned: Any) -> bool:
    if isinstance(returned, str | bytes | dict):
        return False
    return hasattr(returned, "__len__") and hasattr(returned, "__getitem__")


def _read_number(element: Any) -> float | str | None:
    """An element as a float, None as it is, or as text if it is not a reward."""
    if element is None:
        return None
    if not hasattr(element, "__float__"):
        return describe_value(element)
    try:
        number = float(element)
    except (TypeError, ValueError, OverflowError):
        return describe_value(element)
    return number if is_reward(number) else repr(number)


def _faulty(kind: FaultKind, text: str) -> ScoringOutcome:
    return ScoringOutcome(fault=ScoringFault(kind=kind, text=text))


def _user_frames(trace: TracebackType) -> TracebackType:
    """The frames after the last one of this file: those of the user's function."""
    frame: TracebackType | None = trace
    user_frames: TracebackType | None = None
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == __file__:
            user_frames = frame.tb_next
        frame = frame.tb_next
    return user_frames or trace


def main(descriptor: int) -> None:
    """The child, set up by its keeper: load the function, score chunks until the parent closes."""
    leave_signals_to_the_run()
    complaints = os.dup(2)  # the function may do anything to stderr itself
    faulthandler.enable(complaints)
    if hasattr(faulthandler, "register"):
        faulthandler.register(STACK_SIGNAL, complaints, all_threads=False)
    if isinstance(sys.stdout, io.TextIOWrapper):  # None if the run has no standard output
        sys.stdout.reconfigure(line_buffering=True)
    wire = CallSocket(descriptor)
    shipped = wire.receive()
    if shipped is None:
        return
    keep_pandas_out()  # until the function imports it
    scorer = None
    with Caught(interrupts=True) as loading:
        scorer = Scorer(cloudpickle.loads(shipped), interrupts=True)
    wire.reply(ScoringOutcome(fault=loading.fault))
    if scorer is not None:
        _serve(wire, scorer)


def _serve(wire: CallSocket, scorer: Scorer) -> None:
    while (frame := wire.receive()) is not None:
        begun = processor_time.of_process()
        outcome = scorer.score(pa.ipc.open_stream(frame).read_next_batch())
        if os.getpid() != wire.pid:
            _end_fork(wire, outcome)
        took = processor_time.of_process().since(begun)
        wire.reply(msgspec.structs.replace(outcome, processors=took))
    scorer.close()


def _end_fork(wire: CallSocket, outcome: ScoringOutcome) -> None:
    """In a process that the function forked and that came back: report it, as a fault."""
    end = "returned"
    if outcome.fault is None:
        wire.reply(outcome)
    else:
        end = outcome.fault.text
    sys.stderr.write(f"a fork of the function {end}\n")
    os._exit(1)


class CallSocket:
    """The socket to the kernel's process; requests are numbered, and answers repeat the number."""

    def __init__(self, descriptor: int) -> None:
        self._sock = socket.socket(fileno=descriptor)
        self._file = os.fstat(descriptor)[1:3]
        self._number = 0
        self.pid = os.getpid()

    def receive(self) -> bytearray | None:
        """The next request, or None if the parent has closed."""
        header = self._receive(HEADER.size)
        if header is None:
            return None
        _, _, self._number, size = HEADER.unpack(header)
        return self._receive(size)

    def reply(self, outcome: ScoringOutcome) -> None:
        """Answer the last request; ends the process if the socket or the parent is gone."""
        payload = msgspec.msgpack.encode(outcome)
        if self._is_open():
            header = HEADER.pack(MARK, os.getpid(), self._number, len(payload))
            with contextlib.suppress(OSError):  # the parent is gone or has hung up
                self._sock.sendall(header + payload)
                return
        else:
            with contextlib.suppress(OSError, ValueError):
                print(
                    "nothing can be answered: a file descriptor that is not the function's own was"
                    " closed by it"
                )
        os._exit(_CUT_OFF)

    def _is_open(self) -> bool:
        """Whether its descriptor is still the same socket: the function may have closed it."""
        with contextlib.suppress(OSError):
            return os.fstat(self._sock.fileno())[1:3] == self._file
        return False

    def _receive(self, size: int) -> bytearray | None:
        """So many bytes; None if the parent has closed, or is gone."""
        buffer = bytearray(size)
        view = memoryview(buffer)
        received = 0
        while received < size:
            with contextlib.suppress(OSError):
                count = self._sock.recv_into(view[received:])
                if count:
                    received += count
                    continue
            return None
        return buffer
