"""The overlap benchmark's arithmetic: intervals, spans of a trace, the simulator's view."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import overlap
from engine.keep.trace.timeline import Trace, read_trace
from engine.run.simulated_workers.behaviour import Durations
from tests.kit.graphs import grpo_graph
from tests.kit.plans import placed

INTERVALS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda t: (float(t[0]), float(sum(t))))
)


@given(some=INTERVALS, others=INTERVALS)
def test_common_seconds_are_those_that_both_have(some: list, others: list) -> None:
    def seconds(intervals: list) -> set[int]:
        return {at for start, end in intervals for at in range(int(start), int(end))}

    one = overlap.merged(some)
    assert all(before[1] < after[0] for before, after in pairwise(one))
    assert seconds(one) == seconds(some)
    assert overlap.common(one, overlap.merged(others)) == len(seconds(some) & seconds(others))


def test_spans_are_those_of_nodes_after_the_warm_up(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "run.json")
    for track, name, start, end in [
        ("gen/rollout", "open", 5.0, 6.0),
        ("gen/rollout", "rollout", 1.0, 2.0),
        ("gen/rollout", "rollout", 5.0, 7.0),
        ("gen/rollout", "load policy", 7.0, 8.0),
        ("train/train_policy", "train_policy", 6.0, 9.0),
    ]:
        trace.span(track, name, start, end)
    trace.close()
    spans = overlap.spans_of(read_trace(tmp_path / "run.json"), since=4.0)
    assert spans == {"rollout": [(5.0, 7.0)], "train_policy": [(6.0, 9.0)]}
    assert overlap.Overlap(rows=(), spans=spans).overlap == pytest.approx(1 / 3)


def test_results_are_ratios_of_pairs() -> None:
    row = {"data/prompts": 8.0, "time/step": 2.0, "policy/lag/max": 0.0}
    row |= {f"time/{overlap.GENERATE}": 0.9, f"time/{overlap.TRAIN}": 1.0}
    one = overlap.Overlap(rows=[row, row], spans={})
    faster = {"time/step": 1.25, f"time/{overlap.TRAIN}": 1.2, "policy/lag/max": 1.0}
    auto = replace(one, rows=[row | faster])
    assert one.samples_per_second == pytest.approx(4.0 * overlap.N)
    ratios = {r.name: r for r in overlap.results([one, one], [auto, auto], prediction=2.0)}
    speed = ratios["samples/s, Workers at lag 1 / one at lag 0"]
    assert speed.value == pytest.approx(1.6)
    assert speed.holds is True
    assert ratios["measured / predicted"].value == pytest.approx(0.8)
    assert ratios["greatest lag"].holds is True
    assert ratios[f"time/{overlap.TRAIN}, side by side / alone"].value == pytest.approx(1.2)


@pytest.mark.usefixtures("tiny")
def test_the_simulator_foresees_twice_the_speed_where_both_take_as_long() -> None:
    rows = {"prompts": 0.0, "rollout": 1.0, "score": 0.0, "advantage": 0.0}
    durations = Durations(row=rows, tail=0.0, train=1.0, load=0.0, store=0.0, slots=4)
    alone, apart = (
        overlap.predicted(placed(grpo_graph(batch=2, n=2, max_lag=lag)), durations, steps=10)
        for lag in (0, 1)
    )
    assert alone == pytest.approx(2.0)
    assert apart == pytest.approx(1.0)
