"""The arithmetic of benchmarks/long_tail.py: bounds, shares and which layout has the goal."""

from __future__ import annotations

from dataclasses import fields

import pytest

from benchmarks.long_tail import SIDES, LayoutRound, list_results
from benchmarks.report import SideResult
from benchmarks.sides import Measured
from benchmarks.two_cores import StepTimes

ROWS = 100
BOUND = StepTimes(half_generation=60.0, half_training=30.0, all_generation=70.0, all_training=80.0)


def list_by_name(step_ms: dict[str, float]) -> dict[str, SideResult]:
    """The results of one round in which the sides' Steps took so long."""
    sides: dict[str, Measured] = {}
    for name, milliseconds in step_ms.items():
        numbers = dict.fromkeys((field.name for field in fields(Measured)), 1.0)
        numbers["samples_per_second"] = 1e3 * ROWS / milliseconds
        sides[name] = Measured(**numbers)  # type: ignore[arg-type]
    results = list_results([LayoutRound(bound=BOUND, sides=sides)], ROWS)
    return {each.name: each for each in results}


def test_a_lagged_step_is_bound_by_its_slower_side_or_by_halves() -> None:
    assert (BOUND.synchronous, BOUND.lagged) == (90.0, 80.0)
    slow = StepTimes(
        half_generation=60.0, half_training=30.0, all_generation=95.0, all_training=80.0
    )
    assert slow.lagged == 90.0


def test_the_best_synchronous_layout_has_the_goal() -> None:
    results = list_by_name({"one": 200.0, "halves": 100.0, "lag1": 160.0, "trl": 400.0})
    assert results["halves/of_bound"].value == pytest.approx(0.9)
    assert results["halves/of_bound"].goal == 0.9
    assert results["one/of_bound"].goal is None
    assert results["lag1/of_bound"].value == pytest.approx(0.5)
    assert results["halves_to_trl/ratio"].value == pytest.approx(4.0)


def test_every_side_is_reported() -> None:
    names = list_by_name({side.name: 100.0 for side in SIDES})
    assert {f"{side.name}/step_ms" for side in SIDES} <= set(names)
