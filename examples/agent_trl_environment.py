"""An environment written for TRL's `environment_factory`, unchanged, with its reward function.

    python examples/agent_trl_environment.py

trl_guess.py does not know this project. Each episode has an instance in a process of its own;
reward functions get what it exports at its end, as `environments`.
"""

from __future__ import annotations

import tiny
import trl_guess

from dataflow import Graph, Model
from engine.api import Result, run
from operators.advantage import group_advantage
from operators.data import prompts
from operators.interact import interact
from operators.losses import clipped_policy_loss
from operators.reward import reward
from operators.train import train


def graph() -> Graph:
    """GRPO, as GRPOTrainer has it, with TRL's class and function."""
    files = tiny.make()
    policy = Model("policy", files.model, trainable=True)
    prompt = prompts(files.chats, batch=4)
    game = trl_guess.GuessNumber
    episode = interact(policy, prompt, game, n=4, max_turns=4, max_turn_tokens=8, max_tokens=64)
    score = reward(trl_guess.solved, episode)
    loss = clipped_policy_loss(group_advantage(episode, score))
    return Graph("trl_environment", train(policy, episode, loss=loss, lr=5e-3))


def main(steps: int = 12) -> Result:
    """A short run."""
    options = tiny.options("agent_trl_environment", steps=steps)
    return run(graph(), options, on_step=[tiny.show])


if __name__ == "__main__":
    main()
