"""Decoding in simulated time: the schedule where all rows come at once, and what else may come."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.errors import PlanError
from engine.plan.cost.decode import DecodeBatch, schedule_decode
from engine.plan.costs import plan_costs
from engine.plan.joining_decode import PricedDecode
from engine.plan.row_lengths import RowLengths
from engine.simulation.priced_decode import begin_decode
from tests.kit.graphs import grpo_graph
from tests.kit.plans import placed
from tests.kit.turns import example_count
from tests.unit.test_cost_decode import H100, LENGTHS, MODEL

ROWS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 3000)), min_size=1, max_size=12)
LONGEST = 3040


def of_pairs(pairs: list[tuple[int, int]]) -> RowLengths:
    prompts, answers = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return RowLengths(prompts, answers)


def limits(slots: int, *, shared: int = 1, room: int = 0) -> DecodeBatch:
    none = np.zeros(0, dtype=np.int64)
    return DecodeBatch(prompts=none, answers=none, slots=slots, shared=shared, room=room)


def take_ends(decode: PricedDecode, rows: int) -> np.ndarray:
    """When each of so many rows ends, if no others come."""
    ends = np.zeros(rows)
    while (end := decode.next_end()) is not None:
        told = decode.advance(end)
        assert len(told)
        ends[told] = end
    return ends


@settings(max_examples=example_count(80), deadline=None)
@given(
    lengths=LENGTHS,
    slots=st.integers(1, 26),
    shared=st.sampled_from([1, 4]),
    times=st.sampled_from([0.0, 1.0, 1.5, 4.0]),
    looks=st.lists(st.floats(0.0, 5.0), max_size=5),
)
def test_rows_that_come_at_once_are_decoded_by_the_schedule(
    lengths: list[tuple[int, int]], slots: int, shared: int, times: float, looks: list[float]
) -> None:
    """However often somebody looks meanwhile."""
    rows = of_pairs(lengths)
    room = int(times * (rows.prompts + rows.answers).max(initial=1))
    wanted = limits(slots, shared=shared, room=room)
    decode = PricedDecode(MODEL, H100, wanted)
    decode.add(rows, 0.0)
    ends = np.full(len(rows), math.nan)
    for look in sorted(looks):
        ends[decode.advance(look)] = look
    later = take_ends(decode, len(rows))
    batch = DecodeBatch(
        prompts=rows.prompts, answers=rows.answers, slots=slots, shared=shared, room=room
    )
    decoded = schedule_decode(MODEL, H100, batch)
    is_later = np.isnan(ends)
    np.testing.assert_allclose(later[is_later], decoded.ends[is_later], rtol=1e-12)
    assert (decoded.ends[~is_later] <= ends[~is_later]).all()
    np.testing.assert_allclose([decode.begun(r) for r in range(len(rows))], decoded.begins)
    assert len(decode.advance(math.inf)) == 0


@settings(max_examples=example_count(60), deadline=None)
@given(
    adds=st.lists(st.tuples(st.floats(0.0, 60.0), ROWS), min_size=1, max_size=6),
    slots=st.integers(1, 16),
    room=st.sampled_from([0, LONGEST, 3 * LONGEST]),
    asks=st.booleans(),
)
def test_each_row_ends_once_however_rows_come(
    adds: list[tuple[float, list[tuple[int, int]]]], slots: int, room: int, asks: bool
) -> None:
    """No row begins before it comes, none is faster than alone in the whole, and rows in slots are
    never more than there are.
    """
    decode, came, pairs = PricedDecode(MODEL, H100, limits(slots, room=room)), [], []
    ends: dict[int, float] = {}
    for now, more in sorted(adds):
        if asks:
            decode.next_end()
        ends |= dict.fromkeys(decode.advance(now).tolist(), now)
        decode.add(of_pairs(more), now)
        came += [now] * len(more)
        pairs += more
    early = set(ends)
    later = take_ends(decode, len(pairs))
    assert early.isdisjoint(np.flatnonzero(later).tolist())
    assert len(early) + np.count_nonzero(later) == len(pairs)
    begins = np.array([decode.begun(row) for row in range(len(pairs))])
    assert (begins >= came).all()
    alone = DecodeBatch(prompts=np.zeros(1, int), answers=np.ones(1, int))
    fastest = schedule_decode(MODEL, H100, alone).seconds
    for row in set(range(len(pairs))) - early:
        assert later[row] - begins[row] >= 0.999 * fastest * pairs[row][1]
        inside = (begins <= begins[row]) & (later > begins[row])
        assert inside.sum() <= slots or room


@settings(max_examples=example_count(40), deadline=None)
@given(answer=st.integers(200, 3000), rows=st.integers(1, 8), share=st.floats(0.1, 0.9))
def test_a_join_of_nothing_changes_no_time(answer: int, rows: int, share: float) -> None:
    """A cut in the midst of passes is where it should be: the passes after it are what is left."""
    pairs = [(10, answer)] * rows
    whole, cut = (PricedDecode(MODEL, H100, limits(16)) for _ in range(2))
    whole.add(of_pairs(pairs), 0.0)
    cut.add(of_pairs(pairs), 0.0)
    end = take_ends(whole, rows)
    cut.next_end()
    cut.add(of_pairs([]), share * end[0])
    np.testing.assert_allclose(take_ends(cut, rows), end, rtol=1e-9)


def test_a_clock_that_comes_out_a_rounding_error_early_finds_the_row() -> None:
    decode = PricedDecode(MODEL, H100, limits(4))
    decode.add(of_pairs([(7, 900)]), 1e6)
    end = decode.next_end()
    assert end is not None
    assert decode.advance(math.nextafter(end, 0.0)).tolist() == [0]
    assert decode.next_end() is None


def test_rows_join_those_that_are_decoded() -> None:
    """Half as many rows come when the others are half done: they need not wait for their end."""
    decode = PricedDecode(MODEL, H100, limits(8))
    decode.add(of_pairs([(0, 1000)] * 4), 0.0)
    end = decode.next_end()
    assert end is not None
    half = end / 2
    assert len(decode.advance(half)) == 0
    decode.add(of_pairs([(0, 1000)] * 4), half)
    ends = take_ends(decode, 8)
    assert half <= decode.begun(4) < 1.01 * half
    assert end <= ends[0] < 1.2 * end
    assert 1.4 * end < ends[7] < 1.7 * end


def test_heavy_rows_come_first_and_a_full_cache_refuses_a_row() -> None:
    decode = PricedDecode(MODEL, H100, limits(1, room=100))
    decode.add(of_pairs([(0, 10)]), 0.0)
    decode.next_end()
    decode.add(of_pairs([(0, 10)] * 3), 0.0, np.array([1, 3, 2], np.float32))
    decode.add(of_pairs([(0, 10)]), 0.0, np.array([2], np.float32))
    assert np.argsort(take_ends(decode, 5)).tolist() == [0, 2, 3, 4, 1]
    with pytest.raises(PlanError, match="expected room for the longest row, 101 tokens"):
        decode.add(of_pairs([(1, 100)]), 0.0)


def test_of_an_episode_the_first_row_is_decoded_alone() -> None:
    decode = PricedDecode(MODEL, H100, limits(4), segments=3)
    decode.add(of_pairs([(5, 9), (0, 0), (0, 0)] * 2), 2.0)
    assert decode.advance(2.0).tolist() == [1, 2, 4, 5]
    end = decode.next_end()
    assert end is not None
    assert end > 2.0
    assert decode.advance(end).tolist() == [0, 3]


def test_all_that_is_under_way_says_how_much_slower_it_is() -> None:
    under_way: list[int] = []

    def slow(rows: RowLengths) -> float:
        under_way.append(len(rows))
        return 2.0

    fast = PricedDecode(MODEL, H100, limits(2))
    decode = PricedDecode(MODEL, H100, limits(2), slowdown=slow)
    for each in (fast, decode):
        each.add(of_pairs([(1, 100), (1, 200), (1, 300)]), 0.0)
    end = fast.next_end()
    assert end is not None
    assert decode.next_end() == pytest.approx(2 * end)
    decode.advance(2.001 * end)
    decode.add(of_pairs([(1, 50)]), 2.001 * end)
    assert under_way == [3, 3]


@pytest.mark.usefixtures("tiny")
def test_a_plan_node_decodes_what_its_schedule_says() -> None:
    plan = placed(grpo_graph(batch=8, n=4, max_tokens=32), workers="one")
    costs, node = plan_costs(plan), plan.node("rollout")
    rows = RowLengths(np.full(32, 20), np.arange(1, 33))
    decode = begin_decode(costs, node, lambda: 1.0)
    decode.add(rows, 0.0)
    ends = costs.decode("rollout", rows).ends
    np.testing.assert_allclose(take_ends(decode, 32), ends, rtol=1e-12)
