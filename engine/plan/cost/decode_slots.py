"""Rows in the slots of one replica, counted in passes and tokens: continuous batching.

Owns: which rows are decoded in which pass. Does not own: how long a pass takes (model_passes.py),
so that one schedule serves every device (decode.py, decode_curve.py), and rows that come while
others are decoded (engine/simulation/priced_decode.py).

A row begins as soon as a slot is free and the cache has room for its prompt, the heaviest first,
and of equal ones the first that came. A full cache sends the row that began last back, to begin
again before all others with what it has.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLimits:
    """slots: rows at once. room: tokens that the cache holds, 0 for no limit. shared: rows that
    share a prompt's cache (1: none do). copied: whether each row reads a copy of its prompt.
    """

    slots: int
    room: int = 0
    shared: int = 1
    copied: bool = False


@dataclass(slots=True)
class BegunRows:
    """Rows that begin together, and what is fed for them: tokens, and keys that they attend to."""

    rows: list[int]
    fed: float = 0.0
    keys: float = 0.0


class DecodeSlots:
    """Rows under way, numbered in the order of their coming. A row's place in the cache counts from
    its begin to its end.
    """

    def __init__(self, limits: SlotLimits) -> None:
        self._limits = limits
        self._prompt_share = 1.0 / limits.shared
        self._copied_share = 1.0 - self._prompt_share if limits.copied else 0.0
        # Lists of Python ints: single elements are read, which NumPy boxes each time.
        self._prompts: list[int] = []
        self._remaining: list[int] = []
        self._written: list[int] = []
        self._queue: list[tuple[float, int]] = []
        """(weight, negative: heavy ones first; row) of those that wait, a heap."""
        self._returned: list[int] = []
        """Rows that were sent back; the next to begin is at the end."""
        self._begin_pass: dict[int, int] = {}
        """Active row -> the pass before which it began."""
        self._last_passes: list[tuple[int, int]] = []
        """(the pass after which it has all its tokens, row), a heap. Rows that were sent back are
        still in it, under the pass that would have been their last.
        """
        self._begin_order: list[int] = []
        """Rows in the order of their begin; those that have ended are still in it."""
        self.cached = 0.0
        """Tokens whose keys and values the cache has."""
        self.copied = 0.0
        """Tokens of active rows' prompts that are read besides those cached."""
        self.passes, self.sent_back, self.busiest = 0, 0, 0.0

    @property
    def active(self) -> int:
        """Rows in slots."""
        return len(self._begin_pass)

    @property
    def is_busy(self) -> bool:
        """Whether rows are in slots or wait."""
        return bool(self._begin_pass or self._queue or self._returned)

    @property
    def may_admit(self) -> bool:
        """Whether rows wait while a slot is free."""
        is_free = len(self._begin_pass) < self._limits.slots
        return is_free and bool(self._queue or self._returned)

    def add(
        self, prompts: np.ndarray, answers: np.ndarray, weights: np.ndarray | None = None
    ) -> None:
        """Let rows wait for slots. prompts, answers (at least 1): int64 [rows], their tokens;
        weights: float32 [rows], how much each is expected to take.
        """
        first, count = len(self._prompts), len(answers)
        self._prompts += prompts.tolist()
        self._remaining += answers.tolist()
        self._written += [0] * count
        priorities = [0.0] * count
        if weights is not None:
            priorities = (-weights).tolist()
        waiting = zip(priorities, range(first, first + count), strict=True)
        if self._queue:
            for priority_and_row in waiting:
                heapq.heappush(self._queue, priority_and_row)
        else:
            self._queue = list(waiting)
            if weights is not None:
                heapq.heapify(self._queue)

    def rows_under_way(self) -> list[int]:
        """The rows in slots and those that wait."""
        waiting = [row for _, row in self._queue]
        return [*self._begin_pass, *self._returned, *waiting]

    def admit(self) -> BegunRows:
        """Begin rows while there is a slot and room for their prompts."""
        begun = BegunRows([])
        while len(self._begin_pass) < self._limits.slots and (self._returned or self._queue):
            row = self._returned[-1] if self._returned else self._queue[0][1]
            cached = self._cached_at_begin(row)
            if not self._has_room(cached):
                break
            if self._returned:
                self._returned.pop()
            else:
                heapq.heappop(self._queue)
            self._begin_pass[row] = self.passes
            heapq.heappush(self._last_passes, (self.passes + self._remaining[row], row))
            self._begin_order.append(row)
            self.cached += cached
            prompt, written = self._prompts[row], self._written[row]
            self.copied += self._copied_share * prompt
            begun.rows.append(row)
            begun.fed += cached  # a shared prompt is fed once, too
            own_keys = written * (prompt + written / 2.0)
            begun.keys += self._prompt_share * prompt * prompt / 2.0 + own_keys
        return begun

    def _has_room(self, cached: float) -> bool:
        """Whether a row that takes so much of the cache may begin; one alone always may."""
        room, active = self._limits.room, len(self._begin_pass)
        # A token of each row's next pass has to find room, too.
        return not room or not active or self.cached + cached + active + 1 <= room

    def _cached_at_begin(self, row: int) -> float:
        """Tokens of the cache that a row takes as it begins: its share of the prompt, and what it
        had written before it was sent back.
        """
        return self._prompts[row] * self._prompt_share + self._written[row]

    def count_passes(self) -> int:
        """Count the passes until a row ends or the cache is full; if it is full now, send the row
        that began last back, and return 0. Some row has to be in a slot.
        """
        passes = self._first_end() - self.passes
        if not self._limits.room:
            return passes
        active = len(self._begin_pass)
        free = int((self._limits.room - self.cached) // active)
        if free < 1 and active > 1:
            self._send_back()
            return 0
        return min(passes, max(free, 1))

    def ends_a_row(self, passes: int) -> bool:
        """Whether some row has all its tokens after so many more passes."""
        return self._first_end() <= self.passes + passes

    def run(self, passes: int) -> list[int]:
        """Run so many passes, no more than `count_passes` says; return the rows that end."""
        self.passes += passes
        self.cached += len(self._begin_pass) * passes
        self.busiest = max(self.busiest, self.cached)
        ended: list[int] = []
        while self._begin_pass and self._first_end() <= self.passes:
            _, row = heapq.heappop(self._last_passes)
            ended.append(row)
            self._leave(row)
        return ended

    def _first_end(self) -> int:
        """The pass after which the next row has all its tokens."""
        while True:
            last_pass, row = self._last_passes[0]
            begin_pass = self._begin_pass.get(row)
            if begin_pass is not None and begin_pass + self._remaining[row] == last_pass:
                return last_pass
            heapq.heappop(self._last_passes)  # of a row that was sent back meanwhile

    def _leave(self, row: int) -> int:
        """Take a row out of its slot; return its tokens since it began."""
        tokens = self.passes - self._begin_pass.pop(row)
        self.cached -= self._cached_at_begin(row) + tokens
        self.copied -= self._copied_share * self._prompts[row]
        return tokens

    def _send_back(self) -> None:
        """Send the row that began last back: it begins again, and is fed its prompt and what it has
        written.
        """
        while self._begin_order[-1] not in self._begin_pass:
            self._begin_order.pop()
        row = self._begin_order.pop()
        tokens = self._leave(row)
        self._written[row] += tokens
        self._remaining[row] -= tokens
        self._returned.append(row)
        self.sent_back += 1
