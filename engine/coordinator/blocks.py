"""All blocks that the coordinator knows, by number, each with a count of what still needs it.

    a block is    when
    there         its Worker keeps it
    lost          its Worker died with it; readers wait until its rows are made again
    moved         its rows were made again, and lie in other blocks now

Owns: where blocks lie, how long their rows are, and when each may be recycled. Does not own: who
reads them and how lost ones are made again (dispatch.py).

A block is needed by each wanted row in it, by each chunk under way that reads it, by each chunk
that may have to run again, and by each lost block whose rows it has now. Readers name the block
that rows came in; where the rows have moved to is looked up here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np

from dataflow.arrays import all_true
from dataflow.batch import Keys
from engine.protocol.grouping import group_indices, values_at
from engine.protocol.refs import Gather, Ref


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """What to gather from one producer: for each row, its block (an index into `numbers`) and row
    there. keys: as in Gather.
    """

    producer: str
    columns: tuple[str, ...]
    numbers: list[int]
    block: np.ndarray
    row: np.ndarray
    keys: Keys | None = None


_SPARSE = 16
"""Where so many numbers for each row lie between the least and the greatest, sorting is cheaper."""
Readings = Mapping[str, tuple[Reading, ...]]
"""What to gather for each input."""


class Blocks:
    """weigh: whether anyone will ask how many tokens rows have."""

    def __init__(self, *, weigh: bool = False) -> None:
        self._weigh = weigh
        self._tokens: dict[int, np.ndarray] = {}
        self._weights: dict[int, np.ndarray] = {}
        """Of blocks that say how much a generation of each row is expected to take."""
        self._refs: dict[int, tuple[str, int]] = {}
        self._needed: dict[int, int] = {}
        self._lost: dict[int, str] = {}
        """Number -> the worker that died with it."""
        self._moved: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        """Number -> for each of its rows, number and row of where it is now."""
        self._done: list[int] = []
        self._next = 0
        self.on_gone: Callable[[int], None] = _nobody_asks
        """Called with each block that nothing needs any more."""

    def add(self, ref: Ref, wanted: int) -> int:
        """Register a block of which `wanted` rows are needed; with 0 the next `drain` frees it."""
        number = self._next
        self._next += 1
        self._refs[number] = (ref.worker, ref.block)
        self._needed[number] = wanted
        if self._weigh:
            self._tokens[number] = ref.lengths
        if len(ref.weight):
            self._weights[number] = ref.weight
        if not wanted:
            self._done.append(number)
        return number

    def mark_unwanted(self, number: int) -> None:
        """Nothing needs a block that was just added: the next `drain` frees it."""
        self._needed[number] = 0
        self._done.append(number)

    def __len__(self) -> int:
        return len(self._needed)

    # --- counting ---------------------------------------------------------------------------------

    def drop(self, blocks: np.ndarray) -> None:
        """One row of each listed block is no longer wanted; blocks may be listed repeatedly."""
        for number, count in zip(*_count_numbers(blocks), strict=True):
            self._less(number, count)

    def hold(self, numbers: Iterable[int]) -> None:
        """Something begins to read these blocks."""
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
        released: dict[str, list[int]] = {}
        # A block that is forgotten may be the last that needs another: so more than one round.
        while self._done:
            numbers, self._done = self._done, []
            for number in numbers:
                if self._needed.get(number, 1) <= 0:
                    self._forget(number, released)
        return {worker: tuple(blocks) for worker, blocks in released.items()}

    def _forget(self, number: int, released: dict[str, list[int]]) -> None:
        del self._needed[number]
        ref = self._refs.pop(number, None)
        if ref is not None:
            worker, block = ref
            released.setdefault(worker, []).append(block)
        self._lost.pop(number, None)
        self._tokens.pop(number, None)
        self._weights.pop(number, None)
        if number in self._moved:
            self.let_go(np.unique(self._moved.pop(number)[0]).tolist())
        self.on_gone(number)

    # --- reading ----------------------------------------------------------------------------------

    def reading(
        self,
        producer: str,
        columns: tuple[str, ...],
        block: np.ndarray,
        row: np.ndarray,
        keys: Keys | None = None,
    ) -> Reading:
        """These rows, by their blocks' numbers."""
        numbers, index = _index_numbers(block)
        return Reading(producer, columns, numbers, index, row, keys)

    def tokens(self, inputs: Readings, rows: int) -> np.ndarray:
        """int64 [rows]: tokens of each row, the most that any input says; 0 where none does. Inputs
        with rows of their own do not count.
        """
        tokens = np.zeros(rows, dtype=np.int64)
        if not self._weigh:
            return tokens
        for reading in chain.from_iterable(inputs.values()):
            if reading.keys is None:
                blocks = [self._tokens[number] for number in reading.numbers]
                np.maximum(tokens, values_at(blocks, reading.block, reading.row), out=tokens)
        return tokens

    def row_tokens(self, numbers: np.ndarray, row: np.ndarray) -> np.ndarray:
        """int64 [rows]: tokens of these rows of these blocks."""
        unique, index = _index_numbers(numbers)
        return values_at([self._tokens[number] for number in unique], index, row)

    def weights(self, block: np.ndarray, row: np.ndarray) -> np.ndarray:
        """float32: how much each of these rows is expected to take, as its block says; 0 in a block
        that does not say, as those that a checkpoint brought back.
        """
        numbers, index = _index_numbers(block)
        silent = np.zeros(int(row.max(initial=-1)) + 1, dtype=np.float32)
        of_blocks = [self._weights.get(number, silent) for number in numbers]
        return values_at(of_blocks, index, row, np.float32)

    def gather(self, reading: Reading) -> Gather:
        """Where these rows lie now, with the blocks numbered from 0. All have to be there."""
        if self._moved and not self._moved.keys().isdisjoint(reading.numbers):
            reading = self._follow(reading)
        refs = tuple(self._refs[n] for n in reading.numbers)
        return Gather(
            producer=reading.producer,
            columns=reading.columns,
            refs=refs,
            block=reading.block,
            row=reading.row,
            keys=reading.keys,
        )

    def gathers(self, inputs: Readings) -> dict[str, tuple[Gather, ...]]:
        """The same for every input."""
        gathers: dict[str, tuple[Gather, ...]] = {}
        for name, readings in inputs.items():
            gathers[name] = tuple(self.gather(reading) for reading in readings)
        return gathers

    def _follow(self, reading: Reading) -> Reading:
        """The same rows in the blocks that have them now."""
        block, row = np.array(reading.numbers, dtype=np.int64)[reading.block], reading.row.copy()
        moved = True
        while moved:
            moved = False
            here, index = np.unique(block, return_inverse=True)
            parts = group_indices(index, len(here))
            for number, mine in zip(here.tolist(), parts, strict=True):
                if number in self._moved:
                    numbers, rows = self._moved[number]
                    block[mine], row[mine] = numbers[row[mine]], rows[row[mine]]
                    moved = True
        return self.reading(reading.producer, reading.columns, block, row, reading.keys)

    # --- losses -----------------------------------------------------------------------------------

    def lose(self, worker: str) -> frozenset[int]:
        """A Worker is gone, and its blocks with it; returns their numbers."""
        at_worker = (number for number, (at, _) in self._refs.items() if at == worker)
        lost = frozenset(at_worker)
        # Their counts stay: they say whether anybody still needs the rows, to be made again.
        for number in lost:
            del self._refs[number]
            self._lost[number] = worker
        return lost

    def move(self, number: int, numbers: np.ndarray, rows: np.ndarray) -> None:
        """The rows of a lost block have been made again, and lie there now."""
        del self._lost[number]
        self._moved[number] = (numbers, rows)
        self.hold(np.unique(numbers).tolist())

    def lost_with(self, number: int) -> str:
        """The Worker that a block was lost with; empty if not lost, or made again."""
        return self._lost.get(number, "")

    def missing(self, numbers: Iterable[int]) -> set[int]:
        """What has to be made again before these can be read."""
        if not self._lost:
            return set()
        return {number for number in self.places(numbers) if number in self._lost}

    def places(self, numbers: Iterable[int]) -> frozenset[int]:
        """The blocks that have the rows of these now."""
        if not self._moved:
            return frozenset(numbers)
        places: set[int] = set()
        waiting = list(numbers)
        while waiting:
            number = waiting.pop()
            if number in self._moved:
                waiting += np.unique(self._moved[number][0]).tolist()
            else:
                places.add(number)
        return frozenset(places)

    def any_at(self, worker: str) -> bool:
        """Whether a Worker keeps a block."""
        return any(at == worker for at, _ in self._refs.values())

    def some_at(self, numbers: Iterable[int], workers: Iterable[str]) -> bool:
        """Whether one of these blocks is there, at one of these Workers."""
        return any(self._refs[number][0] in workers for number in numbers if number in self._refs)


