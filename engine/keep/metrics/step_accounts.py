"""The numbers of one Step, put together from what the Workers reported.

Owns: which metrics are summed, times, rates, how busy each Worker was, and when a row is written.
Does not own: how reports of one metric become a number (step_metrics.py), the file's form
(sinks.py).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Literal

from engine.keep.metrics.sinks import JsonLines
from engine.keep.metrics.step_metrics import StepMetrics
from engine.keep.metrics.weight_times import WeightTimes
from engine.protocol import events
from engine.protocol import messages as m
from engine.protocol.events import EventStream, RunEvent
from engine.protocol.reports import FLOW, Doing, Report, SpanOf

_SUMS = (
    *("time/", "cpu/", "queue/", "edge/", "coordinator/", "data/rows", "completion/tokens"),
    *("env/timeouts", "env/errors"),
)
_ENGINE = "cpu/engine"
"""Workers in processes of their own tell theirs."""
_NODE_TIME = re.compile("time/[^/]+")
"""Not time/<node>/environments, a part of time/<node>, nor time/<node>/rows, which comes before."""
_TRAINED_TOKENS = re.compile("train/([^/]+/)?tokens")
"""Metrics that a Step sums; it takes the mean of all others."""
_EVALUATIONS = ("eval/", "evaluation/")
"""Metrics that may come after the Step's row is written."""

Interval = tuple[float, float]
"""Start and end, in seconds of one clock."""


class RunMetrics:
    """Writes each Step's row to metrics.jsonl, then emits StepEnded. last: the row written last.

    first: Steps of the run before this graph's own. phase: which of a Program it is; 0 for a graph
    alone, whose rows do not name one. evaluates: no Steps are asked for, so that the evaluations
    have a row of their own, of Step 0.
    """

    takes = (
        *(events.Opened, events.WorkersMeasured, events.WritingBegan, events.WritingEnded),
        *(m.Reported, m.ChunkDone, m.Short, m.WorkerLost, m.Retire, m.StepClosed, m.Finish),
        *(m.Offered, m.Load, m.Loaded, m.Release),
    )

    def __init__(
        self,
        workers: Sequence[str],
        lines: JsonLines,
        stream: EventStream,
        *,
        first: int = 0,
        phase: int = 0,
        evaluates: bool = False,
    ) -> None:
        self._first = first
        self._evaluates = evaluates
        self._named: Mapping[str, float] = {"phase": phase} if phase else {}
        self._accounts = StepAccounts(workers)
        self._chunks = ChunkMetrics()
        self._weights = WeightTimes()
        self._lines = lines
        self._stream = stream
        self._doing: Sequence[Doing] = ()
        self.last: dict[str, float] = {}

    def take(self, event: RunEvent) -> None:
        """See `engine.protocol.events`."""
        match event:
            case events.Opened():
                self._accounts.begin(event.at)
            case events.WorkersMeasured():
                self._accounts.add(event.reports, event.spans)
                self._doing = event.doing
            case events.EventHeard():
                self._accounts.add(self._chunks.hear(event.event), ())
                self._accounts.add(self._weights.hear(event.event, event.at), ())
            case events.WritingBegan():
                self._accounts.begin_writing(event.at)
                if isinstance(event.of, m.Checkpoint):  # which a resume cuts later lines off for
                    self._lines.sync()
            case events.WritingEnded():
                self._accounts.end_writing(event.end)
            case events.InstructionTold():
                self._take_instruction(event.instruction, event.at)

    def _take_instruction(self, instruction: m.Instruction, now: float) -> None:
        self._weights.tell(instruction)
        match instruction:
            case m.Retire(workers=workers):
                for worker in workers:
                    self._chunks.lose(worker)
            case m.StepClosed():
                self._close(instruction, now)
            case m.Finish(error="") if self._evaluates and self._accounts.initial:
                self._write(0, dict(self._accounts.initial), again=False)

    def _close(self, closed: m.StepClosed, now: float) -> None:
        """Write the Step's row, or add an evaluation to the row that is there."""
        self._accounts.add(self._chunks.rest(), ())
        step = self._first + closed.step
        again = step == self._lines.last
        row = self._accounts.close(closed, now, self._doing, again=again)
        if closed.step > 0:
            self._write(step, row, again=again)

    def _write(self, step: int, row: dict[str, float], *, again: bool) -> None:
        row |= self._named
        if again:
            row = self._lines.amend(step, row)
        else:
            self._lines.write(step, row)
        self.last = {"step": step, **row}
        self._stream.emit(events.StepEnded(step=step, metrics=row, again=again))


