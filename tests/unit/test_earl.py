"""EARL's published grid as a table, and a simulated run of 72B whose answers grow."""

from __future__ import annotations

from pathlib import Path

from benchmarks.earl import show_catalogue, show_grid
from benchmarks.earl_run import (
    TP4,
    TP8,
    K,
    list_contexts,
    make_grid_table,
    plan_layouts,
    simulate_run,
)


def test_the_table_of_the_grid_is_right_in_every_cell() -> None:
    right, refused = show_grid()
    assert (right.value, right.goal) == (29, 29)
    assert refused.value == 1


def test_signs_that_the_catalogue_has_wrong_are_of_full_caches() -> None:
    signs, *wrong = show_catalogue()
    full = [each.value for each in wrong if each.name.endswith("of_the_cache")]
    assert signs.value + len(full) == 29
    assert min(full) > 1.0


def test_a_run_that_switches_sends_no_row_back(tmp_path: Path) -> None:
    """From 8K to 32K, by the real planner, coordinator, policy and loop."""
    plans = plan_layouts(tmp_path)
    table, contexts = make_grid_table(plans), list_contexts(30, shortest=8 * K)
    four, eight = (simulate_run(plans, table, contexts, layout=layout) for layout in (TP4, TP8))
    switching = simulate_run(plans, table, contexts)
    ((step, *layouts),) = switching.switches
    assert layouts == [TP4, TP8]
    assert contexts[step - 1] < table.layouts[TP4].most / 64 < 16 * K
    assert (switching.sent_back, eight.sent_back) == (0, 0)
    assert four.sent_back > 0
    best = sum(map(min, four.seconds, eight.seconds))
    assert best <= sum(switching.seconds) <= 1.03 * best
