"""Whole runs on episodes: rewards of turns and of functions, and turns as rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.node import Port
from dataflow.schema import Episode
from engine.api import peek
from operators.advantage import add, gae, group_advantage
from operators.data import prompts
from operators.forward import values
from operators.generate import generate
from operators.losses import clipped_policy_loss, value_loss
from operators.reward import reward
from operators.train import train
from operators.turns import transitions, turn_reward
from tests.kit.episode_rows import as_episodes
from tests.kit.tiny_runs import TinyRuns

pytestmark = [pytest.mark.timeout(180), pytest.mark.long]


def by_state(
    completions: Sequence[str],
    environments: Sequence[Any],
    length: Sequence[int],
    answer: Sequence[str],
    **others: Any,
) -> list[float]:
    """Reads the state as an object and by an entry's name, beside a column of the data."""
    assert [environment.length for environment in environments] == list(length)
    assert len(answer) == len(completions)
    assert not {"messages", "environment_state", "version"} & others.keys()
    return [number / 8 for number in length]


def policy_of(folder: Path) -> Model:
    return Model("policy", str(folder / "model"), trainable=True)


def episodes_of(folder: Path) -> Port[Episode]:
    source = prompts(str(folder / "train.parquet"), batch=4)
    return as_episodes(generate(policy_of(folder), source, n=2, max_tokens=6))


def test_rewards_of_turns_and_of_functions_train_together(tiny: TinyRuns) -> None:
    episode = episodes_of(tiny.folder)
    score = add(turn_reward(episode), reward(by_state, episode))
    loss = clipped_policy_loss(group_advantage(episode, score))
    graph = Graph("g", train(policy_of(tiny.folder), episode, loss=loss, lr=1e-3))
    rows = peek(graph, "as_episodes", 16, tiny.options()).to_pylist()
    rewards = peek(graph, "add", 16, tiny.options())["reward"].to_pylist()
    assert rewards == [len(row["turn_end"]) + len(row["completion_ids"]) / 8 for row in rows]
    result = tiny.run(graph, 2)
    assert result.step == 2
    assert result.metrics["reward/turn/none"] == 0.0
    assert "reward/by_state/mean" in result.metrics


def test_an_actor_and_a_critic_learn_from_turns(tiny: TinyRuns) -> None:
    policy = policy_of(tiny.folder)
    critic = Model("critic", str(tiny.folder / "model"), trainable=True, head="scalar")
    turns: Any = transitions(episodes_of(tiny.folder), max_turns=3)
    advantage = gae(turns, turns, values(critic, turns))
    policy_node = train(
        policy, turns, loss=clipped_policy_loss(advantage), lr=1e-3, name="train_policy"
    )
    critic_node = train(critic, turns, loss=value_loss(advantage), lr=1e-3, name="train_critic")
    graph = Graph("turns", policy_node, critic_node)
    episodes = peek(graph, "as_episodes", 8, tiny.options()).to_pylist()
    rows = peek(graph, "transitions", 24, tiny.options()).to_pylist()
    assert len(rows) == sum(len(row["turn_end"]) for row in episodes)
    assert tiny.run(graph, 3).step == 3