class StepAccounts:
    """Adds up one Step after the other. Times are seconds of one clock. initial: the evaluations
    before Step 1, until its row has them.
    """

    def __init__(self, workers: Sequence[str]) -> None:
        self._several = len(workers) > 1
        self._metrics = StepMetrics()
        self._sums: dict[str, float] = {}
        self._busy = dict.fromkeys(workers, 0.0)
        self._computing: list[Interval] = []
        """When a kernel of any Worker was at work."""
        self.initial: dict[str, float] = {}
        self._since = 0.0
        self._computed_before = 0.0
        """Seconds of processors that this process had taken when the Step began."""
        self._writing = (0.0, 0.0)

    def begin(self, now: float) -> None:
        """Everything is open: what was measured before belongs to no Step."""
        self._clear(now)

    def add(self, reports: Iterable[Report], spans: Iterable[SpanOf]) -> None:
        """Reports (metric, value, count), and spans of Workers."""
        for name, number, count in reports:
            kind = _kind(name)
            if kind == "sum":
                self._sums[name] = self._sums.get(name, 0.0) + number
            elif kind == "mean":
                self._metrics.add(name, number, count)
        for span in spans:
            worker = span.worker
            # A wait lies within another span, and what is done beside them keeps no kernel busy.
            if worker in self._busy and not (span.waits or span.beside):
                self._busy[worker] += max(0.0, span.end - max(span.start, self._since))
                if span.computes:
                    self._computing.append((span.start, span.end))

    def begin_writing(self, now: float) -> None:
        """Note that the loop begins to wait for files."""
        self._writing = (now, self._inside())

    def end_writing(self, now: float) -> None:
        """Count the wait for files, which are there now. Time that a single Worker first spent in
        a kernel does not count.
        """
        start, before = self._writing
        if self._several:
            kernels = 0.0
        else:
            kernels = self._inside() - before
        seconds = self._sums.get("time/checkpoint", 0.0) + max(0.0, now - start - kernels)
        self._sums["time/checkpoint"] = seconds

    def _inside(self) -> float:
        return sum(s for name, s in self._sums.items() if _NODE_TIME.fullmatch(name))

    def close(
        self, closed: m.StepClosed, now: float, doing: Sequence[Doing], *, again: bool
    ) -> dict[str, float]:
        """The Step's numbers, with the coordinator's own; the next Step begins. Step 0 has none:
        its evaluations are in Step 1's row, under eval/initial/. again: only evaluations have come.
        """
        row = self._metrics.row(closed.step)
        numbers = {name: number for name, number in row.items() if name.startswith(_EVALUATIONS)}
        if closed.step == 0:
            self.initial, numbers = numbers, {}
        elif not again:
            rates = self._rates(closed.metrics, now, doing)
            initial = {n.replace("/", "/initial/", 1): v for n, v in self.initial.items()}
            for name, number in (self._sums | dict(closed.metrics) | initial | rates).items():
                self._metrics.add(name, number)
            self.initial, numbers = {}, self._metrics.row(closed.step)
            del numbers["step"]
        self._clear(now)
        return numbers

    def _clear(self, now: float) -> None:
        self._metrics.clear()
        self._sums.clear()
        self._busy = dict.fromkeys(self._busy, 0.0)
        self._computing.clear()
        self._since = now
        self._computed_before = time.process_time()

    def _rates(
        self, metrics: Mapping[str, float], now: float, doing: Sequence[Doing]
    ) -> dict[str, float]:
        seconds = now - self._since
        rates = {"time/step": seconds, "time/outside": self._outside(now, doing)}
        if self._several:
            rates |= self._shares(now, doing)
            mine = time.process_time() - self._computed_before
            rates[_ENGINE] = mine + self._sums.get(_ENGINE, 0.0)
        else:  # seconds outside kernels, checkpoints and sample files
            rates["time/engine"] = max(0.0, seconds - self._inside())
        rows = self._sums.get("data/rows", metrics.get("data/prompts"))
        tokens = self._sums.get("completion/tokens", self._trained_tokens())
        if rows is not None and seconds > 0:
            rates["throughput/samples_per_second"] = rows / seconds
        if tokens is not None and seconds > 0:
            rates["throughput/tokens_per_second"] = tokens / seconds
        return rates

    def _outside(self, now: float, doing: Sequence[Doing]) -> float:
        """Seconds of the Step in which no kernel was at work, in none of the Workers."""
        intervals = list(self._computing)
        for each in doing:
            if each.node and each.computes and each.worker in self._busy:
                intervals.append((each.since, now))
        return now - self._since - covered_seconds(intervals, self._since, now)

    def _trained_tokens(self) -> float | None:
        """Add up the trained tokens of all train nodes; None where none has reported."""
        counts = [n for name, n in self._sums.items() if _TRAINED_TOKENS.fullmatch(name)]
        if counts:
            return sum(counts)
        return None

    def _shares(self, now: float, doing: Sequence[Doing]) -> dict[str, float]:
        """The share of the Step that each Worker was in a kernel, including what is under way."""
        for each in doing:
            if each.node and each.worker in self._busy:
                self._busy[each.worker] += max(0.0, now - max(each.since, self._since))
        seconds = max(now - self._since, 1e-9)
        return {f"worker/{n}/busy": min(1.0, busy / seconds) for n, busy in self._busy.items()}


