"""Wires that do not fit. Pyright must flag exactly the lines marked `# wrong`."""

from __future__ import annotations

import pyarrow as pa

from dataflow import (
    Advantage,
    Graph,
    Model,
    Now,
    Reward,
    Rollout,
    Tensors,
    column,
    linear,
    loss,
    operator,
)
from engine.plan.options import RunOptions
from operators.advantage import (
    baseline_advantage,
    gae,
    group_advantage,
    kl_in_reward,
    overlong_penalty,
    whiten,
)
from operators.data import prompts
from operators.forward import logprobs, scores, values
from operators.generate import generate
from operators.losses import clipped_policy_loss, decoupled_policy_loss, value_loss
from operators.mean_over import mean_over
from operators.optimizers import AdamW
from operators.reward import reward
from operators.rewards import verl_reward
from operators.select import best_of, mixed_groups, select
from operators.train import evaluate, train
from tests.miswirings.right import (
    advantage,
    again,
    careful,
    clipped,
    critic,
    diverse,
    exact,
    expect_tokens,
    graph,
    greedy,
    kept,
    kept_score,
    policy,
    prompt,
    ref,
    reference,
    rollout,
    score,
    shown,
    target,
    value,
    white,
)


def averaged(now: Now, advantage: Tensors[Advantage]) -> float:
    return 1.0


generate(policy, rollout, max_tokens=64)  # wrong
generate(prompt, prompt, max_tokens=64)  # wrong
generate(policy, prompt, max_tokens=64, num_generations=8)  # wrong
generate(policy, prompt, max_tokens="64")  # wrong
generate(policy, prompt, max_tokens=64, on_update="drian")  # wrong
generate(policy, prompt, max_tokens=64, stop=3)  # wrong
prompts("train.parquet", batch_size=64)  # wrong
reward(exact, prompt)  # wrong
logprobs(reference, prompt)  # wrong
logprobs(rollout, reference)  # wrong
values(critic, score)  # wrong
scores(critic, value)  # wrong
group_advantage(score, rollout)  # wrong
group_advantage(rollout, ref)  # wrong
group_advantage(rollout, score, baseline="median")  # wrong
gae(rollout, value, score)  # wrong
whiten(score, rollout)  # wrong
kl_in_reward(shown, score, ref, beta=0.1)  # wrong
kl_in_reward(rollout, score, value, beta=0.1)  # wrong
baseline_advantage(rollout, score, greedy)  # wrong
mean_over(rollout, prompt)  # wrong
mean_over(score)  # wrong
mean_over(score, prompt, n=4)  # wrong
clipped_policy_loss(mean_over(score, prompt))  # wrong
overlong_penalty(rollout, value, max_tokens=64, buffer=8)  # wrong
expect_tokens(overlong_penalty(rollout, score, max_tokens=64, buffer=8), rollout)  # wrong
clipped_policy_loss(score)  # wrong
clipped_policy_loss(advantage, old=value)  # wrong
clipped_policy_loss(advantage, reference=reference)  # wrong
clipped_policy_loss(advantage, epsilon=0.2)  # wrong
decoupled_policy_loss(advantage)  # wrong
value_loss(advantage)  # wrong
value_loss(white, old=ref)  # wrong
mixed_groups(rollout)  # wrong
select(rollout, where=score)  # wrong
first, second = select(rollout, where=best_of(score))  # wrong
group_advantage(kept_score, kept)  # wrong
diverse(score, rollout)  # wrong
diverse(rollout, score, weigth=0.2)  # wrong
careful(target, strength="much")  # wrong
careful(value)  # wrong
train(policy, prompt, loss=clipped, lr=1e-6)  # wrong
train(policy, rollout, loss=advantage, lr=1e-6)  # wrong
train(policy, rollout, loss=clipped, lr="1e-6")  # wrong
train(policy, rollout, loss=clipped, lr=1e-6, aggregate="mean")  # wrong
evaluate(policy, rollout, every=10)  # wrong
graph.extend(rollout)  # wrong
graph.replace(advantage=clipped)  # wrong
group_advantage(graph.port("score", Reward), again)  # wrong
values(critic, graph.port("rollout", Rollout), critic)  # wrong
operator(scope="group", keeps="pars")  # wrong
Model("policy", "base", trainabel=True)  # wrong
Model("policy", "base", head="value")  # wrong
Model("policy", "base", follows="policy")  # wrong
linear(0.1, 0.0, "100")  # wrong
column(pa.float32(), "tokens")  # wrong
operator(scope="groups")  # wrong
operator(reads={"rollout": 1})  # wrong
loss(scope="row")  # wrong
loss()(averaged)  # wrong
reward("digits", rollout)  # wrong
reward(exact, rollout, scope="grup")  # wrong
reward(exact, rollout, weights=0.5)  # wrong
reward(verl_reward("compute_score"), rollout)  # wrong
generate(policy, prompt, max_tokens=64, stop=2)  # wrong
train(policy, rollout, loss=clipped, lr=1e-6, optimizer=AdamW(weight_deacy=0.1))  # wrong
clipped + 1.0  # wrong
"0.5" * clipped  # wrong
Graph(7)  # wrong
RunOptions(strikt=True)  # wrong
