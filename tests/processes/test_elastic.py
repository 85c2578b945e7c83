"""Replicas that join and leave while a run of several processes goes on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dataflow.errors import RunError
from engine.api import resume, run
from tests.kit import run_graphs as graphs
from tests.kit.runs import metrics, require_none_lost, require_same_numbers
from tests.kit.scaled_runs import TOLD, Scaler, hangs_in_the_second, scaled
from tests.kit.tiny_runs import TinyRuns

pytestmark = pytest.mark.timeout(400)
LONG = 300.0
"""Seconds after which waiting for a run counts as a hang."""
COUNTS = "/rollout"
"""The end of the metric that a run of fixed replicas lacks."""


@pytest.mark.long
def test_a_synchronous_run_has_the_bits_of_fixed_replicas(tiny: TinyRuns) -> None:
    scaler = Scaler("rollout", [3, 1, 2])
    handle = scaled(tiny, scaler, max_lag=0, replicas={"rollout": "1..3"}, name="elastic")
    with pytest.raises(RunError, match=r"expected 1 to 3 replicas of rollout, found 4. Fix: rollo"):
        handle.scale(rollout=4)
    with pytest.raises(RunError, match=r"found 'score'. Fix: one of rollout"):
        handle.scale(score=2)
    result = handle.result(LONG)
    assert scaler.seen[0] == 1
    assert {1, 2, 3} == set(scaler.seen)
    graph = graphs.small(tiny.folder, batch=6)
    fixed = run(graph, tiny.options(result.step, chunks={"rollout": 3}, name="fixed"))
    require_same_numbers(result, fixed, but=COUNTS)
    again = resume(result.folder, steps=result.step + 2)
    assert [row["replicas/rollout"] for row in metrics(again)[-2:]] == [1.0, 1.0]
    require_same_numbers(again, resume(fixed.folder, steps=fixed.step + 2), but=COUNTS)


@pytest.mark.long
def test_with_a_lag_every_row_is_trained_once(tiny: TinyRuns) -> None:
    scaler = Scaler("rollout", [2, 1, 3, 1, 2, 3] * 3)
    told = {"replicas": {"rollout": "1..3"}, "grace": 5.0}
    result = scaled(tiny, scaler, max_lag=1, **told).result(LONG)
    require_none_lost(result.folder, batch=6, answers=4, max_lag=1)


@pytest.mark.long
def test_a_chunk_that_outlasts_the_grace_is_run_again_elsewhere(
    tiny: TinyRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "told"
    os.mkfifo(pipe)
    monkeypatch.setenv(TOLD, str(pipe))
    graph = graphs.small(tiny.folder, hangs_in_the_second, batch=6)
    elastic = {"replicas": {"score": "1..2"}, "scaling": "most", "grace": 0.3}
    asked = tiny.options(5000, workers="auto", name="elastic", **elastic)
    last: list[float] = []

    def has_gone(row: object) -> bool:
        assert isinstance(row, dict)
        last.append(row["replicas/score"])
        return not pipe.exists() and last[-1] == 1

    handle = run(graph, asked, until=has_gone, wait=False)
    with open(pipe) as told:  # until it hangs, in a chunk of score-1
        assert told.read() == "hangs"
    handle.scale(score=1)
    result = handle.result(LONG)
    fixed = run(graph, tiny.options(result.step, chunks={"score": 2}, name="fixed"))
    require_same_numbers(result, fixed, but="/score")
