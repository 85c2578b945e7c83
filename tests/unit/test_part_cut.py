"""The cut of a Step into parts: the same whatever comes first, and no sooner than it may."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.coordinator.part_cut import ArrivalCut, EndedGroup, OrderedCut
from tests.kit.turns import example_count

PART = 20
"""Tokens of a part."""
GROUPS = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=3), min_size=1, max_size=12)
"""Lengths of the answers to each prompt."""


def ended(answers: Sequence[Sequence[int]]) -> list[EndedGroup]:
    """A group of each prompt, at its position."""
    return [
        EndedGroup(longest=max(lengths), position=place, slot=place, tokens=sum(lengths))
        for place, lengths in enumerate(answers)
    ]


def positions(parts: Sequence[Sequence[EndedGroup]]) -> list[list[int]]:
    return [[group.position for group in part] for part in parts]


@settings(max_examples=example_count(200))
@given(answers=GROUPS, order=st.randoms(use_true_random=False))
def test_an_ordered_cut_follows_from_lengths_alone(answers: list[list[int]], order) -> None:
    """Groups end one after another, at any speed: the cut is that of a Step that has ended."""
    whole = OrderedCut(PART)
    for group in ended(answers):
        whole.add(group)
    expected = positions(whole.close())

    cut, waiting, parts = OrderedCut(PART), ended(answers), []
    while waiting:
        # One of the groups that can end next; the others have a row with as many tokens by then.
        group = waiting.pop(order.randrange(len(waiting)))
        cut.add(group)
        least = min((each.longest for each in waiting), default=0)
        parts += cut.cut(order.randrange(least) if least else 0)
    parts += cut.close()
    assert positions(parts) == expected


@given(answers=GROUPS)
def test_a_cut_loses_no_group_and_fills_all_parts_but_the_last(answers: list[list[int]]) -> None:
    for cut in (OrderedCut(PART), ArrivalCut(PART)):
        for group in ended(answers):
            cut.add(group)
        parts = cut.cut(0) + cut.close()
        assert sorted(chain.from_iterable(positions(parts))) == list(range(len(answers)))
        for part in parts[:-1]:
            *others, last = (group.tokens for group in part)
            assert sum(others) < PART <= sum(others) + last


def test_a_group_waits_for_those_that_may_stand_before_it() -> None:
    cut = OrderedCut(10)
    short, long = ended([[10], [12]])
    cut.add(long)
    assert cut.cut(11) == [], "a row with 11 tokens may end with 12, at an earlier position"
    cut.add(short)
    assert positions(cut.cut(11)) == [[0]]
    assert positions(cut.cut(12)) == [[1]]


def test_what_arrives_is_cut_as_a_record_says_and_then_as_it_comes() -> None:
    groups = ended([[12], [12], [12], [12], [12]])
    cut = ArrivalCut(PART, recorded=[[3, 1]])
    cut.add(groups[1])
    cut.add(groups[0])
    assert cut.cut(99) == [], "the record's first part has another group"
    cut.add(groups[3])
    assert positions(cut.cut(0)) == [[1, 3]]
    cut.add(groups[4])
    assert positions(cut.cut(0)) == [[0, 4]]
    cut.add(groups[2])
    assert positions(cut.close()) == [[2]]


def test_a_recorded_part_goes_on_without_a_group_that_does_not_come() -> None:
    cut = ArrivalCut(PART, recorded=[[0, 1], [2], [7]])
    for group in ended([[12], [12], [12], [12]])[1:]:
        cut.add(group)
    assert cut.cut(0) == []
    assert positions(cut.close()) == [[1], [2], [3]]
