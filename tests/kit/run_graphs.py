"""Small importable graphs on the tiny model, and their rewards, operators and losses."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dataflow.graph import Graph
from dataflow.loss import Now, Tensors, Terms, loss
from dataflow.model import Model
from dataflow.node import Port
from dataflow.schema import Advantage, Prompt, Reward, Rollout
from dataflow.user import Columns, operator
from graphs.grpo import grpo
from operators.advantage import gae, group_advantage, kl_in_reward
from operators.data import demonstrations, prompts
from operators.forward import logprobs, values
from operators.generate import generate
from operators.losses import (
    clipped_policy_loss,
    policy_gradient_loss,
    supervised_loss,
    value_loss,
)
from operators.reward import reward
from operators.rewards import RewardFn
from operators.select import mixed_groups, select
from operators.train import evaluate, train


def vowels(completions: Sequence[str], **columns: object) -> list[float]:
    """The share of vowels; random text has some, so groups differ."""
    return [sum(letter in "aeiouAEIOU" for letter in text) / 6 for text in completions]


def vowels_of_steps(
    completions: Sequence[str], steps: Sequence[Sequence[str]], **columns: object
) -> list[list[float]]:
    """The share of vowels of each step."""
    return [vowels(completions=pieces) for pieces in steps]


def consonants(completions: Sequence[str], **columns: object) -> list[float]:
    """Less the more vowels there are."""
    return [-1.0 - share for share in vowels(completions)]


def digits(completions: Sequence[str], **columns: object) -> list[float | None]:
    """Does not apply to answers without a digit."""
    counts = [sum(letter.isdigit() for letter in text) for text in completions]
    return [float(count) if count else None for count in counts]


def raises(completions: Sequence[str], **columns: object) -> list[float]:
    return [1.0 / (len(text) - len(text)) for text in completions]


def fails_on_one_prompt(
    completions: Sequence[str], prompts: Sequence[str], **columns: object
) -> list[float]:
    if any(prompt.startswith("a") for prompt in prompts):
        raise LookupError("a prompt that begins with a")
    return vowels(completions)


def never_returns(completions: Sequence[str], **columns: object) -> list[float]:
    threading.Event().wait()
    return [0.0 for _ in completions]


def says_and_hangs(completions: Sequence[str], **columns: object) -> list[float]:
    print("hangs")
    return never_returns(completions)


def own_process(completions: Sequence[str], **columns: object) -> list[float]:
    return [float(os.getpid()) for _ in completions]


async def asynchronous(completions: Sequence[str], **columns: object) -> list[float]:
    return vowels(completions)


@operator()
def hangs(score: Columns[Reward]) -> Columns[Reward]:
    threading.Event().wait()
    return score


@operator()
def breaks(score: Columns[Reward]) -> Columns[Reward]:
    raise RuntimeError("out of luck")


@operator()
def leaves(score: Columns[Reward]) -> Columns[Reward]:
    sys.exit(0)


@loss(scope="token")
def leaves_in_its_loss(now: Now, advantage: Tensors[Advantage]) -> Terms:
    sys.exit("enough")


@loss(scope="token")
def deadly(now: Now, advantage: Tensors[Advantage], *, marker: str, untold: bool = False) -> Terms:
    """In Step 3 the second rank of several kills itself, once: it leaves the marker file, with the
    process of its Supervisor. untold: it stops that first, which would tell of it.
    """
    if now.step == 3 and _is_second_rank() and not Path(marker).exists():
        Path(marker).write_text(str(os.getppid()))
        if untold:
            os.kill(os.getppid(), signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGKILL)
    return Terms(-now.logprobs * advantage["advantage"])


@loss(scope="token")
def unlucky(now: Now, advantage: Tensors[Advantage]) -> Terms:
    """In Step 2 it fails on the second rank of several, and only there."""
    if now.step == 2 and _is_second_rank():
        raise RuntimeError("out of luck")
    return Terms(-now.logprobs * advantage["advantage"])


def _is_second_rank() -> bool:
    import torch.distributed as dist  # reward children import this file, and should start fast

    return dist.is_initialized() and dist.get_rank() == 1


def policy_and_prompts(folder: Path, data: str = "train") -> tuple[Model, Port[Prompt]]:
    policy = Model("policy", str(folder / "model"), trainable=True)
    return policy, prompts(str(folder / f"{data}.parquet"), batch=4)


def rolled_out(folder: Path, n: int = 1, **how: Any) -> tuple[Model, Port[Rollout]]:
    """The policy, and n answers of at most 6 tokens to each prompt. how: of `generate`."""
    policy, asked = policy_and_prompts(folder)
    return policy, generate(policy, asked, n=n, name="rollout", **{"max_tokens": 6} | how)


def small(
    folder: Path, fn: RewardFn = vowels, *, n: int = 4, batch: int = 4, max_lag: int = 0
) -> Graph:
    """GRPO."""
    base, data = str(folder / "model"), str(folder / "train.parquet")
    return grpo(base, data, fn, n=n, batch=batch, max_tokens=6, lr=1e-3, max_lag=max_lag)


def with_score(
    folder: Path,
    change: Callable[[Any], Port[Reward]] | None = None,
    loss_of: Callable[[Any], Any] = policy_gradient_loss,
) -> Graph:
    """GRPO whose score goes through a user's operator, or with a user's loss."""
    policy, rollout = rolled_out(folder, 2)
    score = reward(vowels, rollout, name="score")
    advantage = group_advantage(rollout, change(score) if change else score, name="advantage")
    return Graph("scored", train(policy, rollout, loss=loss_of(advantage), lr=1e-3))


def dapo(folder: Path, *, max_lag: int = 0) -> Graph:
    """Groups with equal rewards are replaced by others; the clip is not symmetric."""
    policy, rollout = rolled_out(folder, 2, max_tokens=3, max_lag=max_lag)
    score = reward(vowels, rollout, name="score")
    rollout, score = select(rollout, score, where=mixed_groups(score), refill=True, max_attempts=20)
    advantage = group_advantage(rollout, score, name="advantage")
    loss = clipped_policy_loss(advantage, clip=(0.2, 0.28))
    return Graph("dapo", train(policy, rollout, loss=loss, lr=1e-3))


def two_models(folder: Path) -> Graph:
    """A policy and a critic that are trained, with the critic's values and a frozen reference."""
    base = str(folder / "model")
    policy, rollout = rolled_out(folder)
    critic = Model("critic", base, trainable=True, head="scalar")
    reference = logprobs(Model("past", base), rollout, name="reference")
    value = values(critic, rollout)
    return Graph("two_models", *train_by_values(policy, critic, rollout, reference, value))


