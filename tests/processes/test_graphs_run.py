"""The shipped graphs for three Steps on the tiny model: in one process, apart, with a lag."""

from __future__ import annotations

import math

import pytest

from tests.kit import algorithms, runs
from tests.kit.tiny_runs import TinyRuns

pytestmark = pytest.mark.timeout(180)


def require_three_steps(result: runs.Run, name: str) -> None:
    """Three Steps with finite numbers, each of which updated every trained Model."""
    rows = runs.metrics(result)
    assert [row["step"] for row in rows] == [1, 2, 3], name
    bad = [(k, v) for row in rows for k, v in row.items() if not math.isfinite(v)]
    assert not bad
    for row in rows:
        updates = [v for k, v in row.items() if k.startswith("optim/") and k.endswith("updates")]
        assert updates, name
        assert min(updates) >= 1, name


@pytest.mark.parametrize("name", algorithms.NAMES)
def test_each_runs(tiny: TinyRuns, name: str) -> None:
    require_three_steps(tiny.run(algorithms.small(name, tiny.folder), inproc=True), name)


@pytest.mark.long
@pytest.mark.parametrize("name", algorithms.NAMES)
def test_each_runs_with_every_node_apart(tiny: TinyRuns, name: str) -> None:
    graph = algorithms.small(name, tiny.folder)
    apart = tiny.run(graph, workers="apart", name="apart")
    require_three_steps(apart, name)
    runs.require_same_numbers(apart, tiny.run(graph, name="one"))


@pytest.mark.long
@pytest.mark.parametrize("name", algorithms.with_parameter("max_lag"))
def test_each_runs_with_a_lag(tiny: TinyRuns, name: str) -> None:
    graph = algorithms.small(name, tiny.folder, max_lag=1)
    result = tiny.run(graph, workers="auto")
    require_three_steps(result, name)
    assert max(runs.column(result, "policy/lag/max")) <= 1
