"""Whole runs in which generation has replicas of several Workers: one's numbers, and deaths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dataflow.graph import Graph
from graphs.grpo import grpo
from tests.kit.processes import KillWorkers
from tests.kit.run_graphs import vowels
from tests.kit.runs import column, require_alike, require_alike_weights
from tests.kit.tiny_runs import TinyRuns

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]

PAIR: dict[str, Any] = {"tensor": {"rollout": 2}, "pin": {"rollout": "r0,r1"}}


def without_reference(folder: Path) -> Graph:
    """GRPO at lag 0."""
    base, rows = str(folder / "model"), str(folder / "train.parquet")
    return grpo(base, rows, vowels, n=4, batch=4, max_tokens=6, lr=1e-3)


def test_a_generation_of_two_ranks_gives_the_numbers_of_one(tiny: TinyRuns) -> None:
    one = tiny.run(without_reference, name="one", pin={"rollout": "r0"})
    two = tiny.run(without_reference, name="two", **PAIR)
    require_alike(two, one)
    assert sum(column(two, "edge/broadcast/bytes")) > 0
    require_alike_weights(two, one)


@pytest.mark.parametrize("rank", ["r0", "r1"])
def test_a_killed_rank_that_decodes_loses_no_row(tiny: TinyRuns, rank: str) -> None:
    death = KillWorkers({2: rank})
    whole = tiny.run(without_reference, 4, name="whole", **PAIR)
    again = tiny.run(without_reference, 4, name="again", **PAIR, on_step=[death])
    assert death.killed
    require_alike(again, whole, rel=1e-6)


def test_two_replicas_of_two_ranks_within_the_ranks_that_train(tiny: TinyRuns) -> None:
    one = tiny.run(without_reference, name="one", chunks={"rollout": 2})
    ranks = "t0,t1,t2,t3"
    pins = {"train_policy": ranks, "rollout": ranks}
    tensor = dict.fromkeys(pins, 2)
    four = tiny.run(without_reference, name="four", pin=pins, tensor=tensor)
    require_alike(four, one)


def test_rows_of_ranks_stream_into_training(tiny: TinyRuns) -> None:
    """The watermark interrupts the first rank alone."""
    how = {"stream": "ordered", "part_tokens": 20}
    whole = tiny.run(without_reference, name="whole", **PAIR)
    streamed = tiny.run(without_reference, name="streamed", **PAIR | how)
    require_alike(streamed, whole)
