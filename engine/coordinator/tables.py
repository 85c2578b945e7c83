"""Tables of arrived rows, as arrays.

Owns: for each node, which rows of which prompts have come and in which block they lie, and
what still needs each block. Does not own: which prompts there are (lane.py), nor any row:
these are a few bytes each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dataflow.batch import Keys
from engine.coordinator.messages import NO_VERSION, Gather, Ref

PENDING, PRESENT, ABSENT = 0, 1, 2
"""A row that may still come; one that has come; one that will never (selected away, or its group was dropped)."""

NO_BLOCK = -1

_SAMPLE_BITS = np.int64(20)


class Blocks:
    """Every block that the coordinator knows, by a number of its own, with a count of what still needs it.

    A block is needed by each of its rows that is wanted, and by each chunk under way that reads it: a kernel looks at
    the bytes where they lie, until its call returns.
    """

    def __init__(self) -> None:
        self._refs: dict[int, tuple[str, int]] = {}
        self._needed: dict[int, int] = {}
        self._done: list[int] = []
        self._next = 0

    def add(self, ref: Ref, wanted: int) -> int:
        """Register a block of which `wanted` rows are taken up; 0 wanted rows are released by the next `drain`."""
        number = self._next
        self._next += 1
        self._refs[number] = (ref.worker, ref.block)
        self._needed[number] = wanted
        if not wanted:
            self._done.append(number)
        return number

    def __len__(self) -> int:
        return len(self._refs)

    def drop(self, blocks: np.ndarray) -> None:
        """One row of each listed block is wanted no longer (a block counts as often as it is listed)."""
        for number, count in zip(*_counted(blocks), strict=True):
            self._less(number, count)

    def hold(self, numbers: Iterable[int]) -> None:
        """A chunk that reads these blocks begins."""
        for number in numbers:
            self._needed[number] += 1

    def let_go(self, numbers: Iterable[int]) -> None:
        """It has ended."""
        for number in numbers:
            self._less(number, 1)

    def _less(self, number: int, count: int) -> None:
        self._needed[number] -= count
        if self._needed[number] <= 0:
            self._done.append(number)

    def drain(self) -> dict[str, tuple[int, ...]]:
        """The blocks that nothing needs, by worker; they are forgotten."""
        done, self._done = self._done, []
        found: dict[str, list[int]] = {}
        for number in done:
            del self._needed[number]
            worker, block = self._refs.pop(number)
            found.setdefault(worker, []).append(block)
        return {worker: tuple(blocks) for worker, blocks in found.items()}

    def gather(
        self, producer: str, columns: tuple[str, ...], block: np.ndarray, row: np.ndarray
    ) -> tuple[Gather, list[int]]:
        """Where these rows lie, with the blocks numbered from 0; and the blocks' numbers here."""
        numbers, index = _indexed(block)
        refs = tuple(self._refs[n] for n in numbers)
        return Gather(producer=producer, columns=columns, refs=refs, block=index, row=row), numbers


def _counted(blocks: np.ndarray) -> tuple[list[int], list[int]]:
    """Which numbers occur and how often; numbers of blocks that live together lie close together."""
    if not len(blocks):
        return [], []
    first = int(blocks.min())
    counts = np.bincount(blocks - first)
    found = np.flatnonzero(counts)
    return (found + first).tolist(), counts[found].tolist()


def _indexed(blocks: np.ndarray) -> tuple[list[int], np.ndarray]:
    """The numbers that occur, ascending, and for each entry the index of its number (int32)."""
    if not len(blocks):
        return [], np.zeros(0, dtype=np.int32)
    first = int(blocks.min())
    if first == int(blocks.max()):
        return [first], np.zeros(len(blocks), dtype=np.int32)
    there = np.zeros(int(blocks.max()) - first + 1, dtype=bool)
    there[blocks - first] = True
    index = np.cumsum(there, dtype=np.int32) - np.int32(1)
    return (np.flatnonzero(there) + first).tolist(), index[blocks - first]


