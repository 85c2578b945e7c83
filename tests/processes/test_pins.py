"""Where a run can be started, and peeks at its nodes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_graphs import asynchronous, dapo, evaluated, followed, small, vowels

from engine.api import Result, peek, run
from graphs.ppo import ppo
from tests.kit.runs import metrics, timeless

Options = Callable[..., Any]
pytestmark = pytest.mark.timeout(180)


def test_in_a_thread(tiny: Path, options: Options) -> None:
    found: list[Result] = []
    thread = threading.Thread(
        target=lambda: found.append(run(small(tiny), options(2, name="thread")))
    )
    thread.start()
    thread.join()
    main = run(small(tiny), options(2, name="main"))
    assert timeless(metrics(found[0].folder)) == timeless(metrics(main.folder))


@pytest.mark.parametrize("inproc", [False, True])
def test_in_a_running_event_loop(tiny: Path, options: Options, inproc: bool) -> None:
    async def cell() -> Result:
        return run(small(tiny, asynchronous), options(1, inproc=inproc))

    assert asyncio.run(cell()).step == 1


def test_on_step_and_until(tiny: Path, options: Options) -> None:
    seen: list[float] = []
    result = run(
        small(tiny),
        options(9),
        on_step=[lambda row: seen.append(row["step"])],
        until=lambda r: r["step"] == 2,
    )
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
def test_peek_above_the_cut(tiny: Path, name: str, columns: set[str]) -> None:
    found = peek(small(tiny), name, 3)
    assert len(found) == 3
    assert columns | {"position", "sample"} <= set(found.column_names)


def test_peek_at_the_same_rows_as_a_run(tiny: Path, options: Options) -> None:
    from engine.observe.samples import read_samples

    result = run(small(tiny), options(1))
    first = read_samples(result.folder / "samples").slice(0, 4)
    assert (
        peek(small(tiny), "rollout", 4)["completion"].to_pylist() == first["completion"].to_pylist()
    )


@pytest.mark.parametrize("name", ["old", "values", "gae", "whiten"])
def test_peek_below_the_cut(tiny: Path, name: str) -> None:
    graph = ppo(str(tiny / "model"), str(tiny / "train.parquet"), vowels, batch=8, max_tokens=6)
    assert len(peek(graph, name, 3)) == 3


def test_peek_at_a_select_shows_the_rows_that_stay(tiny: Path) -> None:
    found = peek(dapo(tiny), "select", 16).to_pylist()
    assert 0 < len(found) <= 16
    kept = {row["position"] for row in found}
    reward = {}
    for row in peek(dapo(tiny), "score", 16).to_pylist():
        reward.setdefault(row["position"], set()).add(row["reward"])
    assert kept == {position for position, values in reward.items() if len(values) > 1}
    assert all("completion" in row for row in found)


def test_peek_at_a_followers_reader_and_at_an_evaluation(tiny: Path) -> None:
    assert len(peek(followed(tiny), "values", 2)) == 2
    assert len(peek(evaluated(tiny), "sampled_reward", 2)) == 2
