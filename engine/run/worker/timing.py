"""What a Worker is doing and how long that takes.

Owns: the one thing under way, its span and its time as a metric; naming the node in every error
that leaves a kernel, even a sys.exit() of the user's code. Does not own: where spans and metrics go
(engine/run/loop/loop.py).

A call returns when a GPU has been told what to do, not when it has done it. So each thing under way
ends with a wait for the device: its time is that of its own work, the next one's has nothing of it
in it, and an error that the device has late is an error of the node that made it. The wait costs
some microseconds where the device is idle, as it is after most calls, since rows and metrics come
to the host. It gives up what the host could do between two calls while the device goes on: a Worker
does one thing after another, and a kernel that launches ahead does it within its call. Events on
the device would not wait, and their times would be of another clock and known only later.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable

import msgspec

from dataflow import processor_time
from dataflow.activity import show
from dataflow.errors import (
    CheckpointError,
    DataError,
    DataflowError,
    KernelError,
    Origin,
    ShortOfMemory,
)
from dataflow.memory_limits import is_out_of_memory
from dataflow.processor_time import ProcessorTime
from dataflow.safe_text import shown_bytes
from engine.protocol.refs import Ref
from engine.protocol.reports import Doing, Report, SpanOf
from engine.run.worker.counters import DEVICE_MEMORY, peak_bytes, wait_for_device

FETCH = "waits for its rows"
"""The name of the span in which a node's rows are fetched while nothing else is done."""
ENGINE = "cpu/engine"
"""The metric: seconds of processors that processes of a run took beside its nodes."""
_LESS = "see 'When memory runs out' in how-to.md"
_SMALLER = (
    "a smaller base, its weights on the host (--offload), a part of them (--tensor, --shard), or"
    " fewer nodes on that device; " + _LESS
)
"""Where weights have no room: nothing can be taken at once less of."""
_OF_WEIGHTS = ("open", "load", "offer", "fetch", "follow", "restore", "wake")
"""First words of what a node does where memory is for weights."""
_SHORTEST_WAIT = 1e-3
"""Seconds from which a wait has a span: shorter ones would fill a trace that shows none of them."""


