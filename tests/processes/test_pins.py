"""Where a run can be started, and peeks at its nodes."""

from __future__ import annotations

import asyncio
import threading

import pytest

from engine.api import Result, peek
from graphs.ppo import ppo
from tests.kit.run_graphs import asynchronous, dapo, evaluated, followed, small, vowels
from tests.kit.runs import metrics, samples, timeless
from tests.kit.tiny_runs import TinyRuns

pytestmark = pytest.mark.timeout(180)


def test_in_a_thread(tiny: TinyRuns) -> None:
    results: list[Result] = []
    thread = threading.Thread(target=lambda: results.append(tiny.run(small, 2, name="thread")))
    thread.start()
    thread.join()
    main = tiny.run(small, 2, name="main")
    assert timeless(metrics(results[0])) == timeless(metrics(main))


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
    assert not result.interrupted
    assert result.checkpoint is not None
    assert result.checkpoint.name == "step_2"


@pytest.mark.parametrize("name,columns", [
    ("prompts", {"prompt", "answer"}),
    ("rollout", {"completion", "completion_ids", "sampler_logprobs", "version", "finish"}),
    ("score", {"reward", "reward/vowels"}),
    ("advantage", {"advantage"}),
])  # fmt: skip
def test_peek_above_the_cut(tiny: TinyRuns, name: str, columns: set[str]) -> None:
    table = peek(small(tiny.folder), name, 3)
    assert len(table) == 3
    assert columns | {"position", "sample"} <= set(table.column_names)


def test_peek_at_the_same_rows_as_a_run(tiny: TinyRuns) -> None:
    first = samples(tiny.run(small, 1)).slice(0, 4)["completion"].to_pylist()
    assert peek(small(tiny.folder), "rollout", 4)["completion"].to_pylist() == first


@pytest.mark.parametrize("name", ["old", "values", "gae", "whiten"])
def test_peek_below_the_cut(tiny: TinyRuns, name: str) -> None:
    base, data = str(tiny.folder / "model"), str(tiny.folder / "train.parquet")
    assert len(peek(ppo(base, data, vowels, batch=8, max_tokens=6), name, 3)) == 3


def test_peek_at_a_select_shows_the_rows_that_stay(tiny: TinyRuns) -> None:
    graph = dapo(tiny.folder)
    rows = peek(graph, "select", 16).to_pylist()
    assert 0 < len(rows) <= 16
    kept = {row["position"] for row in rows}
    rewards: dict[int, set[float]] = {}
    for row in peek(graph, "score", 16).to_pylist():
        rewards.setdefault(row["position"], set()).add(row["reward"])
    assert kept == {position for position, values in rewards.items() if len(values) > 1}
    assert all("completion" in row for row in rows)


def test_peek_at_a_followers_reader_and_at_an_evaluation(tiny: TinyRuns) -> None:
    assert len(peek(followed(tiny.folder), "values", 2)) == 2
    assert len(peek(evaluated(tiny.folder), "sampled_reward", 2)) == 2
