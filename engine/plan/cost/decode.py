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
    tokens that the cache holds, 0 for no limit. budget: tokens of one prefill.
    """

    prompts: np.ndarray
    answers: np.ndarray
    shared: int = 1
    slots: int = 256
    room: int = 0
    budget: int = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """float64 [rows]: seconds from the start to each row's begin and end. sent_back: how often the
    cache was full. busiest: most tokens cached at once.
    """

    begins: np.ndarray
    ends: np.ndarray
    time: Time
    passes: int = 0
    sent_back: int = 0
    busiest: float = 0.0

    def times(self, factor: float) -> Decoded:
        """So many times as long."""
        if factor == 1.0:
            return self
        begins, ends = self.begins * factor, self.ends * factor
        return replace(self, begins=begins, ends=ends, time=self.time.times(factor))

    @property
    def seconds(self) -> float:
        """Until the last row has ended."""
        return float(self.ends.max(initial=0.0))


def decode(model: Sizes, where: Place, batch: DecodeBatch) -> Decoded:
    """Times of one replica's rows, in the order of their coming. Raises PlanError for a row that
    the cache cannot hold alone.
    """
    _require_room(batch)
    return _Schedule(model, where, batch).run()


def room(model: Sizes, where: Place, memory: int) -> int:
    """Tokens whose keys and values fit into so many bytes of each rank's memory; at least 1, which
    no row fits into, since a batch's 0 stands for no limit.
    """
    return max(1, int(memory * where.tensor // max(1, model.cached_bytes)))


def _require_room(batch: DecodeBatch) -> None:
    """A row that is alone has its whole prompt in the cache, whoever shares it later."""
    longest = int((batch.prompts + batch.answers).max(initial=0))
    if batch.room and longest > batch.room:
        problem = f"expected room for the longest row, {longest:,} tokens"
        found = f"found a cache of {batch.room:,}"
        raise PlanError(f"generate: {problem}, {found}. Fix: more tensor ranks, or shorter rows.")


class _Schedule:
    """One batch under way. A row's place in the cache counts from its begin to its end."""

    def __init__(self, model: Sizes, where: Place, batch: DecodeBatch) -> None:
        self._passes = Passes(model, where, "decode")
        self._prefill = Passes(model, where, "prefill")
        self._batch = batch
        rows = len(batch.answers)
        self._prompts: list[int] = batch.prompts.tolist()
        self._left: list[int] = batch.answers.tolist()
        self._made = [0] * rows
        self._kept = 1.0 / batch.shared
        self._begins, self._ends = [-1.0] * rows, [0.0] * rows
        self._waiting = list(range(rows - 1, -1, -1))
        self._since: dict[int, int] = {}
        """The pass before which each active row began."""
        self._soonest: list[tuple[int, int]] = []
        """(the pass after which it has all its tokens, row), a heap. Rows that were sent back are
        still in it, under the pass that would have been their last.
        """
        self._order: list[int] = []
        """Rows in the order of their begin; those that have ended are still in it."""
        self._now, self._pass, self._cached = 0.0, 0, 0.0
        self._compute = self._memory = self._link = self._latency = 0.0
        self._sent_back, self._busiest = 0, 0.0

    def run(self) -> Decoded:
        while self._waiting or self._since:
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
        """Rows begin while there is a slot and room for their prompts."""
        most, slots, fed, keys = self._batch.room, self._batch.slots, 0.0, 0.0
        while self._waiting and len(self._since) < slots:
            row = self._waiting[-1]
            held = self._held(row)
            # A token of each row's next pass has to find room, too.
            if most and self._since and self._cached + held + len(self._since) + 1 > most:
                break
            self._waiting.pop()
            self._since[row] = self._pass
            heapq.heappush(self._soonest, (self._pass + self._left[row], row))
            self._order.append(row)
            self._cached += held
            if self._begins[row] < 0:
                self._begins[row] = self._now
            prompt, made = self._prompts[row], self._made[row]
            fed += held  # a shared prompt is fed once, too
            keys += self._kept * prompt * prompt / 2.0 + made * (prompt + made / 2.0)
        if fed:
            count = max(1, -(-int(fed) // self._batch.budget))
            self._spend(self._prefill.at(fed / count, keys / count, predicted=0.0), count)

    def _held(self, row: int) -> float:
        """Tokens of the cache that a row takes as it begins."""
        return self._prompts[row] * self._kept + self._made[row]

    def _advance(self) -> None:
        """Passes until a row ends, the cache is full, or one pass no longer stands for them."""
        rows = len(self._since)
        passes = min(self._first_end() - self._pass, _STRETCH)
        if self._batch.room:
            free = int((self._batch.room - self._cached) // rows)
            if free < 1 and rows > 1:
                self._send_back()
                return
            passes = min(passes, max(free, 1))
        middle = self._cached + rows * (passes - 1) / 2.0
        self._spend(self._passes.at(rows, middle + rows, cached=middle, rows=rows), passes)
        self._pass += passes
        self._cached += rows * passes
        self._busiest = max(self._busiest, self._cached)
        while self._since and self._first_end() <= self._pass:
            _, row = heapq.heappop(self._soonest)
            self._ends[row] = self._now
            self._leave(row)

    def _first_end(self) -> int:
        """The pass after which the next row has all its tokens."""
        soonest = self._soonest
        while True:
            last, row = soonest[0]
            since = self._since.get(row)
            if since is not None and since + self._left[row] == last:
                return last
            heapq.heappop(soonest)

    def _leave(self, row: int) -> int:
        """A row leaves its slot; returns its tokens since it began."""
        made = self._pass - self._since.pop(row)
        self._cached -= self._held(row) + made
        return made

    def _send_back(self) -> None:
        """The row that began last begins again, with what it has as its prompt."""
        while self._order[-1] not in self._since:
            self._order.pop()
        row = self._order.pop()
        made = self._leave(row)
        self._made[row] += made
        self._left[row] -= made
        self._waiting.append(row)
        self._sent_back += 1

    def _spend(self, one: Time, count: int) -> None:
        """So many passes, one after another."""
        self._now += one.seconds * count
        self._compute += one.compute * count
        self._memory += one.memory * count
        self._link += one.link * count
        self._latency += one.latency * count
