"""Whole runs in which answers are continued, prompts are ids, or a reward model reads text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.node import Port
from dataflow.schema import Prompt, Rollout
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
    """1 where the prompt is text of the question, its answer and the next turn."""
    assert all(prompt.endswith("\nu:Sure?\na:") for prompt in prompts), prompts
    return [float(len(text)) for text in completions]


def policy_of(folder: Path) -> Model:
    return Model("policy", str(folder / "model"), trainable=True)


def answered(folder: Path, data: str = "train.parquet", **params: Any) -> Port[Rollout]:
    source = prompts(str(folder / data), batch=4)
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
    graph = trained(
        tiny.folder, second, reward(lambda completions: [1.0] * len(completions), second)
    )
    options = tiny.options(inproc=True)
    first = peek(graph, "first", 8, options).to_pylist()
    later = peek(graph, "second", 16, options).to_pylist()
    by_row = {(row["position"], row["sample"]): row for row in first}
    assert len(later) == 16
    for row in later:
        above = by_row[row["position"], row["sample"] // 2]
        assert row["prompt_ids"] == above["prompt_ids"] + above["completion_ids"]
    said = peek(graph, "continued", 8, options).to_pylist()
    assert [row["prompt"] for row in said] == [r["prompt_ids"] + r["completion_ids"] for r in first]


@pytest.mark.parametrize(
    "workers, max_lag", [("one", 0), pytest.param("apart", 1, marks=pytest.mark.long)]
)
def test_answers_are_continued_and_samples_show_them_as_text(
    tiny: TinyRuns, workers: str, max_lag: int
) -> None:
    result = tiny.run(lambda folder: two_turns(folder, max_lag=max_lag), workers=workers)
    assert [row["step"] for row in runs.metrics(result)] == [1, 2, 3]
    turn = character_tokenizer()("\nu:Sure?\na:", add_special_tokens=False)["input_ids"]
    rows = runs.samples(result).to_pylist()
    assert len(rows) == 3 * 16
    for row in rows:
        assert row["prompt"].endswith("\nu:Sure?\na:")
        assert row["prompt_ids"][-len(turn) :] == turn  # type: ignore[arg-type]
        assert len(row["prompt_ids"]) <= 2 + 6 + len(turn)  # type: ignore[arg-type]


def test_estimates_know_how_long_continued_prompts_are(tiny: TinyRuns) -> None:
    bounded = plan(two_turns(tiny.folder, max_prompt_tokens=64), tiny.options())
    assert "tokens assumed" not in explain(bounded)
    second = second_of(tiny.folder, "Sure?")
    score = reward(asked_again, second)
    shown = explain(plan(trained(tiny.folder, second, score), tiny.options()))
    assert "first: prompts of 506 tokens assumed" in shown
    assert "second: prompts of 507 tokens assumed" in shown, "what 512 positions leave for 5"
    assert "continued -> second" in shown


def test_rows_that_the_first_answers_made_too_long_are_dropped(tiny: TinyRuns) -> None:
    rows = second_of(tiny.folder, None)
    short = generate(
        policy_of(tiny.folder),
        continued(answered(tiny.folder, max_tokens=20), name="again"),
        max_tokens=5,
        max_prompt_tokens=12,
        overlong_prompt="truncate",
        name="short",
    )
    assert rows.schema is Rollout
    graph = trained(tiny.folder, short, reward(lambda completions: [1.0] * len(completions), short))
    made = peek(graph, "short", 8, tiny.options(inproc=True)).to_pylist()
    first = peek(graph, "first", 8, tiny.options(inproc=True)).to_pylist()
    assert [row["prompt_ids"] for row in made] == [
        (row["prompt_ids"] + row["completion_ids"])[-12:] for row in first
    ]


# data by token ids


def spelt(prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    assert [prompt[0] for prompt in prompts] == list(answer)
    return [float(len(text)) for text in completions]


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_data_by_token_ids_trains_as_the_same_data_by_text(tiny: TinyRuns, form: str) -> None:
    table = pq.read_table(tiny.folder / "train.parquet")
    known = character_tokenizer()
    ids = [known(p, add_special_tokens=False)["input_ids"] for p in table["prompt"].to_pylist()]
    file = tiny.runs.parent / f"train.{form}"
    if form == "parquet":
        columns = {"prompt": pa.array(ids, pa.list_(pa.int32())), "answer": table["answer"]}
        pq.write_table(pa.table(columns), file)
    else:
        rows = zip(ids, table["answer"].to_pylist(), strict=True)
        file.write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in rows))

    def graph(data: Path) -> Graph:
        rollout = answered(tiny.folder, str(data))
        return trained(tiny.folder, rollout, reward(spelt, rollout))

    ours = tiny.run(graph(file), 2, inproc=True, name="ids")
    theirs = tiny.run(graph(tiny.folder / "train.parquet"), 2, inproc=True, name="text")
    named = ("prompt", "prompt_ids", "completion_ids", "reward")
    assert runs.samples(ours).select(named).equals(runs.samples(theirs).select(named))


def test_messages_may_end_in_the_assistants_turn(tiny: TinyRuns) -> None:
    def begun(prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
        assert all(prompt[-1] == {"role": "assistant", "content": "Well"} for prompt in prompts)
        return [float(len(answer[0]["content"])) for answer in completions]

    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "Well"}]
    file = tiny.runs.parent / "begun.parquet"
    pq.write_table(pa.table({"prompt": [turns] * 4}), file)
    rollout = answered(tiny.folder, str(file))
    result = tiny.run(trained(tiny.folder, rollout, reward(begun, rollout)), 1, inproc=True)
    expected = character_tokenizer()("u:q\na:Well", add_special_tokens=False)["input_ids"]
    assert {tuple(row) for row in runs.samples(result)["prompt_ids"].to_pylist()} == {
        tuple(expected)  # type: ignore[arg-type]
    }


# a reward model that reads text


@pytest.mark.parametrize("workers", ["one", pytest.param("apart", marks=pytest.mark.long)])
def test_a_reward_model_of_another_tokenizer_scores_a_run(tiny: TinyRuns, workers: str) -> None:
    judge = Model("rm", save_reward_model(tiny.runs.parent / "rm"), head="scalar")
    rollout = answered(tiny.folder)
    verdict = scores(judge, rollout, reads="text")
    loss = clipped_policy_loss(group_advantage(rollout, verdict))
    graph = Graph("rm", train(policy_of(tiny.folder), rollout, loss=loss, lr=1e-3))
    shown = explain(plan(graph, tiny.options()))
    assert "scores: rows tokenised anew" in shown
    result = tiny.run(graph, 2, workers=workers)
    rewards = runs.samples(result)["reward"].to_pylist()
    assert len(set(rewards)) > 4
    tokens = plan(graph, tiny.options()).node("scores")
    assert [f.columns for i in tokens.inputs for f in i.fetches] == [("completion",), ("prompt",)]
    assert Prompt.shown == ("prompt",)
