"""Process rewards: what the function sees, where its numbers go, every wrong answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dataflow.batch import Batch
from dataflow.errors import GraphError, KernelError
from dataflow.graph import Graph
from dataflow.kernel import Chunk
from dataflow.model import Model
from engine.api import peek
from operators.advantage import returns
from operators.data import demonstrations, prompts
from operators.generate import generate
from operators.kernels.scoring import HostReward
from operators.kernels.step_scoring import StepReward
from operators.kernels.text import to_ragged
from operators.losses import policy_gradient_loss
from operators.reward import step_reward
from operators.train import train
from tests.kit.models import EOS, character_tokenizer
from tests.kit.rows import ragged
from tests.kit.scoring import ScoringSession, answers, scoring
from tests.kit.tiny_runs import TinyRuns

pytestmark = [pytest.mark.timeout(180), pytest.mark.long]


def lengths(steps: list[list[str]]) -> list[list[float]]:
    return [[float(len(step)) for step in row] for row in steps]


def picky(completions: list[str], steps: list[list[str]]) -> list[list[Any]]:
    """Each step says what happens to it."""
    special = {"none": None, "nan": float("nan")}
    return [
        [special.get(step, 1.0) for step in row if step != "short"]
        for row, text in zip(steps, completions, strict=True)
        if text != "gone"
    ]


@pytest.fixture(scope="module")
def base(tiny_folder: Path) -> str:
    return str(tiny_folder / "model")


@contextmanager
def scored(base: str, *fns: Any, **params: Any) -> Iterator[tuple[HostReward, ScoringSession]]:
    models = {"tokenizer": Model("policy", base)}
    usual = {"split": "|", "inproc": True}
    with scoring(*fns, kind=StepReward, models=models, **usual | params) as opened:
        yield opened


def written(texts: list[str], masks: list[list[int]] | None = None, **columns: Any) -> Chunk:
    """A chunk of these answers, one token a character and an <eos>, the first at position 10."""
    known = character_tokenizer()
    ids = [[*known(text, add_special_tokens=False)["input_ids"], EOS] for text in texts]  # type: ignore[misc]
    mask = ragged(masks or [[1] * len(row) for row in ids], np.uint8)
    return answers(texts, completion_ids=to_ragged(ids), completion_mask=mask, **columns)


def tokens(batch: Batch) -> list[list[float]]:
    return batch.array("token_reward").to_pylist()


def test_each_number_stands_on_its_steps_last_token_and_the_reward_is_their_sum(base: str) -> None:
    with scored(base, lengths, inproc=False) as (kernel, _):
        [batch] = kernel.run(written(["abc|d", "x|", ""]))
        assert batch.names == ["reward", "reward/lengths", "token_reward"]
        assert tokens(batch) == [[0, 0, 0, 3, 0, 1], [0, 1, 0], [0]]
        assert batch.flat("reward").tolist() == [4.0, 1.0, 0.0]
        assert batch.array("reward/lengths").to_pylist() == [4.0, 1.0, 0.0]


def test_the_function_gets_steps_and_what_every_reward_function_gets(base: str) -> None:
    def look(prompts: Any, completions: Any, steps: Any, log_metric: Any, **others: Any) -> Any:
        assert prompts == [[{"role": "user", "content": "q"}]]
        assert completions == [[{"role": "assistant", "content": "a|b"}]]
        assert others.pop("completion_ids") == [[10, 91, 11, EOS]]
        assert others == {"answer": ["x"]}
        log_metric("steps", len(steps[0]))
        return [np.arange(len(row)) for row in steps]

    prompt = pa.array([[{"role": "user", "content": "q"}]])
    chunk = written(["a|b"], prompt=prompt, answer=["x"], steps=["a column of the data"])
    with scored(base, look) as (kernel, session):
        [batch] = kernel.run(chunk)
        assert tokens(batch) == [[0, 0, 0, 1]]
        assert session.logged() == [("reward/look/steps", 2.0)]


def test_tool_output_gets_no_number(base: str) -> None:
    with scored(base, lengths) as (kernel, _):
        [batch] = kernel.run(written(["ab|cc|d"], [[1, 1, 1, 0, 0, 0, 1, 1]]))
        assert tokens(batch) == [[0, 0, 2 + 2, 0, 0, 0, 0, 1]]


def test_none_counts_nothing_and_a_row_of_none_is_an_error(base: str) -> None:
    with scored(base, picky, on_error="drop_group") as (kernel, session):
        [batch] = kernel.run(written(["none|x", "none|none", ""]))
        assert tokens(batch) == [[0, 0, 0, 0, 0, 0, 1], [0]]
        assert batch.keys.position.tolist() == [10, 12]
        assert "no reward for row 11/0" in session.failed[11, 0, 0]
        assert "a function that applies to a step of every row" in session.failed[11, 0, 0]


@pytest.mark.parametrize("bad, message", [
    ("x|short", "reward 'picky' returned 1 values for 2 steps, of completion 0"),
    ("gone", "reward 'picky' returned 0 lists for 1 completions"),
    ("x|nan", "reward 'picky' returned nan as value 1 of 2, of completion 0"),
])  # fmt: skip
def test_every_failure_names_its_row_and_gives_up_only_that_row(
    base: str, bad: str, message: str
) -> None:
    with scored(base, picky, on_error="drop_group", inproc=False) as (kernel, session):
        [batch] = kernel.run(written(["fine", bad, "a|b"]))
        assert batch.keys.position.tolist() == [10, 12]
        assert tokens(batch) == [[0, 0, 0, 0, 1], [0, 1, 0, 1]]
        assert list(session.failed) == [(11, 0, 0)]
        assert session.failed[11, 0, 0].startswith(f"node 'score': {message}")
        assert "(row 11/0, step 3)" in session.failed[11, 0, 0]


@pytest.mark.parametrize("made, message", [
    (1.0, "returned float, expected a list with a list of its steps' numbers"),
    ([1.0], "returned float, expected a list with a number for each step, of completion 0"),
    (["ab"], "returned str, expected a list with a number for each step"),
    (np.zeros((1, 2, 1)), "returned an array of shape (2, 1), expected (2,), of completion 0"),
])  # fmt: skip
def test_what_is_no_list_of_lists_is_refused(base: str, made: Any, message: str) -> None:
    with (
        scored(base, lambda steps: made) as (kernel, _),
        pytest.raises(KernelError) as caught,
    ):
        list(kernel.run(written(["a|b"])))
    assert message in str(caught.value)


def no_steps(completions: list[str]) -> list[list[float]]:
    return [[] for _ in completions]


@pytest.mark.parametrize("fn, given, message", [
    (no_steps, {}, "expected a function that takes `steps`, found completions"),
    ([lengths, lengths], {}, "expected a function, found list"),
    ("lengths", {}, "expected a function, found str"),
    (lengths, {"split": ""}, "expected split to be text that is not empty, found ''"),
    (lengths, {"weights": [1.0]}, "unknown parameter 'weights'"),
])  # fmt: skip
def test_wrong_calls_are_refused(fn: Any, given: Any, message: str) -> None:
    rollout = generate(Model("policy", "m"), prompts("d.parquet", batch=4), max_tokens=8)
    with pytest.raises(GraphError) as caught:
        step_reward(fn, rollout, **given)
    assert message in str(caught.value)


# in a graph


def test_demonstrations_are_decoded_by_the_model_that_is_trained_on_them(tiny: TinyRuns) -> None:
    policy = Model("policy", str(tiny.folder / "model"), trainable=True)
    rows = demonstrations(str(tiny.folder / "demos.parquet"), batch=4)
    advantage = returns(rows, step_reward(lengths, rows, split="b"))
    graph = Graph("g", train(policy, rows, loss=policy_gradient_loss(advantage), lr=1e-3))
    made = peek(graph, "step_reward", 24, tiny.options())
    assert set(made["reward"].to_pylist()) == {3.0, 0.0}, "aaa is a step of three, bbb is none"
