"""When a run switches to another layout: EARL's published grid, and any table and trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.earl import TP4, TP8, measure_table
from engine.coordinator.relayout_policy import RelayoutPolicy
from engine.plan.layout_table import LayoutBucket, LayoutTable, RunLayout, measured_table
from tests.kit.turns import example_count

K = 1024


def course(table: LayoutTable, trace: Sequence[float], start: int = 0) -> list[int]:
    """The layout of each Step; the last is that of the Step after the trace."""
    policy = RelayoutPolicy(table, start)
    layouts = [policy.layout]
    for step, live in enumerate(trace, start=1):
        policy.note_step(step, live)
        switch = policy.choose(None)
        if switch is not None:
            policy.layout = switch.layout
        layouts.append(policy.layout)
    return layouts


def switches(layouts: Sequence[int]) -> int:
    return sum(one != other for one, other in pairwise(layouts))


@pytest.mark.parametrize("step_growth", [1.02, 1.05, 2**0.25])
def test_one_switch_as_32_answers_grow_from_1k_to_32k(step_growth: float) -> None:
    steps = math.ceil(math.log(32) / math.log(step_growth)) + 1
    contexts = [min(32 * K, K * step_growth**n) for n in range(steps)]
    layouts = course(measure_table(), [32 * context for context in contexts])
    assert switches(layouts) == 1
    at = layouts.index(TP8)
    assert 8 * K < contexts[at - 1] < 16 * K * step_growth


def test_one_switch_as_contexts_double_every_few_steps() -> None:
    contexts = [K * 2**n for n in range(6) for _ in range(8)]
    layouts = course(measure_table(switch_seconds=0.05), [32 * context for context in contexts])
    assert switches(layouts) == 1
    assert contexts[layouts.index(TP8) - 1] == 16 * K


def test_four_gpus_are_refused_where_they_do_not_fit() -> None:
    """At 128 answers of 32 K, and before: what the next Step needs is predicted."""
    table = measure_table(switch_seconds=1e9)  # no gain is worth that
    policy = RelayoutPolicy(table)
    for step in range(1, 11):
        policy.note_step(step, 128 * 8 * K)
    assert policy.choose(None) is None
    policy.note_step(11, 128 * 32 * K)
    switch = policy.choose(None)
    assert switch is not None
    assert (switch.layout, switch.forced) == (TP8, True)
    assert "do not fit into layout 0" in switch.reason


@settings(max_examples=example_count(200))
@given(
    st.sampled_from([32 * K * 11.3, 32 * 8 * K * 1.0, 32 * 16 * K * 1.0, 2048 * K * 1.0]),
    st.lists(st.floats(0.9, 1.1), min_size=1, max_size=60),
    st.sampled_from([TP4, TP8]),
)
def test_noise_at_a_boundary_does_not_flap(mean: float, noise: Sequence[float], start: int) -> None:
    layouts = course(measure_table(), [mean * share for share in noise], start)
    assert switches(layouts) <= 1


walks = st.lists(st.floats(-0.2, 0.2), min_size=5, max_size=120).map(
    lambda moves: [2.0**power for power in accumulate(moves, initial=18.0)]
)


@settings(max_examples=example_count(200))
@given(walks)
def test_a_run_loses_at_most_7_percent_to_an_oracle(trace: Sequence[float]) -> None:
    """EARL's worst case of a wrong TP 4 is 6.5 %."""
    table = measure_table()
    layouts = course(table, trace)
    taken = oracle = 0.0
    # of the first Step nothing is known
    for layout, live in list(zip(layouts, trace, strict=False))[1:]:
        seconds = table.buckets[table.bucket_at(live)].seconds
        taken += seconds[layout]
        oracle += min(seconds)
    assert taken <= oracle * 1.07


