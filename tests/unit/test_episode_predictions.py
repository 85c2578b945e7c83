"""A machine measured and a plan simulated, of graphs whose rows have several turns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dataflow.graph import Graph
from dataflow.model import Model
from engine.plan.cost.devices import device
from engine.plan.plan import Plan
from engine.predict.profile.grid import choose_works
from engine.predict.profile.kernel_timing import measure
from engine.simulation.prediction import Prediction
from engine.simulation.prediction_run import predict
from operators.advantage import group_advantage
from operators.data import prompts
from operators.interact import interact
from operators.losses import clipped_policy_loss
from operators.reward import reward
from operators.train import train
from tests.kit.plans import placed, planned
from tests.kit.run_graphs import vowels

SEGMENTS: dict[str, Any] = {"overflow": "segment", "compact": list, "segments": 4}


class Unasked:
    """An environment that a profile must not ask."""

    def reset(self) -> None:
        raise RuntimeError("a profile asked the environment")

    def step(self, message: Any) -> None:
        raise RuntimeError("a profile asked the environment")


def graph(base: str, **how: Any) -> Graph:
    policy = Model("policy", base, trainable=True)
    usual: dict[str, Any] = {"n": 4, "max_turns": 4, "max_tokens": 32, "max_prompt_tokens": 16}
    tasks = prompts("tasks", batch=8)
    episodes = interact(policy, tasks, Unasked, name="episodes", **usual | how)
    score = reward(vowels, episodes, name="score")
    loss = clipped_policy_loss(group_advantage(episodes, score))
    return Graph("episodes", train(policy, episodes, loss=loss, lr=1e-5))


def test_a_profile_measures_the_writing_alone(base: str) -> None:
    """In rows of the cell's lengths, of n answers to a prompt: no turn ends one of them."""
    plan = planned(graph(base, **SEGMENTS))
    works, skipped = choose_works([plan], device("cpu"), quick=True, longest=0.1)
    assert not skipped
    [work] = [work for work in works if work.node == "episodes"]
    assert work.kind == "decode"
    assert work.samples == 4
    cell = replace(work.cells[0], rows=8, prompt=5, answer=6)
    work = replace(work, cells=(cell,))
    [measured] = measure(plan, work, repeats=1, further=0)
    assert measured.prompts == (5,) * 8
    assert measured.answers == (6,) * 8


def simulate(plan: Plan) -> Prediction:
    return predict(plan, steps=3, seconds={"score": 1e-4})


def test_a_simulation_runs_episodes_of_one_row(base: str) -> None:
    plain = simulate(placed(graph(base), workers="one"))
    assert [(step.rows, step.tokens) for step in plain.steps] == [(32, 32 * (16 + 32))] * 3
    several = simulate(placed(graph(base, **SEGMENTS), workers="one"))
    assert [(step.rows, step.tokens) for step in several.steps] == [(32, 32 * (16 + 32))] * 3
    written = [
        [span.busy for span in each.spans if span.node == "episodes"] for each in (plain, several)
    ]
    assert written[1] == pytest.approx(written[0], rel=0.05)
