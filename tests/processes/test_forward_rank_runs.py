"""Whole runs with replicas of several Workers: the numbers of one, and a death."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dataflow.graph import Graph
from graphs.grpo import grpo
from tests.kit.processes import KillWorkers
from tests.kit.run_graphs import two_models, vowels
from tests.kit.runs import column, require_alike, require_alike_weights
from tests.kit.tiny_runs import TinyRuns

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]

APART: dict[str, Any] = {"tensor": {"reference": 2}, "pin": {"reference": "r0,r1"}}


def with_reference(folder: Path) -> Graph:
    """GRPO with a term for the distance from where it began."""
    base, data = str(folder / "model"), str(folder / "train.parquet")
    return grpo(base, data, vowels, n=4, batch=4, max_tokens=6, lr=1e-3, beta=0.1)


def test_a_reference_of_two_ranks_gives_the_numbers_of_one(tiny: TinyRuns) -> None:
    one = tiny.run(with_reference, name="one", pin={"reference": "r0"})
    two = tiny.run(with_reference, name="two", **APART)
    require_alike(two, one)
    assert sum(column(two, "edge/broadcast/bytes")) > 0
    require_alike_weights(two, one)


@pytest.mark.parametrize("rank", ["r0", "r1"])
def test_with_one_rank_all_begin_again_and_the_numbers_are_the_same(
    tiny: TinyRuns, rank: str
) -> None:
    death = KillWorkers({2: rank})
    whole = tiny.run(with_reference, 4, name="whole", **APART)
    again = tiny.run(with_reference, 4, name="again", **APART, on_step=[death])
    assert death.killed
    require_alike(again, whole, rel=1e-6)


def test_a_critic_and_its_values_share_the_parts_of_two_by_two_ranks(tiny: TinyRuns) -> None:
    one = tiny.run(two_models, name="one", checkpoint_every=2)
    ranks = "t0,t1,t2,t3"
    pins = {"train_policy": ranks, "train_critic": ranks, "values": ranks, "reference": "t2,t3"}
    tensor = dict.fromkeys(pins, 2)
    four = tiny.run(two_models, name="four", checkpoint_every=2, pin=pins, tensor=tensor)
    require_alike(four, one)
