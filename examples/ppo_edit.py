"""PPO as an edit of GRPO: another advantage and a critic; `dataflow diff` shows what that changes.

Run: python examples/ppo_edit.py
"""

from __future__ import annotations

import tiny
from user_reward import short_digits

from dataflow import Graph, Model, Reward, Rollout
from dataflow.diff import diff
from engine.api import Result, run
from graphs.grpo import grpo
from operators.advantage import gae
from operators.forward import values
from operators.losses import value_loss
from operators.train import train


def before() -> Graph:
    """GRPO with one answer per prompt: groups of one are refused, but only if a sink reads them."""
    files = tiny.make()
    return grpo(files.model, files.train, short_digits, n=1, batch=32, max_tokens=8, lr=3e-3)


def after() -> Graph:
    """The edit."""
    g = before()
    rollout, score = g.port("rollout", Rollout), g.port("score", Reward)
    critic = Model("critic", tiny.make().model, trainable=True, head="scalar")
    value = values(critic, rollout)
    advantage = gae(rollout, score, value)
    critic_sink = train(critic, rollout, loss=value_loss(advantage), lr=1e-2)
    return g.replace(advantage=advantage).extend(critic_sink).renamed("ppo")


def main(steps: int = 12) -> Result:
    """Print the difference, then a short run."""
    print(diff(before(), after()))
    return run(after(), tiny.options("ppo_edit", steps=steps), on_step=[tiny.show])


if __name__ == "__main__":
    main()
