"""Prompts that do not fit, in whole runs: dropped, cut or an error; nothing hangs where none fits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from run_graphs import vowels

from dataflow.errors import DataError, RunError
from dataflow.graph import Graph
from dataflow.model import Model
from engine.api import resume, run
from engine.observe.samples import read_samples
from operators.advantage import group_advantage
from operators.data import demonstrations, prompts
from operators.generate import generate
from operators.losses import policy_gradient_loss, supervised_loss
from operators.reward import reward
from operators.train import evaluate, train
from tests.kit.runs import metrics

Options = Callable[..., Any]
pytestmark = pytest.mark.timeout(180)

SHORT, LONG = "ab", "abcdefghij"


@pytest.fixture
def data(tiny: Path, tmp_path: Path) -> Path:
    """The tiny model, and prompts of which every second is long."""
    shutil.copytree(tiny / "model", tmp_path / "model")
    for name, asked in (
        ("mixed", [SHORT, LONG] * 8),
        ("long", [LONG] * 6),
        ("held", [SHORT, LONG, SHORT]),
    ):
        pq.write_table(pa.table({"prompt": asked}), tmp_path / f"{name}.parquet")
    return tmp_path


def graph(
    data: Path, policy: str, name: str = "mixed", *, max_lag: int = 0, held: str = ""
) -> Graph:
    model = Model("policy", str(data / "model"), trainable=True)
    asked: dict[str, Any] = {"max_tokens": 4, "max_prompt_tokens": 4, "overlong_prompt": policy}
    source = prompts(str(data / f"{name}.parquet"), batch=4)
    rollout = generate(model, source, n=2, max_lag=max_lag, name="rollout", **asked)
    loss = policy_gradient_loss(group_advantage(rollout, reward(vowels, rollout, name="score")))
    sinks = [train(model, rollout, loss=loss, lr=1e-3)]
    if held:
        kept = generate(
            model, prompts(str(data / f"{held}.parquet"), name="held"), name="answers", **asked
        )
        sinks.append(evaluate(model, reward(vowels, kept, name="held_score"), every=10))
    return Graph("overlong", *sinks)


@pytest.mark.parametrize("max_lag", [0, pytest.param(1, marks=pytest.mark.long)])
def test_dropped_prompts_make_room_for_others(data: Path, options: Options, max_lag: int) -> None:
    result = run(graph(data, "drop", max_lag=max_lag), options(3))
    rows = metrics(result.folder)
    assert [row["data/rows"] for row in rows] == [8.0] * 3
    assert rows[-1]["data/overlong"] >= 8
    assert rows[-1]["data/dropped"] == 0
    assert rows[-1]["data/admitted"] >= 12 + rows[-1]["data/overlong"] - 8
    assert 0 < max(row.get("prompt/overlong", 0.0) for row in rows) <= 1
    assert set(read_samples(result.folder / "samples")["prompt"].to_pylist()) == {SHORT}


@pytest.mark.long
def test_a_resumed_run_knows_how_many_were_dropped(data: Path, options: Options) -> None:
    whole = run(graph(data, "drop"), options(4, name="whole"))
    first = run(graph(data, "drop"), options(2, name="first"))
    again = metrics(resume(first.folder, steps=4).folder)
    same = ("data/overlong", "data/admitted", "reward/mean", "loss/policy_gradient_loss")
    assert [[row[name] for name in same] for row in again] == [
        [row[name] for name in same] for row in metrics(whole.folder)
    ]


@pytest.mark.long
def test_prompts_are_cut_to_their_end(data: Path, options: Options) -> None:
    rows = metrics(run(graph(data, "truncate", "long"), options(2)).folder)
    assert [row["prompt/overlong"] for row in rows] == [1.0, 1.0]
    assert rows[-1]["data/overlong"] == 0


@pytest.mark.parametrize("steps", [3, pytest.param(None, marks=pytest.mark.long)])
def test_a_run_of_which_no_prompt_fits_ends_with_the_reason(
    data: Path, options: Options, steps: int | None
) -> None:
    with pytest.raises(
        RunError,
        match=r"rollout.*expected at most 4 prompt tokens \(max_prompt_tokens=4\), found 10",
    ):
        run(graph(data, "drop", "long"), options(steps))


@pytest.mark.long
def test_an_evaluation_leaves_them_out_and_says_how_many_it_had(
    data: Path, options: Options
) -> None:
    rows = metrics(run(graph(data, "drop", held="held"), options(1)).folder)
    assert rows[0]["eval/initial/rows"] == 2


@pytest.mark.long
def test_an_evaluation_of_nothing_is_an_error(data: Path, options: Options) -> None:
    with pytest.raises(RunError, match=r"evaluate.*found 10"):
        run(graph(data, "drop", held="long"), options(1))


def demos(data: Path, policy: str) -> Graph:
    """Rows of 6 and of 14 tokens, the eos among them, for 12 positions."""
    config = (data / "model" / "config.json").read_text()
    (data / "model" / "config.json").write_text(
        config.replace('"max_position_embeddings": 512', '"max_position_embeddings": 12')
    )
    table = pa.table({"prompt": [SHORT] * 16, "completion": ["abc", LONG + "k"] * 8})
    pq.write_table(table, data / "demos.parquet")
    model = Model("policy", str(data / "model"), trainable=True)
    rows = demonstrations(str(data / "demos.parquet"), batch=4, overlong=policy)  # type: ignore[arg-type]
    return Graph("demos", train(model, rows, loss=supervised_loss(), lr=1e-3))


@pytest.mark.long
def test_demonstrations_beyond_the_positions(data: Path, options: Options) -> None:
    with pytest.raises(
        DataError,
        match=r"demonstrations.*expected at most 12 tokens, the positions of Model 'policy'",
    ):
        run(demos(data, "error"), options(2, name="error"))
    left = metrics(run(demos(data, "drop"), options(2, name="drop")).folder)
    assert [row["train/tokens"] for row in left] == [16.0, 16.0]
    cut = metrics(run(demos(data, "truncate"), options(4, name="truncate")).folder)
    assert sum(row["train/tokens"] for row in cut) == 8 * 4 + 8 * 10
