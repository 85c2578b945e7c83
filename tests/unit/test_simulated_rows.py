"""How many rows a simulated run has, how long they are, and how many its selections keep."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataflow.batch import Keys
from dataflow.errors import PlanError
from dataflow.graph import Graph
from engine.plan.cost.distribution import constant_length
from engine.plan.explain import explain
from engine.plan.options import RunOptions
from engine.plan.plan import Plan
from engine.predict.row_statistics import SeenRows
from engine.predict.simulations import SimulatedRows, simulate
from engine.run.simulated_workers.behaviour import Outcomes
from engine.simulation.prediction import Prediction
from engine.simulation.prediction_run import predict
from operators.advantage import group_advantage
from operators.losses import clipped_policy_loss
from operators.select import best_of, mixed_groups, select
from tests.kit.files import save_character_tokenizer, save_jsonl
from tests.kit.graphs import grpo_graph, sampled, scored, trained
from tests.kit.plans import CONFIG, placed

pytestmark = pytest.mark.usefixtures("tiny")
SCORES = ("score", "eval_score")


def save_prompts(lengths: list[int], path: str = "train.parquet") -> None:
    """Prompts of so many characters, each a token; `tiny` can read them."""
    save_character_tokenizer(Path("tiny"))
    config = CONFIG | {"max_position_embeddings": 4096}
    Path("tiny/config.json").write_text(json.dumps(config))
    texts = ["x" * length for length in lengths]
    pq.write_table(pa.table({"prompt": texts, "answer": texts}), path)


def predicted(plan: Plan, **asked: Any) -> Prediction:
    scored = {node.name: 1e-3 for node in plan.nodes if node.name in SCORES}
    return predict(plan, **{"steps": 3, "seconds": scored} | asked)


def made(found: Prediction) -> Counter[str]:
    """Rows that each node made or trained, in all Steps."""
    rows: Counter[str] = Counter()
    for span in found.spans:
        rows[span.node] += span.rows
    return rows


# --- lengths of prompts ---------------------------------------------------------------------------


def test_prompts_are_as_long_as_those_of_the_data() -> None:
    save_prompts([700, 900])
    plan = placed(grpo_graph(batch=16, n=2, max_tokens=10))
    prediction = predicted(plan)
    tokens = [(step.tokens - 32 * 10) / 32 for step in prediction.steps]
    assert all(700 <= mean <= 900 for mean in tokens)
    assert len(set(tokens)) > 1, "each prompt is one of the data's"
    said = "prompts of 700 to 900 tokens, mean 800, from 2 rows of train.parquet"
    assert prediction.rows["prompts"] == said
    assert f"rollout: {said}" in plan.notes
    assert said in " ".join(explain(plan).split())


def test_estimates_are_of_the_longest_prompt_and_seconds_of_all() -> None:
    save_prompts([100, 100, 100, 1000])
    several = placed(grpo_graph(max_tokens=8)).node("rollout").estimate
    save_prompts([1000])
    longest = placed(grpo_graph(max_tokens=8)).node("rollout").estimate
    assert several.bytes == longest.bytes
    assert several.seconds is not None
    assert longest.seconds is not None
    assert several.seconds < 0.6 * longest.seconds


@pytest.mark.parametrize(
    ("params", "rows"),
    [
        ({"max_prompt_tokens": 300, "overlong_prompt": "truncate"}, "100 to 300 tokens, mean 200"),
        ({"max_prompt_tokens": 300, "overlong_prompt": "drop"}, "of 100 tokens, from 1 row of"),
        ({"max_tokens": 4096 - 400, "overlong_prompt": "truncate"}, "100 to 400 tokens, mean 250"),
        ({"max_prompt_tokens": 2000}, "100 to 900 tokens, mean 500"),
    ],
)
def test_no_counted_prompt_is_longer_than_graph_and_model_allow(
    params: dict[str, Any], rows: str
) -> None:
    save_prompts([100, 900])
    rollout = sampled(2, batch=4, **{"max_tokens": 8} | params)
    graph = Graph("g", trained(rollout))
    prediction = predicted(placed(graph), steps=1)
    assert rows in prediction.rows["prompts"]


def test_prompts_of_a_flag_are_longer_than_any_guess_or_the_data() -> None:
    given = SeenRows(prompts=constant_length(796))
    graph = grpo_graph(batch=4, n=2, max_tokens=10)
    prediction = predicted(placed(graph), lengths=given, steps=1)
    assert prediction.steps[0].tokens == 8 * 806, "not cut at a guess of 512"
    save_prompts([50])
    prediction = predicted(placed(graph), lengths=given, steps=1)
    assert prediction.steps[0].tokens == 8 * 806, "nor at the longest of the data"
    limited = placed(Graph("g", trained(sampled(2, batch=4, max_prompt_tokens=100))))
    prediction = predicted(limited, lengths=given, steps=1)
    assert "796 tokens, at most 100, as --prompts or --lengths says" in prediction.rows["prompts"]


def test_what_is_assumed_is_said() -> None:
    prediction = predicted(placed(grpo_graph(batch=4, n=2, max_tokens=10)), steps=1)
    why = "prompts of 512 tokens assumed (train.parquet: no such file): --prompts says others"
    assert prediction.rows["prompts"] == why
    assert prediction.rows["rollout"].startswith("answers of 10 tokens, the most that it may write")


# --- evaluations ----------------------------------------------------------------------------------


def evaluated(held: int) -> Graph:
    """Of so many held-out prompts, before the first Step and after the last."""
    rows = [{"prompt": f"{row} + 1 =", "answer": "2"} for row in range(held)]
    save_jsonl(Path("held.jsonl"), *rows)
    return grpo_graph(batch=4, n=2, max_tokens=8, eval_data="held.jsonl", eval_every=50)


def test_an_evaluation_has_the_rows_of_its_data() -> None:
    prediction = predicted(placed(evaluated(5)))
    rows = made(prediction)
    assert {name: rows[name] for name in rows if name.startswith("eval_")} == dict.fromkeys(
        ("eval_prompts", "eval_rollout", "eval_score"), 2 * 5
    )
    scores = [span for span in prediction.spans if span.node == "eval_score"]
    assert [span.busy for span in scores] == pytest.approx([5e-3, 5e-3])
    assert prediction.rows["eval_prompts"].startswith("5 rows; prompts of ")


def test_an_evaluation_of_an_unknown_number_of_rows_fills_the_slots_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = placed(evaluated(5))
    monkeypatch.setattr("engine.simulation.prediction_run.rows_in_data", lambda node: None)
    monkeypatch.setattr("engine.simulation.row_origins.rows_in_data", lambda node: None)
    prediction = predicted(plan, steps=1)
    assert "256 rows assumed, as many as have slots; " in prediction.rows["eval_prompts"]


def test_what_is_said_of_trained_prompts_is_not_said_of_counted_held_out_ones() -> None:
    save_prompts([90])
    save_prompts([40], "held.parquet")
    graph = grpo_graph(batch=4, n=2, max_tokens=8, eval_data="held.parquet")
    prediction = predicted(placed(graph), lengths=SeenRows(prompts=constant_length(700)), steps=1)
    assert "prompts of 700 tokens" in prediction.rows["prompts"]
    assert "1 rows; prompts of 40 tokens" in prediction.rows["eval_prompts"].replace(
        "1 row;", "1 rows;"
    )


# --- selections -----------------------------------------------------------------------------------


def selected(which: Any, *, refill: bool = False, n: int = 4, batch: int = 64) -> Graph:
    """A selection before training; its answers take much longer than training on them."""
    rollout = sampled(n, batch=batch, max_tokens=512)
    score = scored(rollout)
    where = which(score)
    rollout, score = select(rollout, score, where=where, refill=refill, name="chosen")
    advantage = group_advantage(rollout, score, name="advantage", ragged=which is not mixed_groups)
    return Graph("g", trained(rollout, clipped_policy_loss(advantage)))


def best_two(score: Any) -> Any:
    return best_of(score, k=2)


def test_a_refill_generates_until_the_batch_is_full() -> None:
    plan = placed(selected(mixed_groups, refill=True), workers="one")
    rows = SeenRows(prompts=constant_length(8), answers=constant_length(400))
    whole, half = (predicted(plan, lengths=rows, kept={"chosen": kept}) for kept in (1.0, 0.5))
    assert [step.rows for step in half.steps] == [step.rows for step in whole.steps] == [256] * 3
    assert made(half)["rollout"] == pytest.approx(2 * made(whole)["rollout"], rel=0.2)
    train = sum(span.busy for span in whole.spans if span.node == "train_policy")
    longer = (half.seconds - train) / (whole.seconds - train)
    assert 1.8 < longer < 2.8, "the last few prompts of a batch fill fewer slots"


def test_without_refill_later_nodes_get_the_rows_that_are_kept() -> None:
    plan = placed(selected(best_two))
    whole, half = (predicted(plan, kept=kept) for kept in ({}, {"chosen": 0.5}))
    assert made(half)["rollout"] == made(whole)["rollout"] == 3 * 256
    assert made(half)["advantage"] == made(half)["train_policy"] == 3 * 128
    assert [step.rows for step in half.steps] == [128] * 3
    nothing = predicted(plan, kept={"chosen": 0.0})
    assert [step.rows for step in nothing.steps] == [0] * 3


def test_what_a_selection_keeps_is_said() -> None:
    save_prompts([10] * 8)
    graph = selected(best_two)

    def said(**rows: Any) -> str:
        asked = SimulatedRows(steps=1, seconds={"score": 1e-3}, **rows)
        return simulate(graph, RunOptions(), asked).rows["chosen"]

    assert said() == "keeps all rows, as nothing says a share (--kept chosen=0.5)"
    assert said(kept={"chosen": 0.25}) == "keeps 25 % of its rows, as --kept says"
    run = SeenRows(kept={"chosen": 0.5, "of_another_graph": 0.1})
    assert said(lengths=run) == "keeps 50 % of its rows, as the run did"
    assert said(lengths=run, kept={"chosen": 0.25}) == "keeps 25 % of its rows, as --kept says"


@pytest.mark.parametrize(
    ("kept", "told"),
    [
        ({"chosn": 0.5}, r"expected a selection of the graph, found 'chosn'\. Fix: chosen\."),
        ({"rollout": 0.5}, r"found 'rollout'\. Fix: .*chosen"),
        ({"chosen": 1.5}, r"above 0 and at most 1, found 1\.5\. Fix: --kept chosen=0\.5"),
        ({"chosen": 0.0}, r"above 0 and at most 1, found 0\."),
    ],
)
def test_shares_that_mean_nothing_are_refused(kept: dict[str, float], told: str) -> None:
    plan = placed(selected(mixed_groups, refill=True))
    with pytest.raises(PlanError, match=told):
        predicted(plan, kept=kept)


def test_a_graph_without_selections_says_so() -> None:
    with pytest.raises(PlanError, match=r"found 'best'\. Fix: leave --kept out: this graph has no"):
        predicted(placed(grpo_graph()), kept={"best": 0.5})


def groups(of: Outcomes, n: int = 8) -> np.ndarray:
    """How many rows of each of 4,000 groups are kept."""
    count = 4000
    positions, samples = np.repeat(np.arange(count), n), np.tile(np.arange(n), count)
    chosen_rows = of.draw_kept_rows("chosen", Keys(positions, samples, np.zeros_like(samples)))
    return chosen_rows.reshape(count, n).sum(axis=1)


def test_rows_of_a_group_are_kept_as_the_selection_keeps_them() -> None:
    share, one = {"chosen": 0.3}, frozenset({"chosen"})
    whole = groups(Outcomes(keep=share, groups=one))
    assert set(whole.tolist()) == {0, 8}
    even = groups(Outcomes(keep=share, even=one))
    assert set(even.tolist()) == {2, 3}, "each group keeps its share, but for rounding"
    pairs = groups(Outcomes(keep={"chosen": 0.2}, pairs={"chosen": 8}))
    assert set(pairs.tolist()) == {0, 2}
    for kept, mean in ((whole, 0.3), (even, 0.3), (pairs, 0.2)):
        assert kept.mean() / 8 == pytest.approx(mean, abs=0.03)
