"""Rows by what they belong to: in one pass, and as a pass for each of them says."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.batch import Keys
from engine.coordinator.blocks import Blocks
from engine.coordinator.grouping import grouped, values_at
from engine.coordinator.refs import Ref


@settings(max_examples=100, deadline=None)
@given(group=st.lists(st.integers(0, 6), max_size=30), more=st.integers(0, 3))
def test_entries_of_each_group_are_those_of_a_pass_for_each(group: list[int], more: int) -> None:
    of, count = np.array(group, dtype=np.int32), max(group, default=-1) + 1 + more
    found = grouped(of, count)
    assert [each.tolist() for each in found] == [
        np.flatnonzero(of == number).tolist() for number in range(count)
    ]


@st.composite
def places(draw: st.DrawFn) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Blocks of values, and (block, row) of some entries of them; blocks may be far longer."""
    sizes = draw(st.lists(st.integers(1, 60), min_size=1, max_size=5))
    blocks = [np.array(draw(st.lists(st.integers(0, 99), min_size=n, max_size=n))) for n in sizes]
    block = draw(st.lists(st.integers(0, len(sizes) - 1), max_size=20))
    row = [draw(st.integers(0, sizes[number] - 1)) for number in block]
    return blocks, np.array(block, dtype=np.int32), np.array(row, dtype=np.int32)


@settings(max_examples=100, deadline=None)
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
    assert grouped(nothing, 0) == []


class MovingRows:
    """Blocks, and beside them where each of their first rows lies now, as a dict."""

    def __init__(self, lengths: list[int]) -> None:
        self.blocks = Blocks(weigh=True)
        self.refs: dict[int, Ref] = {}
        self.lies: dict[tuple[int, int], tuple[int, int]] = {}
        for at in range(0, len(lengths), 3):
            some = lengths[at : at + 3]
            number = self._add(some)
            self.lies |= {(number, row): (number, row) for row in range(len(some))}

    def _add(self, lengths: list[int]) -> int:
        """A block of a Worker that has no other."""
        ref = Ref(
            worker=f"w{len(self.refs)}",
            block=7,
            keys=Keys.of(range(len(lengths))),
            lengths=np.array(lengths),
            version=np.zeros(len(lengths), dtype=np.int32),
        )
        number = self.blocks.add(ref, len(lengths))
        self.refs[number] = ref
        return number

    def lose(self, which: int, *, apart: bool) -> None:
        """A block that has rows dies, and they are made again: each in a block of its own, or all
        in one.
        """
        alive = sorted({number for number, _ in self.lies.values()})
        gone = alive[which % len(alive)]
        lengths = self.refs[gone].lengths.tolist()
        self.blocks.lose(self.refs[gone].worker)
        if apart:
            moved = [(self._add([length]), 0) for length in lengths]
        else:
            number = self._add(lengths)
            moved = [(number, row) for row in range(len(lengths))]
        self.blocks.move(gone, *np.array(moved).T)
        self.lies = {
            at: moved[row] if n == gone else (n, row) for at, (n, row) in self.lies.items()
        }


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 99), min_size=1, max_size=12),
    draw=st.randoms(use_true_random=False),
    lost=st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=6),
)
def test_rows_are_found_and_weighed_wherever_they_have_moved(
    lengths: list[int], draw: random.Random, lost: list[tuple[int, bool]]
) -> None:
    moving = MovingRows(lengths)
    asked = list(moving.lies)
    for which, apart in lost:
        moving.lose(which, apart=apart)
    draw.shuffle(asked)
    reading = moving.blocks.reading("rollout", ("x",), *np.array(asked).T)
    gather = moving.blocks.gather(reading)
    assert [(*gather.refs[b], r) for b, r in zip(gather.block, gather.row, strict=True)] == [
        (moving.refs[number].worker, 7, row) for number, row in (moving.lies[at] for at in asked)
    ]
    tokens = moving.blocks.tokens({"rows": (reading,)}, len(asked))
    assert tokens.tolist() == [int(moving.refs[number].lengths[row]) for number, row in asked]