def covered_seconds(intervals: Iterable[Interval], start: float, end: float) -> float:
    """Seconds between start and end that are in any of the intervals, each counted once."""
    covered, reached = 0.0, start
    for begins, ends in sorted(intervals):
        first = max(begins, reached)
        last = min(ends, end)
        covered += max(0.0, last - first)
        reached = max(reached, last)
    return covered


class ChunkMetrics:
    """Metrics of unfinished chunks. Each chunk counts once, even after a rerun."""

    def __init__(self) -> None:
        self._runs: dict[int, list[m.Reported]] = {}
        """By chunk id."""

    def hear(self, event: m.Event) -> Iterable[Report]:
        """The reports that count now: those of a chunk that ends. A lost Worker's are dropped."""
        match event:
            case m.Reported(id=chunk):
                self._runs.setdefault(chunk, []).append(event)
            case m.ChunkDone(id=chunk):
                return _metrics(self._runs.pop(chunk, []))
            case m.Short(id=chunk):
                self._runs.pop(chunk, None)
            case m.WorkerLost(worker=worker):
                self.lose(worker)
        return ()

    def lose(self, worker: str) -> None:
        """A Worker is gone, and what it had under way is run again."""
        self._runs = {
            c: reported for c, reported in self._runs.items() if reported[0].worker != worker
        }

    def rest(self) -> Iterable[Report]:
        """As a Step closes: reports of chunks that have not ended, for rows that came before it."""
        unfinished = list(chain.from_iterable(self._runs.values()))
        self._runs.clear()
        return _metrics(unfinished)


@cache
def _kind(name: str) -> Literal["flow", "sum", "mean"]:
    """What a report of this name is: no metric, one that a Step sums, or one that it averages."""
    if name.startswith(FLOW):
        return "flow"
    if name.startswith(_SUMS) or _TRAINED_TOKENS.fullmatch(name):
        return "sum"
    return "mean"


def _metrics(reported: Iterable[m.Reported]) -> list[Report]:
    return list(chain.from_iterable(each.metrics for each in reported))
