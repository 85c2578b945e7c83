"""One replica's decoding as time goes on, into which further rows come while others are decoded.

Owns: when each row begins and ends, by the cost model. Does not own: which rows are in slots
(engine/plan/cost/decode_slots.py), seconds of a pass (engine/plan/cost/model_passes.py), when rows
come (engine/plan/step_flow.py, engine/simulation).

Rows that come while others are decoded join them at the end of the pass that is under way, or of
the prefill. What is decoded is planned up to the next end of a row; rows that come cut that plan.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import numpy as np

from engine.plan.cost.decode import DecodeBatch, divide_prefill, require_room, split_passes
from engine.plan.cost.decode_slots import BegunRows, DecodeSlots
from engine.plan.cost.devices import Place
from engine.plan.cost.model_passes import Passes, Sizes
from engine.plan.row_lengths import RowLengths

_ROUNDING = 1e-12


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
        self._decode, self._prefill = (
            Passes(model, where, "decode"),
            Passes(model, where, "prefill"),
        )
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
        self._planned = 0
        """Passes planned from `_time` on, until a row ends or the cache is full; 0: none."""
        self._planned_end = 0.0
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
        numbers, decoded = range(first, first + count), rows
        if self._segments > 1:
            self._end_unwritten(first, count, now)
            numbers = numbers[:: self._segments]
            places = np.arange(0, count, self._segments)
            decoded = rows.take(places)
            weights = None if weights is None else weights[places]
        self._add_to_slots(decoded, numbers, weights)

    def _add_to_slots(self, rows: RowLengths, numbers: range, weights: np.ndarray | None) -> None:
        prompts, answers = rows.prompts, np.maximum(rows.answers, 1)
        if self._limits.room:
            require_room(DecodeBatch(prompts=prompts, answers=answers, room=self._limits.room))
        self._row_numbers += numbers
        self._slots.add(prompts, answers, weights)
        if self._slowdown is not None:
            self._lengths += zip(prompts.tolist(), answers.tolist(), strict=True)
            self._factor = self._slowdown(self._rows_under_way())

    def next_end(self) -> float | None:
        """When the next row ends, if no others join; None without rows."""
        if self._ended:
            return self._ended[0][0]
        while self._slots.is_busy:
            self._plan()
            if self._slots.ends_a_row(self._planned):
                return self._planned_end
            # The cache is full then: nobody can join before a row ends.
            self._do(self._planned, self._planned_end)
        return None

    def advance(self, now: float) -> np.ndarray:
        """int64: the rows that have ended up to now, in the order of their ends, each told once."""
        # Who adds up seconds until `next_end` may come out a rounding error before it.
        until = now * (1.0 + _ROUNDING)
        self._settle(until)
        rows: list[int] = []
        while self._ended and self._ended[0][0] <= until:
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
            self._plan()
            if self._planned_end > now:
                return
            self._do(self._planned, self._planned_end)

    def _plan(self) -> None:
        """Begin rows while there are slots, and plan the passes until one ends or the cache is
        full, if none are planned.
        """
        slots = self._slots
        while not self._planned:
            if slots.may_admit:
                self._begin(slots.admit())
            self._planned = slots.count_passes()
            rows, cached, end = slots.active, slots.cached, self._time
            for count in split_passes(self._planned):
                end += self._pass_seconds(rows, cached, count) * count
                cached += rows * count
            self._planned_end = end

    def _begin(self, begun: BegunRows) -> None:
        """Note when rows begin, and feed their prompts."""
        for row in begun.rows:
            number = self._row_numbers[row]
            if self._begins[number] == math.inf:
                self._begins[number] = self._time
        self._time += self._prefill_seconds(begun)

    def _prefill_seconds(self, begun: BegunRows) -> float:
        if not begun.fed:
            return 0.0
        count = divide_prefill(begun.fed, self._limits.budget)
        tokens, keys = begun.fed / count, begun.keys / count
        return self._prefill.seconds_at(tokens, keys, 0.0, 0.0, 0.0) * count * self._factor

    def _pass_seconds(self, rows: int, cached: float, count: int) -> float:
        """Seconds of one of so many passes; `cached` before the first."""
        middle = cached + rows * (count - 1) / 2.0
        read = middle + self._slots.copied
        one = self._decode.seconds_at(rows, middle + rows, read, rows, rows)
        return one * self._factor

    def _do(self, passes: int, until: float) -> None:
        """Do so many passes, which end then."""
        self._planned, self._time = 0, until
        if passes:
            for row in self._slots.run(passes):
                self._ended.append((until, self._row_numbers[row]))

    def _cut(self, now: float) -> None:
        """Do those planned passes that have begun by now; the others are planned anew."""
        at, done = self._time, 0
        cached, rows = self._slots.cached, self._slots.active
        for count in split_passes(self._planned):
            if at >= now:
                break
            end = at + count * self._pass_seconds(rows, cached, count)
            if end >= now:
                count, end = self._cut_part(at, cached, count, now)
            done, at = done + count, end
            cached += rows * count
        self._do(done, at)

    def _cut_part(self, at: float, cached: float, count: int, now: float) -> tuple[int, float]:
        """The fewest of so many passes from `at` on that end now or later, and when they end."""
        rows = self._slots.active
        fewest, most = 1, count
        while fewest < most:
            middle = (fewest + most) // 2
            if at + middle * self._pass_seconds(rows, cached, middle) >= now:
                most = middle
            else:
                fewest = middle + 1
        return fewest, at + fewest * self._pass_seconds(rows, cached, fewest)

    def _end_unwritten(self, first: int, count: int, now: float) -> None:
        """End the rows that nobody decodes."""
        for row in range(count):
            if row % self._segments:
                self._begins[first + row] = now
                self._ended.append((now, first + row))

    def _rows_under_way(self) -> RowLengths:
        lengths = [self._lengths[row] for row in self._slots.rows_under_way()]
        prompts, answers = np.array(lengths, dtype=np.int64).reshape(-1, 2).T
        return RowLengths(prompts, answers)
