"""What a run drops or ends with where user code fails or hangs, and what peek refuses."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from dataflow.errors import GraphError, RunError
from dataflow.graph import Graph
from dataflow.schema import Rollout
from engine.api import peek
from engine.coordinator.coordinator import Coordinator
from operators.reward import reward
from tests.kit import run_graphs
from tests.kit.runs import column, metrics, samples
from tests.kit.tiny_runs import TinyRuns

pytestmark = pytest.mark.timeout(180)


def scored(folder: Path, fn: Any, **how: Any) -> Graph:
    graph = run_graphs.small(folder)
    return graph.replace(score=reward(fn, graph.port("rollout", Rollout), name="score", **how))


def test_a_group_with_a_failed_row_is_dropped(
    tiny: TinyRuns, caplog: pytest.LogCaptureFixture
) -> None:
    result = tiny.run(scored(tiny.folder, run_graphs.fails_on_one_prompt, on_error="drop_group"), 4)
    last = metrics(result)[-1]
    assert column(result, "data/prompts") == [4, 4, 4, 4]
    assert last["data/dropped"] >= 1, "no prompt that begins with a came up: this tests nothing"
    assert last["data/admitted"] == 16 + last["data/dropped"]
    (told,) = (line for line in caplog.messages if "prompt is dropped" in line)
    assert re.search(r"score: row \(\d+, \d, 0\) failed, .*; the first such: .*raised", told)
    assert not any(text.startswith("a") for text in samples(result)["prompt"].to_pylist())


@pytest.mark.long
def test_an_error_budget_that_is_spent_stops_the_run(tiny: TinyRuns) -> None:
    told = r"11 of \d+ admitted prompts were dropped, more than the error budget of 25%"
    graph = scored(tiny.folder, run_graphs.raises, on_error="drop_group")
    with pytest.raises(RunError, match=told):
        tiny.run(graph, 4, error_budget=0.25)


def test_an_operator_that_hangs_is_named_by_the_watchdog(
    tiny: TinyRuns, capfd: pytest.CaptureFixture[str]
) -> None:
    told = r"nothing has moved for 8 s; main is in run_graphs.py:\d+ hangs \(chunk \d+, 8 rows\)"
    with pytest.raises(RunError, match=told):
        tiny.run(run_graphs.with_score(tiny.folder, run_graphs.hangs), 2, watchdog=8.0)
    shown = capfd.readouterr().err
    assert "advantage: " in shown, "who waits for it"
    assert "run_graphs.py" in shown, "where it hangs"


def test_a_run_in_which_nothing_can_move_says_who_waits(
    tiny: TinyRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = Coordinator.handle_together

    def forgetful(self: Coordinator, events: Any, now: float) -> Any:
        told = handle(self, events, now)
        return [each for each in told if getattr(each, "node", "") != "score"]

    monkeypatch.setattr(Coordinator, "handle_together", forgetful)
    with pytest.raises(RunError) as caught:
        tiny.run(run_graphs.small, 2)
    told = str(caught.value)
    assert "nothing is under way" in told
    assert "score: 16 rows have not come (first: prompt 0); it reads rollout" in told
    assert "intake of prompts: 0 of 4 prompts are finished" in told


def test_inproc_calls_the_reward_in_this_process(tiny: TinyRuns) -> None:
    graph = run_graphs.small(tiny.folder, run_graphs.own_process)
    assert tiny.run(graph, 1, inproc=True).metrics["reward/mean"] == os.getpid()
    assert tiny.run(graph, 1, name="other").metrics["reward/mean"] != os.getpid()


@pytest.mark.parametrize("node,told", [
    ("rolout", "advantage, prompts, reference, rollout, score, train_policy"),
    ("train_policy", "no output"),
], ids=["an unknown node", "a sink"])  # fmt: skip
def test_peek_refuses_what_has_no_rows(tiny: TinyRuns, node: str, told: str) -> None:
    with pytest.raises(GraphError, match=told):
        peek(run_graphs.small(tiny.folder), node)
