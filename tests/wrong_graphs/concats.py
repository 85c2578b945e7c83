"""Rows that do not belong in one group, and what a concat of them would lose."""

from __future__ import annotations

import pyarrow as pa

from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.node import Port
from dataflow.schema import Completion, Reward, Rollout, column
from dataflow.user import Columns, operator
from operators.advantage import gae, group_advantage, kl_in_reward
from operators.answers import answers
from operators.concat import concat
from operators.data import preferences, prompts
from operators.forward import logprobs, values
from operators.generate import generate
from operators.losses import (
    clipped_policy_loss,
    policy_gradient_loss,
    supervised_loss,
)
from tests.wrong_graphs.parts import BASE, DATA, judged, policy, scored, source, trained
from tests.wrong_graphs.rows import conversation, turns

reference = Model("reference", BASE)


class WithStates(Completion):
    """A completion with hidden states."""

    states = column(pa.float32(), "T", device=True)


@operator()
def with_states(rollout: Columns[Rollout]) -> Columns[WithStates]:
    return Columns.make(WithStates, like=rollout)


@operator()
def scored_of(rows: Columns[Completion]) -> Columns[Reward]:
    raise TypeError(rows)


@operator()
def conversation_of(rows: Columns[Completion]) -> Columns[Completion]:
    return rows


def two(temperature: float = 1.0) -> tuple[Port[Rollout], Port[Rollout]]:
    """Answers of two generations to one prompt."""
    prompt = source()
    rollout = generate(policy, prompt, n=4, max_tokens=64, name="rollout")
    how = {"n": 4, "max_tokens": 32, "temperature": temperature}
    return rollout, generate(policy, prompt, **how, name="other")


def concat_of_one_port() -> Graph:
    return trained(concat(two()[0]))


def concat_of_two_sources() -> Graph:
    rollout, _ = two()
    elsewhere = prompts(DATA, batch=64, name="elsewhere")
    other = generate(policy, elsewhere, n=4, max_tokens=64, name="other")
    return trained(concat(rollout, other))


def concat_of_one_port_twice() -> Graph:
    rollout, other = two()
    return trained(concat(rollout, other, rollout))


def concat_of_a_rollout_and_a_reward() -> Graph:
    rollout, other = two()
    rows = concat(rollout, scored(other))
    return trained(rows, supervised_loss())  # type: ignore[arg-type]


def concat_of_pairs() -> Graph:
    rows, _ = preferences("data/pairs.parquet", batch=64)
    return trained(concat(rows, conversation_of(rows)), supervised_loss())


def concat_of_states_on_a_device() -> Graph:
    rollout, other = two()
    rows = concat(with_states(rollout), with_states.named("others")(other))
    return trained(rows, supervised_loss())


def rewards_of_tokens_of_some_rows() -> Graph:
    """gae takes a Reward where there are no rewards of tokens: the penalties would move."""
    rollout, other = two()
    anchor = logprobs(reference, rollout)
    spread = kl_in_reward(rollout, scored(rollout), anchor, beta=0.1)
    rows = concat(rollout, other, name="rows")
    score = concat(spread, scored_of(other), name="score_of_rows")
    value = values(Model("judge", BASE, head="scalar"), rows)
    return trained(rows, clipped_policy_loss(gae(rows, score, value)))


def scores_in_another_order() -> Graph:
    rollout, other = two()
    first, second = scored_of(rollout), scored_of.named("second")(other)
    return judged(concat(rollout, other), concat(second, first, name="score"))


def old_logprobs_of_a_part_at_another_temperature() -> Graph:
    rollout, other = two(0.7)
    rows = concat(rollout, other)
    first, second = logprobs(policy, rollout, name="a"), logprobs(policy, other, name="b")
    hot = logprobs(policy, other, temperature=1.5, name="hot")
    advantage = advantage_of(rows)
    right = clipped_policy_loss(advantage, old=concat(first, second, name="right"))
    wrong = clipped_policy_loss(advantage, old=concat(first, hot, name="wrong"))
    return trained(rows, right + wrong)


def advantage_of(rows: Port[Completion]) -> Port:
    return group_advantage(rows, scored(rows))


def old_logprobs_of_a_part_by_another_model() -> Graph:
    rollout, other = two(0.7)
    rows = concat(rollout, other)
    parts = logprobs(policy, rollout, name="a"), logprobs(reference, other, name="b")
    return trained(rows, clipped_policy_loss(advantage_of(rows), old=concat(*parts, name="old")))


def recorded_logprobs_of_a_part_at_another_temperature() -> Graph:
    rollout, other = two(0.7)
    rows = concat(rollout, other)
    return trained(rows, clipped_policy_loss(advantage_of(rows)), temperature=1.0)


def tokens_of_two_generations_in_a_part() -> Graph:
    rollout, later = turns()
    rows = concat(rollout, conversation(later, rollout))
    return trained(rows, policy_gradient_loss(advantage_of(rows)))


def logprobs_of_rows_in_another_order() -> Graph:
    rollout, other = two()
    rows = concat(rollout, other)
    old = logprobs(policy, concat(other, rollout, name="turned"), name="old")
    return trained(rows, clipped_policy_loss(advantage_of(rows), old=old))


def answers_of_a_column_that_the_data_lacks() -> Graph:
    return trained(answers(source(), column="anwser"), supervised_loss())


def answers_that_are_numbers() -> Graph:
    return trained(answers(source(), column="level"), supervised_loss())


def constant_of_rows_that_nothing_sampled() -> Graph:
    rollout, _ = two()
    rows = concat(rollout, answers(rollout.node.inputs["prompt"], column="answer"))
    return trained(rows, supervised_loss(), aggregate="constant")