class Timing:
    """`doing` may be read from any thread. span: called with each span. peak: called with a node
    and the most bytes that were on the GPU while it computed. origin: a node's line. wait: returns
    when the device has done what was launched; its RuntimeError is the node's.
    """

    def __init__(
        self,
        worker: str,
        origin: Callable[[str], Origin | None] = lambda node: None,
        wait: Callable[[], None] = wait_for_device,
    ) -> None:
        self.origin = origin
        self.wait = wait
        self.idle = Doing(worker=worker)
        self.doing = self.idle
        self.span: Callable[[SpanOf], None] | None = None
        self.peak: Callable[[str, int], None] | None = None
        self.worker = worker
        self.computed = 0.0
        """Seconds of processors that this process took while it did something of a node."""
        self._reports: list[Report] = []
        self._placed: dict[str, str] = {}
        self.between = f"{worker} is between two kernels"

    def during(
        self,
        node: str,
        name: str,
        what: str = "",
        *,
        task: int = -1,
        counted: bool = True,
        computes: bool = True,
        queues: bool = False,
        elsewhere: Callable[[], ProcessorTime] | None = None,
    ) -> During:
        """A context in which the node computes. name: of its span. what: the same with its
        particulars, where it has some. task: what it was told. counted: its time is part of
        time/<node>. computes: a kernel is at work, and not only its code or files are read or
        written. queues: what this thread waited for a core is part of queue/<node>. elsewhere: what
        other processes computed for it since the last call; with it, that and what this thread
        computed are part of cpu/<node>, and what either waited for a core of queue/<node>.
        """
        return During(self, node, name, what, task, counted, computes, queues, elsewhere)

    def reports(self) -> list[Report]:
        """Times since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def locate_node(self, node: str) -> str:
        """`my_graph.py:14 score`, as the check names it."""
        if node not in self._placed:
            origin = self.origin(node)
            self._placed[node] = node
            if origin:
                self._placed[node] = f"{origin} {node}"
        return self._placed[node]

    def begin_wait(self, reason: str, start: float) -> Doing:
        """Show that the kernel under way only waits from now on; returns what was shown before."""
        computing = self.doing
        self.doing = msgspec.structs.replace(computing, waits_for=reason, waits_since=start)
        show(f"{self.worker} is in {self.locate_node(computing.node)} (waits for {reason})")
        return computing

    def end_wait(
        self, computing: Doing, node: str, start: float, end: float, *, counted: bool
    ) -> None:
        """The kernel goes on: report the wait as time/<node>/<reason>, where it is counted, and
        tell its span. computing: what `begin_wait` returned.
        """
        reason, self.doing = self.doing.waits_for, computing
        show(f"{self.worker} is in {self.locate_node(computing.node)} ({computing.what})")
        if counted:
            self._reports.append((f"time/{node}/{reason}", end - start, 1.0))
        if self.span is not None and end - start >= _SHORTEST_WAIT:
            track, name = f"{self.worker}/{node}", f"waits for {reason}"
            self.span(
                SpanOf(track=track, name=name, start=start, end=end, computes=False, waits=True)
            )

    def tell_fetch_beside(
        self, lane: str, name: str, start: float, end: float, what: str, task: int = -1
    ) -> None:
        """From any thread: tell the span of a fetch that kept no kernel waiting, on a lane of its
        own.
        """
        if self.span is not None:
            self.span(
                SpanOf(
                    track=f"{self.worker}/{lane}",
                    name=name,
                    start=start,
                    end=end,
                    what=what,
                    task=task,
                    computes=False,
                    beside=True,
                )
            )

    def note_fetch(self, node: str, start: float, end: float) -> None:
        """Report as time/<node>/rows how long a node waited until its rows were there; from 1 ms
        on it is a span of its lane.
        """
        self._reports.append((f"time/{node}/rows", end - start, 1.0))
        if self.span is not None and end - start >= _SHORTEST_WAIT:
            track = f"{self.worker}/{node}"
            span = SpanOf(track=track, name=FETCH, start=start, end=end, computes=False, waits=True)
            self.span(span)

    def note(
        self, node: str, seconds: float, took: ProcessorTime | None, *, is_function: bool
    ) -> None:
        """Report time that counts, and how much of it was waiting for a core, where that is known;
        of a function also how much was computing.
        """
        self._reports.append((f"time/{node}", seconds, 1.0))
        if took is None:
            return
        if is_function:
            self._reports.append((f"cpu/{node}", took.computed, 1.0))
        self._reports.append((f"queue/{node}", took.queued, 1.0))


class During:
    """A context that notes what a Worker does and how long; its errors name the node."""

    def __init__(
        self,
        timing: Timing,
        node: str,
        name: str,
        what: str,
        task: int,
        counted: bool,
        computes: bool,
        queues: bool,
        elsewhere: Callable[[], ProcessorTime] | None,
    ) -> None:
        self._timing, self._node, self._name, self._what = timing, node, name, what or name
        self._task, self._counted, self._elsewhere = task, counted, elsewhere
        self._computes = computes
        self._queues = queues or elsewhere is not None
        self._start = self._end = 0.0
        self._before = ProcessorTime()
        self._process_before = 0.0
        self._makes = False

    def making(self) -> During:
        """The same; its span waits for `note_rows`."""
        self._makes = True
        return self

    @property
    def seconds(self) -> float:
        """How long it took, once it is over."""
        return self._end - self._start

    def note_rows(self, ref: Ref | None, task: int | None = None) -> None:
        """Tell the span, with the rows that came of it, if any. task: whose they are, where that is
        another one than was expected.
        """
        if task is not None:
            self._task = task
        if ref is None:
            self._tell(-1, 0, 0)
        else:
            self._tell(ref.block, len(ref.keys), int(ref.lengths.sum()))

    def _tell(self, block: int, rows: int, tokens: int) -> None:
        if self._timing.span is None:
            return
        span = SpanOf(
            track=f"{self._timing.worker}/{self._node}",
            name=self._name,
            start=self._start,
            end=self._end,
            what="" if self._what == self._name else self._what,
            task=self._task,
            block=block,
            rows=rows,
            tokens=tokens,
            computes=self._computes,
        )
        self._timing.span(span)

    def __enter__(self) -> None:
        self._start = time.monotonic()
        worker, what = self._timing.worker, self._what
        self._timing.doing = Doing(
            worker=worker, node=self._node, what=what, since=self._start, computes=self._computes
        )
        show(f"{worker} is in {self._locate()} ({what})")
        self._process_before = time.process_time()
        if self._queues:
            self._before = processor_time.of_thread()
        if self._counted:
            DEVICE_MEMORY.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if error is None:  # else the device may never be done
            error = self._wait()
        self._end = time.monotonic()
        computed = time.process_time() - self._process_before
        self._timing.computed += computed
        self._timing.doing = self._timing.idle
        show(self._timing.between)
        if self._counted:
            is_function = self._elsewhere is not None
            self._timing.note(self._node, self.seconds, self._took(), is_function=is_function)
            self._report_peak()
        if error is not None or not self._makes:
            self.note_rows(None)
        if error is not None:
            self._raise_named(error)

    def _wait(self) -> RuntimeError | None:
        """Wait for the device; what it says of work that it could not do."""
        try:
            self._timing.wait()
        except RuntimeError as error:  # torch.AcceleratorError is one
            return error
        return None

    def _raise_named(self, error: BaseException) -> None:
        """Raise the error of a kernel as one that names the node, or return for it to go on."""
        what = self._what
        if isinstance(error, DataError) and what != "open" and self._node not in str(error):
            raise KernelError(f"{self._locate()}: {what}: {error}") from error
        if isinstance(error, DataflowError):
            self._place(error)
        elif is_out_of_memory(error):
            # Without the traceback, whose frames hold what was computed.
            text = "".join(traceback.format_exception(error)).rstrip()
            raised = f"{type(error).__name__}: {error}".rstrip(".")
            fix = _SMALLER if what.partition(" ")[0] in _OF_WEIGHTS else _LESS
            had = shown_bytes(peak_bytes())
            why = f"its memory ran out, of which its process had {had}: {raised}. Fix: {fix}."
            raise ShortOfMemory(f"{self._locate()}: {what}: {why}\n{text}") from None
        elif isinstance(error, Exception) and what == "restore":
            first_line = str(error).strip().partition("\n")[0]
            raised = f"{type(error).__name__}: {first_line}"
            problem = f"expected files that it wrote in the checkpoint, found others ({raised})"
            text = f"{self._locate()}: {problem}. Fix: an earlier checkpoint."
            raise CheckpointError(text) from error
        # Even SystemExit: the user's code must not end a Worker without a word.
        elif not isinstance(error, (KeyboardInterrupt, GeneratorExit)):
            text = "".join(traceback.format_exception(error)).rstrip()
            why = f"raised {type(error).__name__}: {error}. Fix: see the traceback.\n{text}"
            raise KernelError(f"{self._locate()}: {what}: {why}") from error

    def _took(self) -> ProcessorTime | None:
        if not self._queues:
            return None
        now = processor_time.of_thread()
        here = now.since(self._before)
        if self._elsewhere is None:
            return here
        return here + self._elsewhere()

    def _report_peak(self) -> None:
        peak = DEVICE_MEMORY.since()
        if peak and self._timing.peak is not None:
            self._timing.peak(self._node, peak)

    def _locate(self) -> str:
        return self._timing.locate_node(self._node)

    def _place(self, error: DataflowError) -> None:
        """Put the node's line before the error's text. The exception stays the same object."""
        origin, text = self._timing.origin(self._node), str(error)
        if origin is None or f"{origin} " in text:
            return
        if text.startswith((f"{self._node}:", f"{self._node} ", f"node {self._node!r}")):
            error.args = (f"{origin} {text}",)
        else:
            error.args = (f"{self._locate()}: {text}",)
