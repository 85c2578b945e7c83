"""Failures of a run name node, row and cause; and nothing is left behind."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dataflow.errors import GraphError, KernelError, RunError
from dataflow.graph import Graph
from dataflow.schema import Rollout
from engine.api import peek
from engine.coordinator.core import Coordinator
from graphs.grpo import grpo
from operators.reward import reward
from tests.kit import run_graphs
from tests.kit.processes import children
from tests.kit.runs import column, metrics, samples
from tests.kit.tiny_runs import TinyRuns

pytestmark = pytest.mark.timeout(180)


def scored(folder: Path, fn: Any, **how: Any) -> Graph:
    graph = run_graphs.small(folder)
    return graph.replace(score=reward(fn, graph.port("rollout", Rollout), name="score", **how))


FAILURES = {
    "a reward that raises": (
        partial(run_graphs.small, fn=run_graphs.raises),
        ["'score'", "'raises'", "row 0/0", "ZeroDivisionError", "run_graphs.py", "Fix:"],
    ),
    "an operator that raises": (
        partial(run_graphs.with_score, change=run_graphs.breaks),
        ["breaks: ", r"\(0, 0, 0\)", "RuntimeError: out of luck", "run_graphs.py"],
    ),
    "an operator that returns too few rows": (
        partial(run_graphs.with_score, change=run_graphs.one_row_less),
        ["one_row_less: .*returned 7 rows for 8. Fix: "],
    ),
    "a reward that takes too long": (
        partial(scored, fn=run_graphs.never_returns, timeout=0.5),
        ["'never_returns' timed out after 0.5 s"],
    ),
    "a loss that is no number": (
        partial(run_graphs.with_score, loss_of=run_graphs.not_a_number),
        ["train_policy: step 1: expected a loss .* found nan; first row"],
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_the_run_stops_and_says_what_failed(tiny: TinyRuns, name: str) -> None:
    make, told = FAILURES[name]
    with pytest.raises(KernelError) as caught:
        tiny.run(make, 2)
    assert [part for part in told if not re.search(part, str(caught.value))] == []
    assert not children()


def test_a_group_with_a_failed_row_is_dropped(
    tiny: TinyRuns, caplog: pytest.LogCaptureFixture
) -> None:
    result = tiny.run(scored(tiny.folder, run_graphs.fails_on_one_prompt, on_error="drop_group"), 4)
    last = metrics(result)[-1]
    assert column(result, "data/prompts") == [4, 4, 4, 4]
    assert last["data/dropped"] >= 1, "no prompt that begins with a came up: this tests nothing"
    assert last["data/admitted"] == 16 + last["data/dropped"]
    [told] = [r.getMessage() for r in caplog.records if "prompt is dropped" in r.getMessage()]
    assert re.search(r"score: row \(\d+, \d, 0\) failed, .*; the first such: .*raised", told)
    assert not any(text.startswith("a") for text in samples(result)["prompt"].to_pylist())


@pytest.mark.parametrize("given,said", [({}, "10%"), ({"error_budget": 0.25}, "25%")])
def test_an_error_budget_that_is_spent_stops_the_run(
    tiny: TinyRuns, given: dict[str, float], said: str
) -> None:
    told = rf"11 of \d+ admitted prompts were dropped, more than the error budget of {said}"
    with pytest.raises(RunError, match=told):
        tiny.run(scored(tiny.folder, run_graphs.raises, on_error="drop_group"), 4, **given)


def test_an_operator_that_hangs_is_named_by_the_watchdog(
    tiny: TinyRuns, capfd: pytest.CaptureFixture[str]
) -> None:
    told = r"nothing has moved for 8 s; main is in run_graphs.py:\d+ hangs \(chunk \d+, 8 rows\)"
    with pytest.raises(RunError, match=told):
        tiny.run(run_graphs.with_score(tiny.folder, run_graphs.hangs), 2, watchdog=8.0)
    shown = capfd.readouterr().err
    assert "advantage: " in shown, "who waits for it"
    assert "run_graphs.py" in shown, "where it hangs"
    assert not children()


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


def test_a_missing_model_is_the_error_that_is_seen(tiny: TinyRuns) -> None:
    base, data = str(tiny.folder / "modle"), str(tiny.folder / "train.parquet")
    with pytest.raises((KernelError, GraphError), match=r"modle.*Fix: .*model"):
        tiny.run(grpo(base, data, run_graphs.vowels, beta=0.1, n=2, batch=2), 1)


def test_a_folder_that_is_there_is_not_overwritten(tiny: TinyRuns) -> None:
    first = tiny.run(run_graphs.small, 1)
    with pytest.raises(RunError, match="overwrite"):
        tiny.run(run_graphs.small, 1)
    again = tiny.run(run_graphs.small, 2, overwrite=True)
    assert again.folder == first.folder
    assert len(metrics(again)) == 2


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


def test_no_child_is_left_by_a_run(tiny: TinyRuns) -> None:
    tiny.run(run_graphs.small, 1)
    assert not children()
