"""One replica's decoding in simulated time, into which further rows come while others are decoded.

Owns: when each row begins and ends, by the cost model. Does not own: which rows are in slots
(engine/plan/cost/decode_slots.py), seconds of a pass (engine/plan/cost/model_passes.py), when rows
come.

Rows that come while others are decoded join them at the end of the pass that is under way, or of
the prefill. What is decoded is planned up to the next end of a row; rows that come cut that plan.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.plan.cost.decode import DecodeBatch, divide_prefill, require_room, split_passes
from engine.plan.cost.decode_slots import Admission, DecodeSlots
from engine.plan.cost.devices import Place
from engine.plan.cost.model_passes import Passes, Sizes
from engine.plan.row_lengths import RowLengths


@dataclass(slots=True)
class _PlannedPasses:
    """Passes of the rows in slots: (how many, seconds of each), one part after another."""

    start: float
    parts: list[tuple[int, float]] = field(default_factory=list)
    end: float = 0.0


class PricedDecode:
    """Rows that one replica decodes, numbered in the order of their coming. limits: the slots and
    the cache of a batch, whose rows do not count. segments: of so many rows one is decoded, the
    first (an episode's); the others end as they come. slowdown: by how much the passes of these
    rows, all that are under way, take longer than the cost model says. Times are in seconds.
    """

    def __init__(
        self,
        model: Sizes,
        where: Place,
        limits: DecodeBatch,
        *,
        segments: int = 1,
        slowdown: Callable[[RowLengths], float] | None = None,
    ) -> None:
        self._decode, self._prefill = Passes(model, where, "decode"), Passes(model, where, "prefill")
        self._limits, self._segments, self._slowdown = limits, segments, slowdown
        self._slots = DecodeSlots(limits.limits)
        self._row_numbers: list[int] = []
        """Of each row in `_slots`."""
        self._lengths: list[tuple[int, int]] = []
        """Tokens of the prompt and the answer of each row in `_slots`."""
        self._begins: list[float] = []
        self._ended: deque[tuple[float, int]] = deque()
        """(when, row) of those that have ended and that nobody has heard of."""
        self._time = 0.0
        """Up to when passes are done, or the prefill of those that are planned."""
        self._planned: _PlannedPasses | None = None
        self._factor = 1.0

    def add(self, rows: RowLengths, now: float, weights: np.ndarray | None = None) -> None:
        """Let rows join: at once if there is a slot, else as one gets free, the heaviest first, and
        of equal ones the first that came. weights: float32 [rows], how much each is expected to
        take. Raises PlanError for a row that the cache cannot hold.
        """
        self._settle(now)
        self._cut(now)
        if not self._slots.is_busy:
            self._time = max(self._time, now)
        first, count = len(self._begins), len(rows)
        self._begins += [math.inf] * count
        decoded = np.arange(0, count, self._segments)
        if self._segments > 1:
            self._end_unwritten(first, count, now)
        prompts, answers = rows.prompts[decoded], np.maximum(rows.answers[decoded], 1)
        require_room(DecodeBatch(prompts=prompts, answers=answers, room=self._limits.room))
        self._row_numbers += (first + decoded).tolist()
        if self._slowdown is not None:
            self._lengths += zip(prompts.tolist(), answers.tolist(), strict=True)
        self._slots.add(prompts, answers, None if weights is None else weights[decoded])
        if self._slowdown is not None:
            self._factor = self._slowdown(self._rows_under_way())

    def next_end(self) -> float | None:
        """When the next row ends, if no others join; None without rows."""
        if self._ended:
            return self._ended[0][0]
        while self._slots.is_busy:
            planned = self._plan()
            if self._ends_a_row(planned):
                return planned.end
            # The cache is full then: nobody can join before a row ends.
            self._finish(planned)
        return None

    def advance(self, now: float) -> np.ndarray:
        """int64: the rows that have ended up to now, in the order of their ends, each told once."""
        self._settle(now)
        rows: list[int] = []
        while self._ended and self._ended[0][0] <= now:
            rows.append(self._ended.popleft()[1])
        return np.array(rows, dtype=np.int64)

    def begun(self, row: int) -> float:
        """When a row began; infinity for one that has not."""
        return self._begins[row]

    # --- within -----------------------------------------------------------------------------------

    def _settle(self, now: float) -> None:
        """Do all passes that end up to now. What begins now is not planned before somebody asks, so
        that rows that come at one time are fed together.
        """
        while self._time < now and self._slots.is_busy:
            planned = self._plan()
            if planned.end > now:
                return
            self._finish(planned)

    def _plan(self) -> _PlannedPasses:
        """Begin rows while there are slots, and plan the passes until one ends or the cache is
        full.
        """
        if self._planned is not None:
            return self._planned
        slots = self._slots
        passes = 0
        while not passes:
            admission = slots.admit()
            for row in admission.rows:
                number = self._row_numbers[row]
                if self._begins[number] == math.inf:
                    self._begins[number] = self._time
            self._time += self._prefill_seconds(admission)
            passes = slots.count_passes()
        planned = _PlannedPasses(self._time)
        rows, cached, copied = slots.active, slots.cached, slots.copied
        at = self._time
        for count in split_passes(passes):
            one = self._pass_seconds(rows, cached, copied, count)
            planned.parts.append((count, one))
            at += one * count
            cached += rows * count
        planned.end = at
        self._planned = planned
        return planned

    def _prefill_seconds(self, admission: Admission) -> float:
        if not admission.fed:
            return 0.0
        count = divide_prefill(admission.fed, self._limits.budget)
        one = self._prefill.at(admission.fed / count, admission.keys / count, predicted=0.0)
        return one.seconds * count * self._factor

    def _pass_seconds(self, rows: int, cached: float, copied: float, count: int) -> float:
        """Seconds of one of so many passes; `cached` before the first."""
        middle = cached + rows * (count - 1) / 2.0
        one = self._decode.at(rows, middle + rows, cached=middle + copied, rows=rows)
        return one.seconds * self._factor

    def _ends_a_row(self, planned: _PlannedPasses) -> bool:
        return self._slots.ends_a_row(sum(count for count, _ in planned.parts))

    def _finish(self, planned: _PlannedPasses) -> None:
        """Do all planned passes."""
        self._do(sum(count for count, _ in planned.parts), planned.end)

    def _do(self, passes: int, until: float) -> None:
        self._planned, self._time = None, until
        if passes:
            for row in self._slots.run(passes):
                self._ended.append((until, self._row_numbers[row]))

    def _cut(self, now: float) -> None:
        """Do those planned passes that have begun by now; the others are planned anew."""
        planned = self._planned
        if planned is None:
            return
        at, done = planned.start, 0
        for count, one in planned.parts:
            if at >= now:
                break
            if at + count * one < now:
                passes, at = count, at + count * one
            else:
                passes, at = self._cut_part(at, done, count, now)
            done += passes
        self._do(done, at)

    def _cut_part(self, at: float, done: int, count: int, now: float) -> tuple[int, float]:
        """The fewest of so many passes from `at` on that end now or later, and when they end. done:
        passes of the plan before them.
        """
        slots = self._slots
        rows = slots.active
        cached = slots.cached + rows * done
        fewest, most = 1, count
        while fewest < most:
            middle = (fewest + most) // 2
            one = self._pass_seconds(rows, cached, slots.copied, middle)
            if at + middle * one >= now:
                most = middle
            else:
                fewest = middle + 1
        return fewest, at + fewest * self._pass_seconds(rows, cached, slots.copied, fewest)

    def _end_unwritten(self, first: int, count: int, now: float) -> None:
        """End the rows that nobody decodes."""
        for row in range(count):
            if row % self._segments:
                self._begins[first + row] = now
                self._ended.append((now, first + row))

    def _rows_under_way(self) -> RowLengths:
        lengths: Sequence[tuple[int, int]] = [
            self._lengths[row] for row in self._slots.rows_under_way()
        ]
        prompts, answers = np.array(lengths, dtype=np.int64).reshape(-1, 2).T
        return RowLengths(prompts, answers)