seconds = st.floats(0.1, 10.0)
tables = st.integers(1, 4).flatmap(
    lambda count: st.lists(
        st.lists(st.one_of(seconds, st.just(math.inf)), min_size=count, max_size=count),
        min_size=1,
        max_size=6,
    ).map(
        lambda rows: measured_table(
            [RunLayout(text=f"tensor.rollout={2**n}") for n in range(count)],
            {2 ** (15 + n): row for n, row in enumerate(rows)},
        )
    )
)
traces = st.lists(st.floats(1.0, 2.0**22), min_size=1, max_size=60)


@settings(max_examples=example_count(300))
@given(tables, traces, st.floats(0.0, 20.0))
def test_what_does_not_fit_is_never_chosen(
    table: LayoutTable, trace: Sequence[float], cost: float
) -> None:
    policy = RelayoutPolicy(table)
    policy.cost = cost
    for step, live in enumerate(trace, start=1):
        policy.note_step(step, live)
        switch = policy.choose(None)
        if switch is not None:
            assert switch.layout != policy.layout
            assert table.fits(switch.layout, live)
            policy.layout = switch.layout
        elif not table.fits(policy.layout, live):
            assert not any(table.fits(n, live) for n in range(len(table.layouts)))


@settings(max_examples=example_count(300))
@given(tables, traces, st.floats(0.0, 20.0))
def test_there_are_no_more_switches_than_buckets_are_crossed(
    table: LayoutTable, trace: Sequence[float], cost: float
) -> None:
    """Where all layouts fit: one that does not is left wherever that is."""
    layouts = tuple(RunLayout() for _ in table.layouts)
    table = LayoutTable(layouts=layouts, buckets=table.buckets, switch_seconds=cost)
    buckets = [table.bucket_at(live) for live in trace]
    crossed = sum(abs(one - other) for one, other in pairwise(buckets))
    # the layout that the run begins with need not be the first bucket's
    assert switches(course(table, trace)) <= crossed + 1


def test_a_table_without_seconds_is_followed() -> None:
    buckets = (LayoutBucket(start=0, best=0), LayoutBucket(start=1000, best=1))
    table = LayoutTable(layouts=(RunLayout(), RunLayout(text="x")), buckets=buckets)
    grows = [500.0] * 3 + [1200.0] * 5 + [2000.0] * 5 + [900.0] * 3
    layouts = course(table, grows)
    assert switches(layouts) == 2
    assert layouts[-1] == 0
    policy = RelayoutPolicy(table)
    policy.note_step(1, 3000.0)
    switch = policy.choose(None)
    assert switch is not None
    assert switch.reason == ("3000 live tokens (the last step 3000): the table has layout 1 there")


def test_a_closed_layout_is_never_chosen() -> None:
    buckets = tuple(LayoutBucket(start=1000 * best, best=best) for best in range(3))
    table = LayoutTable(layouts=tuple(RunLayout() for _ in range(3)), buckets=buckets)
    closed = table.close(1, "no device")
    trace = [500.0] * 3 + [1500.0] * 5 + [2700.0] * 5 + [1500.0] * 5
    assert set(course(table, trace)) == {0, 1, 2}
    assert set(course(closed, trace)) == {0, 2}
    assert course(closed, trace)[-1] == 2, "there is no reason to leave the present one"


def test_a_switch_that_costs_more_than_it_saves_waits() -> None:
    dear = RelayoutPolicy(measure_table(switch_seconds=6.0))  # 100 Steps save 5 s
    cheap = RelayoutPolicy(measure_table(switch_seconds=1.0))
    for step in range(1, 5):
        for policy in (dear, cheap):
            policy.note_step(step, 1024 * K)
    assert dear.choose(None) is None
    switch = cheap.choose(None)
    assert switch is not None
    assert "100 steps save 4.97 s, a switch costs 1 s" in switch.reason
    assert cheap.choose(10) is None, "the run ends before that"


def test_a_repeated_step_is_noted_once() -> None:
    policy = RelayoutPolicy(measure_table())
    for step in (1, 2, 3, 2, 3):
        policy.note_step(step, 512 * K * step)
    once = RelayoutPolicy(measure_table())
    for step in (1, 2, 3):
        once.note_step(step, 512 * K * step)
    assert policy.choose(None) == once.choose(None)
