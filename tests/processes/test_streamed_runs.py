"""Runs whose synchronous Steps are worked on in parts while they are generated."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from dataflow.graph import Graph
from engine.api import Result, rerun, resume
from engine.keep.record.place import row_files
from engine.replay.row_diff import row_differences
from graphs.grpo import grpo
from tests.kit.processes import KillWorkers
from tests.kit.run_graphs import two_models, vowels
from tests.kit.runs import metrics, require_same_numbers, timeless
from tests.kit.tiny_runs import TinyRuns

pytestmark = pytest.mark.timeout(240)
CHUNKS = {"workers": "apart", "chunks": {"rollout": 2}}
STREAMED: dict[str, Any] = CHUNKS | {"stream": "ordered", "part_tokens": 40}
ARRIVAL: dict[str, Any] = STREAMED | {"stream": "arrival"}
TWO: dict[str, Any] = {"replicas": {"rollout": 2}}
SPREAD: dict[str, Any] = {"spread": {"rollout": 2}, "record": "all"}
"""Of three prompts, so that the answers of one of them are in both chunks."""


def graph(folder: Path) -> Graph:
    """GRPO with long and short answers, and a reference."""
    model, data = str(folder / "model"), str(folder / "train.parquet")
    return grpo(model, data, vowels, n=4, batch=6, max_tokens=24, beta=0.05, lr=1e-3)


def spread_graph(folder: Path, **settings: Any) -> Graph:
    """The same with fewer prompts, and settings of its own."""
    model, data = str(folder / "model"), str(folder / "train.parquet")
    return grpo(model, data, vowels, n=4, batch=3, max_tokens=24, beta=0.05, lr=1e-3, **settings)


def require_spread(run: Result) -> None:
    """Require that of some prompt several chunks made answers."""
    chunks_of_prompt: dict[int, set[int]] = defaultdict(set)
    for file in row_files(run.folder / "recorded", "rollout"):
        rows = pq.read_table(file.path, columns=["key.position", "made.chunk"]).to_pydict()
        for position, chunk in zip(rows["key.position"], rows["made.chunk"], strict=True):
            chunks_of_prompt[position].add(chunk)
    assert max(map(len, chunks_of_prompt.values())) > 1


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


def test_values_of_a_part_are_computed_beside_its_rewards(tiny: TinyRuns) -> None:
    """They read the critic that the Step starts from, above the cut."""
    death = KillWorkers({1: "values"})
    one = tiny.run(two_models, 3, name="one", record="all", **STREAMED)
    assert find_region(one, "values") == "stream"
    killed = tiny.run(two_models, 3, name="killed", on_step=[death], **STREAMED)
    assert len(death.killed) == 1
    require_same_numbers(killed, one)
    whole = tiny.run(two_models, 3, name="whole", **CHUNKS)
    for row, same in zip(metrics(one), metrics(whole), strict=True):
        norms = [name for name in row if name.endswith("grad_norm")]
        assert len(norms) == 2
        for name in norms:
            assert row[name] == pytest.approx(same[name], rel=1e-3, abs=1e-5), name
    again = rerun(one.folder, ["values", "train_critic"], 2)
    assert again.same, again.nodes


def find_region(run: Result, node: str) -> str:
    """The region of a node, as the run's plan has it."""
    plan = json.loads((run.folder / "plan.json").read_text())
    (region,) = {each["region"] for each in plan["nodes"] if each["name"] == node}
    return region


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


# --- answers of a prompt on several replicas ------------------------------------------------------


@pytest.mark.parametrize("how", [CHUNKS, STREAMED], ids=["whole", "ordered"])
def test_spread_answers_have_the_bits_of_one_replica_and_run_again(
    tiny: TinyRuns, how: dict[str, Any]
) -> None:
    one = tiny.run(spread_graph, name="one", **how, **SPREAD)
    death = KillWorkers({1: "rollout-1"})
    two = tiny.run(spread_graph, name="two", on_step=[death], **TWO, **how, **SPREAD)
    for run in (one, two):
        require_spread(run)
    require_same_numbers(two, one)
    assert row_differences(one.folder, two.folder).startswith("rows: no difference\n")
    for nodes in ("rollout", "advantage", "train_policy"), ("train_policy",):
        again = rerun(two.folder, nodes, 2)
        assert again.same, again.nodes
        assert {node.promise for node in again.nodes} == {"bits"}


def test_spread_answers_of_joined_chunks_run_again(tiny: TinyRuns) -> None:
    """At a lag: chunks of spans that were told one after another are written together."""
    how = SPREAD | {"workers": "apart", "checkpoint_every": 1, "keep": 4}
    run = tiny.run(partial(spread_graph, max_lag=1), 4, **TWO, **how)
    require_spread(run)
    joined = [
        pq.read_table(file.path, columns=["made.joined"]).column(0).to_pylist()
        for file in row_files(run.folder / "recorded", "rollout")
    ]
    assert any(map(any, joined))
    for node, promise in (
        ("rollout", "tolerance"),
        ("advantage", "bits"),
        ("train_policy", "bits"),
    ):
        again = rerun(run.folder, [node], 3)
        assert again.same, again.nodes
        assert again.nodes[0].promise == promise
