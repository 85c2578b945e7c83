"""Runs that switch to another layout, and back, while they go on: the numbers of one that does not.

Their episodes are longer in the middle of the data, which comes in its order.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataflow.graph import Graph
from dataflow.set_expressions import edited
from engine.api import Result, resume
from graphs.agent import agent
from tests.kit.environments import Echo
from tests.kit.processes import KillWorkers
from tests.kit.runs import (
    column,
    metrics,
    require_alike,
    require_each_row_once,
    require_same_numbers,
    samples,
    state_of,
)
from tests.kit.tiny_runs import TinyRuns

pytestmark = [pytest.mark.timeout(300)]
LONG = pytest.mark.long

BATCH, N = 2, 4
LETTERS = (4, 4, 60, 60, 4, 4)
"""In each prompt of a Step, and in what the environment answers."""
BETWEEN = "300"
"""Live tokens, fewer than those of long episodes and more than those of short ones."""
APART: dict[str, Any] = {"workers": "apart", "chunks": {"episode": 2}}


def growing(folder: Path, *, max_lag: int = 0, letters: tuple[int, ...] = LETTERS) -> Graph:
    """An agent whose episodes grow and shrink."""
    data = folder / f"growing_{len(letters)}.parquet"
    prompts: list[str] = []
    for step, count in enumerate(letters):
        prompts += [chr(97 + step) * (count - 1) + letter for letter in "xy"]
    pq.write_table(pa.table({"prompt": prompts}), data)
    shape = {"n": N, "batch": BATCH, "max_turns": 2, "max_tokens": 96, "max_turn_tokens": 6}
    graph = agent(str(folder / "model"), str(data), Echo, lr=1e-3, max_lag=max_lag, **shape)
    return edited(graph, ["prompts.shuffle=False"])


def layouts_of(run: Result) -> list[int]:
    """The layout of each Step."""
    return [int(number) for number in column(run, "relayout/layout")]


def switches_of(run: Result) -> list[tuple[int, int, int]]:
    """(the Step before, its layout, the next one's) of each switch."""
    kept = json.loads((run.folder / "layouts.json").read_text())
    return [(each["step"], each["before"], each["layout"]) for each in kept["switches"]]


def test_generation_on_one_two_and_one_replica_has_the_bits_of_one(tiny: TinyRuns) -> None:
    """The numbers, weights and samples; with equal chunks."""
    graph = growing(tiny.folder)
    to_two = {BETWEEN: "replicas.episode=2"}
    run = tiny.run(graph, 6, name="switching", relayout=to_two, **APART)
    print(column(run, "relayout/live_tokens"))
    assert layouts_of(run) == [0, 0, 0, 1, 1, 0]
    assert switches_of(run) == [(3, 0, 1), (5, 1, 0)]
    fixed = tiny.run(graph, 6, name="fixed", **APART)
    require_same_numbers(run, fixed)
    assert samples(run).equals(samples(fixed))
