"""Right graphs whose rows other Models than the trained one wrote, or wrote a part of."""

from __future__ import annotations

from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.node import Port
from dataflow.schema import Rollout
from dataflow.user import Columns, operator
from operators.advantage import group_advantage, returns
from operators.continued import continued
from operators.data import prompts
from operators.forward import logprobs
from operators.generate import generate
from operators.losses import clipped_policy_loss, importance, policy_gradient_loss
from operators.reward import reward
from operators.train import train
from tests.kit.rewards import exact

BASE, DATA = "models/tiny", "data/train.parquet"

policy = Model("policy", BASE, trainable=True)


def answered_by(model: Model, n: int = 8) -> Port[Rollout]:
    prompt = prompts(DATA, batch=64)
    return generate(model, prompt, n=n, max_tokens=64, name="rollout")


def ratio_with_a_follower() -> Graph:
    """The clip is around the weights of up to 49 Steps ago."""
    rows = answered_by(Model("behind", BASE, follows=policy, every=50))
    loss = clipped_policy_loss(group_advantage(rows, reward(exact, rows)))
    return Graph("ratio_with_a_follower", train(policy, rows, loss=loss, lr=1e-6))


def frozen_generator_corrected() -> Graph:
    """Each token counts by how likely the trained Model makes it."""
    rows = answered_by(Model("fixed", BASE))
    advantage = group_advantage(rows, reward(exact, rows))
    old = logprobs(policy, rows, name="old")
    loss = policy_gradient_loss(advantage, old=old, correction=importance())
    return Graph("frozen_generator_corrected", train(policy, rows, loss=loss, lr=1e-6))


@operator(parent="first")
def dialogue(later: Columns[Rollout], first: Columns[Rollout]) -> Columns[Rollout]:
    assert len(later) == len(first)
    return later


def answers_to_a_simulated_user() -> Graph:
    """The tokens of a frozen Model stand between those of the policy."""
    rollout = answered_by(policy, n=1)
    user = Model("user", BASE)
    asked = generate(user, continued(rollout, then="Well?"), max_tokens=64, name="asked")
    rows = dialogue(asked, rollout)
    loss = clipped_policy_loss(returns(rows, reward(exact, rows)))
    sink = train(policy, rows, loss=loss, lr=1e-6, temperature=1.0)
    return Graph("answers_to_a_simulated_user", sink)
