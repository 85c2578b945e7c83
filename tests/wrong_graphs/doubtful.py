"""Graphs that can be run and look wrong, one warning a function; golden files say how."""

from __future__ import annotations

from dataflow.graph import Graph
from dataflow.model import Model
from operators.advantage import kl_in_reward, returns
from operators.data import prompts
from operators.forward import logprobs
from operators.generate import generate
from operators.losses import clipped_policy_loss, policy_gradient_loss
from operators.reward import reward
from operators.train import evaluate
from tests.wrong_graphs.held_out import FOLDER
from tests.wrong_graphs.parts import (
    BASE,
    DATA,
    compared,
    exact,
    graph,
    judged,
    policy,
    sampled,
    scored,
    trained,
    updated,
)


def batch_larger_than_the_data() -> Graph:
    prompt = prompts(str(FOLDER / "train.jsonl"), batch=64)
    rollout = generate(policy, prompt, n=8, max_tokens=64, name="rollout")
    return trained(rollout)


def greedy_sampling_of_several_answers() -> Graph:
    prompt = prompts(DATA, batch=64)
    rollout = generate(policy, prompt, n=8, max_tokens=64, temperature=0.0, name="rollout")
    return trained(rollout)


def several_updates_without_a_ratio() -> Graph:
    rollout = sampled(n=1)
    loss = policy_gradient_loss(returns(rollout, scored(rollout)))
    return trained(rollout, loss, epochs=2, minibatches=4)


def lag_without_a_ratio() -> Graph:
    rollout = sampled(n=1, max_lag=2)
    advantage = returns(rollout, scored(rollout))
    loss = clipped_policy_loss(advantage) + 0.1 * policy_gradient_loss(advantage)
    return trained(rollout, loss)


def reference_that_is_the_trained_policy() -> Graph:
    rollout = sampled()
    reference = logprobs(policy, rollout, name="reference")
    return trained(rollout, clipped_policy_loss(compared(rollout), reference=reference, beta=0.04))


def reward_with_a_divergence_from_the_trained_policy() -> Graph:
    rollout = sampled()
    return judged(
        rollout, kl_in_reward(rollout, scored(rollout), logprobs(policy, rollout), beta=0.05)
    )


def lag_of_a_model_that_nobody_trains() -> Graph:
    rollout = sampled()
    reference = logprobs(Model("reference", BASE), rollout, max_lag=3)
    return trained(rollout, clipped_policy_loss(compared(rollout), reference=reference, beta=0.04))


def lag_of_an_evaluation() -> Graph:
    prompt = prompts("data/test.parquet", name="test")
    held = generate(policy, prompt, max_tokens=64, max_lag=2, name="held")
    return graph(updated(sampled()), evaluate(policy, reward(exact, held), every=10))


def intake_of_rows_that_never_lag() -> Graph:
    return trained(sampled(), intake="drop")
