"""Rewards by token stay so: `add`, `overlong_penalty`, and what reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.batch import Batch, Keys
from dataflow.model import Model
from dataflow.schema import Reward, Rollout, Schema, TokenReward
from dataflow.user import Columns
from operators import advantage
from operators.data import prompts
from operators.forward import logprobs
from operators.generate import generate
from operators.reward import reward
from tests.kit.rewards import zero
from tests.kit.rows import ragged
from tests.kit.turns import example_count

_NUMBER = st.floats(-8, 8, width=16)


def columns(schema: type[Schema], **given_: object) -> Columns:
    """Rows 0, 1, ... of these columns; lists are token columns."""
    rows = len(next(iter(given_.values())))  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for name, value in given_.items():
        lists = isinstance(value, list) and value and isinstance(value[0], list)
        kind = {"completion_mask": np.uint8, "completion_ids": np.int32}.get(name, np.float32)
        values[name] = ragged(value, kind) if lists else value  # type: ignore[arg-type]
    return Columns(Batch.make(Keys.of(range(rows)), values, schema), schema)


def tokens(result: Columns, name: str) -> list[list[float]]:
    return [result[name][row].tolist() for row in range(len(result))]


SPREAD = columns(TokenReward, reward=[3.0, 0.5, 0.0], token_reward=[[1.0, 2.0], [0.5], []])
PLAIN = columns(Reward, reward=[10.0, 20.0, 30.0])


@pytest.mark.parametrize(("scores", "weights", "reward", "by_token"), [
    # A plain reward is added to the last token alone; tokens to tokens wherever they stand.
    ((SPREAD, PLAIN), (1.0, 0.5), [8.0, 10.5, 15.0], [[1.0, 7.0], [10.5], []]),
    ((PLAIN, SPREAD, SPREAD), None, [16.0, 21.0, 30.0], [[2.0, 14.0], [21.0], []]),
])  # fmt: skip
def test_rewards_of_tokens_stay_so(
    scores: Any, weights: Any, reward: list[float], by_token: list[list[float]]
) -> None:
    result = advantage.ADD.function(*scores, weights=weights)  # type: ignore[misc]
    assert result["reward"].tolist() == reward
    assert tokens(result, "token_reward") == by_token


def test_plain_rewards_stay_plain() -> None:
    assert advantage.ADD.function(PLAIN, PLAIN, weights=None).batch.names == ["reward"]  # type: ignore[misc]


def test_the_penalty_of_a_long_answer_stands_on_its_last_token() -> None:
    rollout = columns(Rollout, completion_ids=[[5, 6], [7], []])
    result = advantage.OVERLONG_PENALTY.function(
        rollout, SPREAD, max_tokens=2, buffer=2, factor=1.0, dialect="trl"
    )  # type: ignore[misc]
    assert result["reward"].tolist() == [2.0, 0.0, 0.0]
    assert tokens(result, "token_reward") == [[1.0, 1.0], [0.0], []]


ROWS = st.lists(
    st.lists(st.tuples(st.booleans(), _NUMBER, _NUMBER), min_size=1, max_size=5).filter(
        lambda r: any(m for m, *_ in r)
    ),
    min_size=1,
    max_size=4,
)


@given(ROWS, st.sampled_from([1.0, 0.9]), st.data())
@settings(max_examples=example_count(50))
def test_returns_of_a_sum_are_their_sum(rows: list, gamma: float, data: st.DataObject) -> None:
    """With any tokens written or left out: the plain reward counts once, where it would alone."""
    plain = data.draw(st.lists(_NUMBER, min_size=len(rows), max_size=len(rows)))
    rollout = columns(Rollout, completion_mask=[[int(m) for m, *_ in row] for row in rows])
    tokens = [[r for _, r, _ in row] for row in rows]
    spread = columns(TokenReward, reward=[sum(row) for row in tokens], token_reward=tokens)
    score = columns(Reward, reward=plain)
    both = advantage.ADD.function(spread, score, weights=None)  # type: ignore[misc]
    values = columns(Schema, values=[[0.0] * len(row) for row in rows])
    for scan in (
        lambda s: advantage.RETURNS.function(rollout, s, gamma=gamma, dialect="trl"),  # type: ignore[misc]
        lambda s: advantage.GAE.function(rollout, s, values, gamma=gamma, lam=0.9, dialect="trl"),  # type: ignore[misc]
    ):
        apart = scan(spread)["advantage"].values + scan(score)["advantage"].values
        np.testing.assert_allclose(scan(both)["advantage"].values, apart, rtol=1e-4, atol=1e-4)


def test_their_ports_say_that_they_are_spread() -> None:
    rollout = generate(Model("p", "b"), prompts("d", batch=1), max_tokens=4)
    score = reward(zero, rollout)
    spread = advantage.kl_in_reward(rollout, score, logprobs(Model("r", "b"), rollout), beta=0.1)
    assert advantage.add(score, spread).schema is TokenReward
    assert advantage.add(score, score).schema is Reward
    assert advantage.overlong_penalty(rollout, spread, max_tokens=4, buffer=2).schema is TokenReward
    assert advantage.overlong_penalty(rollout, score, max_tokens=4, buffer=2).schema is Reward
