"""Policies trained on rows that they did not write, or that nobody sampled: warnings."""

from __future__ import annotations

from typing import Any

from dataflow.graph import Graph
from dataflow.loss import Loss
from dataflow.model import Model
from dataflow.node import Port
from dataflow.schema import Rollout
from operators.advantage import returns
from operators.answers import answers
from operators.forward import logprobs
from operators.generate import generate
from operators.losses import clipped_policy_loss, policy_gradient_loss, supervised_loss
from operators.train import train
from tests.wrong_graphs.parts import BASE, compared, graph, policy, scored, source, trained, updated

fixed = Model("fixed", BASE)


def written_by(model: Model, n: int = 8, **asked: Any) -> Port[Rollout]:
    """Answers of this Model. asked: of `generate`."""
    return generate(model, source(), n=n, max_tokens=64, name="rollout", **asked)


def without_ratio(rows: Port[Rollout]) -> Loss:
    return policy_gradient_loss(compared(rows))


def policy_gradient_on_a_frozen_generator() -> Graph:
    rows = written_by(fixed)
    return trained(rows, without_ratio(rows))


def policy_gradient_on_a_frozen_copy() -> Graph:
    rows = written_by(Model("first", BASE, follows=policy, every=0))
    return trained(rows, without_ratio(rows))


def policy_gradient_on_a_generator_of_another_base() -> Graph:
    rows = written_by(Model("large", "models/large"))
    return trained(rows, without_ratio(rows))


def policy_gradient_on_a_follower_of_every_50_steps() -> Graph:
    rows = written_by(Model("behind", BASE, follows=policy, every=50), max_lag=1)
    return trained(rows, without_ratio(rows))


def policy_gradient_on_a_follower_that_moves_slowly() -> Graph:
    rows = written_by(Model("slow", BASE, follows=policy, rate=0.1))
    return trained(rows, without_ratio(rows))


def policy_gradient_on_greedy_rows() -> Graph:
    rows = written_by(policy, n=1, temperature=0.0)
    return trained(rows, policy_gradient_loss(returns(rows, scored(rows))))


def policy_gradient_on_answers_of_the_data() -> Graph:
    rows = answers(source(), column="answer")
    return trained(rows, policy_gradient_loss(returns(rows, scored(rows))))


def ratio_with_a_frozen_generator() -> Graph:
    rows = written_by(fixed)
    return trained(rows, clipped_policy_loss(compared(rows)))


def ratio_with_a_generator_that_is_trained_otherwise() -> Graph:
    other = Model("other", BASE, trainable=True)
    rows = written_by(other)
    sink = updated(rows, clipped_policy_loss(compared(rows)))
    return graph(sink, train(other, rows, loss=supervised_loss(), lr=1e-6))


def ratio_with_recomputed_logprobs_on_a_frozen_generator() -> Graph:
    rows = written_by(fixed)
    old = logprobs(policy, rows, name="old")
    return trained(rows, clipped_policy_loss(compared(rows), old=old), minibatches=4)


def ratio_on_greedy_rows() -> Graph:
    rows = written_by(policy, n=1, temperature=0.0)
    return trained(rows, clipped_policy_loss(returns(rows, scored(rows))))
