"""What goes wrong in a run is named: node, row, cause; and nothing is left behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_graphs import (
    breaks,
    fails_on_one_prompt,
    hangs,
    never_returns,
    not_a_number,
    one_row_less,
    own_process,
    raises,
    small,
    vowels,
    with_score,
)

from dataflow.errors import GraphError, KernelError, RunError
from dataflow.graph import Graph
from dataflow.schema import Rollout
from engine.api import peek, run
from engine.coordinator.core import Coordinator
from engine.observe.samples import read_samples
from graphs.grpo import grpo
from operators.reward import reward
from tests.kit.processes import children
from tests.kit.runs import metrics

Options = Callable[..., Any]
pytestmark = pytest.mark.timeout(180)


def scored(folder: Path, fn: Any, **how: Any) -> Graph:
    graph = small(folder)
    return graph.replace(score=reward(fn, graph.port("rollout", Rollout), name="score", **how))


def test_a_reward_that_raises_stops_the_run(tiny: Path, options: Options) -> None:
    with pytest.raises(KernelError) as caught:
        run(small(tiny, raises), options(2))
    told = str(caught.value)
    for part in ("'score'", "'raises'", "row 0/0", "ZeroDivisionError", "run_graphs.py", "Fix:"):
        assert part in told, part
    assert not children()


def test_a_group_with_a_failed_row_is_dropped(tiny: Path, options: Options) -> None:
    result = run(scored(tiny, fails_on_one_prompt, on_error="drop_group"), options(4))
    rows = metrics(result.folder)
    assert [row["data/prompts"] for row in rows] == [4, 4, 4, 4]
    assert rows[-1]["data/dropped"] >= 1, (
        "no prompt that begins with a came up, so this tests nothing"
    )
    assert rows[-1]["data/admitted"] == 16 + rows[-1]["data/dropped"]
    assert not any(
        text.startswith("a")
        for text in read_samples(result.folder / "samples")["prompt"].to_pylist()
    )


def test_an_error_budget_that_is_spent_stops_the_run(tiny: Path, options: Options) -> None:
    with pytest.raises(
        RunError,
        match=r"11 of \d+ admitted prompts were dropped, more than the error budget of 10%",
    ):
        run(scored(tiny, raises, on_error="drop_group"), options(4))


def test_a_reward_that_takes_too_long_is_killed(tiny: Path, options: Options) -> None:
    with pytest.raises(KernelError, match=r"'never_returns' timed out after 0.5 s"):
        run(scored(tiny, never_returns, timeout=0.5), options(2))
    assert not children()


def test_a_loss_that_is_no_number(tiny: Path, options: Options) -> None:
    with pytest.raises(
        KernelError, match=r"train_policy: step 1: expected a loss .* found nan; first row"
    ):
        run(with_score(tiny, None, not_a_number), options(2))


def test_an_operator_that_returns_too_few_rows(tiny: Path, options: Options) -> None:
    with pytest.raises(KernelError, match=r"one_row_less: .*returned 7 rows for 8. Fix: "):
        run(with_score(tiny, one_row_less), options(2))


def test_an_operator_that_raises(tiny: Path, options: Options) -> None:
    with pytest.raises(KernelError) as caught:
        run(with_score(tiny, breaks), options(2))
    told = str(caught.value)
    for part in ("breaks: ", "(0, 0, 0)", "RuntimeError: out of luck", "run_graphs.py"):
        assert part in told, part


def test_an_operator_that_hangs_is_named_by_the_watchdog(
    tiny: Path, options: Options, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        RunError,
        match=(
            r"nothing has moved for 3 s; main is in run_graphs.py:\d+ hangs \(chunk \d+, 8 rows\)"
        ),
    ):
        run(with_score(tiny, hangs), options(2, watchdog=3.0))
    shown = capfd.readouterr().err
    assert "advantage: " in shown, "who waits for it"
    assert "run_graphs.py" in shown, "where it hangs"
    assert not children()


def test_a_run_in_which_nothing_can_move_says_who_waits(
    tiny: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = Coordinator.handle

    def forgetful(self: Coordinator, event: Any, now: float) -> Any:
        told = handle(self, event, now)
        return [each for each in told if getattr(each, "node", "") != "score"]

    monkeypatch.setattr(Coordinator, "handle", forgetful)
    with pytest.raises(RunError) as caught:
        run(small(tiny), options(2))
    told = str(caught.value)
    assert "nothing is under way" in told
    assert "score: 16 rows have not come (first: prompt 0); it reads rollout" in told
    assert "intake of prompts: 0 of 4 prompts are finished" in told


def test_a_missing_model_is_the_error_that_is_seen(tiny: Path, options: Options) -> None:
    graph = grpo(str(tiny / "modle"), str(tiny / "train.parquet"), vowels, beta=0.1, n=2, batch=2)
    with pytest.raises((KernelError, GraphError), match=r"modle.*did you mean .*model"):
        run(graph, options(1))


def test_a_folder_that_is_there_is_not_overwritten(tiny: Path, options: Options) -> None:
    first = run(small(tiny), options(1))
    with pytest.raises(RunError, match="overwrite"):
        run(small(tiny), options(1))
    again = run(small(tiny), options(2, overwrite=True))
    assert again.folder == first.folder
    assert len(metrics(again.folder)) == 2


def test_inproc_calls_the_reward_in_this_process(tiny: Path, options: Options) -> None:
    result = run(small(tiny, own_process), options(1, inproc=True))
    assert result.metrics["reward/mean"] == os.getpid()
    other = run(small(tiny, own_process), options(1, name="other"))
    assert other.metrics["reward/mean"] != os.getpid()


def test_peek_at_an_unknown_node_names_those_that_there_are(tiny: Path) -> None:
    with pytest.raises(
        GraphError, match="advantage, prompts, reference, rollout, score, train_policy"
    ):
        peek(small(tiny), "rolout")


def test_peek_at_a_sink(tiny: Path) -> None:
    with pytest.raises(GraphError, match="no output"):
        peek(small(tiny), "train_policy")


def test_no_child_is_left_by_a_run(tiny: Path, options: Options) -> None:
    run(small(tiny), options(1))
    assert not children()
