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

from engine.run.simulated_workers.spans import SimulatedSpan
from engine.simulation.prediction import SimulatedStep

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
    """Finds what each Step of one run waited for."""

    def __init__(self, spans: Sequence[SimulatedSpan]) -> None:
        self._spans = spans
        self._numbers: dict[str, list[int]] = defaultdict(list)
        """Worker -> the numbers of its spans, in the order in which they ended."""
        self._ends: dict[str, list[float]] = defaultdict(list)
        """Worker -> when they ended, to be searched by halves."""
        for number in sorted(range(len(spans)), key=lambda number: spans[number].end):
            span = spans[number]
            self._numbers[span.worker].append(number)
            self._ends[span.worker].append(span.end)

    def path(self, step: SimulatedStep, start: float) -> list[CriticalPart]:
        """The parts from the end of the Step before it, at `start`, to its own; they add up to its
        seconds.
        """
        return list(self._walk_back(step, start))[::-1]

    def _walk_back(self, step: SimulatedStep, start: float) -> Iterator[CriticalPart]:
        """Yield the parts from the last to the first."""
        moment = step.end
        number = self._last(step, start)
        visited: set[int] = set()
        while number is not None and moment > start + _SAME:
            visited.add(number)
            span = self._spans[number]
            if span.end < moment - _SAME:
                yield _gap(max(span.end, start), moment, MESSAGE)
            moment = min(moment, span.end)
            begun = max(span.start, start)
            if moment > begun:
                fetch = max(0.0, min(moment, span.start + span.fetch) - begun)
                yield CriticalPart(
                    worker=span.worker,
                    node=span.node,
                    what=span.what,
                    start=begun,
                    end=moment,
                    fetch=fetch,
                )
            moment = min(moment, begun)
            number = self._before(number, visited)
        if moment > start + _SAME:
            yield _gap(start, moment, WAIT)

    def _last(self, step: SimulatedStep, start: float) -> int | None:
        """The span of a Step that ended last in its time."""
        ends: list[tuple[float, int]] = []
        for number, span in enumerate(self._spans):
            if span.step == step.step and start < span.end <= step.end + _SAME:
                ends.append((span.end, number))
        if not ends:
            return None
        return max(ends)[1]

    def _before(self, number: int, visited: set[int]) -> int | None:
        """The span that this one waited for."""
        span = self._spans[number]
        awaited = span.cause if span.cause >= 0 else None
        if span.start > span.asked + _SAME:
            before = self._on_worker(number)
            if before is not None:
                awaited = before
        # A span that is on the path already would lead around it for ever.
        return None if awaited in visited else awaited

    def _on_worker(self, number: int) -> int | None:
        """What the Worker of a span did before it, if that ended as the span began."""
        span = self._spans[number]
        numbers, ends = self._numbers[span.worker], self._ends[span.worker]
        place = bisect_right(ends, span.start + _SAME) - 1
        # A span of no length ends as it starts, and would be its own predecessor.
        if place >= 0 and numbers[place] == number:
            place -= 1
        if place < 0:
            return None
        before = numbers[place]
        # One that had ended when this one was asked for kept nobody waiting.
        return before if self._spans[before].end > span.asked + _SAME else None


def _gap(start: float, end: float, what: str) -> CriticalPart:
    """A stretch in which no Worker did anything that counts."""
    return CriticalPart(worker="", node="", what=what, start=start, end=end)


def sum_parts(path: Iterable[CriticalPart]) -> list[CriticalSum]:
    """Add parts up by what was done and by which node, in the order in which each first comes."""
    groups: dict[tuple[str, str], list[CriticalPart]] = defaultdict(list)
    for part in path:
        groups[part.node, part.what].append(part)
    return [_sum_group(node, what, parts) for (node, what), parts in groups.items()]


def _sum_group(node: str, what: str, parts: Sequence[CriticalPart]) -> CriticalSum:
    return CriticalSum(
        node=node,
        what=what,
        count=len(parts),
        seconds=sum(part.seconds for part in parts),
        fetch=sum(part.fetch for part in parts),
    )
