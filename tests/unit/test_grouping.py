"""Rows by what they belong to: in one pass, and as a pass for each of them says."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.coordinator.blocks import Blocks
from engine.protocol.grouping import values_at
from engine.protocol.refs import Ref
from tests.kit.plans import ref
from tests.kit.turns import example_count


@st.composite
def places(draw: st.DrawFn) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Blocks of values, and (block, row) of some entries of them; blocks may be far longer."""
    sizes = draw(st.lists(st.integers(1, 60), min_size=1, max_size=5))
    blocks = [np.array(draw(st.lists(st.integers(0, 99), min_size=n, max_size=n))) for n in sizes]
    block = draw(st.lists(st.integers(0, len(sizes) - 1), max_size=20))
    row = [draw(st.integers(0, sizes[number] - 1)) for number in block]
    return blocks, np.array(block, dtype=np.int32), np.array(row, dtype=np.int32)


@given(given=places())
def test_values_are_those_of_each_entry(
    given: tuple[list[np.ndarray], np.ndarray, np.ndarray],
) -> None:
    blocks, block, row = given
    found = values_at(blocks, block, row)
    assert found.dtype == np.int64
    assert found.tolist() == [int(blocks[b][r]) for b, r in zip(block, row, strict=True)]


def test_no_block_has_no_entry() -> None:
    nothing = np.zeros(0, dtype=np.int32)
    assert values_at([], nothing, nothing).tolist() == []


class MovingRows:
    """Blocks, each of a Worker of its own. alive: those that have rows, by number."""

    def __init__(self) -> None:
        self.blocks = Blocks(weigh=True)
        self.alive: dict[int, Ref] = {}
        self._names = (f"w{number}" for number in itertools.count())

    def add(self, lengths: list[int]) -> list[tuple[int, int]]:
        """The block and row of each."""
        block = ref(range(len(lengths)), block=7, worker=next(self._names))
        block = replace(block, lengths=np.array(lengths))
        number = self.blocks.add(block, len(lengths))
        self.alive[number] = block
        return [(number, row) for row in range(len(lengths))]

    def lose(self, which: int, *, apart: bool) -> None:
        """A block dies, and its rows are made again: each in a block of its own, or all in one."""
        gone = list(self.alive)[which % len(self.alive)]
        block = self.alive.pop(gone)
        self.blocks.lose(block.worker)
        lengths = block.lengths.tolist()
        moved: list[tuple[int, int]] = []
        for part in [[length] for length in lengths] if apart else [lengths]:
            moved += self.add(part)
        self.blocks.move(gone, *np.array(moved).T)


@settings(max_examples=example_count(60))
@given(
    count=st.integers(1, 12),
    draw=st.randoms(use_true_random=False),
    lost=st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=6),
)
def test_rows_are_found_and_weighed_wherever_they_have_moved(
    count: int, draw: random.Random, lost: list[tuple[int, bool]]
) -> None:
    """Each row has another length, which tells it from all others."""
    moving, length_at = MovingRows(), dict[tuple[int, int], int]()
    for first in range(0, count, 3):
        lengths = list(range(count))[first : first + 3]
        length_at |= zip(moving.add(lengths), lengths, strict=True)
    for which, apart in lost:
        moving.lose(which, apart=apart)
    asked = list(length_at)
    draw.shuffle(asked)
    reading = moving.blocks.reading("rollout", ("x",), *np.array(asked).T)
    gather = moving.blocks.gather(reading)
    lengths_of = {(ref.worker, ref.block): ref.lengths for ref in moving.alive.values()}
    lengths_read = [
        lengths_of[gather.refs[b]][r] for b, r in zip(gather.block, gather.row, strict=True)
    ]
    assert lengths_read == [length_at[place] for place in asked]
    assert moving.blocks.tokens({"rows": (reading,)}, len(asked)).tolist() == lengths_read
