"""Tables of arrived rows, as arrays.

Owns: for each node, which rows of which prompts have come and in which block they lie, and
how many rows of each block are still wanted. Does not own: which prompts there are
(lane.py), nor any row: these are a few bytes each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dataflow.batch import Keys
from engine.coordinator.messages import NO_VERSION, Gather, Ref

PENDING, PRESENT, ABSENT = 0, 1, 2
"""A row that may still come; one that has come; one that will never (selected away, or its group was dropped)."""

_SAMPLE_BITS = np.int64(20)


class Blocks:
    """Every block that the coordinator knows, by a number of its own, with the count of rows that are still wanted."""

    def __init__(self) -> None:
        self._refs: dict[int, tuple[str, int]] = {}
        self._live: dict[int, int] = {}
        self._done: list[int] = []
        self._next = 0

    def add(self, ref: Ref, wanted: int) -> int:
        """Register a block of which `wanted` rows are taken up; 0 wanted rows are released by the next `drain`."""
        number = self._next
        self._next += 1
        self._refs[number] = (ref.worker, ref.block)
        self._live[number] = wanted
        if not wanted:
            self._done.append(number)
        return number

    def __len__(self) -> int:
        return len(self._refs)

    def drop(self, blocks: np.ndarray) -> None:
        """One row of each listed block is wanted no longer (a block counts as often as it is listed)."""
        for number, count in zip(*np.unique(blocks, return_counts=True), strict=True):
            self._live[int(number)] -= int(count)
            if self._live[int(number)] <= 0:
                self._done.append(int(number))

    def drain(self) -> list[tuple[str, int]]:
        """The blocks without a wanted row; they are forgotten."""
        done, self._done = self._done, []
        for number in done:
            del self._live[number]
        return [self._refs.pop(number) for number in done]

    def gather(self, producer: str, columns: tuple[str, ...], block: np.ndarray, row: np.ndarray) -> Gather:
        """Where these rows lie, with the blocks numbered from 0."""
        numbers, index = np.unique(block, return_inverse=True)
        refs = tuple(self._refs[int(n)] for n in numbers)
        return Gather(producer=producer, columns=columns, refs=refs, block=index.astype(np.int32), row=row)


class Table:
    """The output rows of one node: arrays [slots, rows]; a slot is a prompt that is outstanding."""

    __slots__ = ("block", "length", "row", "rows", "state", "version")

    def __init__(self, rows: int, slots: int) -> None:
        self.rows = rows
        self.state = np.zeros((slots, rows), dtype=np.uint8)
        self.block = np.zeros((slots, rows), dtype=np.int64)
        self.row = np.zeros((slots, rows), dtype=np.int32)
        self.version = np.full((slots, rows), NO_VERSION, dtype=np.int32)
        self.length = np.zeros((slots, rows), dtype=np.int64)

    def grow(self, slots: int) -> None:
        """Room for at least this many slots."""
        for name in ("state", "block", "row", "version", "length"):
            old = getattr(self, name)
            new = np.zeros((slots, self.rows), dtype=old.dtype)
            new[: len(old)] = old
            setattr(self, name, new)

    def put(self, slots: np.ndarray, samples: np.ndarray, number: int, rows: np.ndarray, ref: Ref) -> None:
        """These rows of a block have come."""
        self.state[slots, samples] = PRESENT
        self.block[slots, samples] = number
        self.row[slots, samples] = rows
        self.version[slots, samples] = ref.version[rows]
        self.length[slots, samples] = ref.lengths[rows]

    def clear(self, slots: np.ndarray) -> np.ndarray:
        """Forget these slots; returns the blocks of the rows that had come, one entry a row."""
        had = self.block[slots][self.state[slots] == PRESENT]
        self.state[slots] = PENDING
        self.version[slots] = NO_VERSION
        self.length[slots] = 0
        return had


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """Rows of one node within a Step, sorted by (position, sample), and where they lie."""

    keys: Keys
    block: np.ndarray
    row: np.ndarray

    def find(self, keys: Keys, ratio: int) -> tuple[np.ndarray, np.ndarray]:
        """(block, row) for each key; with a ratio, of the ancestor row that the key descends from."""
        want = codes(keys.position, keys.sample // ratio)
        at = np.searchsorted(codes(self.keys.position, self.keys.sample), want)
        return self.block[at], self.row[at]

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
