"""Weights of rows: how they are checked, planned and told, and what makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dataflow.batch import Batch, Keys
from dataflow.check import check
from dataflow.errors import DataError, GraphError, KernelError
from dataflow.graph import Graph
from dataflow.kernel import Chunk, KernelNode, Layout
from dataflow.model import Model
from dataflow.node import Port
from dataflow.schema import Keep, Prompt, Reward, Rollout, Weight
from dataflow.user import Columns, operator
from engine.channels.inproc import InprocChannel
from engine.run.worker.rows import WorkerRows
from operators.advantage import group_advantage
from operators.data import prompts
from operators.forward import scores
from operators.generate import generate
from operators.interact import interact
from operators.kernels.data_weight import DataWeight
from operators.kernels.prompt_rows import PromptTokens
from operators.losses import clipped_policy_loss
from operators.reward import reward
from operators.row_weights import data_weight, prompt_rows, weight_of
from operators.select import select
from operators.train import train
from operators.weight_formulas import answer_length
from tests.kit.environments import VowelTurns
from tests.kit.kernels import FakeSession
from tests.kit.models import CHARACTERS, EOS, save_tiny
from tests.kit.plans import headers, planned
from tests.kit.ragged_lists import ragged
from tests.kit.run_graphs import vowels

MODEL = "models/tiny"
policy = Model("policy", MODEL, trainable=True)
ranker = Model("ranker", MODEL, head="scalar")


def graph_of(rollout: Port[Rollout]) -> Graph:
    score = reward(vowels, rollout, name="score")
    loss = clipped_policy_loss(group_advantage(rollout, score))
    return Graph("weighted", train(policy, rollout, loss=loss, lr=1e-3))


def source() -> Port[Prompt]:
    return prompts("x.parquet", batch=4)


def ranked(prompt: Port[Prompt]) -> Port[Weight]:
    return weight_of(scores(ranker, prompt_rows(prompt)))


def rollout_by(weigh: Callable[[Port[Prompt]], Any]) -> Port[Rollout]:
    prompt = source()
    return generate(policy, prompt, n=2, max_tokens=8, weight=weigh(prompt), name="rollout")


def data_column(name: str) -> Callable[[Port[Prompt]], Port[Weight]]:
    return lambda prompt: data_weight(prompt, column=name)


# --- checked --------------------------------------------------------------------------------------


@pytest.mark.parametrize("weigh", [ranked, data_column("level")])
def test_a_weight_is_any_of_the_prompts_rows(weigh: Callable[..., Any]) -> None:
    assert check(graph_of(rollout_by(weigh)), headers).warnings == ()


def scored_weight(prompt: Port[Prompt]) -> Port[Reward]:
    return scores(ranker, prompt_rows(prompt))


def later_weight(prompt: Port[Prompt]) -> Port[Weight]:
    first = generate(policy, prompt, n=2, max_tokens=8, name="first")
    return weight_of(reward(vowels, first, name="first_score"))


def other_weight(prompt: Port[Prompt]) -> Port[Weight]:
    return data_weight(prompts("x.parquet", batch=4, name="others"), column="level")


@pytest.mark.parametrize(
    ("weigh", "problem", "fix"),
    [
        (
            scored_weight,
            "expected Weight (weight: float per row), found Reward",
            "weight_of(score)",
        ),
        (later_weight, "'weight' on prompts x2", "mean_over(reward, prompts)"),
        (other_weight, "'prompt' stands on prompts, 'weight' on others", "come from one source"),
        (
            data_column("levle"),
            "wants 'levle', prompts 'x.parquet' has: prompt, answer, level",
            "'level'",
        ),
        (lambda prompt: 3.0, "expected Port[Weight], the output of an operator, found float", ""),
    ],
)
def test_what_is_no_weight_of_these_rows_is_refused(
    weigh: Callable[..., Any], problem: str, fix: str
) -> None:
    with pytest.raises(GraphError) as caught:
        check(graph_of(rollout_by(weigh)), headers)
    told = str(caught.value)
    assert problem in told
    assert fix in told.partition("Fix: ")[2]


def test_an_interaction_takes_one_too() -> None:
    prompt = source()
    episode = interact(
        policy, prompt, VowelTurns, n=2, max_turns=2, max_tokens=8, weight=ranked(prompt)
    )
    plan = planned(graph_of(episode))
    assert plan.node("interact").inputs[1].gate == "weight_of"
    assert plan.node("weight_of").weight == "weight"


# --- planned --------------------------------------------------------------------------------------


def test_its_bytes_do_not_travel_to_the_generation() -> None:
    plan = planned(graph_of(rollout_by(ranked)))
    weight = next(i for i in plan.node("rollout").inputs if i.name == "weight")
    assert (weight.gate, weight.fetches) == ("weight_of", ())
    assert {n.name: n.weight for n in plan.nodes if n.weight} == {"weight_of": "weight"}
    assert {plan.node(name).region for name in ("prompt_rows", "scores", "rollout")} == {"stream"}
    (recorded,) = plan.recorded
    weights = [f for f in recorded.fetches if f.producer == "weight_of"]
    assert [(f.columns, f.ratio) for f in weights] == [(("weight",), 2)]


@operator()
def heavy(weight: Columns[Weight]) -> Columns[Keep]:
    return Columns.make(Keep, like=weight, keep=(weight["weight"] > 0).astype(np.uint8))


def test_behind_a_selection_the_gate_is_what_made_it() -> None:
    prompt = source()
    weight = ranked(prompt)
    heavy_prompt, weight = select(prompt, weight, where=heavy(weight))
    rollout = generate(policy, heavy_prompt, n=2, max_tokens=8, weight=weight, name="rollout")
    plan = planned(graph_of(rollout))
    gates = {i.name: i.gate for i in plan.node("rollout").inputs}
    assert gates == {"prompt": "select", "weight": "weight_of"}


# --- told -----------------------------------------------------------------------------------------


def keep_weights(weights: list[float]) -> np.ndarray:
    """What a Worker tells of rows with these weights."""
    plan = planned(graph_of(rollout_by(ranked)))
    rows = WorkerRows("main", plan, InprocChannel())
    batch = Batch.make(Keys.of(range(5, 5 + len(weights))), {"weight": weights}, Weight)
    return rows.keep("weight_of", batch).weight


def test_a_worker_tells_the_weights_of_its_rows() -> None:
    told = keep_weights([3.0, -1.0, 0.5])
    assert told.dtype == np.float32
    assert told.tolist() == [3.0, -1.0, 0.5]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_names_its_row(wrong: float) -> None:
    with pytest.raises(KernelError, match=r"weight_of: row \(6, 0, 0\): expected a finite weight"):
        keep_weights([3.0, wrong])


def test_rows_that_weigh_nothing_tell_none() -> None:
    plan = planned(graph_of(rollout_by(ranked)))
    rows = WorkerRows("main", plan, InprocChannel())
    batch = Batch.make(Keys.of([0]), {"reward": [1.0]}, Reward)
    assert rows.keep("score", batch).weight.tolist() == []


# --- made -----------------------------------------------------------------------------------------


def run_on_prompts(
    kernel: Any, columns: dict[str, Any], session: FakeSession | None = None, **node: Any
) -> Batch:
    keys = Keys.of(range(10, 10 + len(next(iter(columns.values())))))
    kernel.open(
        KernelNode(name="made", operator="made", **node), Layout(), session or FakeSession()
    )
    rows = Batch.make(keys, columns, Prompt)
    (batch,) = kernel.run(Chunk(id=0, step=0, keys=keys, inputs={"prompt": rows}))
    return batch


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1, 2], pa.uint8()),
        pa.array([1, 2], pa.int64()),
        pa.array([1.0, 2.0], pa.float64()),
        pa.array([1.0, 2.0], pa.float32()),
    ],
)
def test_a_column_of_numbers_is_a_weight(column: pa.Array) -> None:
    batch = run_on_prompts(DataWeight(), {"effort": column}, params={"column": "effort"})
    assert batch.array("weight").type == pa.float32()
    assert batch.flat("weight").tolist() == [1.0, 2.0]


def test_a_missing_weight_names_its_row() -> None:
    column = pa.array([1.0, None])
    with pytest.raises(DataError, match=r"row \(11, 0, 0\): expected a number in column 'effort'"):
        run_on_prompts(DataWeight(), {"effort": column}, params={"column": "effort"})


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model", layers=1)


def prompt_batch(
    base: str, column: Any, session: FakeSession | None = None, **params: Any
) -> Batch:
    models = {"tokenizer": Model("ranker", base, head="scalar")}
    return run_on_prompts(PromptTokens(), {"prompt": column}, session, models=models, params=params)


def tokens(text: str) -> list[int]:
    return [CHARACTERS.index(letter) for letter in text]


def test_a_prompt_is_a_row_that_ends_in_the_end_token(base: str) -> None:
    batch = prompt_batch(base, ["ab", "", "c"])
    prompt_ids = batch.ragged("prompt_ids")
    assert [prompt_ids[row].tolist() for row in range(3)] == [tokens("ab"), [EOS], tokens("c")]
    assert batch.ragged("completion_ids").values.tolist() == [EOS] * 3
    assert batch.lengths("completion_mask").tolist() == [1, 1, 1]
    assert batch.ragged("completion_mask").values.tolist() == [1, 1, 1]


def test_messages_are_rendered_by_the_template(base: str) -> None:
    messages = pa.array([[{"role": "user", "content": "hi"}]])
    prompt_ids = prompt_batch(base, messages).ragged("prompt_ids")[0].tolist()
    assert prompt_ids[:4] == tokens("u:hi")
    assert prompt_ids[-2:] == tokens("a:")


def test_of_a_prompt_that_is_too_long_the_end_stays(base: str) -> None:
    session = FakeSession()
    batch = prompt_batch(base, ["abcd", "e"], session, overlong="truncate", positions=3)
    assert batch.ragged("prompt_ids")[0].tolist() == tokens("cd")
    assert session.metrics == {"made/overlong": [(0.5, 2)]}
    with pytest.raises(DataError, match=r"row \(10, 0, 0\): expected at most 2 tokens"):
        prompt_batch(base, ["abcd", "e"], overlong="error", positions=3)
    session = FakeSession()
    batch = prompt_batch(base, ["abcd", "e"], session, overlong="drop", positions=3)
    assert batch.keys.position.tolist() == [11]
    assert [key for key, _ in session.tombstones] == [(10, 0, 0)]


def test_a_length_counts_what_the_model_wrote() -> None:
    masks = ragged([[1, 0, 1], [0], [1]])
    columns = {"completion_mask": masks.like(masks.values.astype(np.uint8))}
    rollout = Columns(Batch.make(Keys.of([0, 0, 1], [0, 1, 0]), columns, Rollout), Rollout)
    assert answer_length(rollout, log=False)["reward"].tolist() == [2.0, 0.0, 1.0]
    logs = answer_length(rollout)["reward"]
    np.testing.assert_allclose(logs, np.log([3.0, 1.0, 2.0]), rtol=1e-6)
