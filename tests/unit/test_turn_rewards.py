"""Rewards of turns: where they stand, what they sum to, and what returns make of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.batch import Batch, Keys
from dataflow.check import check
from dataflow.errors import DataError, GraphError
from dataflow.graph import Graph
from dataflow.kernel import KernelNode, Layout
from dataflow.model import Model
from dataflow.schema import Episode, Reward, Rollout, TokenReward, Values
from dataflow.user import Columns
from operators import advantage
from operators.data import prompts
from operators.generate import generate
from operators.kernels.turn_rewards import TurnRewards
from operators.losses import policy_gradient_loss
from operators.reward import reward
from operators.train import train
from operators.turn_formulas import turn_reward as formula
from operators.turns import TURN_REWARD, turn_reward
from tests.kit.episode_rows import (
    WrittenTurn,
    as_episodes,
    columns_of,
    episode_chunk,
    make_episodes,
)
from tests.kit.kernels import FakeSession
from tests.kit.rewards import zero
from tests.kit.rows import ragged
from tests.kit.turns import example_count

TWO_TURNS = [
    WrittenTurn(written=[3, 4], answer=[5, 6], reward=0.5),
    WrittenTurn(written=[7], reward=0.25),
]
NO_REWARD = [WrittenTurn(written=[3], answer=[5]), WrittenTurn(written=[7, 8])]


def tokens(scores: Columns[TokenReward]) -> list[list[float]]:
    return scores.batch.array("token_reward").to_pylist()


def test_a_turns_reward_stands_on_the_last_token_that_it_wrote() -> None:
    scores = formula(columns_of(make_episodes([TWO_TURNS, NO_REWARD, []])))
    assert tokens(scores) == [[0, 0.5, 0, 0, 0.25], [0, 0, 0, 0], []]
    assert scores["reward"].tolist() == [0.75, 0.0, 0.0]


def test_the_final_reward_stands_on_the_last_written_token_of_all() -> None:
    episodes = make_episodes([TWO_TURNS, NO_REWARD], final=[10.0, -1.0])
    scores = formula(columns_of(episodes))
    assert tokens(scores) == [[0, 0.5, 0, 0, 10.25], [0, 0, 0, -1]]
    assert scores["reward"].tolist() == [10.75, -1.0]


NUMBERS = st.none() | st.floats(-1e3, 1e3, width=32)
TURNS = st.builds(
    WrittenTurn,
    written=st.lists(st.just(3), min_size=1, max_size=3),
    answer=st.lists(st.just(4), min_size=1, max_size=3),
    reward=NUMBERS,
)
EPISODES = st.lists(
    st.tuples(st.lists(TURNS, min_size=1, max_size=4), NUMBERS), min_size=1, max_size=4
)


@given(EPISODES)
@settings(max_examples=example_count(60))
def test_the_rewards_of_tokens_sum_to_the_rows(episodes: list[Any]) -> None:
    rows = make_episodes([turns for turns, _ in episodes], final=[final for _, final in episodes])
    scores = formula(columns_of(rows))
    for row, (turns, final) in enumerate(episodes):
        total = sum(turn.reward or 0.0 for turn in turns) + (final or 0.0)
        assert scores["reward"][row] == np.float32(total)
        expected: list[float] = []
        for number, turn in enumerate(turns):
            last = (turn.reward or 0.0) + ((final or 0.0) if number == len(turns) - 1 else 0.0)
            expected += [0.0] * (len(turn.written) - 1) + [last] + [0.0] * len(turn.answer)
        assert tokens(scores)[row] == np.array(expected, np.float32).tolist()


@pytest.mark.parametrize(
    "turn_end, found",
    [
        ([[2, 9]], "turn 1 to end behind 2 of 5 completion tokens, on one with mask 1"),
        ([[3, 5]], "turn 0 to end behind 0 of 5"),
        ([[5, 2]], "turn 1 to end behind 5 of 5"),
    ],
)
def test_turns_that_end_elsewhere_are_refused(turn_end: list[list[int]], found: str) -> None:
    rows = make_episodes([TWO_TURNS], keys=Keys.of([7], [2]), turn_end=ragged(turn_end))
    with pytest.raises(DataError, match=rf"\(7, 2, 0\): expected {found}"):
        formula(columns_of(rows))


def run_kernel(rows: Batch) -> tuple[Batch, FakeSession]:
    session = FakeSession()
    kernel = TurnRewards()
    node = KernelNode(
        name="turns",
        operator="turn_reward",
        schemas={"episode": Episode},
        returns=("reward", "token_reward"),
        function=TURN_REWARD.function,
    )
    kernel.open(node, Layout(), session)
    (scores,) = kernel.run(episode_chunk(rows))
    return scores, session


def test_the_share_of_episodes_without_any_reward_is_a_metric() -> None:
    rows = make_episodes([TWO_TURNS, NO_REWARD, NO_REWARD, []], final=[None, None, 0.0, None])
    scores, session = run_kernel(rows)
    assert scores.flat("reward").tolist() == [0.75, 0.0, 0.0, 0.0]
    assert session.metrics == {"reward/turn/none": [(0.5, 4)]}


def test_a_users_episodes_may_have_turns_without_a_reward_but_none_that_is_nan() -> None:
    from operators.kernels.host import _find_first_not_finite as find

    assert find(make_episodes([TWO_TURNS, NO_REWARD]), "turn_reward") is None
    nan = pa.array([[None], [1.0, None], [None, float("nan")]], pa.large_list(pa.float32()))
    assert find(make_episodes([[], [], []], turn_reward=nan), "turn_reward") == 2


def test_it_adds_to_a_functions_reward() -> None:
    episode = as_episodes(generate(Model("p", "b"), prompts("d", batch=1), max_tokens=4))
    scores = turn_reward(episode)
    assert scores.schema is TokenReward
    assert advantage.add(scores, reward(zero, episode)).schema is TokenReward
    rows = make_episodes([TWO_TURNS])
    plain = Columns(Batch.make(rows.keys, {"reward": [2.0]}, Reward), Reward)
    both = advantage.ADD.function(formula(columns_of(rows)), plain, weights=(1.0, 0.5))  # type: ignore[misc]
    assert tokens(both) == [[0, 0.5, 0, 0, 1.25]]
    assert both["reward"].tolist() == [1.75]


def scan_as_verl(
    rewards: list[float], values: list[float], mask: list[int], gamma: float, lam: float
) -> list[float]:
    """verl 0.9.1, core_algos.compute_gae_advantage_return, for one row: an observed token passes on
    what stands behind it.
    """
    advantages = [0.0] * len(mask)
    next_value = running = 0.0
    for token in reversed(range(len(mask))):
        delta = rewards[token] + gamma * next_value - values[token]
        here = delta + gamma * lam * running
        next_value = values[token] * mask[token] + (1 - mask[token]) * next_value
        running = here * mask[token] + (1 - mask[token]) * running
        advantages[token] = running
    return advantages


@pytest.mark.parametrize("dialect", ["trl", "verl", "nemo_rl"])
@given(episodes=EPISODES, gamma=st.sampled_from([1.0, 0.5]))
@settings(max_examples=example_count(40))
def test_an_answered_token_is_no_step_of_discount(
    dialect: str, episodes: list[Any], gamma: float
) -> None:
    rows = make_episodes([turns for turns, _ in episodes], final=[final for _, final in episodes])
    episode = columns_of(rows)
    mask = rows.ragged("completion_mask")
    written_values = np.linspace(-1.0, 1.0, len(mask.values)).astype(np.float32)
    critic = Columns(Batch.make(rows.keys, {"values": mask.like(written_values)}, Values), Values)
    scores = formula(episode)
    rollout = Columns(rows, Rollout)
    both = advantage.GAE.function(  # type: ignore[misc]
        rollout, scores, critic, gamma=gamma, lam=0.5, dialect=dialect
    )
    for row, written in enumerate(tokens(scores)):
        expected = scan_as_verl(
            written, critic["values"][row].tolist(), mask[row].tolist(), gamma, 0.5
        )
        is_written = mask[row] > 0
        got = both["advantage"][row]
        np.testing.assert_allclose(got[is_written], np.array(expected)[is_written], atol=1e-2)
        assert not got[~is_written].any()


def test_openrlhf_discounts_by_answered_tokens_too() -> None:
    rows = make_episodes([TWO_TURNS])
    scores = formula(columns_of(rows))
    rollout = Columns(rows, Rollout)
    by_dialect = {}
    for dialect in ("trl", "openrlhf"):
        returned = advantage.RETURNS.function(rollout, scores, gamma=0.5, dialect=dialect)  # type: ignore[misc]
        by_dialect[dialect] = returned["advantage"][0].tolist()
    assert by_dialect["trl"] == [0.5 * (0.5 + 0.5 * 0.25), 0.5 + 0.5 * 0.25, 0, 0, 0.25]
    assert by_dialect["openrlhf"] == [0.5 * (0.5 + 0.25 / 8), 0.5 + 0.25 / 8, 0, 0, 0.25]


def test_an_advantage_of_the_group_stands_on_written_tokens_alone() -> None:
    rows = make_episodes([TWO_TURNS, NO_REWARD], keys=Keys.of([4, 4], [0, 1]))
    scores = formula(columns_of(rows))
    compared = advantage.GROUP_ADVANTAGE.function(  # type: ignore[misc]
        Columns(rows, Rollout), scores, baseline="mean", scale="none", ragged=False, dialect="trl"
    )
    half = 0.375
    assert compared.batch.array("advantage").to_pylist() == [
        [half, half, 0, 0, half],
        [-half, 0, -half, -half],
    ]


def test_rows_that_are_no_episodes_are_refused_with_what_makes_them() -> None:
    rollout = generate(Model("p", "b", trainable=True), prompts("d", batch=1), max_tokens=4)
    scores = turn_reward(rollout)  # type: ignore[arg-type]
    loss = policy_gradient_loss(advantage.returns(rollout, scores))
    policy = Model("p", "b", trainable=True)
    graph = Graph("g", train(policy, rollout, loss=loss, lr=1e-3))
    with pytest.raises(GraphError, match=r"expected Episode \(.*Fix: interact\("):
        check(graph, lambda data, split: {"prompt": pa.utf8()})


def test_a_sum_of_turn_rewards_is_nothing_to_warn_of() -> None:
    policy = Model("p", "models/tiny", trainable=True)
    episode = as_episodes(generate(policy, prompts("d", batch=4), n=2, max_tokens=4))
    compared = advantage.group_advantage(episode, turn_reward(episode))
    graph = Graph("g", train(policy, episode, loss=policy_gradient_loss(compared), lr=1e-3))
    assert not check(graph, lambda data, split: {"prompt": pa.utf8()}).warnings
