"""The clean twin of wrong.py: every wire fits, and pyright has nothing to say."""

from __future__ import annotations

from dataflow import (
    Advantage,
    Columns,
    Graph,
    Model,
    Now,
    Reward,
    Rollout,
    Tensors,
    Terms,
    TokenReward,
    linear,
    loss,
    operator,
)
from operators.advantage import (
    baseline_advantage,
    gae,
    group_advantage,
    kl_in_reward,
    overlong_penalty,
    whiten,
)
from operators.data import demonstrations, prompts
from operators.forward import logprobs, scores, values
from operators.generate import generate
from operators.losses import (
    clipped_policy_loss,
    decoupled_policy_loss,
    policy_gradient_loss,
    value_loss,
)
from operators.mean_over import mean_over
from operators.reward import reward
from operators.select import best_of, mixed_groups, select
from operators.train import evaluate, train


def exact(completions: list[str], answer: list[str]) -> list[float]:
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


@operator(scope="group")
def diverse(
    rollout: Columns[Rollout], score: Columns[Reward], *, weight: float = 0.1
) -> Columns[Reward]:
    return score


@operator(parent="before")
def expect_tokens(score: Columns[TokenReward], before: Columns[Rollout]) -> Columns[Reward]:
    return score


@loss(scope="token")
def careful(now: Now, advantage: Tensors[Advantage], *, strength: float = 1.0) -> Terms:
    return Terms(strength * advantage["advantage"])


policy = Model("policy", "base", trainable=True)
critic = Model("critic", "base", trainable=True, head="scalar")
reference = Model("reference", "base")

prompt = prompts("train.parquet", batch=64)
shown = demonstrations("demos.jsonl", batch=64)
rollout = generate(policy, prompt, n=8, max_tokens=64)
greedy = generate(policy, prompt, max_tokens=64, temperature=0.0, name="greedy")
score = reward(exact, rollout)
verdict = scores(critic, rollout)
ref = logprobs(reference, rollout)
value = values(critic, rollout)
shaped = kl_in_reward(rollout, score, ref, beta=0.1)
wider = diverse(rollout, score, weight=0.2)
advantage = group_advantage(rollout, wider)
remax = baseline_advantage(rollout, score, mean_over(reward(exact, greedy), prompt))
stopped = generate(policy, prompt, max_tokens=64, stop="</answer>")
spread = overlong_penalty(rollout, shaped, max_tokens=64, buffer=8)
tokenwise = expect_tokens(spread, rollout)
target = gae(rollout, shaped, value)
white = whiten(target, rollout)
kept, kept_score = select(rollout, score, where=mixed_groups(score), refill=True)
best = select(rollout, where=best_of(score, k=1))

clipped = clipped_policy_loss(
    advantage, old=ref, reference=ref, clip=(0.2, 0.28), beta=linear(0.1, 0.0, 100)
)
decoupled = decoupled_policy_loss(advantage, proximal=ref)
own = careful(advantage, strength=0.5)
fitted = value_loss(white, old=value)
mixed = clipped + 0.1 * own

graph = Graph(
    "right",
    train(policy, rollout, loss=mixed, lr=1e-6),
    train(critic, rollout, loss=fitted, lr=1e-5),
    evaluate(policy, score, every=10),
)
again = graph.port("rollout", Rollout)
other = graph.replace(advantage=group_advantage(again, score))
longer = graph.extend(train(policy, kept, loss=policy_gradient_loss(remax), lr=1e-6))
