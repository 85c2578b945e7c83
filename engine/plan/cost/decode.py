"""When each row of a batch is decoded: rows in slots, one token each a pass, within a cache.

Owns: the passes of a batch and their seconds, by which estimates and simulated kernels take their
times. Does not own: which rows are decoded in which pass (decode_slots.py), seconds of a pass
(model_passes.py), lengths (distribution.py).

The prompts of rows that begin are fed first (prefill), which holds up all others. All rows then get
one token a pass. Time passes from one end of a row to the next: between them the number of rows is
constant, and the cached tokens grow by one a row and pass, so the pass in the middle stands for
all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from dataflow.errors import PlanError
from engine.plan.cost.decode_slots import BegunRows, DecodeSlots, SlotLimits
from engine.plan.cost.devices import Place
from engine.plan.cost.model_passes import Passes, PassParts, Sizes, Time

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

    @property
    def limits(self) -> SlotLimits:
        """Its slots and cache."""
        return SlotLimits(slots=self.slots, room=self.room, shared=self.shared, copied=self.copied)


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
    require_room(batch)
    return time_passes(model, where, list_passes(batch))


def cache_capacity(model: Sizes, where: Place, memory: int) -> int:
    """Tokens whose keys and values fit into so many bytes of each rank's memory; at least 1, which
    no row fits into, since a batch's 0 stands for no limit.
    """
    return max(1, int(memory * where.tensor // max(1, model.cached_bytes)))


def cache_room(model: Sizes, where: Place, memory: int) -> int:
    """Tokens that a batch's cache of so many bytes of each rank holds; 0, for no limit, where its
    size is not fixed.
    """
    return cache_capacity(model, where, memory) if memory else 0


def require_room(batch: DecodeBatch) -> None:
    """Raise PlanError for a row that the cache cannot hold alone. Alone it has its whole prompt in
    the cache, whoever shares it later.
    """
    longest = int((batch.prompts + batch.answers).max(initial=0))
    if batch.room and longest > batch.room:
        problem = f"expected room for the longest row, {longest:,} tokens"
        problem = f"{problem}, found a cache of {batch.room:,}"
        raise PlanError(f"generate: {problem}. Fix: more tensor ranks, or shorter rows.")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassList:
    """The passes of a batch in their order, which no device changes: parts of equal ones, prefills
    and others. By row, int64 [rows]: how many parts there were before it began, and at its end.
    """

    prefill: PassParts
    decode: PassParts
    is_prefill: np.ndarray
    """bool [parts]: which of all parts, in their order, are prefills."""
    begins: np.ndarray
    ends: np.ndarray
    passes: int
    sent_back: int
    busiest: float


def list_passes(batch: DecodeBatch) -> PassList:
    """List the passes in which a batch is decoded, in the order of its rows' coming."""
    slots, listing = DecodeSlots(batch.limits), _PassListing(batch.budget)
    slots.add(batch.prompts, batch.answers)
    rows = len(batch.answers)
    begins, ends = [-1] * rows, [0] * rows  # below 0: it has not begun
    while slots.is_busy:
        begun = slots.admit()
        part = len(listing.is_prefill)
        for row in begun.rows:
            if begins[row] < 0:
                begins[row] = part
        listing.add_prefill(begun)
        passes = slots.count_passes()
        if not passes:
            continue
        listing.add_passes(slots, passes)
        part = len(listing.is_prefill)
        for row in slots.run(passes):
            ends[row] = part
    return PassList(
        prefill=listing.prefill.as_parts(predicted=False),
        decode=listing.decode.as_parts(predicted=True),
        is_prefill=np.array(listing.is_prefill, dtype=bool),
        begins=np.array(begins, dtype=np.int64),
        ends=np.array(ends, dtype=np.int64),
        passes=slots.passes,
        sent_back=slots.sent_back,
        busiest=slots.busiest,
    )


def time_passes(model: Sizes, where: Place, listed: PassList) -> Decoded:
    """Time listed passes on a place, one part after another."""
    decode, prefill = Passes(model, where, "decode"), Passes(model, where, "prefill")
    seconds = np.empty(len(listed.is_prefill) + 1)
    seconds[0] = 0.0
    parts = seconds[1:]
    parts[listed.is_prefill] = prefill.seconds_of_each(listed.prefill) * listed.prefill.count
    parts[~listed.is_prefill] = decode.seconds_of_each(listed.decode) * listed.decode.count
    clock = np.cumsum(seconds)
    time = decode.total(listed.decode) + prefill.total(listed.prefill)
    return Decoded(
        begins=clock[listed.begins],
        ends=clock[listed.ends],
        time=replace(time, seconds=float(clock[-1])),
        passes=listed.passes,
        sent_back=listed.sent_back,
        busiest=listed.busiest,
    )


def split_passes(passes: int) -> Iterator[int]:
    """Split passes of the same rows into parts, for each of which its middle one stands."""
    while passes:
        count = min(passes, _STRETCH)
        yield count
        passes -= count


def divide_prefill(fed: float, budget: int) -> int:
    """Passes of one prefill: as many as its tokens need."""
    return max(1, -(-int(fed) // budget))


@dataclass(slots=True)
class _Columns:
    """Parts of equal passes, column by column."""

    count: list[int] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    keys: list[float] = field(default_factory=list)
    cached: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    def as_parts(self, *, predicted: bool) -> PassParts:
        return PassParts(
            count=np.array(self.count, dtype=np.float64),
            tokens=np.array(self.tokens, dtype=np.float64),
            keys=np.array(self.keys, dtype=np.float64),
            cached=np.array(self.cached, dtype=np.float64),
            rows=np.array(self.rows, dtype=np.float64),
            predicted=predicted,
        )


class _PassListing:
    """The list of passes, as it grows."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self.prefill, self.decode = _Columns(), _Columns()
        self.is_prefill: list[bool] = []

    def add_prefill(self, begun: BegunRows) -> None:
        if not begun.fed:
            return
        count = divide_prefill(begun.fed, self._budget)
        columns = self.prefill
        columns.count.append(count)
        columns.tokens.append(begun.fed / count)
        columns.keys.append(begun.keys / count)
        columns.cached.append(0.0)
        columns.rows.append(0)
        self.is_prefill.append(True)

    def add_passes(self, slots: DecodeSlots, passes: int) -> None:
        """Add passes of all rows in slots, before they are run."""
        rows, cached, columns = slots.active, slots.cached, self.decode
        for count in split_passes(passes):
            middle = cached + rows * (count - 1) / 2.0
            columns.count.append(count)
            columns.tokens.append(rows)
            columns.keys.append(middle + rows)
            columns.cached.append(middle + slots.copied)
            columns.rows.append(rows)
            self.is_prefill.append(False)
            cached += rows * count
