"""Where a run can be started, and peeks at its nodes."""

from __future__ import annotations

import asyncio

import pytest

from engine.api import Result, peek
from tests.kit import algorithms
from tests.kit.run_graphs import asynchronous, dapo, evaluated, followed, small
from tests.kit.runs import samples, steps_stored
from tests.kit.tiny_runs import TinyRuns

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize("inproc", [False, True])
def test_in_a_running_event_loop(tiny: TinyRuns, inproc: bool) -> None:
    async def cell() -> Result:
        return tiny.run(small(tiny.folder, asynchronous), 1, inproc=inproc)

    assert asyncio.run(cell()).step == 1


def test_on_step_and_until(tiny: TinyRuns) -> None:
    seen: list[float] = []
    tell = [lambda row: seen.append(row["step"])]
    result = tiny.run(small, 9, on_step=tell, until=lambda row: row["step"] == 2)
    assert seen == [1, 2]
    assert result.reason == "its condition held after step 2"
    assert steps_stored(result) == [2]


@pytest.mark.parametrize("name,columns", [
    ("prompts", {"prompt", "answer"}),
    ("rollout", {"completion", "completion_ids", "sampler_logprobs", "version", "finish"}),
    ("score", {"reward", "reward/vowels"}),
])  # fmt: skip
def test_peek_above_the_cut(tiny: TinyRuns, name: str, columns: set[str]) -> None:
    table = peek(small(tiny.folder), name, 3)
    assert len(table) == 3
    assert columns | {"position", "sample"} <= set(table.column_names)


@pytest.mark.long
def test_peek_at_the_same_rows_as_a_run(tiny: TinyRuns) -> None:
    first = samples(tiny.run(small, 1)).slice(0, 4)["completion"].to_pylist()
    assert peek(small(tiny.folder), "rollout", 4)["completion"].to_pylist() == first


@pytest.mark.long
def test_peek_below_the_cut(tiny: TinyRuns) -> None:
    """What is read there has the values of a critic and log-probs above it."""
    assert len(peek(algorithms.small("ppo", tiny.folder), "whiten", 3)) == 3


@pytest.mark.long
def test_peek_at_a_select_shows_the_rows_that_stay(tiny: TinyRuns) -> None:
    graph = dapo(tiny.folder)
    kept = peek(graph, "select", 16)
    rewards: dict[int, set[float]] = {}
    for row in peek(graph, "score", 16).to_pylist():
        rewards.setdefault(row["position"], set()).add(row["reward"])
    mixed = {position for position, values in rewards.items() if len(values) > 1}
    assert mixed
    assert set(kept["position"].to_pylist()) == mixed
    assert "completion" in kept.column_names


@pytest.mark.long
def test_peek_at_a_followers_reader_and_at_an_evaluation(tiny: TinyRuns) -> None:
    assert len(peek(followed(tiny.folder), "values", 2)) == 2
    assert len(peek(evaluated(tiny.folder), "sampled_reward", 2)) == 2
