"""Rows of one generation read as another's, and values of another distribution or text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.node import Port
from dataflow.schema import Completion, Prompt, Reward, Rollout, TokenReward, column
from dataflow.user import Columns, operator
from operators.advantage import add, baseline_advantage, gae, returns
from operators.data import demonstrations, preferences, prompts
from operators.forward import logprobs, values
from operators.generate import generate
from operators.losses import (
    clipped_policy_loss,
    decoupled_policy_loss,
    dpo_loss,
    policy_gradient_loss,
    supervised_loss,
    trajectory_balance_loss,
    value_loss,
)
from operators.mean_over import mean_over
from operators.reward import reward
from operators.select import best_of, select
from operators.train import evaluate, train
from tests.wrong_graphs.parts import (
    compared,
    critic,
    exact,
    graph,
    policy,
    sampled,
    scored,
    source,
    trained,
    updated,
)

reference = Model("reference", "models/tiny")
TOKENIZERS = Path(__file__).parent / "tokenizers"


@operator()
def ask_again(rollout: Columns[Rollout]) -> Columns[Prompt]:
    prompt = [f"{text} Again:" for text in rollout["completion"]]
    return Columns.make(Prompt, like=rollout, prompt=prompt)


@operator()
def shortened(rollout: Columns[Rollout]) -> Columns[Rollout]:
    return rollout


@operator()
def distance(rollout: Columns[Rollout], other: Columns[Rollout]) -> Columns[Reward]:
    far = np.abs(rollout["completion_ids"].lengths - other["completion_ids"].lengths)
    return Columns.make(Reward, like=rollout, reward=far.astype(np.float32))


@operator(parent="first")
def conversation(later: Columns[Rollout], first: Columns[Rollout]) -> Columns[Rollout]:
    return later


def two(temperature: float = 1.0, n: int = 1) -> tuple[Port[Rollout], Port[Rollout]]:
    """Two answers to one prompt, by two generations."""
    prompt = source()
    rollout = generate(policy, prompt, n=n, max_tokens=64, name="rollout")
    return rollout, generate(
        policy, prompt, n=n, max_tokens=64, temperature=temperature, name="other"
    )


def turns(n: int = 1) -> tuple[Port[Rollout], Port[Rollout]]:
    """An answer, and an answer to a question about it."""
    rollout = generate(policy, source(), n=n, max_tokens=64, temperature=0.7, name="rollout")
    asked = ask_again(rollout)
    return rollout, generate(Model("second", "models/tiny"), asked, max_tokens=64, name="later")


def reward_of_another_generation() -> Graph:
    rollout, other = two()
    return trained(rollout, clipped_policy_loss(returns(rollout, scored(other))))


def reference_of_another_generation() -> Graph:
    rollout, other = two()
    advantage = returns(rollout, scored(rollout))
    loss = clipped_policy_loss(advantage, reference=logprobs(reference, other), beta=0.1)
    return trained(rollout, loss)


def old_logprobs_of_another_generation() -> Graph:
    rollout, other = two()
    old = logprobs(policy, other, name="old")
    return trained(rollout, clipped_policy_loss(returns(rollout, scored(rollout)), old=old))


def old_logprobs_of_another_text() -> Graph:
    rollout = sampled()
    old = logprobs(policy, shortened(rollout), name="old")
    return trained(rollout, clipped_policy_loss(compared(rollout), old=old))


def old_logprobs_of_another_text_behind_a_selection() -> Graph:
    rollout = sampled()
    score = scored(rollout)
    old = logprobs(policy, shortened(rollout), name="old", max_lag=0)
    rollout, score, old = select(rollout, score, old, where=best_of(score))
    return trained(rollout, clipped_policy_loss(returns(rollout, score), old=old))


def old_values_of_another_text() -> Graph:
    rollout = sampled()
    value = values(critic, shortened(rollout))
    advantage = gae(rollout, scored(rollout), value)
    critics = train(critic, rollout, loss=value_loss(advantage, old=value, clip=0.2), lr=1e-5)
    return graph(updated(rollout, clipped_policy_loss(advantage)), critics)


def critic_of_another_generation() -> Graph:
    rollout, other = two()
    advantage = gae(rollout, scored(rollout), values(critic, other))
    critics = train(critic, rollout, loss=value_loss(advantage), lr=1e-5)
    return graph(updated(rollout, clipped_policy_loss(advantage)), critics)


def reward_of_turn_2_on_turn_1() -> Graph:
    rollout, later = turns()
    return trained(rollout, clipped_policy_loss(returns(rollout, scored(later))))


def reward_of_turn_1_on_turn_2() -> Graph:
    rollout, later = turns()
    return trained(later, clipped_policy_loss(returns(later, scored(rollout))))


def reward_of_turn_2_on_selected_rows_of_turn_1() -> Graph:
    rollout, later = turns(n=4)
    kept = select(rollout, where=best_of(reward(exact, rollout)))
    return trained(kept, clipped_policy_loss(returns(kept, scored(later))))


def greedy_baseline_that_was_not_taken_up() -> Graph:
    rollout, greedy = two(temperature=0.0)
    advantage = baseline_advantage(
        rollout, scored(rollout), reward(exact, greedy, name="greedy_score")
    )
    return trained(rollout, clipped_policy_loss(advantage))


def operator_on_two_generations() -> Graph:
    rollout, other = two()
    return trained(rollout, clipped_policy_loss(returns(rollout, distance(rollout, other))))


def selection_of_two_generations() -> Graph:
    rollout, other = two(n=4)
    kept, kept_score = select(rollout, scored(other), where=best_of(reward(exact, rollout)))
    return trained(kept, clipped_policy_loss(returns(kept, kept_score)))


def sum_of_rewards_of_two_generations() -> Graph:
    rollout, other = two()
    total = add(scored(rollout), reward(exact, other, name="other_score"))
    return trained(rollout, clipped_policy_loss(returns(rollout, total)))


def mean_over_its_own_rows() -> Graph:
    rollout = sampled()
    loss = clipped_policy_loss(returns(rollout, mean_over(scored(rollout), rollout)))
    return trained(rollout, loss)


def mean_over_rows_that_a_selection_left() -> Graph:
    rollout = sampled()
    score = scored(rollout)
    best = select(score, where=best_of(score))
    return trained(rollout, clipped_policy_loss(returns(rollout, mean_over(best, rollout))))


def mean_over_rows_that_are_no_ancestor() -> Graph:
    rollout, other = two()
    score = mean_over(scored(other), rollout)
    return trained(rollout, clipped_policy_loss(returns(rollout, score)))


def mean_over_rows_of_another_source() -> Graph:
    rollout = sampled()
    prompt = prompts("data/test.parquet", name="held_out")
    held = generate(policy, prompt, max_tokens=64, name="held_rollout")
    sink = updated(rollout)
    return graph(sink, evaluate(policy, mean_over(reward(exact, held), rollout), every=10))


def mean_over_with_its_ports_turned_round() -> Graph:
    rollout, later = turns()
    wrong: Any = mean_over(later, scored(rollout))  # pyright: ignore[reportArgumentType]
    return trained(rollout, clipped_policy_loss(returns(rollout, wrong)))


def stop_string_that_is_empty() -> Graph:
    rollout = generate(policy, source(), n=8, max_tokens=64, stop=["</answer>", ""], name="rollout")
    return trained(rollout)


def stop_string_that_is_a_number() -> Graph:
    wrong: Any = 7
    return trained(generate(policy, source(), n=8, max_tokens=64, stop=wrong, name="rollout"))


def schema_of_two_that_differ() -> Graph:
    class Steps(Reward):
        parts = column(pa.float32(), "K")

    class Tokens(Reward):
        parts = column(pa.float32(), "T")

    class StepsAndTokens(Steps, Tokens):
        pass

    raise AssertionError(StepsAndTokens)


def schema_with_a_column_of_another_type() -> Graph:
    class Graded(TokenReward):
        reward = column(pa.utf8())

    raise AssertionError(Graded)


def parent_that_is_no_port() -> Graph:
    @operator(parent=["frist"])
    def joined(later: Columns[Rollout], first: Columns[Rollout]) -> Columns[Rollout]:
        return later

    raise AssertionError(joined)


def logprobs_of_rows_of_two_generations() -> Graph:
    rollout, later = turns()
    both = conversation(later, rollout)
    old, anchor = logprobs(policy, both, name="old"), logprobs(reference, both)
    clipped = clipped_policy_loss(returns(both, scored(both)), old=old, reference=anchor)
    return trained(both, supervised_loss() + clipped)


def training_on_rows_of_two_generations() -> Graph:
    rollout, later = turns()
    both = conversation(later, rollout)
    return trained(both, policy_gradient_loss(returns(both, scored(both))))


def constant_of_rows_of_two_generations() -> Graph:
    rollout, later = turns()
    both = conversation(later, rollout)
    return graph(train(policy, both, loss=supervised_loss(), lr=1e-6, aggregate="constant"))


def vocabularies_of_rows_of_two_generations() -> Graph:
    first, trained = (
        Model("first", str(TOKENIZERS / "others")),
        Model("trained", str(TOKENIZERS / "words"), trainable=True),
    )
    rollout = generate(first, source(), max_tokens=64, name="rollout")
    later = generate(trained, ask_again(rollout), max_tokens=64, name="later")
    both: Port[Completion] = conversation(later, rollout)
    return graph(train(trained, both, loss=supervised_loss(), lr=1e-6))


def old_logprobs_at_another_temperature() -> Graph:
    rollout = generate(policy, source(), n=8, max_tokens=64, temperature=0.7, name="rollout")
    old = logprobs(policy, rollout, temperature=1.0, name="old")
    return trained(rollout, clipped_policy_loss(compared(rollout), old=old))


def proximal_logprobs_at_another_temperature() -> Graph:
    rollout = sampled()
    near = logprobs(policy, rollout, temperature=0.5, name="near")
    return trained(rollout, decoupled_policy_loss(compared(rollout), proximal=near))


def old_logprobs_at_another_temperature_behind_a_selection() -> Graph:
    rollout = generate(policy, source(), n=8, max_tokens=64, temperature=0.0, name="rollout")
    score, old = scored(rollout), logprobs(policy, rollout, temperature=0.3, name="old")
    rollout, score, old = select(rollout, score, old, where=best_of(score))
    return trained(rollout, clipped_policy_loss(returns(rollout, score), old=old))


def demos() -> Port[Completion]:
    return demonstrations("data/demos.jsonl", batch=64)


def loss_on_the_rows_of_another_source() -> Graph:
    rollout, (rows, pairs) = sampled(), preferences("data/pairs.jsonl", batch=64)
    other = dpo_loss(pairs, reference=logprobs(reference, rows))
    return trained(rollout, clipped_policy_loss(compared(rollout)) + other)


def own_rows_with_a_port_on_others() -> Graph:
    rollout, (rows, pairs) = sampled(), preferences("data/pairs.jsonl", batch=64)
    other = dpo_loss(pairs, reference=logprobs(reference, rollout), rows=rows)
    return trained(rollout, clipped_policy_loss(compared(rollout)) + other)


def own_rows_that_are_trained_anyway() -> Graph:
    rollout = sampled()
    loss = clipped_policy_loss(compared(rollout)) + 0.1 * supervised_loss(rows=rollout)
    return trained(rollout, loss)


def rows_that_no_term_trains() -> Graph:
    return trained(sampled(), supervised_loss(rows=demos()))


def ratio_on_demonstrations_of_its_own() -> Graph:
    rollout, rows = sampled(), demos()
    advantage = returns(rows, reward(exact, rows, name="score_of_demos"))
    loss = clipped_policy_loss(compared(rollout)) + clipped_policy_loss(advantage, rows=rows)
    return trained(rollout, loss)


def groups_of_one_row_of_its_own() -> Graph:
    rollout, rows = sampled(), demos()
    score = reward(exact, rows, name="score_of_demos")
    how = {"reference": logprobs(reference, rows), "beta": 0.1}
    loss = clipped_policy_loss(compared(rollout)) + trajectory_balance_loss(score, **how, rows=rows)
    return trained(rollout, loss)
