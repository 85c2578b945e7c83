"""When each row of a batch is decoded: rows in slots, one token each a pass, within a cache.

Owns: the schedule of continuous batching, by which estimates and simulated kernels take their
times. Does not own: seconds of a pass (model_passes.py), lengths (distribution.py).

A row begins as soon as a slot is free and the cache has room for its prompt; its prompt is fed
first (prefill), which holds up all others. All rows then get one token a pass. A full cache sends
the row that began last back, to begin again with what it has. Time passes from one end of a row to
the next: between them the number of rows is constant, and the cached tokens grow by one a row and
pass, so the pass in the middle stands for all.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

import numpy as np

from dataflow.errors import PlanError
from engine.plan.cost.devices import Place
from engine.plan.cost.model_passes import Passes, Sizes, Time

_STRETCH = 1024
"""Passes that one pass stands for at most: beyond that compute may take over from memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBatch:
    """Rows to decode, int64 [rows]: tokens of each row's prompt, and of its answer, at least 1.

    shared: rows that share a prompt's cache, its group (1: none do). slots: rows at once. room:
    tokens that the cache holds, 0 for no limit. budget: tokens of one prefill. copied: whether each
    row reads a copy of its prompt of its own, which is fed once for all.
    """

    prompts: np.ndarray
    answers: np.ndarray
    shared: int = 1
    slots: int = 256
    room: int = 0
    budget: int = 16384
    copied: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """When each row began and ended, float64 [rows]: seconds from the start. sent_back: how often
    the cache was full. busiest: most tokens cached at once.
    """

    begins: np.ndarray
    ends: np.ndarray
    time: Time
    passes: int = 0
    sent_back: int = 0
    busiest: float = 0.0

    def times(self, factor: float) -> Decoded:
        """The same schedule, so many times as long."""
        if factor == 1.0:
            return self
        begins, ends = self.begins * factor, self.ends * factor
        return replace(self, begins=begins, ends=ends, time=self.time.times(factor))

    @property
    def seconds(self) -> float:
        """Seconds until the last row has ended."""
        return float(self.ends.max(initial=0.0))


def schedule_decode(model: Sizes, where: Place, batch: DecodeBatch) -> Decoded:
    """Schedule one replica's rows, in the order of their coming. Raises PlanError for a row that
    the cache cannot hold alone.
    """
    _require_room(batch)
    return _Schedule(model, where, batch).run()


