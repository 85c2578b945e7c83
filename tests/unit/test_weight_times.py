"""How long a version takes from being offered until a reader has it."""

from __future__ import annotations

import pytest

from engine.keep.metrics.weight_times import WeightTimes
from engine.protocol import messages as m
from engine.protocol.reports import Report

NAME = "weights/policy/offered_to_loaded"


def load(task: int, worker: str, source: str = "train") -> m.Load:
    return m.Load(
        id=task,
        model="policy",
        writer="train_policy",
        reader="rollout",
        version=1,
        worker=worker,
        source=source,
        block=7,
    )


def end_loads(times: WeightTimes, *ends: tuple[int, str, float]) -> list[Report]:
    """What is reported as these tasks end, of these Workers, at these moments."""
    reports: list[Report] = []
    for task, worker, now in ends:
        reports += times.hear(m.Loaded(id=task, worker=worker), now)
    return reports


def offer(times: WeightTimes, now: float) -> None:
    assert times.hear(m.Offered(id=1, worker="train", block=7, digest=""), now) == ()


@pytest.fixture
def times() -> WeightTimes:
    """Of a version that was offered at 10.0, and that two readers are told to load."""
    times = WeightTimes()
    offer(times, 10.0)
    for task, worker in ((2, "gen-0"), (3, "gen-1")):
        times.tell(load(task, worker))
    return times


def test_each_reader_counts_from_the_offer(times: WeightTimes) -> None:
    reports = end_loads(times, (3, "gen-1", 10.5), (2, "gen-0", 12.0), (2, "gen-0", 13.0))
    assert reports == [(NAME, 0.5, 1.0), (NAME, 2.0, 1.0)]


def test_what_does_not_come_from_another_worker_does_not_count() -> None:
    times = WeightTimes()
    offer(times, 1.0)
    times.tell(load(2, "train", source=""))
    times.tell(load(3, "train", source="train"))
    assert end_loads(times, (2, "train", 2.0), (3, "train", 2.0)) == []


@pytest.mark.parametrize("lost", ["train", "gen-0"])
def test_what_a_lost_worker_had_under_way_does_not_count(times: WeightTimes, lost: str) -> None:
    times.hear(m.WorkerLost(worker=lost, epoch=0, error=""), 11.0)
    assert end_loads(times, (2, "gen-0", 12.0)) == []


def test_a_block_that_is_gone_is_forgotten(times: WeightTimes) -> None:
    times.tell(m.Release(worker="train", blocks=(6, 7)))
    assert end_loads(times, (2, "gen-0", 12.0)) == []
