"""TRL's reward functions, several at once, from a file that does not know this project.

    python examples/run_trl_reward.py
    dataflow run graphs.grpo:grpo --reward-fn \\
        examples/trl_reward.py:correct,examples/trl_reward.py:only_digits ...

Functions are called with keywords only: `completions`, `prompts`, `completion_ids` and the data's
columns by name.
"""

from __future__ import annotations

import tiny
import trl_reward

from dataflow import Graph, Model
from engine.api import Result, run
from operators.advantage import group_advantage
from operators.data import prompts
from operators.generate import generate
from operators.losses import clipped_policy_loss
from operators.reward import reward
from operators.train import train


def graph() -> Graph:
    """GRPO written out, with a weighted sum of the two functions."""
    files = tiny.make()
    policy = Model("policy", files.model, trainable=True)
    rollout = generate(policy, prompts(files.train, batch=8), n=8, max_tokens=4)
    score = reward([trl_reward.correct, trl_reward.only_digits], rollout, weights=[1.0, 0.2])
    advantage = group_advantage(rollout, score)
    return Graph(
        "trl_rewards", train(policy, rollout, loss=clipped_policy_loss(advantage), lr=5e-3)
    )


def main(steps: int = 12) -> Result:
    """A short run; reward/correct/mean and reward/only_digits/mean are logged by name."""
    return run(graph(), tiny.options("run_trl_reward", steps=steps), on_step=[tiny.show])


if __name__ == "__main__":
    main()
