"""One file of a user, edited five times: each algorithm is at most four lines away from GRPO.

python examples/edits.py
dataflow diff examples/edits.py:grpo examples/edits.py:gspo
"""

from __future__ import annotations

import tiny
from user_reward import short_digits

from dataflow import Graph, Model
from dataflow.diff import diff
from engine.api import Result, run
from operators.advantage import gae, group_advantage, overlong_penalty
from operators.data import prompts
from operators.forward import logprobs, values
from operators.generate import generate
from operators.losses import (
    clipped_policy_loss,
    decoupled_policy_loss,
    distillation_loss,
    value_loss,
)
from operators.reward import reward
from operators.select import mixed_groups, select
from operators.train import train


def ppo() -> Graph:
    """A critic gives each token its advantage."""
    files = tiny.make()
    policy = Model("policy", files.model, trainable=True)
    prompt = prompts(files.train, batch=8)
    rollout = generate(policy, prompt, n=8, max_tokens=8)
    score = reward(short_digits, rollout)
    critic = Model("critic", files.model, trainable=True, head="scalar")
    advantage = gae(rollout, score, values(critic, rollout))
    loss = clipped_policy_loss(advantage)
    fit = train(critic, rollout, loss=value_loss(advantage), lr=1e-2)
    return Graph("mine", train(policy, rollout, loss=loss, lr=5e-3, minibatches=2), fit)


def grpo() -> Graph:
    """The critic goes; the answers to a prompt are compared."""
    files = tiny.make()
    policy = Model("policy", files.model, trainable=True)
    prompt = prompts(files.train, batch=8)
    rollout = generate(policy, prompt, n=8, max_tokens=8)
    score = reward(short_digits, rollout)
    advantage = group_advantage(rollout, score)
    loss = clipped_policy_loss(advantage)
    return Graph("mine", train(policy, rollout, loss=loss, lr=5e-3, minibatches=2))


def dapo() -> Graph:
    """Groups without signal are replaced, long answers punished, the clip is wider above."""
    files = tiny.make()
    policy = Model("policy", files.model, trainable=True)
    prompt = prompts(files.train, batch=8)
    rollout = generate(policy, prompt, n=8, max_tokens=8)
    score = reward(short_digits, rollout)
    rollout, score = select(rollout, score, where=mixed_groups(score), refill=True)
    score = overlong_penalty(rollout, score, max_tokens=8, buffer=2)
    advantage = group_advantage(rollout, score)
    loss = clipped_policy_loss(advantage, clip=(0.2, 0.28))
    return Graph("mine", train(policy, rollout, loss=loss, lr=5e-3, minibatches=2))


def gspo() -> Graph:
    """Ratio and clip are of whole answers."""
    files = tiny.make()
    policy = Model("policy", files.model, trainable=True)
    prompt = prompts(files.train, batch=8)
    rollout = generate(policy, prompt, n=8, max_tokens=8)
    score = reward(short_digits, rollout)
    advantage = group_advantage(rollout, score)
    loss = clipped_policy_loss(advantage, level="sequence", clip=(3e-4, 4e-4))
    return Graph("mine", train(policy, rollout, loss=loss, lr=5e-3, minibatches=2))


def distilled() -> Graph:
    """No reward: a teacher grades each token of the answers."""
    files = tiny.make()
    policy = Model("policy", files.model, trainable=True)
    prompt = prompts(files.train, batch=8)
    rollout = generate(policy, prompt, n=8, max_tokens=8)
    grades = logprobs(Model("teacher", files.teacher), rollout, top_k=16)
    loss = distillation_loss(grades)
    return Graph("mine", train(policy, rollout, loss=loss, lr=5e-3, minibatches=2))


def decoupled() -> Graph:
    """Generation and training overlap; the clip is around the policy before the Step."""
    files = tiny.make()
    policy = Model("policy", files.model, trainable=True)
    prompt = prompts(files.train, batch=8)
    rollout = generate(policy, prompt, n=8, max_tokens=8, max_lag=1)
    score = reward(short_digits, rollout)
    proximal = logprobs(policy, rollout, name="proximal")
    advantage = group_advantage(rollout, score)
    loss = decoupled_policy_loss(advantage, proximal=proximal)
    return Graph("mine", train(policy, rollout, loss=loss, lr=5e-3, minibatches=2))


EDITS = ((ppo, grpo), (grpo, dapo), (grpo, gspo), (grpo, distilled), (grpo, decoupled))


def main(steps: int = 4) -> Result:
    """What each edit changes, and a short run of what it makes; returns the last."""
    for before, after in EDITS:
        print(diff(before(), after()))
        options = tiny.options(f"edits_{after.__name__}", steps=steps)
        result = run(after(), options, on_step=[tiny.show])
    return result


if __name__ == "__main__":
    main()
