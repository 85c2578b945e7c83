"""Runs whose synchronous Steps are worked on in parts while they are generated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dataflow.errors import PlanError
from dataflow.graph import Graph
from engine.api import Result, resume
from graphs.grpo import grpo
from tests.kit.processes import KillWorkers
from tests.kit.run_graphs import vowels
from tests.kit.runs import metrics, require_same_numbers
from tests.kit.tiny_runs import TinyRuns

pytestmark = pytest.mark.timeout(240)
CHUNKS = {"workers": "apart", "chunks": {"rollout": 2}}
STREAMED: dict[str, Any] = CHUNKS | {"stream": "ordered", "part_tokens": 40}
TWO: dict[str, Any] = {"replicas": {"rollout": 2}}


def graph(folder: Path) -> Graph:
    """GRPO with long and short answers, and a reference."""
    model, data = str(folder / "model"), str(folder / "train.parquet")
    return grpo(model, data, vowels, n=4, batch=6, max_tokens=24, beta=0.05, lr=1e-3)


def require_close(run: Result, other: Result) -> None:
    """Require the numbers of training to be equal, but for the last bits of sums."""
    for row, same in zip(metrics(run), metrics(other), strict=True):
        assert row["train/tokens"] == same["train/tokens"]
        for name in ("loss/clipped_policy_loss", "optim/grad_norm", "reward/mean"):
            assert row[name] == pytest.approx(same[name], rel=1e-3, abs=1e-5), name


def test_an_ordered_step_has_the_same_bits_on_any_replicas_after_deaths_and_resumed(
    tiny: TinyRuns,
) -> None:
    one = tiny.run(graph, 4, name="one", **STREAMED)
    death = KillWorkers({1: "rollout-1", 2: "reference"})
    killed = tiny.run(graph, 4, name="killed", on_step=[death], **TWO, **STREAMED)
    assert len(death.killed) == 2
    require_same_numbers(killed, one)
    half = tiny.run(graph, 2, name="half", **TWO, **STREAMED)
    require_same_numbers(resume(half.folder, steps=4), one)
    require_close(one, tiny.run(graph, 4, name="whole", **CHUNKS))


def test_what_arrives_is_trained_once_and_by_ranks(tiny: TinyRuns) -> None:
    whole = tiny.run(graph, name="whole", **CHUNKS)
    arrival = STREAMED | {"stream": "arrival"}
    ranks = {"ranks": {"train_policy": 2}}
    require_close(tiny.run(graph, name="arrival", **TWO, **arrival), whole)
    require_close(tiny.run(graph, name="ranks", **ranks, **STREAMED), whole)


def test_the_rows_of_a_streamed_step_are_not_recorded(tiny: TinyRuns) -> None:
    with pytest.raises(PlanError, match="parts of a streamed Step cannot be run again"):
        tiny.run(graph, record="rollout", **STREAMED)
