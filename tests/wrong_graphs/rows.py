"""Rows of one generation read as another's, and values of another distribution or text."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.node import Port
from dataflow.schema import Completion, Prompt, Reward, Rollout, TokenReward, column
from dataflow.user import Columns, operator
from operators.advantage import baseline_advantage, gae, returns
from operators.data import demonstrations, preferences
from operators.forward import logprobs, values
from operators.generate import generate
from operators.losses import (
    clipped_policy_loss,
    decoupled_policy_loss,
    dpo_loss,
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
    held_out,
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


@operator(parent="first")
def conversation(later: Columns[Rollout], first: Columns[Rollout]) -> Columns[Rollout]:
    return later


def two(temperature: float = 1.0, n: int = 1) -> tuple[Port[Rollout], Port[Rollout]]:
    """Two answers to one prompt, by two generations."""
    prompt, how = source(), {"n": n, "max_tokens": 64}
    rollout = generate(policy, prompt, **how, name="rollout")
    return rollout, generate(policy, prompt, **how, temperature=temperature, name="other")


def turns(n: int = 1) -> tuple[Port[Rollout], Port[Rollout]]:
    """An answer, and an answer to a question about it."""
    rollout = sampled(n, temperature=0.7)
    asked = ask_again(rollout)
    return rollout, generate(Model("second", "models/tiny"), asked, max_tokens=64, name="later")


def credited(rows: Port[Completion], score: Port[Reward]) -> Graph:
    """Each row trained by its own score."""
    return trained(rows, clipped_policy_loss(returns(rows, score)))


def reward_of_another_generation() -> Graph:
    rollout, other = two()
    return credited(rollout, scored(other))


def reference_of_another_generation() -> Graph:
    rollout, other = two()
    advantage = returns(rollout, scored(rollout))
    loss = clipped_policy_loss(advantage, reference=logprobs(reference, other), beta=0.1)
    return trained(rollout, loss)


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


def reward_of_turn_2_on_turn_1() -> Graph:
    rollout, later = turns()
    return credited(rollout, scored(later))


def reward_of_turn_1_on_turn_2() -> Graph:
    rollout, later = turns()
    return credited(later, scored(rollout))


def reward_of_turn_2_on_selected_rows_of_turn_1() -> Graph:
    rollout, later = turns(n=4)
    return credited(select(rollout, where=best_of(reward(exact, rollout))), scored(later))


def greedy_baseline_that_was_not_taken_up() -> Graph:
    rollout, greedy = two(temperature=0.0)
    advantage = baseline_advantage(
        rollout, scored(rollout), reward(exact, greedy, name="greedy_score")
    )
    return trained(rollout, clipped_policy_loss(advantage))


def selection_of_two_generations() -> Graph:
    rollout, other = two(n=4)
    return credited(*select(rollout, scored(other), where=best_of(reward(exact, rollout))))


def mean_over_its_own_rows() -> Graph:
    rollout = sampled()
    return credited(rollout, mean_over(scored(rollout), rollout))


def mean_over_rows_that_a_selection_left() -> Graph:
    rollout = sampled()
    score = scored(rollout)
    best = select(score, where=best_of(score))
    return credited(rollout, mean_over(best, rollout))


def mean_over_rows_that_are_no_ancestor() -> Graph:
    rollout, other = two()
    return credited(rollout, mean_over(scored(other), rollout))


def mean_over_rows_of_another_source() -> Graph:
    rollout = sampled()
    score = mean_over(reward(exact, held_out()), rollout)
    return trained(rollout).extend(evaluate(policy, score, every=10))


def mean_over_with_its_ports_turned_round() -> Graph:
    rollout, later = turns()
    return credited(rollout, mean_over(later, scored(rollout)))  # type: ignore


def stop_string_that_is_empty() -> Graph:
    return trained(generate(policy, source(), n=8, max_tokens=64, stop=["</answer>", ""]))


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


def constant_of_rows_of_two_generations() -> Graph:
    rollout, later = turns()
    both = conversation(later, rollout)
    return trained(both, supervised_loss(), aggregate="constant")


def vocabularies_of_rows_of_two_generations() -> Graph:
    first = Model("first", str(TOKENIZERS / "others"))
    trained = Model("trained", str(TOKENIZERS / "words"), trainable=True)
    rollout = generate(first, source(), max_tokens=64, name="rollout")
    later = generate(trained, ask_again(rollout), max_tokens=64, name="later")
    both: Port[Completion] = conversation(later, rollout)
    return graph(train(trained, both, loss=supervised_loss(), lr=1e-6))


def old_logprobs_at_another_temperature() -> Graph:
    rollout = sampled(temperature=0.7)
    old = logprobs(policy, rollout, temperature=1.0, name="old")
    return trained(rollout, clipped_policy_loss(compared(rollout), old=old))


def proximal_logprobs_at_another_temperature() -> Graph:
    rollout = sampled()
    near = logprobs(policy, rollout, temperature=0.5, name="near")
    return trained(rollout, decoupled_policy_loss(compared(rollout), proximal=near))


def old_logprobs_at_another_temperature_behind_a_selection() -> Graph:
    rollout = sampled(temperature=0.0)
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
    return trained(rollout, clipped_policy_loss(compared(rollout)) + supervised_loss(rows=rollout))


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
