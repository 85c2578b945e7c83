"""Log-probs of two temperatures in one ratio, and parameters of training that do not exist."""

from __future__ import annotations

from typing import Any

from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.node import Port
from dataflow.schema import Rollout
from operators.advantage import group_advantage, kl_in_reward
from operators.data import prompts
from operators.forward import logprobs
from operators.generate import generate
from operators.losses import clipped_policy_loss, decoupled_policy_loss, dpo_loss, supervised_loss
from operators.select import select
from operators.train import train
from tests.right_graphs import pair
from tests.wrong_graphs.parts import BASE, DATA, compared, graph, policy, scored


def cool(n: int = 8) -> Port[Rollout]:
    prompt = prompts(DATA, batch=64)
    return generate(policy, prompt, n=n, max_tokens=64, temperature=0.7, name="rollout")


def training_at_another_temperature_than_the_recorded_logprobs() -> Graph:
    rollout = cool()
    loss = clipped_policy_loss(compared(rollout))
    return graph(train(policy, rollout, loss=loss, temperature=1.0, lr=1e-6))


def training_at_another_temperature_than_proximal() -> Graph:
    rollout = cool()
    proximal = logprobs(policy, rollout, name="proximal")
    loss = decoupled_policy_loss(compared(rollout), proximal=proximal)
    return graph(train(policy, rollout, loss=loss, temperature=0.5, lr=1e-6))


def reference_at_another_temperature() -> Graph:
    rollout = cool()
    pairs = pair(scored(rollout))
    rollout, pairs = select(rollout, pairs, where=pairs, refill=True)
    reference = logprobs(Model("reference", BASE), rollout)
    loss = dpo_loss(pairs, reference=reference)
    return graph(train(policy, rollout, loss=loss, temperature=1.0, lr=1e-6))


def imitation_at_a_temperature_of_zero() -> Graph:
    return graph(train(policy, cool(), loss=supervised_loss(), temperature=0.0, lr=1e-6))


def masked_rows_that_are_neither_skipped_nor_counted() -> Graph:
    rollout = cool()
    word: Any = "drop"
    loss = clipped_policy_loss(compared(rollout))
    return graph(train(policy, rollout, loss=loss, masked_rows=word, lr=1e-6))


def dialect_of_a_peer_that_has_none() -> Graph:
    rollout = cool()
    name: Any = "verll"
    reference = logprobs(Model("reference", BASE), rollout)
    score = kl_in_reward(rollout, scored(rollout), reference, beta=0.1, dialect=name)
    loss = clipped_policy_loss(group_advantage(rollout, score))
    return graph(train(policy, rollout, loss=loss, lr=1e-6))


def truncation_by_a_sampler_that_does_not_record_it() -> Graph:
    prompt = prompts(DATA, batch=64)
    rollout = generate(policy, prompt, n=8, max_tokens=64, top_p=0.9, sampler="vllm")
    loss = clipped_policy_loss(compared(rollout))
    return graph(train(policy, rollout, loss=loss, lr=1e-6))