def _nobody_asks(number: int) -> None:
    del number


def _count_numbers(blocks: np.ndarray) -> tuple[list[int], list[int]]:
    """Which numbers occur, and how often; those of blocks that live together are close."""
    if not len(blocks):
        return [], []
    if all_true(blocks == blocks[0]):
        return [int(blocks[0])], [len(blocks)]
    first = int(blocks.min())
    counts = np.bincount(blocks - first)
    present = counts.nonzero()[0]
    return (present + first).tolist(), counts[present].tolist()


def _index_numbers(blocks: np.ndarray) -> tuple[list[int], np.ndarray]:
    """The numbers that occur, ascending, and for each entry the index of its number (int32)."""
    if not len(blocks):
        return [], np.zeros(0, dtype=np.int32)
    first = int(blocks[0])
    if len(blocks) == 1 or all_true(blocks == first):
        return [first], np.zeros(len(blocks), dtype=np.int32)
    first, last = int(blocks.min()), int(blocks.max())
    if last - first > _SPARSE * len(blocks):
        numbers, index = np.unique(blocks, return_inverse=True)
        return numbers.tolist(), index.astype(np.int32)
    occurs = np.zeros(last - first + 1, dtype=bool)
    occurs[blocks - first] = True
    index = np.cumsum(occurs, dtype=np.int32) - np.int32(1)
    return (np.flatnonzero(occurs) + first).tolist(), index[blocks - first]
