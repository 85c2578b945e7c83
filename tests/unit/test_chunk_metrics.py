"""Metrics of a chunk count once, however often and wherever it runs."""

from __future__ import annotations

from engine.keep.metrics.step_accounts import ChunkMetrics
from engine.protocol.messages import ChunkDone, Reported, WorkerLost


def reported(chunk: int, worker: str, value: float) -> Reported:
    return Reported(id=chunk, worker=worker, metrics=(("reward/mean", value, 4.0),))


def test_what_a_run_reports_counts_when_it_ends() -> None:
    runs = ChunkMetrics()
    for report in (reported(1, "a", 0.5), reported(2, "b", 0.1), reported(1, "a", 0.7)):
        assert list(runs.hear(report)) == []
    expected = [("reward/mean", 0.5, 4.0), ("reward/mean", 0.7, 4.0)]
    assert runs.hear(ChunkDone(id=1, node="score")) == expected
    assert runs.hear(ChunkDone(id=1, node="score")) == []
    assert runs.rest() == [("reward/mean", 0.1, 4.0)]
    assert runs.rest() == []


def test_what_a_lost_worker_had_under_way_counts_for_nothing() -> None:
    runs = ChunkMetrics()
    for chunk, worker in ((1, "a"), (2, "b"), (3, "a")):
        runs.hear(reported(chunk, worker, float(chunk)))
    ended = [*runs.hear(ChunkDone(id=3, node="score"))]
    runs.hear(WorkerLost(worker="a", epoch=0, error="killed"))
    expected = [("reward/mean", 3.0, 4.0)]
    assert ended == expected, "its rows are made again, and their run reports nothing"
    assert runs.rest() == [("reward/mean", 2.0, 4.0)]
