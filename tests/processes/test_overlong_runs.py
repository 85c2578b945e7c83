"""Prompts that do not fit, in whole runs: dropped or an error; nothing hangs."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataflow.errors import RunError
from dataflow.graph import Graph
from dataflow.model import Model
from engine.api import resume
from operators.advantage import group_advantage
from operators.data import demonstrations, prompts
from operators.generate import generate
from operators.losses import policy_gradient_loss, supervised_loss
from operators.reward import reward
from operators.train import evaluate, train
from tests.kit.run_graphs import policy_and_prompts, vowels
from tests.kit.runs import column, metrics, samples
from tests.kit.tiny_runs import TinyRuns

pytestmark = pytest.mark.timeout(180)

SHORT, LONG = "ab", "abcdefghij"
Policy = Literal["error", "drop", "truncate"]


@pytest.fixture
def tiny(tiny_folder: Path, tmp_path: Path) -> TinyRuns:
    """The tiny model, and prompts of which every second is long."""
    shutil.copytree(tiny_folder / "model", tmp_path / "model")
    data = {"mixed": [SHORT, LONG] * 8, "long": [LONG] * 6, "held": [SHORT, LONG, SHORT]}
    for name, asked in data.items():
        pq.write_table(pa.table({"prompt": asked}), tmp_path / f"{name}.parquet")
    return TinyRuns(folder=tmp_path, runs=tmp_path / "runs")


def graph(folder: Path, policy: Policy, data: str = "mixed", *, held: str = "") -> Graph:
    """GRPO on these prompts, of which 4 tokens fit. held: the prompts of an evaluation."""
    asked: dict[str, Any] = {"max_tokens": 4, "max_prompt_tokens": 4, "overlong_prompt": policy}
    model, source = policy_and_prompts(folder, data)
    rollout = generate(model, source, n=2, name="rollout", **asked)
    loss = policy_gradient_loss(group_advantage(rollout, reward(vowels, rollout, name="score")))
    sinks = [train(model, rollout, loss=loss, lr=1e-3)]
    if held:
        questions = prompts(str(folder / f"{held}.parquet"), name="held")
        answers = generate(model, questions, name="answers", **asked)
        sinks.append(evaluate(model, reward(vowels, answers, name="held_score"), every=10))
    return Graph("overlong", *sinks)


dropping = partial(graph, policy="drop")


@pytest.mark.long
def test_dropped_prompts_make_room_for_others(tiny: TinyRuns) -> None:
    result = tiny.run(dropping)
    last = metrics(result)[-1]
    assert column(result, "data/rows") == [8.0] * 3
    assert last["data/overlong"] >= 8
    assert last["data/dropped"] == 0
    assert last["data/admitted"] >= 4 + last["data/overlong"]
    assert 0 < max(column(result, "prompt/overlong")) <= 1
    assert set(samples(result)["prompt"].to_pylist()) == {SHORT}


@pytest.mark.long
def test_a_resumed_run_knows_how_many_were_dropped(tiny: TinyRuns) -> None:
    whole = tiny.run(dropping, 4, name="whole")
    again = resume(tiny.run(dropping, 2, name="first").folder, steps=4)
    for name in ("data/overlong", "data/admitted", "reward/mean", "loss/policy_gradient_loss"):
        assert column(again, name) == column(whole, name)


@pytest.mark.parametrize("steps", [3, pytest.param(None, marks=pytest.mark.long)])
def test_a_run_where_no_prompt_fits_ends_with_why(tiny: TinyRuns, steps: int | None) -> None:
    told = r"rollout.*expected at most 4 prompt tokens \(max_prompt_tokens=4\), found 10"
    with pytest.raises(RunError, match=told):
        tiny.run(partial(dropping, data="long"), steps)


@pytest.mark.long
def test_an_evaluation_leaves_them_out_and_says_how_many_it_had(tiny: TinyRuns) -> None:
    result = tiny.run(partial(dropping, held="held"), 1)
    assert metrics(result)[0]["eval/initial/rows"] == 2


@pytest.mark.long
def test_an_evaluation_of_nothing_is_an_error(tiny: TinyRuns) -> None:
    with pytest.raises(RunError, match=r"evaluate.*found 10"):
        tiny.run(partial(dropping, held="long"), 1)


@pytest.mark.long
def test_demonstrations_beyond_the_positions_are_dropped(tiny: TinyRuns) -> None:
    """Rows of 6 and of 14 tokens, the eos among them, for 12 positions."""
    config = tiny.folder / "model" / "config.json"
    positions = '"max_position_embeddings": '
    config.write_text(config.read_text().replace(f"{positions}512", f"{positions}12"))
    table = pa.table({"prompt": [SHORT] * 16, "completion": ["abc", LONG + "k"] * 8})
    pq.write_table(table, tiny.folder / "demos.parquet")
    model = Model("policy", str(tiny.folder / "model"), trainable=True)
    rows = demonstrations(str(tiny.folder / "demos.parquet"), batch=4, overlong="drop")
    graph = Graph("demos", train(model, rows, loss=supervised_loss(), lr=1e-3))
    assert column(tiny.run(graph, 2), "train/tokens") == [16.0, 16.0]
