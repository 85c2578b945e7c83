"""Whole runs with a lag in which several ranks decode: versions, joins, and deaths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dataflow.graph import Graph
from graphs.grpo import grpo
from tests.kit.processes import KillWorkers
from tests.kit.run_graphs import vowels
from tests.kit.runs import column
from tests.kit.tiny_runs import TinyRuns

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]

PAIR: dict[str, Any] = {"tensor": {"rollout": 2}, "pin": {"rollout": "r0,r1"}}


def with_a_lag(folder: Path) -> Graph:
    """GRPO that trains rows of the version before."""
    base, rows = str(folder / "model"), str(folder / "train.parquet")
    return grpo(base, rows, vowels, n=4, batch=4, max_tokens=120, lr=1e-3, max_lag=1)


def test_ranks_decode_while_their_model_is_trained(tiny: TinyRuns) -> None:
    run = tiny.run(with_a_lag, 12, name="two", **PAIR)
    assert len(column(run, "edge/broadcast/bytes")) == 12
    assert max(column(run, "policy/lag/max")) == 1


@pytest.mark.parametrize("rank", ["r0", "r1"])
def test_a_killed_rank_that_decodes_with_a_lag_loses_no_row(tiny: TinyRuns, rank: str) -> None:
    death = KillWorkers({2: rank})
    again = tiny.run(with_a_lag, 5, name="again", **PAIR, on_step=[death])
    assert death.killed
    assert len(column(again, "edge/broadcast/bytes")) == 5