def followed(folder: Path, *, every: int = 2, rate: float = 0.5) -> Graph:
    """A critic whose slow copy computes the values, and a slow copy of the policy as reference."""
    base = str(folder / "model")
    policy, rollout = rolled_out(folder)
    critic = Model("critic", base, trainable=True, head="scalar")
    slow = Model("slow", base, head="scalar", follows=critic, every=every, rate=rate)
    reference = logprobs(Model("past", base, follows=policy, every=3), rollout)
    value = values(slow, rollout)
    return Graph("followed", *train_by_values(policy, critic, rollout, reference, value))


def train_by_values(
    policy: Model, critic: Model, rollout: Port[Rollout], reference: Any, value: Any
) -> list[Any]:
    """Both Models' train nodes, as PPO has them."""
    score = kl_in_reward(rollout, reward(vowels, rollout, name="score"), reference, beta=0.1)
    advantage = gae(rollout, score, value)
    return [
        train(policy, rollout, loss=clipped_policy_loss(advantage, clip=0.2), lr=1e-3),
        train(critic, rollout, loss=value_loss(advantage, old=value, clip=0.2), lr=1e-2),
    ]


def evaluated(folder: Path, *, every: int = 2, keep_best: int = 0, batch: int = 4) -> Graph:
    """GRPO with a greedy and a sampled evaluation on other prompts."""
    policy = Model("policy", str(folder / "model"), trainable=True)
    held_out = prompts(str(folder / "test.parquet"), shuffle=False, name="held_out")
    greedy = generate(policy, held_out, max_tokens=6, temperature=0.0, name="greedy_rollout")
    sampled = generate(policy, held_out, max_tokens=6, name="sampled_rollout")
    greedy_score = reward(vowels, greedy, name="greedy_reward")
    sampled_score = reward(vowels, sampled, name="sampled_reward")
    return small(folder, batch=batch).extend(
        evaluate(policy, greedy_score, every=every, keep_best=keep_best),
        evaluate(policy, sampled_score, every=every, name="sampled"),
    )


def two_policies(folder: Path) -> Graph:
    """Two Models with their own rows, reward and training, on the same prompts."""
    prompt = prompts(str(folder / "train.parquet"), batch=2)
    sinks = []
    for name, fn in (("red", vowels), ("blue", consonants)):
        model = Model(name, str(folder / "model"), trainable=True)
        rollout = generate(model, prompt, n=4, max_tokens=6, name=name)
        score = reward(fn, rollout, name=f"{name}_score")
        advantage = group_advantage(rollout, score, name=f"{name}_advantage")
        sinks.append(train(model, rollout, loss=clipped_policy_loss(advantage), lr=1e-2))
    return Graph("two_policies", *sinks)


def sft_and_rl(folder: Path, *, max_lag: int = 0, batch: int = 2, **how: Any) -> Graph:
    """Answers of the policy, and demonstrations with half the weight, in one loss."""
    policy, asked = policy_and_prompts(folder)
    rollout = generate(
        policy, asked, n=4, max_tokens=5, temperature=0.8, max_lag=max_lag, name="rollout"
    )
    advantage = group_advantage(rollout, reward(vowels, rollout, name="score"), name="advantage")
    demos = demonstrations(str(folder / "demos.parquet"), batch=batch, name="demos")
    loss = clipped_policy_loss(advantage) + 0.5 * supervised_loss(rows=demos)
    return Graph("sft_and_rl", train(policy, rollout, loss=loss, **{"lr": 2e-3} | how))
