"""The critical path of a simulated Step: what it waited for, one thing after another.

Owns: walking back from the Step's last span. Does not own: the spans (prediction.py), how the path
is said (report.py).

A span began when two things were there: what it was told, which the end of another span had led
to, and its Worker. Where the Worker was busy with something else, that is what was waited for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from engine.predict.simulation.prediction import SimulatedStep
from engine.run.simulated_workers.spans import SimulatedSpan

MESSAGE = "message"
"""Time between what was waited for and what followed from it: the coordinator had to hear of it."""
WAIT = "wait"
"""Time in which nothing that is known of was waited for."""
_SAME = 1e-9
"""Seconds within which two times are one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalPart:
    """A stretch of the path. fetch: seconds of it in which rows or weights travelled."""

    worker: str
    node: str
    what: str
    start: float
    end: float
    fetch: float = 0.0

    @property
    def seconds(self) -> float:
        """How long it was."""
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalSum:
    """All parts of a node that did the same. count: how many."""

    node: str
    what: str
    count: int
    seconds: float
    fetch: float


class CriticalPaths:
    """Of the Steps of one run."""

    def __init__(self, spans: Sequence[SimulatedSpan]) -> None:
        self._spans = spans
        self._of: dict[str, list[int]] = defaultdict(list)
        """Worker -> the numbers of its spans, in the order in which they ended."""
        for number in sorted(range(len(spans)), key=lambda i: spans[i].end):
            self._of[spans[number].worker].append(number)
        self._ends = {w: [spans[i].end for i in own] for w, own in self._of.items()}

    def path(self, step: SimulatedStep, start: float) -> list[CriticalPart]:
        """From the end of the Step before it, at `start`, to its own; adds up to its seconds."""
        return list(self._back(step, start))[::-1]

    def _back(self, step: SimulatedStep, start: float) -> Iterator[CriticalPart]:
        """From the last part to the first."""
        at, number, seen = step.end, self._last(step, start), set[int]()
        while number is not None and at > start + _SAME:
            seen.add(number)
            span = self._spans[number]
            if span.end < at - _SAME:
                yield _waited(max(span.end, start), at, MESSAGE)
            at = min(at, span.end)
            begun = max(span.start, start)
            if at > begun:
                fetch = max(0.0, min(at, span.start + span.fetch) - begun)
                yield CriticalPart(
                    worker=span.worker,
                    node=span.node,
                    what=span.what,
                    start=begun,
                    end=at,
                    fetch=fetch,
                )
            at = min(at, begun)
            number = self._before(number, seen)
        if at > start + _SAME:
            yield _waited(start, at, WAIT)

    def _last(self, step: SimulatedStep, start: float) -> int | None:
        """The span of a Step that ended last in its time."""
        found = (
            i
            for i, span in enumerate(self._spans)
            if span.step == step.step and start < span.end <= step.end + _SAME
        )
        return max(found, key=lambda i: (self._spans[i].end, i), default=None)

    def _before(self, number: int, seen: set[int]) -> int | None:
        """The span that this one waited for."""
        span = self._spans[number]
        found = span.cause if span.cause >= 0 else None
        if span.start > span.asked + _SAME:
            before = self._on_worker(number)
            found = found if before is None else before
        return None if found in seen else found

    def _on_worker(self, number: int) -> int | None:
        """What the Worker of a span did before it, if that ended as the span began."""
        span = self._spans[number]
        own, ends = self._of[span.worker], self._ends[span.worker]
        at = bisect_right(ends, span.start + _SAME)
        found = next((own[i] for i in range(at - 1, -1, -1) if own[i] != number), None)
        busy = found is not None and self._spans[found].end > span.asked + _SAME
        return found if busy else None


def _waited(start: float, end: float, what: str) -> CriticalPart:
    return CriticalPart(worker="", node="", what=what, start=start, end=end)


def summed(path: Iterable[CriticalPart]) -> list[CriticalSum]:
    """By what was done and by which node, in the order in which each first comes."""
    found: dict[tuple[str, str], list[CriticalPart]] = defaultdict(list)
    for part in path:
        found[part.node, part.what].append(part)
    return [
        CriticalSum(
            node=node,
            what=what,
            count=len(parts),
            seconds=sum(part.seconds for part in parts),
            fetch=sum(part.fetch for part in parts),
        )
        for (node, what), parts in found.items()
    ]
