"""Whole runs in which answers are continued, or a reward model reads text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.node import Port
from dataflow.schema import Rollout
from engine.api import peek, plan
from engine.plan.explain import explain
from operators.advantage import group_advantage, returns
from operators.continued import continued
from operators.data import prompts
from operators.forward import scores
from operators.generate import generate
from operators.losses import clipped_policy_loss
from operators.reward import reward
from operators.train import train
from tests.kit import runs
from tests.kit.models import character_tokenizer
from tests.kit.tiny_runs import TinyRuns
from tests.unit.test_text_scores import save_reward_model

pytestmark = pytest.mark.timeout(180)


def asked_again(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """Reads the question, its answer and the next turn as the text of the prompt."""
    assert all(prompt.endswith("\nu:Sure?\na:") for prompt in prompts), prompts
    return lengths(completions)


def lengths(completions: Sequence[str], **columns: object) -> list[float]:
    return [float(len(text)) for text in completions]


def policy_of(folder: Path) -> Model:
    return Model("policy", str(folder / "model"), trainable=True)


def answered(folder: Path, **params: Any) -> Port[Rollout]:
    source = prompts(str(folder / params.pop("data", "train.parquet")), batch=4)
    usual: dict[str, Any] = {"n": 2, "max_tokens": 6, "name": "first"}
    return generate(policy_of(folder), source, **usual | params)


def trained(folder: Path, rows: Port[Rollout], score: Any) -> Graph:
    loss = clipped_policy_loss(returns(rows, score))
    return Graph("g", train(policy_of(folder), rows, loss=loss, lr=1e-3))


def second_of(folder: Path, then: str | None, **params: Any) -> Port[Rollout]:
    asked = continued(answered(folder, **params), then=then)
    return generate(policy_of(folder), asked, n=2, max_tokens=5, name="second", **params)


def two_turns(folder: Path, **params: Any) -> Graph:
    second = second_of(folder, "Sure?", **params)
    return trained(folder, second, reward(asked_again, second))


def test_a_second_generation_reads_the_very_tokens_of_the_first(tiny: TinyRuns) -> None:
    second = second_of(tiny.folder, None)
    graph = trained(tiny.folder, second, reward(lengths, second))
    options = tiny.options(inproc=True)
    first = peek(graph, "first", 8, options).to_pylist()
    later = peek(graph, "second", 16, options).to_pylist()
    whole = [row["prompt_ids"] + row["completion_ids"] for row in first]
    for answers in (later[::2], later[1::2]):
        assert [row["prompt_ids"] for row in answers] == whole
    said = peek(graph, "continued", 8, options)
    assert said["prompt"].to_pylist() == whole


@pytest.mark.parametrize(
    "workers, max_lag", [("one", 0), pytest.param("apart", 1, marks=pytest.mark.long)]
)
def test_answers_are_continued_and_samples_show_them_as_text(
    tiny: TinyRuns, workers: str, max_lag: int
) -> None:
    result = tiny.run(lambda folder: two_turns(folder, max_lag=max_lag), workers=workers)
    turn = character_tokenizer()("\nu:Sure?\na:", add_special_tokens=False)["input_ids"]
    rows = runs.samples(result).to_pylist()
    assert len(rows) == 3 * 16
    for row in rows:
        assert row["prompt"].endswith("\nu:Sure?\na:")
        assert row["prompt_ids"][-len(turn) :] == turn  # type: ignore[arg-type]
        assert len(row["prompt_ids"]) <= 2 + 6 + len(turn)  # type: ignore[arg-type]


def test_estimates_know_how_long_continued_prompts_are(
    tiny: TinyRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded = plan(two_turns(tiny.folder, max_prompt_tokens=64), tiny.options())
    assert "tokens assumed" not in explain(bounded)
    second = second_of(tiny.folder, "Sure?")
    score = reward(asked_again, second)
    graph = trained(tiny.folder, second, score)
    shown = explain(plan(graph, tiny.options()))
    assert "first: prompts of 2 tokens, from 24 rows of train.parquet" in shown
    assert "tokens assumed" not in shown
    monkeypatch.setattr("operators.kernels.token_counts.MOST_BYTES", 0)
    shown = explain(plan(graph, tiny.options()))
    assert "first: prompts of 506 tokens assumed" in shown
    assert "second: prompts of 507 tokens assumed" in shown, "what 512 positions leave for 5"
    assert "continued -> second" in shown


# data by token ids


def test_data_by_token_ids_trains_as_the_same_data_by_text(tiny: TinyRuns) -> None:
    table = pq.read_table(tiny.folder / "train.parquet")
    ids = character_tokenizer()(table["prompt"].to_pylist(), add_special_tokens=False)["input_ids"]
    by_ids = tiny.runs.parent / "ids.parquet"
    pq.write_table(table.set_column(0, "prompt", [ids]), by_ids)
    rows = []
    for data in ("train.parquet", by_ids):
        rollout = answered(tiny.folder, data=data)
        graph = trained(tiny.folder, rollout, reward(lengths, rollout))
        samples = runs.samples(tiny.run(graph, 2, overwrite=True))
        rows.append(samples.select(["prompt_ids", "prompt", "completion"]))
    assert rows[0].equals(rows[1])


# a reward model that reads text


def test_a_reward_model_of_another_tokenizer_scores_a_run(tiny: TinyRuns) -> None:
    judge = Model("rm", save_reward_model(tiny.runs.parent / "rm"), head="scalar")
    rollout = answered(tiny.folder)
    verdict = scores(judge, rollout, reads="text")
    loss = clipped_policy_loss(group_advantage(rollout, verdict))
    graph = Graph("rm", train(policy_of(tiny.folder), rollout, loss=loss, lr=1e-3))
    planned = plan(graph, tiny.options())
    assert "scores: rows tokenised anew" in explain(planned)
    read = [fetch.columns for each in planned.node("scores").inputs for fetch in each.fetches]
    assert read == [("completion",), ("prompt",)]
    result = tiny.run(graph, 2)
    assert len(set(runs.samples(result)["reward"].to_pylist())) > 4
