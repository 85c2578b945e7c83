"""Names, schemas, dataset columns and rows that do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.node import Port
from operators.advantage import add, gae, group_advantage, returns, whiten
from operators.data import demonstrations, prompts
from operators.forward import values
from operators.generate import generate
from operators.losses import clipped_policy_loss, value_loss
from operators.reward import reward
from operators.select import mixed_groups, select
from operators.train import train
from tests.wrong_graphs.parts import (
    BASE,
    DATA,
    compared,
    compared_with,
    critic,
    exact,
    graph,
    judged,
    policy,
    sampled,
    scored,
    source,
    trained,
    updated,
)


def any_port(port: Port[Any]) -> Any:
    """A port as a type checker does not see it: what is refused here, pyright refuses as well."""
    return cast(Any, port)


def two_nodes_of_one_name() -> Graph:
    prompt = source()
    a = generate(policy, prompt, n=4, max_tokens=64)
    b = generate(policy, prompt, n=4, max_tokens=64)
    other = Model("other", BASE, trainable=True)
    advantage = group_advantage(b, reward(exact, b, name="score_b"), name="advantage_b")
    loss = clipped_policy_loss(advantage)
    return graph(updated(a), train(other, b, loss=loss, lr=1e-6))


def illegal_name() -> Graph:
    return trained(generate(policy, source(), n=8, max_tokens=64, name="my rollout/8"))


def models_of_one_name_that_differ() -> Graph:
    return compared_with(Model("policy", "models/other"))


def message_1_reward_for_an_advantage() -> Graph:
    rollout = sampled()
    return trained(rollout, clipped_policy_loss(any_port(scored(rollout))))


def prompt_for_a_rollout() -> Graph:
    rollout = sampled()
    prompt = rollout.node.inputs["prompt"]
    advantage = group_advantage(any_port(prompt), scored(rollout), name="advantage")
    return trained(rollout, clipped_policy_loss(advantage))


def values_for_logprobs() -> Graph:
    rollout = sampled()
    value = values(critic, rollout)
    advantage = gae(rollout, scored(rollout), value)
    return graph(
        updated(rollout, clipped_policy_loss(advantage, old=any_port(value))),
        train(critic, rollout, loss=value_loss(advantage, old=value), lr=1e-5),
    )


def rollout_for_a_prompt() -> Graph:
    return trained(generate(policy, any_port(sampled(n=1)), n=8, max_tokens=64))


def advantage_for_returns() -> Graph:
    rollout = sampled()
    advantage = compared(rollout)
    return graph(
        updated(rollout, clipped_policy_loss(advantage)),
        train(critic, rollout, loss=value_loss(any_port(advantage)), lr=1e-5),
    )


def no_recorded_logprobs() -> Graph:
    rows = demonstrations("data/demos.jsonl", batch=64)
    return trained(rows, clipped_policy_loss(returns(rows, scored(rows))))


def unknown_dataset_column() -> Graph:
    def wants_solution(completions: Sequence[str], solution: Sequence[str]) -> list[float]:
        return [float(c == s) for c, s in zip(completions, solution, strict=True)]

    rollout = sampled()
    return judged(rollout, reward([exact, wants_solution], rollout, name="score"))


def misspelt_dataset_column() -> Graph:
    def wants_answers(completions: Sequence[str], answers: Sequence[str]) -> list[float]:
        return [float(c == a) for c, a in zip(completions, answers, strict=True)]

    rollout = sampled()
    return judged(rollout, reward(wants_answers, rollout))


def missing_data_file() -> Graph:
    prompt = prompts("no_such_folder/train.parquet", batch=64)
    return trained(generate(policy, prompt, n=8, max_tokens=64))


def message_2_score_of_rows_that_were_selected_away() -> Graph:
    rollout = sampled(n=16)
    score = scored(rollout)
    rollout = select(rollout, where=mixed_groups(score), refill=True)
    return trained(rollout, clipped_policy_loss(group_advantage(rollout, score)))


def rows_of_two_sources() -> Graph:
    rollout = sampled()
    prompt = prompts("data/more.parquet", batch=64, name="more")
    other = generate(policy, prompt, n=8, max_tokens=64, name="other")
    return trained(rollout, clipped_policy_loss(group_advantage(rollout, scored(other))))


def one_score_for_a_group_of_answers() -> Graph:
    prompt = source()
    rollout = generate(policy, prompt, n=8, max_tokens=64, name="rollout")
    greedy = generate(policy, prompt, max_tokens=64, temperature=0.0, name="greedy")
    return trained(rollout, clipped_policy_loss(returns(rollout, scored(greedy))))


def loss_on_rows_that_are_not_trained() -> Graph:
    rollout = sampled()
    score = scored(rollout)
    kept = select(rollout, where=mixed_groups(score), refill=True)
    return trained(kept, clipped_policy_loss(group_advantage(rollout, score)))


def sum_of_nothing() -> Graph:
    return judged(sampled(), add())


def whitened_twice() -> Graph:
    rollout = sampled()
    once = whiten(returns(rollout, scored(rollout)), rollout)
    twice = whiten(once, rollout, name="again")
    return trained(rollout, clipped_policy_loss(twice))


def several_faults_at_once() -> Graph:
    rollout = generate(policy, prompts(DATA, batch=0), n=1, max_tokens=64, top_p=1.5)
    advantage = group_advantage(rollout, scored(rollout))
    return graph(
        train(policy, rollout, loss=clipped_policy_loss(advantage), lr=0.0),
        train(policy, rollout, loss=clipped_policy_loss(advantage), lr=1e-6),
    )
