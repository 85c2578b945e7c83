"""Parameters out of range, groups of the wrong size, calls that do not bind."""

from __future__ import annotations

from typing import Any

from dataflow.graph import Graph
from dataflow.model import Model, linear
from operators.advantage import group_advantage, kl_in_reward
from operators.data import prompts
from operators.forward import logprobs
from operators.generate import generate
from operators.losses import clipped_policy_loss, trajectory_balance_loss
from operators.reward import reward
from operators.select import best_of, mixed_groups, select
from operators.train import evaluate, train
from tests.wrong_graphs.parts import (
    BASE,
    DATA,
    compared,
    exact,
    graph,
    policy,
    sampled,
    scored,
    trained,
    updated,
)


def message_3_groups_of_one() -> Graph:
    rollout = generate(policy, prompts(DATA, batch=64), n=1, max_tokens=64)
    advantage = group_advantage(rollout, scored(rollout))
    return trained(rollout, clipped_policy_loss(advantage))


def reward_of_groups_of_one() -> Graph:
    rollout = sampled(n=1)
    score = reward(exact, rollout, scope="group")
    kept = select(rollout, where=mixed_groups(score), refill=True)
    return graph(train(policy, kept, loss=clipped_policy_loss(compared(kept)), lr=1e-6))


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
    return trained(
        mixed,
        clipped_policy_loss(group_advantage(mixed, reward(exact, mixed, name="r"), ragged=True)),
    )


def minibatches_that_split_groups() -> Graph:
    return trained(sampled(), minibatches=7)


def no_answers() -> Graph:
    return trained(generate(policy, prompts(DATA, batch=64), n=0, max_tokens=64))


def text_for_a_number() -> Graph:
    many: Any = "8"
    return trained(generate(policy, prompts(DATA, batch=64), n=many, max_tokens=64))


def negative_temperature() -> Graph:
    return trained(generate(policy, prompts(DATA, batch=64), n=8, max_tokens=64, temperature=-0.5))


def misspelt_choice() -> Graph:
    word: Any = "drian"
    return trained(generate(policy, prompts(DATA, batch=64), n=8, max_tokens=64, on_update=word))


def schedule_where_none_is_taken() -> Graph:
    rollout = sampled()
    beta: Any = linear(0.1, 0.0, 100)
    score = kl_in_reward(
        rollout, scored(rollout), logprobs(Model("reference", BASE), rollout), beta=beta
    )
    return trained(rollout, clipped_policy_loss(group_advantage(rollout, score)))


def schedule_below_zero() -> Graph:
    rollout = sampled()
    lr = linear(1e-6, -1e-6, 100)
    return graph(train(policy, rollout, loss=clipped_policy_loss(compared(rollout)), lr=lr))


def clip_below_zero() -> Graph:
    rollout = sampled()
    return trained(rollout, clipped_policy_loss(compared(rollout), clip=(0.2, -0.28)))


def aggregate_of_a_group_loss() -> Graph:
    rollout = sampled()
    reference = logprobs(Model("reference", BASE), rollout)
    loss = trajectory_balance_loss(scored(rollout), reference=reference, beta=0.01)
    return graph(train(policy, rollout, loss=loss, lr=1e-6, aggregate="sequence_sum"))


def evaluation_every_zero_steps() -> Graph:
    prompt = prompts("data/test.parquet", name="held_out")
    held = generate(policy, prompt, max_tokens=64, name="answers")
    return graph(updated(sampled()), evaluate(policy, reward(exact, held), every=0))


def message_6_beta_without_a_reference() -> Graph:
    rollout = sampled()
    return trained(rollout, clipped_policy_loss(compared(rollout), beta=0.04))


def message_8_a_name_of_trl() -> Graph:
    return graph(
        updated(generate(policy, prompts(DATA, batch=64), num_generations=8, max_tokens=64))
    )  # type: ignore


def message_8_replace_of_no_node() -> Graph:
    rollout = sampled()
    return graph(updated(rollout)).replace(advantages=compared(rollout))


def misspelt_parameter() -> Graph:
    return graph(updated(generate(policy, prompts(DATA, batch=64), n=8, max_token=64)))  # type: ignore


def missing_argument() -> Graph:
    return graph(train(policy, sampled(), lr=1e-6))  # type: ignore


def port_for_a_loss() -> Graph:
    rollout = sampled()
    advantage: Any = compared(rollout)
    return graph(train(policy, rollout, loss=advantage, lr=1e-6))


def number_for_a_port() -> Graph:
    rollout: Any = 8
    return trained(sampled(), clipped_policy_loss(group_advantage(rollout, scored(sampled()))))


def port_for_a_sink() -> Graph:
    rollout: Any = sampled()
    return Graph("wrong", rollout)


def unknown_optimizer() -> Graph:
    rollout = sampled()
    optimizer: Any = "adam"
    loss = clipped_policy_loss(compared(rollout))
    return graph(train(policy, rollout, loss=loss, lr=1e-6, optimizer=optimizer))


def one_weight_for_two_functions() -> Graph:
    rollout = sampled()
    score = reward([exact, exact], rollout, weights=[1.0])
    return trained(rollout, clipped_policy_loss(group_advantage(rollout, score)))


def weight_that_is_no_number() -> Graph:
    rollout = sampled()
    return trained(rollout, float("nan") * clipped_policy_loss(compared(rollout)))
