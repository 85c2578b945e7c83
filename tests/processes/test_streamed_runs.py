"""Runs whose synchronous Steps are worked on in parts while they are generated."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dataflow.graph import Graph
from engine.api import Result, rerun, resume
from graphs.grpo import grpo
from tests.kit.processes import KillWorkers
from tests.kit.run_graphs import vowels
from tests.kit.runs import metrics, require_same_numbers, timeless
from tests.kit.tiny_runs import TinyRuns

pytestmark = pytest.mark.timeout(240)
CHUNKS = {"workers": "apart", "chunks": {"rollout": 2}}
STREAMED: dict[str, Any] = CHUNKS | {"stream": "ordered", "part_tokens": 40}
ARRIVAL: dict[str, Any] = STREAMED | {"stream": "arrival"}
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


def recorded_parts(folder: Path, step: int) -> list[list[int]]:
    """The positions of each part that a run has recorded of a Step."""
    lines = (folder / "parts.jsonl").read_text().splitlines()
    formed_parts = [json.loads(line) for line in lines]
    return [part["positions"] for part in formed_parts if part["step"] == step]


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
    ranks = {"ranks": {"train_policy": 2}}
    require_close(tiny.run(graph, name="arrival", **TWO, **ARRIVAL), whole)
    require_close(tiny.run(graph, name="ranks", **ranks, **STREAMED), whole)


@pytest.mark.parametrize("stream", ["ordered", "arrival"])
def test_a_streamed_step_is_run_again_part_by_part(tiny: TinyRuns, stream: str) -> None:
    how = STREAMED | {"stream": stream, "record": "rollout,score,reference", "checkpoint_every": 1}
    run = tiny.run(graph, 3, name=stream, **TWO, **how)
    for node, step in (("train_policy", 3), ("train_policy", 1), ("reference", 2), ("rollout", 2)):
        again = rerun(run.folder, [node], step)
        assert again.same, again.nodes
        assert again.nodes[0].promise == "bits"


def test_ranks_run_their_shares_of_parts_again(tiny: TinyRuns) -> None:
    how = STREAMED | {"ranks": {"train_policy": 2}, "record": "rollout,score,reference"}
    run = tiny.run(graph, name="ranks", **how)
    again = rerun(run.folder, ["train_policy"], 2)
    assert again.same, again.nodes


def test_a_step_that_is_repeated_is_cut_as_recorded(tiny: TinyRuns) -> None:
    """Replicas race: only by the record a Step has the same parts, and so the same bits, twice."""
    rows: list[Mapping[str, float]] = []
    death = KillWorkers({1: "train_policy"})
    run = tiny.run(graph, 2, name="arrival", on_step=[death, rows.append], **TWO, **ARRIVAL)
    first_steps = timeless([dict(row) for row in rows if row["step"] == 1])
    assert len(first_steps) == 2, "the run has not gone back"
    assert first_steps[0] == first_steps[1]

    # As if it had been killed in Step 3, in an order in which no groups come.
    unlikely_parts = [[12, 17], [13, 16], [14, 15]]
    with open(run.folder / "parts.jsonl", "a", encoding="ascii") as file:
        for part, positions in enumerate(unlikely_parts):
            line = {"step": 3, "source": "prompts", "part": part, "positions": positions}
            file.write(json.dumps(line) + "\n")
    copy = run.folder.with_name("copy")
    shutil.copytree(run.folder, copy)
    resumed = resume(run.folder, steps=3)
    assert recorded_parts(run.folder, 3) == unlikely_parts
    require_same_numbers(resume(copy, steps=3), resumed)
