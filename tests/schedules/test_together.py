"""Schedules in which the coordinator is slow and takes together what waits: every promise holds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.coordinator import messages as m
from engine.coordinator.core import Coordinator
from tests.kit.turns import REPEATS
from tests.schedules.elastic import elastic_case
from tests.schedules.plans import ScheduleCase, drawn_case
from tests.schedules.test_schedules import killed_and_resumed
from tests.schedules.weather import prove, prove_undisturbed

SEEDS = [range(start, start + 20) for start in range(0, 40, 20)] + [
    pytest.param(range(start, start + 40), marks=REPEATS) for start in range(40, 400, 40)
]


def slow(seed: int) -> ScheduleCase:
    """A case of which a few messages wait, or very many."""
    draw = random.Random(f"slow {seed}")
    case = drawn_case(seed, up=seed % 4 == 1, beside=seed % 5 == 2, own=seed % 7 == 3)
    return replace(case, together=draw.choice((2, 5, 30, 1000)))


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_every_promise_holds(seeds: range) -> None:
    """Synchronous runs train the same Steps as where each event is handled alone."""
    for seed in seeds:
        prove_undisturbed(slow(seed))


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_losses_among_what_waits_change_nothing(seeds: range) -> None:
    for seed in seeds:
        prove(slow(seed))


@pytest.mark.parametrize("seeds", SEEDS[1:], ids=str)
def test_replicas_that_come_and_go_change_nothing(seeds: range) -> None:
    for seed in seeds:
        prove(replace(elastic_case(seed), together=(2, 5, 30, 1000)[seed % 4]))


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 50), marks=REPEATS)], ids=str)
def test_killed_and_resumed(seeds: range) -> None:
    for seed in seeds:
        killed_and_resumed(slow(seed), seed)


def test_these_schedules_have_groups_and_losses_beside_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the tests above would say nothing."""
    sizes: list[int] = []
    beside = 0
    last: Sequence[m.Event] = ()
    handle = Coordinator.handle_together

    def noted(self: Coordinator, events: Sequence[m.Event], now: float) -> list[m.Instruction]:
        nonlocal beside, last
        sizes.append(len(events))
        beside += isinstance(events[0], m.WorkerLost) and len(last) > 1
        last = events
        return handle(self, events, now)

    monkeypatch.setattr(Coordinator, "handle_together", noted)
    for seed in range(20):
        prove(slow(seed))
    assert sum(size > 1 for size in sizes) > 1000
    assert max(sizes) > 30
    assert beside > 5
