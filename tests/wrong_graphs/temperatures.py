"""Log-probs of two temperatures in one ratio, and parameters of training that do not exist."""

from __future__ import annotations

from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.node import Port
from dataflow.schema import Rollout
from operators.advantage import kl_in_reward
from operators.forward import logprobs
from operators.losses import decoupled_policy_loss, dpo_loss, supervised_loss
from operators.select import select
from tests.right_graphs import pair
from tests.wrong_graphs.parts import BASE, compared, judged, policy, sampled, scored, trained


def cool() -> Port[Rollout]:
    return sampled(temperature=0.7)


def training_at_another_temperature_than_proximal() -> Graph:
    rollout = cool()
    proximal = logprobs(policy, rollout, name="proximal")
    loss = decoupled_policy_loss(compared(rollout), proximal=proximal)
    return trained(rollout, loss, temperature=0.5)


def reference_at_another_temperature() -> Graph:
    rollout = cool()
    pairs = pair(scored(rollout))
    rollout, pairs = select(rollout, pairs, where=pairs, refill=True)
    reference = logprobs(Model("reference", BASE), rollout)
    return trained(rollout, dpo_loss(pairs, reference=reference), temperature=1.0)


def imitation_at_a_temperature_of_zero() -> Graph:
    return trained(cool(), supervised_loss(), temperature=0.0)


def masked_rows_that_are_neither_skipped_nor_counted() -> Graph:
    return trained(cool(), masked_rows="drop")


def dialect_of_a_peer_that_has_none() -> Graph:
    rollout = cool()
    near = logprobs(Model("reference", BASE), rollout)
    score = kl_in_reward(rollout, scored(rollout), near, beta=0.1, dialect="verll")  # type: ignore
    return judged(rollout, score)


def truncation_by_a_sampler_that_does_not_record_it() -> Graph:
    return trained(sampled(top_p=0.9, sampler="vllm"))
