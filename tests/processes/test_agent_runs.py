"""Runs of episodes: the same numbers however they are divided, and nothing lost by deaths."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dataflow.graph import Graph
from engine.api import rerun, resume
from tests.kit import algorithms, runs
from tests.kit.environments import Failing
from tests.kit.processes import KillWorkers
from tests.kit.tiny_runs import TinyRuns

pytestmark = pytest.mark.timeout(240)
LONG = pytest.mark.long
CHUNKS: dict[str, Any] = {"chunks": {"episode": 2}}
REPLICAS: dict[str, Any] = {"workers": "apart", "replicas": {"episode": 2}}

agent = partial(algorithms.small, "agent")


def lagging_agent(folder: Path) -> Graph:
    return agent(folder, max_lag=1)


def failing_agent(folder: Path) -> Graph:
    return agent(folder, environment=Failing)


@LONG
def test_rounds_have_the_same_bits_in_one_process_and_in_many(tiny: TinyRuns) -> None:
    one = tiny.run(agent, name="one", **CHUNKS)
    many = tiny.run(agent, name="many", **CHUNKS, **REPLICAS)
    runs.require_same_numbers(many, one)


@LONG
def test_a_killed_worker_changes_no_number_without_lag(tiny: TinyRuns) -> None:
    death = KillWorkers({1: "episode-0", 2: "episode-1", 3: "score"})
    killed = tiny.run(agent, 4, name="killed", on_step=[death], **CHUNKS, **REPLICAS)
    alone = tiny.run(agent, 4, name="alone", **CHUNKS)
    runs.require_same_numbers(killed, alone)


@LONG
def test_no_episode_is_lost_or_trained_twice_with_lag_kills_and_resume(tiny: TinyRuns) -> None:
    death = KillWorkers({1: "episode-0", 3: "episode-1"})
    result = tiny.run(lagging_agent, 4, on_step=[death], checkpoint_every=1, **REPLICAS)
    resume(result.folder, steps=6)
    runs.require_each_row_once(result, 24, 4)
    assert max(runs.column(result, "policy/lag/max")) <= 1


@LONG
def test_a_recorded_step_of_episodes_runs_again_to_the_same_bits(tiny: TinyRuns) -> None:
    result = tiny.run(agent, 3, record="all")
    for node in ("episode", "score", "advantage", "train_policy"):
        again = rerun(result.folder, [node], 2)
        assert again.same, again.nodes


def test_failing_environments_cost_rows_and_no_group(tiny: TinyRuns) -> None:
    result = tiny.run(failing_agent, 3)
    lost = sum(runs.column(result, "env/errors"))
    assert lost > 0
    rows = [row["data/rows"] for row in runs.metrics(result)]
    assert min(rows) < 16
    assert max(rows) <= 16
    assert all(row["data/groups"] == 4 for row in runs.metrics(result) if "data/groups" in row)


def test_turns_that_episodes_do_not_have_are_no_lost_rows(tiny: TinyRuns) -> None:
    result = tiny.run(partial(algorithms.small, "agent_turns"), 2)
    assert set(runs.column(result, "data/lost_rows")) == {0.0}
