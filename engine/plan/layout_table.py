"""Which layout a run has at how many live tokens: what a search, or a user, says before the run.

    live tokens    rows of a Step that are generated x their mean length
    bucket         from so many live tokens on, up to the next bucket
    layout         options that differ from the run's own, as a resume changes them

Owns: the table, its look-ups, its words. Does not own: finding layouts (searched_table.py), when a
run switches (engine/coordinator/relayout_policy.py), how a layout becomes a plan
(engine/session/layouts.py).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

ALIKE = 0.01
"""Layouts whose seconds differ by less than this share are as fast as each other."""

LIVE_TOKENS = "live tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLayout:
    """A layout of a run. changes: options that differ from the run's own, by name, with all that
    the option then is. text: the same as the user would write it, of a search in words; empty for
    the run's own. most: live tokens with which it fits. closed: why it cannot be had; empty if it
    can.
    """

    changes: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    most: float = math.inf
    closed: str = ""

    def __str__(self) -> str:
        return self.text or "the run's own options"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutBucket:
    """Live tokens from `start` on. best: the number of the layout. seconds: of a Step in each
    layout, in their order; infinite where it does not fit; empty where nobody knows.
    """

    start: int
    best: int
    seconds: tuple[float, ...] = ()

    def seconds_in(self, layout: int) -> float:
        """Seconds of a Step; nan where nobody knows."""
        if not self.seconds:
            return math.nan
        return self.seconds[layout]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutTable:
    """layouts: the smallest first. buckets: ascending, the first from 0. switch_seconds: what a
    switch is expected to cost, until one is measured. begins: live tokens with which a run is
    expected to begin.
    """

    layouts: tuple[RunLayout, ...]
    buckets: tuple[LayoutBucket, ...]
    switch_seconds: float = 0.0
    begins: float = 0.0

    @property
    def first(self) -> int:
        """The number of the layout that a run begins with."""
        return self.buckets[self.bucket_at(self.begins)].best

    def bucket_at(self, live_tokens: float) -> int:
        """The index of the bucket of so many live tokens."""
        starts = [bucket.start for bucket in self.buckets]
        return max(0, bisect.bisect_right(starts, live_tokens) - 1)

    def end_of(self, bucket: int) -> float:
        """Where the next bucket begins; infinite for the last."""
        if bucket + 1 < len(self.buckets):
            return self.buckets[bucket + 1].start
        return math.inf

    def fits(self, layout: int, live_tokens: float) -> bool:
        """Whether a layout fits, as far as is known."""
        return not self.layouts[layout].closed and live_tokens <= self.layouts[layout].most

    def close(self, layout: int, why: str) -> LayoutTable:
        """The same table, of which a layout is never chosen again."""
        layouts = list(self.layouts)
        layouts[layout] = replace(layouts[layout], closed=why)
        return replace(self, layouts=tuple(layouts))

    def close_from(self, layouts: Collection[int], live_tokens: float) -> LayoutTable:
        """The table with these layouts closed in the bucket of so many live tokens, and above: they
        do not fit there.
        """
        start = self.buckets[self.bucket_at(live_tokens)].start
        closed = list(self.layouts)
        for number in layouts:
            most = min(closed[number].most, max(0, start - 1))
            closed[number] = replace(closed[number], most=most)
        return replace(self, layouts=tuple(closed))

    def lines(self) -> list[str]:
        """The table in words, a line for all buckets beside each other with one layout."""
        lines: list[str] = []
        last = -1
        for bucket in self.buckets:
            if bucket.best == last:
                continue
            last = bucket.best
            seconds = bucket.seconds_in(last)
            known = f", {seconds:.3g} s a step" if math.isfinite(seconds) else ""
            start = f"from {bucket.start} {LIVE_TOKENS} on" if bucket.start else "at first"
            lines.append(f"{start}: layout {last}, {self.layouts[last]}{known}")
        return lines


def measured_table(
    layouts: Sequence[RunLayout],
    grid: Mapping[int, Sequence[float]],
    *,
    switch_seconds: float = 0.0,
    begins: float = 0.0,
) -> LayoutTable:
    """Make a table of seconds that were measured, or predicted, at some live tokens, such as powers
    of two. grid: live tokens -> seconds of a Step in each layout, infinite where it does not fit. A
    bucket begins half way (of logarithms) between two of them. A layout fits up to its `most`;
    where that is not known, up to the last of them before the first at which it does not.
    """
    buckets: list[LayoutBucket] = []
    points = sorted(grid)
    for before, point in zip([0, *points], points, strict=False):
        seconds = tuple(grid[point])
        start = round(math.sqrt(before * point))
        buckets.append(LayoutBucket(start=start, best=_fastest(seconds), seconds=seconds))
    limited: list[RunLayout] = []
    for number, layout in enumerate(layouts):
        most = layout.most
        for before, point in zip([0, *points], points, strict=False):
            if math.isinf(grid[point][number]) and not before <= layout.most < point:
                most = min(most, before)
        limited.append(replace(layout, most=most))
    return LayoutTable(
        layouts=tuple(limited),
        buckets=tuple(buckets),
        switch_seconds=switch_seconds,
        begins=begins,
    )


def _fastest(seconds: Sequence[float]) -> int:
    """Of the layouts that are alike the smallest; where none fits, the greatest."""
    least = min(seconds)
    if math.isinf(least):
        return len(seconds) - 1
    return next(n for n, time in enumerate(seconds) if time <= least * (1 + ALIKE))
