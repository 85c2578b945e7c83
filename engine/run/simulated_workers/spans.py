"""Who does what when in a simulated run, and what led to it.

Owns: numbering spans, and finding the span behind each instruction: the one whose event the
coordinator had just heard when it asked. Does not own: what is made of them
(engine/simulation/prediction.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.protocol import messages as m
from engine.run.simulated_workers.clock import VirtualClock
from engine.run.simulated_workers.kernel_times import Rows

START = "start"
"""What a Worker does until it is open, if it begins during the run."""
NOBODY = -1
"""The cause of what nothing led to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSpan:
    """A Worker did one thing, from `start` to `end`, in simulated seconds.

    what: start, chunk, train, prepare, load, offer, wake, sleep, evaluate, record. fetch: seconds
    at its start in which rows or weights travelled. asked: when the coordinator asked. cause:
    the number of the span (its place in the run's list) whose rows or end made the coordinator
    ask, and which may go on after that; -1 for none. busy: seconds of it in which the device
    computed.
    """

    worker: str
    what: str
    node: str
    step: int
    start: float
    end: float
    asked: float
    cause: int = -1
    fetch: float = 0.0
    busy: float = 0.0
    rows: int = 0
    tokens: int = 0


@dataclass(slots=True)
class _Open:
    """A span under way. end: negative until it has ended."""

    worker: str
    what: str
    node: str
    step: int
    start: float
    asked: float
    cause: int
    end: float = -1.0
    fetch: float = 0.0
    busy: float = 0.0
    rows: int = 0
    tokens: int = 0


class SpanLog:
    """The spans of one run, in the order in which they begin. A message is known by its identity
    while it is under way.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._spans: list[_Open] = []
        self._told: dict[int, tuple[float, int]] = {}
        """Message -> when it was told, and the span that had led to it."""
        self._said: dict[int, int] = {}
        """Event -> the span that it came from."""
        self._cause = NOBODY

    def note_message(self, message: object) -> None:
        """Note what a Worker is told, and the span that this follows from."""
        self._told[id(message)] = self._clock.now, self._cause

    def note_event(self, event: m.Event, span: int) -> None:
        """Note what a Worker says, within a span."""
        self._said[id(event)] = span

    def set_cause(self, event: object) -> None:
        """Note that the coordinator is about to hear this; what it asks next follows from it."""
        self._cause = self._said.pop(id(event), NOBODY)

    def begin(self, worker: str, what: str, node: str, step: int, message: object) -> int:
        """A Worker begins to do what a message says; the number of the span."""
        now = self._clock.now
        asked_at, cause = self._told.pop(id(message), (now, NOBODY))
        self._spans.append(_Open(worker, what, node, step, now, asked_at, cause))
        return len(self._spans) - 1

    def starts(self, worker: str) -> int:
        """A Worker begins, as the coordinator asked just now; the number of the span."""
        now = self._clock.now
        self._spans.append(_Open(worker, START, "", 0, now, now, self._cause))
        return len(self._spans) - 1

    def note_fetch(self, span: int) -> None:
        """Note that what the span needs has come."""
        under_way = self._spans[span]
        under_way.fetch = self._clock.now - under_way.start

    def note_compute(self, span: int, seconds: float, rows: int = 0, tokens: int = 0) -> None:
        """Note that the span has kept its device busy for so long, on so many rows."""
        under_way = self._spans[span]
        under_way.busy, under_way.rows, under_way.tokens = seconds, rows, tokens

    def end(self, span: int) -> None:
        """It has ended."""
        self._spans[span].end = self._clock.now

    def all(self) -> Iterator[SimulatedSpan]:
        """Those that have ended in time, and what was under way as the run ended."""
        for each in self._spans:
            end = each.end if each.end >= 0.0 else self._clock.now
            yield SimulatedSpan(
                worker=each.worker,
                what=each.what,
                node=each.node,
                step=each.step,
                start=each.start,
                end=end,
                asked=each.asked,
                cause=each.cause,
                fetch=each.fetch,
                busy=min(each.busy, end - each.start),
                rows=each.rows,
                tokens=each.tokens,
            )


def describe_message(message: Rows) -> tuple[str, str, int]:
    """Say what a span of it is called, its node, and its Step."""
    match message:
        case m.RunChunk(node=node, step=step):
            return "chunk", node, step
        case m.TrainStep(node=node, step=step, mine=mine):
            return ("train" if mine is None else "prepare"), node, step
        case m.TrainPart(node=node, step=step):
            return "train", node, step
        case m.Evaluate(node=node, version=version):
            return "evaluate", node, version
        case m.Record(step=step):
            return "record", "", step
