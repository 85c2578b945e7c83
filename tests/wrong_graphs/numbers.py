"""Parameters out of range, groups of the wrong size, calls that do not bind."""

from __future__ import annotations

from dataflow.graph import Graph
from dataflow.model import Model, linear
from operators.advantage import group_advantage, kl_in_reward, overlong_penalty
from operators.forward import logprobs
from operators.generate import generate
from operators.losses import clipped_policy_loss, clipped_weight_loss, trajectory_balance_loss
from operators.reward import reward
from operators.select import best_of, mixed_groups, select
from operators.train import evaluate, train
from tests.wrong_graphs.parts import (
    BASE,
    compared,
    exact,
    graph,
    held_out,
    judged,
    policy,
    sampled,
    scored,
    source,
    trained,
    updated,
)


def message_3_groups_of_one() -> Graph:
    rollout = generate(policy, source(), n=1, max_tokens=64)
    advantage = group_advantage(rollout, scored(rollout))
    return trained(rollout, clipped_policy_loss(advantage))


def reward_of_groups_of_one() -> Graph:
    rollout = sampled(n=1)
    score = reward(exact, rollout, scope="group")
    kept = select(rollout, where=mixed_groups(score), refill=True)
    return trained(kept)


def baseline_of_ragged_groups() -> Graph:
    rollout = sampled()
    best = select(rollout, where=best_of(scored(rollout), k=4))
    advantage = group_advantage(best, reward(exact, best), name="second")
    return trained(best, clipped_policy_loss(advantage))


def loss_over_ragged_groups() -> Graph:
    rollout = sampled()
    score = scored(rollout)
    best, score = select(rollout, score, where=best_of(score, k=4))
    reference = logprobs(Model("reference", BASE), best)
    return trained(best, trajectory_balance_loss(score, reference=reference, beta=0.01))


def selection_from_ragged_groups() -> Graph:
    rollout = sampled()
    best = select(rollout, where=best_of(scored(rollout), k=4))
    mixed = select(best, where=mixed_groups(reward(exact, best)), name="mixed")
    advantage = group_advantage(mixed, reward(exact, mixed, name="r"), ragged=True)
    return trained(mixed, clipped_policy_loss(advantage))


def minibatches_that_split_groups() -> Graph:
    return trained(sampled(), minibatches=7)


def text_for_a_number() -> Graph:
    return trained(generate(policy, source(), n="8", max_tokens=64))  # type: ignore


def negative_temperature() -> Graph:
    return trained(generate(policy, source(), n=8, max_tokens=64, temperature=-0.5))


def misspelt_choice() -> Graph:
    return trained(generate(policy, source(), n=8, max_tokens=64, on_update="drian"))  # type: ignore


def schedule_where_none_is_taken() -> Graph:
    rollout = sampled()
    near, beta = logprobs(Model("reference", BASE), rollout), linear(0.1, 0.0, 100)
    return judged(rollout, kl_in_reward(rollout, scored(rollout), near, beta=beta))  # type: ignore


def schedule_below_zero() -> Graph:
    rollout, lr = sampled(), linear(1e-6, -1e-6, 100)
    return graph(train(policy, rollout, loss=clipped_policy_loss(compared(rollout)), lr=lr))


def clip_below_zero() -> Graph:
    rollout = sampled()
    return trained(rollout, clipped_policy_loss(compared(rollout), clip=(0.2, -0.28)))


def aggregate_of_a_group_loss() -> Graph:
    rollout = sampled()
    reference = logprobs(Model("reference", BASE), rollout)
    loss = trajectory_balance_loss(scored(rollout), reference=reference, beta=0.01)
    return trained(rollout, loss, aggregate="sequence_sum")


def evaluation_every_zero_steps() -> Graph:
    return graph(updated(sampled()), evaluate(policy, reward(exact, held_out()), every=0))


def message_6_beta_without_a_reference() -> Graph:
    rollout = sampled()
    return trained(rollout, clipped_policy_loss(compared(rollout), beta=0.04))


def message_8_a_name_of_trl() -> Graph:
    return trained(generate(policy, source(), num_generations=8, max_tokens=64))  # type: ignore


def message_8_replace_of_no_node() -> Graph:
    rollout = sampled()
    return trained(rollout).replace(advantages=compared(rollout))


def misspelt_parameter() -> Graph:
    return trained(generate(policy, source(), n=8, max_token=64))  # type: ignore


def missing_argument() -> Graph:
    return graph(train(policy, sampled(), lr=1e-6))  # type: ignore


def port_for_a_loss() -> Graph:
    rollout = sampled()
    return graph(train(policy, rollout, loss=compared(rollout), lr=1e-6))  # type: ignore


def number_for_a_port() -> Graph:
    return trained(sampled(), clipped_policy_loss(group_advantage(8, scored(sampled()))))  # type: ignore


def port_for_a_sink() -> Graph:
    return graph(sampled())  # type: ignore


def unknown_optimizer() -> Graph:
    return trained(sampled(), optimizer="adam")


def one_weight_for_two_functions() -> Graph:
    rollout = sampled()
    return judged(rollout, reward([exact, exact], rollout, weights=[1.0]))


def weight_that_is_no_number() -> Graph:
    rollout = sampled()
    return trained(rollout, float("nan") * clipped_policy_loss(compared(rollout)))


def penalty_of_more_tokens_than_there_are() -> Graph:
    rollout = sampled()
    return judged(rollout, overlong_penalty(rollout, scored(rollout), max_tokens=64, buffer=128))


def cap_below_every_ratio() -> Graph:
    rollout = sampled()
    return trained(rollout, clipped_weight_loss(compared(rollout), cap=0.2))
