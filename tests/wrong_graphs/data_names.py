"""Data whose columns have names of the engine, one warning a function; golden files say how."""

from __future__ import annotations

from dataflow.graph import Graph
from operators.data import prompts
from operators.generate import generate
from operators.reward import reward
from tests.kit.rewards import zero
from tests.wrong_graphs.parts import judged, policy


def data_that_has_a_column_of_completions() -> Graph:
    prompt = prompts("data/completions.parquet", batch=64)
    rollout = generate(policy, prompt, n=8, max_tokens=64, name="rollout")
    return judged(rollout, reward(zero, rollout, name="score"))