class Table:
    """The output rows of one node: arrays [slots, rows]; a slot is a prompt that is outstanding.

    state says which rows go on downstream. block is the number of the block that holds a row, NO_BLOCK where none
    came: the rows of a failed group are ABSENT, and hold their blocks until the prompt is retired.
    """

    __slots__ = ("block", "row", "rows", "state", "version")

    def __init__(self, rows: int, slots: int) -> None:
        self.rows = rows
        self.state = np.full((slots, rows), PENDING, dtype=np.uint8)
        self.block = np.full((slots, rows), NO_BLOCK, dtype=np.int64)
        self.row = np.zeros((slots, rows), dtype=np.int32)
        self.version = np.full((slots, rows), NO_VERSION, dtype=np.int32)

    def grow(self, slots: int) -> None:
        """Room for this many slots."""
        wider = Table(self.rows, slots)
        for name in ("state", "block", "row", "version"):
            old, new = getattr(self, name), getattr(wider, name)
            new[: len(old)] = old
            setattr(self, name, new)

    def put(self, slots: np.ndarray, samples: np.ndarray, number: int, rows: np.ndarray, ref: Ref) -> None:
        """These rows of a block have come."""
        self.state[slots, samples] = PRESENT
        self.block[slots, samples] = number
        self.row[slots, samples] = rows
        self.version[slots, samples] = ref.version[rows]

    def clear(self, slots: np.ndarray) -> np.ndarray:
        """Forget these slots; returns the blocks of the rows that had come, one entry a row."""
        had = self.block[slots]
        self.state[slots] = PENDING
        self.block[slots] = NO_BLOCK
        self.version[slots] = NO_VERSION
        return had[had != NO_BLOCK]


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """Rows of one node within a Step, sorted by (position, sample), and where they lie."""

    keys: Keys
    block: np.ndarray
    row: np.ndarray

    def find(self, keys: Keys, ratio: int) -> tuple[np.ndarray, np.ndarray]:
        """(block, row) for each key; with a ratio, of its ancestor row. All have to be there."""
        if ratio == 1 and self._same(keys):
            return self.block, self.row
        want = codes(keys.position, keys.sample // ratio)
        at = np.searchsorted(codes(self.keys.position, self.keys.sample), want)
        return self.block[at], self.row[at]

    def having(self, keys: Keys, ratio: int) -> Keys:
        """Those of the keys whose row (with a ratio, whose ancestor's) is among these."""
        if ratio == 1 and self._same(keys):
            return keys
        there = np.isin(codes(keys.position, keys.sample // ratio), codes(self.keys.position, self.keys.sample))
        return keys if there.all() else keys.take(there)

    def _same(self, keys: Keys) -> bool:
        mine = self.keys
        return keys is mine or (
            np.array_equal(keys.position, mine.position) and np.array_equal(keys.sample, mine.sample)
        )

    @staticmethod
    def merge(parts: Iterable[StepRows]) -> StepRows:
        """All rows of the parts, sorted."""
        parts = list(parts)
        if not parts:
            return StepRows(Keys.of([]), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32))
        keys = Keys.concat([p.keys for p in parts])
        order = keys.order()
        block, row = np.concatenate([p.block for p in parts]), np.concatenate([p.row for p in parts])
        return StepRows(keys.take(order), block[order], row[order])


def codes(position: np.ndarray, sample: np.ndarray) -> np.ndarray:
    """One sortable int64 for (position, sample)."""
    return (position << _SAMPLE_BITS) | sample.astype(np.int64)


def by_prompt(keys: Keys, parts: int) -> list[Keys]:
    """Sorted keys in at most so many runs of about as many prompts each, no prompt in two of them."""
    return [keys] if parts == 1 else [keys.take(run) for run in prompt_runs(keys.position, parts)]


def prompt_runs(positions: np.ndarray, parts: int) -> list[np.ndarray]:
    """Indices into sorted positions, in at most so many runs of about as many different ones each."""
    starts = np.flatnonzero(np.diff(positions, prepend=positions[0] - 1))
    edges = [int(starts[len(starts) * i // parts]) for i in range(parts)] + [len(positions)]
    return [np.arange(a, b) for a, b in pairwise(edges) if a < b]
