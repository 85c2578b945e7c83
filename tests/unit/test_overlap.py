"""The overlap benchmark's own arithmetic: intervals, spans of a trace, what the simulator says of a
plan.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.overlap import (
    GENERATE,
    TRAIN,
    Measured,
    N,
    common,
    merged,
    predicted,
    results,
    spans_of,
)
from engine.observe.trace import Trace, read_trace
from engine.plan.plan import (
    Fetch,
    ModelUse,
    Plan,
    PlannedInput,
    PlannedModel,
    PlannedNode,
    PlannedSource,
    with_lags,
)
from engine.simulate.behaviour import Timing

INTERVALS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda t: (float(t[0]), float(sum(t))))
)


@given(some=INTERVALS, others=INTERVALS)
def test_common_seconds_are_those_that_both_have(some: list, others: list) -> None:
    def seconds(intervals: list) -> set[int]:
        return {at for start, end in intervals for at in range(int(start), int(end))}

    one = merged(some)
    assert all(before[1] < after[0] for before, after in pairwise(one))
    assert seconds(one) == seconds(some)
    assert common(one, merged(others)) == len(seconds(some) & seconds(others))


def test_spans_are_those_of_nodes_after_the_warm_up(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "run.json")
    for track, name, start, end in [
        ("gen/rollout", "open", 5.0, 6.0),
        ("gen/rollout", "chunk", 1.0, 2.0),
        ("gen/rollout", "chunk", 5.0, 7.0),
        ("gen/rollout", "load", 7.0, 8.0),
        ("train/train_policy", "step 1", 6.0, 9.0),
    ]:
        trace.span(track, name, start, end)
    trace.close()
    found = spans_of(read_trace(tmp_path / "run.json"), since=4.0)
    assert found == {"rollout": [(5.0, 7.0)], "train_policy": [(6.0, 9.0)]}
    assert Measured(rows=(), spans=found).overlap == pytest.approx(1 / 3)


def test_results_are_ratios_of_pairs() -> None:
    row = {
        "data/prompts": 8.0,
        "time/step": 2.0,
        f"time/{GENERATE}": 0.9,
        f"time/{TRAIN}": 1.0,
        "policy/lag/max": 0.0,
    }
    one = Measured(rows=[row, row], spans={})
    auto = replace(
        one, rows=[row | {"time/step": 1.25, f"time/{TRAIN}": 1.2, "policy/lag/max": 1.0}]
    )
    assert one.samples_per_second == pytest.approx(4.0 * N)
    found = {r.name: r for r in results([one, one], [auto, auto], prediction=2.0)}
    speed = found["samples/s, Workers at lag 1 / one at lag 0"]
    assert speed.value == pytest.approx(1.6)
    assert speed.holds is True
    assert found["measured / predicted"].value == pytest.approx(0.8)
    assert found["greatest lag"].holds is True
    assert found[f"time/{TRAIN}, side by side / alone"].value == pytest.approx(1.2)


def planned(max_lag: int, *workers: str) -> Plan:
    """prompts -> rollout -> train_policy, on these workers."""
    asked = PlannedInput(
        name="prompt", gate="prompts", fetches=(Fetch(producer="prompts", columns=("x",)),)
    )
    rows = PlannedInput(
        name="rows", gate="rollout", fetches=(Fetch(producer="rollout", columns=("x",)),)
    )
    read, write = (
        ModelUse(param="model", model="policy", access=a, trained=True) for a in ("read", "write")
    )
    fields: list[dict[str, Any]] = [
        {"name": "prompts", "work": "source", "region": "stream", "relation": "source"},
        {
            "name": "rollout",
            "work": "decode",
            "region": "stream",
            "relation": "same",
            "inputs": (asked,),
            "models": (read,),
        },
        {
            "name": "train_policy",
            "work": "train",
            "region": "step",
            "relation": "sink",
            "inputs": (rows,),
            "models": (write,),
        },
    ]
    nodes = tuple(
        PlannedNode(operator=each["name"], scope="row", source="prompts", workers=(worker,), **each)
        for each, worker in zip(fields, workers, strict=True)
    )
    alone = len(set(workers)) == 1
    aliases = ("rollout",) if alone and not max_lag else ()
    model = PlannedModel(
        name="policy", base="b", writer="train_policy", readers=("rollout",), aliases=aliases
    )
    source = PlannedSource(name="prompts", batch=4, max_lag=max_lag, cohort=4)
    return Plan(
        graph="g",
        digest="",
        seed=0,
        nodes=with_lags(nodes, (source,)),
        sources=(source,),
        models=(model,),
        recorder=workers[0],
    )


def test_the_simulator_foresees_twice_the_speed_where_both_take_as_long() -> None:
    timing = Timing(
        row={"prompts": 0.0, "rollout": 1.0}, tail=0.0, train=1.0, load=0.0, store=0.0, slots=4
    )
    alone = predicted(planned(0, "main", "main", "main"), timing, steps=10)
    apart = predicted(planned(1, "gen", "gen", "train"), timing, steps=10)
    assert alone == pytest.approx(2.0)
    assert apart == pytest.approx(1.0)