def cache_capacity(model: Sizes, where: Place, memory: int) -> int:
    """Tokens whose keys and values fit into so many bytes of each rank's memory; at least 1, which
    no row fits into, since a batch's 0 stands for no limit.
    """
    return max(1, int(memory * where.tensor // max(1, model.cached_bytes)))


def _require_room(batch: DecodeBatch) -> None:
    """Raise PlanError for a row that the cache cannot hold alone. Alone it has its whole prompt in
    the cache, whoever shares it later.
    """
    longest = int((batch.prompts + batch.answers).max(initial=0))
    if batch.room and longest > batch.room:
        problem = f"expected room for the longest row, {longest:,} tokens"
        problem = f"{problem}, found a cache of {batch.room:,}"
        raise PlanError(f"generate: {problem}. Fix: more tensor ranks, or shorter rows.")


class _Schedule:
    """One batch under way. A row's place in the cache counts from its begin to its end."""

    def __init__(self, model: Sizes, where: Place, batch: DecodeBatch) -> None:
        self._passes = Passes(model, where, "decode")
        self._prefill = Passes(model, where, "prefill")
        self._batch = batch
        rows = len(batch.answers)
        # Lists of Python ints: the schedule reads single elements, which NumPy boxes each time.
        self._prompts: list[int] = batch.prompts.tolist()
        self._remaining: list[int] = batch.answers.tolist()
        self._written = [0] * rows
        self._prompt_share = 1.0 / batch.shared
        self._copied_share = 1.0 - self._prompt_share if batch.copied else 0.0
        self._copied = 0.0
        """Tokens of active rows' prompts that are read besides those cached."""
        self._begins = [-1.0] * rows  # below 0: it has not begun
        self._ends = [0.0] * rows
        self._queue = list(range(rows - 1, -1, -1))  # the next row is at its end
        self._begin_pass: dict[int, int] = {}
        """Active row -> the pass before which it began."""
        self._last_passes: list[tuple[int, int]] = []
        """(the pass after which it has all its tokens, row), a heap. Rows that were sent back are
        still in it, under the pass that would have been their last.
        """
        self._begin_order: list[int] = []
        """Rows in the order of their begin; those that have ended are still in it."""
        self._now, self._pass, self._cached = 0.0, 0, 0.0
        self._compute = self._memory = self._link = self._latency = 0.0
        self._sent_back, self._busiest = 0, 0.0

    def run(self) -> Decoded:
        while self._queue or self._begin_pass:
            self._admit()
            self._advance()
        return Decoded(
            begins=np.array(self._begins, dtype=np.float64),
            ends=np.array(self._ends, dtype=np.float64),
            time=Time(
                seconds=self._now,
                compute=self._compute,
                memory=self._memory,
                link=self._link,
                latency=self._latency,
            ),
            passes=self._pass,
            sent_back=self._sent_back,
            busiest=self._busiest,
        )

    def _admit(self) -> None:
        """Begin rows while there is a slot and room for their prompts."""
        capacity, slots = self._batch.room, self._batch.slots
        fed = keys = 0.0
        while self._queue and len(self._begin_pass) < slots:
            row = self._queue[-1]
            cached = self._cached_at_begin(row)
            # A token of each row's next pass has to find room, too.
            needed = self._cached + cached + len(self._begin_pass) + 1
            if capacity and self._begin_pass and needed > capacity:
                break
            self._queue.pop()
            self._begin_pass[row] = self._pass
            heapq.heappush(self._last_passes, (self._pass + self._remaining[row], row))
            self._begin_order.append(row)
            self._cached += cached
            self._copied += self._copied_share * self._prompts[row]
            if self._begins[row] < 0:
                self._begins[row] = self._now
            prompt, written = self._prompts[row], self._written[row]
            fed += cached  # a shared prompt is fed once, too
            keys += self._prompt_share * prompt * prompt / 2.0 + written * (prompt + written / 2.0)
        if fed:
            count = max(1, -(-int(fed) // self._batch.budget))
            one_prefill = self._prefill.at(fed / count, keys / count, predicted=0.0)
            self._spend(one_prefill, count)

    def _cached_at_begin(self, row: int) -> float:
        """Tokens of the cache that a row takes as it begins: its share of the prompt, and what it
        had written before it was sent back.
        """
        return self._prompts[row] * self._prompt_share + self._written[row]

    def _advance(self) -> None:
        """Run passes until a row ends, the cache is full, or one pass no longer stands for them."""
        rows = len(self._begin_pass)
        passes = min(self._first_end() - self._pass, _STRETCH)
        if self._batch.room:
            free = int((self._batch.room - self._cached) // rows)
            if free < 1 and rows > 1:
                self._send_back()
                return
            passes = min(passes, max(free, 1))
        middle = self._cached + rows * (passes - 1) / 2.0
        one_pass = self._passes.at(rows, middle + rows, cached=middle + self._copied, rows=rows)
        self._spend(one_pass, passes)
        self._pass += passes
        self._cached += rows * passes
        self._busiest = max(self._busiest, self._cached)
        while self._begin_pass and self._first_end() <= self._pass:
            _, row = heapq.heappop(self._last_passes)
            self._ends[row] = self._now
            self._leave(row)

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
        tokens = self._pass - self._begin_pass.pop(row)
        self._cached -= self._cached_at_begin(row) + tokens
        self._copied -= self._copied_share * self._prompts[row]
        return tokens

    def _send_back(self) -> None:
        """Send the row that began last back to the queue: it begins again, and is fed its prompt
        and what it has written.
        """
        while self._begin_order[-1] not in self._begin_pass:
            self._begin_order.pop()
        row = self._begin_order.pop()
        tokens = self._leave(row)
        self._written[row] += tokens
        self._remaining[row] -= tokens
        self._queue.append(row)
        self._sent_back += 1

    def _spend(self, one: Time, count: int) -> None:
        """Add the time of so many passes, one after another."""
        self._now += one.seconds * count
        self._compute += one.compute * count
        self._memory += one.memory * count
        self._link += one.link * count
        self._latency += one.latency * count
