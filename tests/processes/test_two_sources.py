"""Runs in which one Model is trained on rows of two sources at once, by terms of one loss."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from dataflow.graph import Graph
from dataflow.model import Model
from operators.advantage import group_advantage
from operators.data import preferences
from operators.forward import logprobs
from operators.losses import clipped_policy_loss, dpo_loss
from operators.reward import reward
from operators.train import train
from tests.kit import runs
from tests.kit.files import save_jsonl
from tests.kit.run_graphs import rolled_out, sft_and_rl, vowels
from tests.kit.tiny_runs import TinyRuns

pytestmark = pytest.mark.timeout(180)


@pytest.mark.long
@pytest.mark.parametrize("batch, steps", [(8, 3), (2, 6)])
def test_the_first_source_to_end_ends_the_run(tiny: TinyRuns, batch: int, steps: int) -> None:
    result = tiny.run(partial(sft_and_rl, batch=batch), None)
    assert (result.step, result.reason) == (steps, "the data has ended")
    assert runs.column(result, "data/prompts") == [4 + batch] * steps


@pytest.mark.long
def test_pairs_beside_rollouts(tiny: TinyRuns, tmp_path: Path) -> None:
    told = [{"prompt": n, "chosen": n[0] * 2, "rejected": n[1]} for n in ("ab", "ba", "cd")]
    rows, pairs = preferences(save_jsonl(tmp_path / "pairs.jsonl", *told), batch=2)
    policy, rollout = rolled_out(tiny.folder, 4)
    advantage = group_advantage(rollout, reward(vowels, rollout, name="score"), name="advantage")
    reference = logprobs(Model("reference", str(tiny.folder / "model")), rows)
    other = dpo_loss(pairs, reference=reference, rows=rows)
    loss = clipped_policy_loss(advantage) + other
    graph = Graph("pairs", train(policy, rollout, loss=loss, lr=1e-3, minibatches=2))
    first, second = runs.metrics(tiny.run(graph, 2))
    assert first["data/prompts"] == second["data/prompts"] == 6
    assert 0.5 < first["loss/dpo_loss"] < 0.7
    assert first["dpo/accuracy"] in (0.0, 0.5, 1.0)
