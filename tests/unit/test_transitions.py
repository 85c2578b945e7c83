"""Transitions: each turn of an episode as a row, and the rows of turns that were not taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.batch import Batch, Keys
from dataflow.errors import DataError
from dataflow.graph import Graph
from dataflow.kernel import KernelNode, Layout
from dataflow.model import Model
from dataflow.schema import (
    Episode,
    Reward,
    Rollout,
    Transition,
    TruncatedEpisode,
    TruncatedTransition,
)
from dataflow.user import Columns, operator
from engine.plan.cost.column_bytes import column_bytes
from engine.plan.cost.lengths import Lengths
from operators.advantage import gae
from operators.data import prompts
from operators.forward import values
from operators.generate import generate
from operators.kernels.transitions import Transitions
from operators.losses import clipped_policy_loss, value_loss
from operators.train import train
from operators.turns import transitions
from tests.kit.episode_rows import WrittenTurn, as_episodes, episode_chunk, make_episodes
from tests.kit.kernels import FakeSession
from tests.kit.plans import planned
from tests.kit.turns import example_count

WITHOUT_TEXT = tuple(name for name in Transition.columns if name != "completion")


def cut(
    rows: Batch, max_turns: int, returns: tuple[str, ...] = WITHOUT_TEXT, **models: Any
) -> tuple[list[Batch], FakeSession]:
    """What the kernel makes of these episodes."""
    session = FakeSession()
    kernel = Transitions()
    node = KernelNode(
        name="turns",
        operator="transitions",
        params={"max_turns": max_turns},
        returns=returns,
        models=models,
    )
    kernel.open(node, Layout(), session)
    batches = list(kernel.run(episode_chunk(rows)))
    kernel.close()
    return batches, session


TWO_TURNS = [
    WrittenTurn(written=[3, 4], answer=[5, 6], reward=0.5),
    WrittenTurn(written=[7], reward=0.25),
]
ONE_TURN = [WrittenTurn(written=[8, 9, 8])]


def test_a_turns_prompt_is_all_that_stood_before_it() -> None:
    rows = make_episodes(
        [TWO_TURNS, ONE_TURN],
        final=[1.0, None],
        keys=Keys.of([7, 9], [1, 0], [0, 2]),
        prompts=[[1], [2, 2]],
        finish=["turns", "length"],
    )
    [turns], session = cut(rows, 3)
    columns = {name: turns.array(name).to_pylist() for name in turns.names}
    assert columns["prompt_ids"] == [[1], [1, 3, 4, 5, 6], [2, 2]]
    assert columns["completion_ids"] == [[3, 4], [7], [8, 9, 8]]
    assert columns["completion_mask"] == [[1, 1], [1], [1, 1, 1]]
    assert columns["sampler_logprobs"] == [[0, -1], [-4], [-5, -6, -7]]
    assert columns["version"] == [[0, 1], [4], [5, 6, 7]]
    assert columns["finish"] == ["stop", "turns", "length"]
    assert columns["turn"] == [0, 1, 0]
    assert columns["reward"] == [0.5, 1.25, 0.0]
    assert columns["done"] == [0, 1, 1]
    first, second, third = columns["episode_id"]
    assert first == second != third
    assert turns.keys.rows() == [(7, 3, 0), (7, 4, 0), (9, 0, 2)]
    assert session.lost_alone == [(7, 5, 0), (9, 1, 2), (9, 2, 2)]
    assert [key for key, _ in session.tombstones] == session.lost_alone
    assert not any(session.charged)


TURNS = st.builds(
    WrittenTurn,
    written=st.lists(st.integers(3, 9), min_size=1, max_size=3),
    answer=st.lists(st.integers(3, 9), min_size=1, max_size=3),
    reward=st.none() | st.floats(-8, 8, width=16),
)


def without_last_answer(turns: list[WrittenTurn]) -> list[WrittenTurn]:
    """An answer that is never continued is not in the row."""
    if not turns:
        return turns
    *others, last = turns
    return [*others, WrittenTurn(written=last.written, reward=last.reward)]


@given(st.lists(st.lists(TURNS, max_size=4).map(without_last_answer), min_size=1, max_size=4))
@settings(max_examples=example_count(60))
def test_the_state_after_a_turn_is_the_next_rows_prompt(
    episodes: list[list[WrittenTurn]],
) -> None:
    rows = make_episodes(episodes, keys=Keys.of([5] * len(episodes), range(len(episodes))))
    batches, session = cut(rows, 4)
    turns = [turn for episode in episodes for turn in episode]
    assert len(session.lost_alone) == 4 * len(episodes) - len(turns)
    if not turns:
        assert batches == []
        return
    [batch] = batches
    assert batch.keys.order().tolist() == list(range(len(turns)))
    before, written = batch.ragged("prompt_ids"), batch.ragged("completion_ids")
    done = batch.flat("done")
    episode_ids = batch.flat("episode_id")
    for row, turn in enumerate(turns):
        assert written[row].tolist() == turn.written
        if not done[row]:
            state = [*before[row], *turn.written, *turn.answer]
            assert before[row + 1].tolist() == state
            assert episode_ids[row + 1] == episode_ids[row]
    assert int(done.sum()) == len(set(episode_ids.tolist())) == sum(map(bool, episodes))


def test_an_episode_with_more_turns_is_an_error() -> None:
    rows = make_episodes([ONE_TURN, TWO_TURNS], keys=Keys.of([3, 4]))
    with pytest.raises(DataError, match=r"\(4, 0, 0\): expected at most max_turns=1 turns, found"):
        cut(rows, 1)


def test_only_columns_that_are_read_are_made_and_text_needs_a_tokenizer(base: str) -> None:
    rows = make_episodes([TWO_TURNS])
    [batch], _ = cut(rows, 2, ("reward", "done"))
    assert batch.names == ["reward", "done"]
    model = Model("policy", base)
    [batch], _ = cut(rows, 2, ("completion",), tokenizer=model)
    text = batch.array("completion").to_pylist()
    assert len(text) == 2
    assert len(text[1]) == 1


def test_turns_of_truncated_episodes_have_what_was_kept() -> None:
    mass = np.arange(5, dtype=np.float32)
    rows = make_episodes([TWO_TURNS])
    ids = rows.ragged("completion_ids")
    more = Batch.make(rows.keys, {"sampler_mass": ids.like(-mass)}, TruncatedEpisode)
    rows = rows.with_columns({"sampler_mass": more.array("sampler_mass")})
    [batch], _ = cut(rows, 2, ("sampler_mass", "turn"))
    assert batch.array("sampler_mass").to_pylist() == [[0, -1], [-4]]


@operator()
def as_truncated(rollout: Columns[Rollout]) -> Columns[TruncatedEpisode]:
    raise AssertionError("only its schema is looked at")


def test_its_port_has_the_schema_of_its_episodes() -> None:
    rollout = generate(Model("p", "b"), prompts("d", batch=1), max_tokens=4)
    turns = transitions(as_episodes(rollout), max_turns=3)
    assert turns.schema is Transition
    assert issubclass(turns.schema, Rollout)
    assert issubclass(turns.schema, Reward)
    assert transitions(as_truncated(rollout), max_turns=3).schema is TruncatedTransition


def actor_and_critic(base: str, data: str) -> Graph:
    """Both learn from turns: a critic over token ids, and the policy."""
    policy = Model("policy", base, trainable=True)
    critic = Model("critic", base, trainable=True, head="scalar")
    rollout = generate(policy, prompts(data, batch=4), n=2, max_tokens=6)
    turns: Any = transitions(as_episodes(rollout), max_turns=2)
    advantage = gae(turns, turns, values(critic, turns))
    losses: Any = clipped_policy_loss(advantage), value_loss(advantage)
    policy_node = train(policy, turns, loss=losses[0], lr=1e-3, name="train_policy")
    critic_node = train(critic, turns, loss=losses[1], lr=1e-3, name="train_critic")
    return Graph("turns", policy_node, critic_node)


def test_a_plan_has_places_for_all_turns() -> None:
    plan = planned(actor_and_critic("models/tiny", "data/train.parquet"))
    node = plan.node("transitions")
    assert (node.relation, node.inner, node.rows) == ("expand", 2, 4)
    assert {"prompt_ids", "completion_ids", "reward", "version"} <= set(node.returns)
    assert not {"done", "episode_id"} & set(node.returns), "nobody reads them"


def test_a_conversation_is_as_long_as_its_row() -> None:
    lengths = Lengths(prompt=5, completion=7)
    assert column_bytes(Episode.columns["messages"], lengths) == 8 + 4 * 12
