"""Asynchronous training as one number: the same graph with max_lag=0 and max_lag=1.

    python examples/async_lag.py

With max_lag=1 prompts of the next Step are admitted before this one is trained, and no row is
trained that was made by weights more than one version old: policy/lag/max is what was measured.
max_lag is the graph's; decoupled_policy_loss (AReaL) is the loss for rows that lag.
"""

from __future__ import annotations

import tiny
from user_reward import short_digits

from dataflow import Graph, Model, check
from engine.api import Result, run
from operators.advantage import group_advantage
from operators.data import prompts
from operators.forward import logprobs
from operators.generate import generate
from operators.losses import decoupled_policy_loss
from operators.reward import reward
from operators.train import train


def graph(*, max_lag: int = 1) -> Graph:
    """AReaL's objective: `proximal` is the policy as the Step finds it."""
    files = tiny.make()
    policy = Model("policy", files.model, trainable=True)
    rollout = generate(policy, prompts(files.train, batch=8), n=8, max_tokens=8, max_lag=max_lag)
    proximal = logprobs(policy, rollout, name="proximal")
    advantage = group_advantage(rollout, reward(short_digits, rollout))
    objective = decoupled_policy_loss(advantage, proximal=proximal)
    return Graph("async", train(policy, rollout, loss=objective, lr=5e-3, minibatches=2))


def main(steps: int = 12) -> Result:
    """Both, one after the other; returns the last."""
    print(check(graph()).describe())
    run(graph(max_lag=0), tiny.options("async_lag_0", steps=steps), on_step=[tiny.show])
    return run(graph(max_lag=1), tiny.options("async_lag_1", steps=steps), on_step=[tiny.show])


if __name__ == "__main__":
    main()
