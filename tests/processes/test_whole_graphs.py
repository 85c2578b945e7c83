"""Whole graphs, run by the engine, against a plain loop over a Hugging Face model that is written
out here.

The engine samples; the loop takes the token ids, and computes everything else itself from its own
weights, which it updates itself: rewards, log-probs, advantages, the loss of each row, the gradient
of each weight, and the weights of the next Step. Whatever we record is compared, row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plain_loop as loop
import pytest
import torch
from plain_loop import Learner, Step
from run_graphs import vowels
from safetensors.torch import load_file
from torch import Tensor

from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.node import Node, Port
from dataflow.schema import Preference, Reward, Rollout
from dataflow.user import Columns, operator
from engine.api import run
from operators.advantage import gae, group_advantage, kl_in_reward, whiten
from operators.data import prompts
from operators.forward import logprobs, values
from operators.generate import generate
from operators.losses import (
    clipped_policy_loss,
    decoupled_policy_loss,
    dpo_loss,
    policy_gradient_loss,
    supervised_loss,
    trajectory_balance_loss,
    value_loss,
)
from operators.optimizers import AdamW
from operators.reward import reward
from operators.select import best_of, select
from operators.train import train

pytestmark = pytest.mark.timeout(180)
Options = Callable[..., Any]
LR, T = 2e-3, 0.8


def sampled(tiny: Path, n: int, **how: Any) -> tuple[Model, Port[Rollout], Port[Reward], Model]:
    """Policy, rows, rewards, reference."""
    base = str(tiny / "model")
    policy = Model("policy", base, trainable=True)
    source = prompts(str(tiny / "train.parquet"), batch=4)
    rollout = generate(
        policy, source, n=n, max_tokens=5, name="rollout", **{"temperature": T} | how
    )
    return policy, rollout, reward(vowels, rollout, name="score"), Model("reference", base)


def updated(model: Model, rollout: Port[Rollout], loss: Any, **how: Any) -> Node:
    return train(model, rollout, loss=loss, lr=LR, optimizer=AdamW(eps=loop.EPS), **how)


def run_watched(
    graph: Graph, options: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Step], dict[str, Path]]:
    """What our train kernels did, and what they left."""
    steps = loop.watched(monkeypatch)
    result = run(graph, options)
    return steps, {name: Path(path) for name, path in result.trained.items()}


def same_weights(learner: Learner, folder: Path) -> None:
    """Ours on disk are those that the loop came to, and not those that both began with."""
    saved, moved = load_file(folder / "model.safetensors"), 0.0
    for name, wanted in learner.module.named_parameters():
        if name in saved:
            torch.testing.assert_close(
                saved[name],
                wanted.detach(),
                rtol=1e-4,
                atol=2e-5,
                msg=lambda m, n=name: f"{n}: {m}",
            )
            moved = max(moved, float((wanted.detach() - learner.versions[0][name]).abs().max()))
    assert moved > 1e-4


def scored(base: str, step: Step) -> list[float]:
    return loop.rewards(base, step.rows, vowels)


def sampled_by(learner: Learner, step: Step) -> list[Tensor]:
    """The log-probs of the Step's rows, which have to be those that we recorded."""
    with torch.no_grad():
        found = loop.logprobs(learner.module, step.rows, T)
    loop.same(loop.column(step, "rows", "sampler_logprobs"), found, "sampler_logprobs")
    return found


def test_grpo(tiny: Path, options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    base = str(tiny / "model")
    policy, rollout, score, reference = sampled(tiny, 4)
    advantage = group_advantage(rollout, score, name="advantage")
    loss = clipped_policy_loss(advantage, reference=logprobs(reference, rollout), beta=0.04)
    steps, trained = run_watched(
        Graph("grpo", updated(policy, rollout, loss, epochs=2)),
        options(2, inproc=True),
        monkeypatch,
    )
    learner, fixed = loop.policy(base, LR), loop.policy(base, LR)
    for step in steps:
        old, score_of = sampled_by(learner, step), np.array(scored(base, step))
        with torch.no_grad():
            anchor = loop.logprobs(fixed.module, step.rows, T)
        loop.same(
            loop.column(step, "clipped_policy_loss.reference", "logprobs"), anchor, "reference"
        )
        gains = np.zeros(len(score_of))
        for rows in loop.groups(step.rows):
            gains[rows] = (score_of[rows] - score_of[rows].mean()) / (
                score_of[rows].std(ddof=1) + 1e-4
            )
        gain = loop.spread(gains.tolist(), step.rows)
        loop.same(
            loop.column(step, "clipped_policy_loss.advantage", "advantage"), gain, "advantage"
        )
        for ours in step.updates:
            now = loop.logprobs(learner.module, step.rows, T)
            away = [n - a for n, a in zip(now, anchor, strict=True)]
            parts = [
                s + 0.04 * (torch.exp(-d) - 1 + d)
                for s, d in zip(loop.surrogate(now, old, gain), away, strict=True)
            ]
            learner.update(loop.token_mean(parts), ours, loop.by_row(parts))
        learner.end_step()
    assert [len(step.updates) for step in steps] == [2, 2]
    same_weights(learner, trained["policy"])


@pytest.mark.long
def test_rloo(tiny: Path, options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    base = str(tiny / "model")
    policy, rollout, score, reference = sampled(tiny, 4)
    shaped = kl_in_reward(rollout, score, logprobs(reference, rollout), beta=0.05)
    advantage = group_advantage(
        rollout, shaped, baseline="leave_one_out", scale="none", name="advantage"
    )
    node = updated(policy, rollout, policy_gradient_loss(advantage), aggregate="sequence_sum")
    steps, trained = run_watched(Graph("rloo", node), options(2, inproc=True), monkeypatch)
    learner, fixed = loop.policy(base, LR), loop.policy(base, LR)
    for step in steps:
        own = sampled_by(learner, step)
        with torch.no_grad():
            anchor = loop.logprobs(fixed.module, step.rows, T)
        kl = np.array([float((a - b).sum()) for a, b in zip(own, anchor, strict=True)])
        total, gains = np.array(scored(base, step)) - 0.05 * kl, np.zeros(len(own))
        for rows in loop.groups(step.rows):
            for row in rows:
                gains[row] = total[row] - np.mean([total[r] for r in rows if r != row])
        gain = loop.spread(gains.tolist(), step.rows)
        loop.same(
            loop.column(step, "policy_gradient_loss.advantage", "advantage"), gain, "advantage"
        )
        (ours,) = step.updates
        parts = [
            -g * n for g, n in zip(gain, loop.logprobs(learner.module, step.rows, T), strict=True)
        ]
        learner.update(sum(p.sum() for p in parts) / len(parts), ours, loop.by_row(parts))
        learner.end_step()
    same_weights(learner, trained["policy"])


def test_ppo(tiny: Path, options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    base = str(tiny / "model")
    policy, rollout, score, reference = sampled(tiny, 1)
    critic = Model("critic", base, trainable=True, head="scalar")
    old, value = logprobs(policy, rollout, name="old"), values(critic, rollout)
    shaped = kl_in_reward(rollout, score, logprobs(reference, rollout), beta=0.05)
    returns = gae(rollout, shaped, value, gamma=0.99, lam=0.9)
    graph = Graph(
        "ppo",
        updated(policy, rollout, clipped_policy_loss(whiten(returns, rollout), old=old), epochs=2),
        updated(critic, rollout, value_loss(returns, old=value, clip=0.2), epochs=2),
    )
    steps, trained = run_watched(graph, options(2, inproc=True), monkeypatch)
    actor, judge, fixed = loop.policy(base, LR), loop.critic(base, LR), loop.policy(base, LR)
    for step, of_critic in zip(steps[::2], steps[1::2], strict=True):
        own = sampled_by(actor, step)
        loop.same(loop.column(step, "clipped_policy_loss.old", "logprobs"), own, "old")
        with torch.no_grad():
            anchor, before = (
                loop.logprobs(fixed.module, step.rows, T),
                loop.values(judge.module, step.rows),
            )
        loop.same(loop.column(of_critic, "value_loss.old", "values"), before, "values")
        raw, goals = [], []
        for row, number in enumerate(scored(base, step)):
            by_token = -0.05 * (own[row] - anchor[row])
            by_token[-1] += number
            raw.append(loop.generalised(by_token, before[row], 0.99, 0.9))
            goals.append(raw[-1] + before[row])
        loop.same(loop.column(of_critic, "value_loss.returns", "returns"), goals, "returns")
        every = torch.cat(raw)
        gain = [(g - every.mean()) / (every.var(unbiased=True) + 1e-8).sqrt() for g in raw]
        loop.same(
            loop.column(step, "clipped_policy_loss.advantage", "advantage"), gain, "advantage", 1e-4
        )
        for ours, theirs in zip(step.updates, of_critic.updates, strict=True):
            parts = loop.surrogate(loop.logprobs(actor.module, step.rows, T), own, gain)
            actor.update(loop.token_mean(parts), ours, loop.by_row(parts))
            errors = []
            for v, b, goal in zip(loop.values(judge.module, step.rows), before, goals, strict=True):
                held = b + (v - b).clamp(-0.2, 0.2)
                errors.append(0.5 * torch.maximum((v - goal) ** 2, (held - goal) ** 2))
            judge.update(loop.token_mean(errors), theirs, loop.by_row(errors))
        actor.end_step(), judge.end_step()
    assert [step.node for step in steps] == ["train_policy", "train_critic"] * 2
    same_weights(actor, trained["policy"])
    same_weights(judge, trained["critic"])


@operator(scope="group")
def better_of_two(score: Columns[Reward]) -> Columns[Preference]:
    """Of each two answers the better one, the first where they are equal."""
    first, second = score["reward"][::2], score["reward"][1::2]
    signs = np.stack(
        [np.where(first >= second, 1, -1), np.where(first >= second, -1, 1)], 1
    ).ravel()
    return Columns.make(
        Preference, like=score, keep=np.ones(len(signs), np.uint8), sign=signs.astype(np.int8)
    )


Tokens = Sequence[Tensor]
"""Log-probs of each row's tokens."""
Numbers = Sequence[float]
"""The reward of each row."""


def trained_on_groups(
    base: str,
    steps: Sequence[Any],
    trained: Any,
    loss_of: Callable[[Sequence[int], Tokens, Tokens, Numbers], Any],
) -> None:
    """The weights of a plain loop whose loss is the mean over groups of `loss_of(rows, now,
    reference, rewards)`.
    """
    learner, fixed = loop.policy(base, LR), loop.policy(base, LR)
    for step in steps:
        sampled_by(learner, step)
        numbers = scored(base, step)
        with torch.no_grad():
            anchor = loop.logprobs(fixed.module, step.rows, T)
        for ours in step.updates:
            now = loop.logprobs(learner.module, step.rows, T)
            losses = {
                rows[0]: loss_of(rows, now, anchor, numbers) for rows in loop.groups(step.rows)
            }
            whole = torch.stack(list(losses.values())).mean()
            learner.update(whole, ours, {row: float(loss.detach()) for row, loss in losses.items()})
        learner.end_step()
    same_weights(learner, trained["policy"])


@pytest.mark.long
def test_online_dpo(tiny: Path, options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    base = str(tiny / "model")
    policy, rollout, score, reference = sampled(tiny, 2)
    pairs = better_of_two(score)
    rollout, pairs = select(rollout, pairs, where=pairs, refill=True)
    loss = dpo_loss(pairs, reference=logprobs(reference, rollout), beta=0.3)
    graph = Graph("online_dpo", updated(policy, rollout, loss, epochs=2))
    steps, trained = run_watched(graph, options(2, inproc=True), monkeypatch)

    def loss_of(rows: Sequence[int], now: Tokens, anchor: Tokens, numbers: Numbers) -> Tensor:
        first, second = rows
        win, lose = (first, second) if numbers[first] >= numbers[second] else (second, first)
        margin = (now[win] - anchor[win]).sum() - (now[lose] - anchor[lose]).sum()
        return -torch.nn.functional.logsigmoid(0.3 * margin)

    # The very first update has all margins at 0, where each pair has the slope of one half.
    trained_on_groups(base, steps, trained, loss_of)


@pytest.mark.long
def test_the_best_of_several_at_a_low_temperature(
    tiny: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = str(tiny / "model")
    policy, rollout, score, _ = sampled(tiny, 4, temperature=0.3)
    best = select(rollout, where=best_of(score, k=1))
    graph = Graph("best_of", updated(policy, best, supervised_loss()))
    steps, trained = run_watched(graph, options(2, inproc=True), monkeypatch)
    learner = loop.policy(base, LR)
    for step in steps:
        assert len(step.rows) == 4
        with torch.no_grad():
            cold = loop.logprobs(learner.module, step.rows, 0.3)
        loop.same(loop.column(step, "rows", "sampler_logprobs"), cold, "sampler_logprobs", 1e-4)
        (ours,) = step.updates
        parts = [-x for x in loop.logprobs(learner.module, step.rows, 1.0)]
        learner.update(loop.token_mean(parts), ours, loop.by_row(parts))
        learner.end_step()
    same_weights(learner, trained["policy"])


@pytest.mark.long
def test_trajectory_balance(tiny: Path, options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    base = str(tiny / "model")
    policy, rollout, score, reference = sampled(tiny, 4)
    loss = trajectory_balance_loss(score, reference=logprobs(reference, rollout), beta=0.5)
    graph = Graph("tba", updated(policy, rollout, loss, epochs=2))
    steps, trained = run_watched(graph, options(2, inproc=True), monkeypatch)

    def loss_of(rows: Sequence[int], now: Tokens, anchor: Tokens, numbers: Numbers) -> Tensor:
        log_z = np.mean(
            [float((anchor[r] - now[r].detach()).sum()) + numbers[r] / 0.5 for r in rows]
        )
        return torch.stack(
            [(log_z + (now[r] - anchor[r]).sum() - numbers[r] / 0.5) ** 2 for r in rows]
        ).mean()

    trained_on_groups(base, steps, trained, loss_of)


def test_decoupled_at_lag_1_behind_top_p(
    tiny: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, top_p = str(tiny / "model"), 0.7
    policy, rollout, score, _ = sampled(tiny, 4, top_p=top_p, max_lag=1)
    proximal = logprobs(policy, rollout, name="proximal")
    loss = decoupled_policy_loss(group_advantage(rollout, score), proximal=proximal, cap=2.0)
    graph = Graph("areal", updated(policy, rollout, loss, epochs=2))
    steps, trained = run_watched(graph, options(4, inproc=True), monkeypatch)
    learner, stale = loop.policy(base, LR), 0
    for step in steps:
        recorded, mass = (
            loop.column(step, "rows", name) for name in ("sampler_logprobs", "sampler_mass")
        )
        versions = loop.column(step, "rows", "version")
        stale += sum(int((v < len(learner.versions) - 1).sum()) for v in versions)
        with torch.no_grad():
            near = loop.logprobs(learner.module, step.rows, T)
            whole, cut = [torch.zeros_like(x) for x in near], [torch.zeros_like(x) for x in near]
            for version in {int(x) for v in versions for x in v}:
                then = learner.at(version)
                every, kept = (
                    loop.logprobs(then, step.rows, T),
                    behaviour(then, step, versions, version, top_p),
                )
                for row, made_by in enumerate(versions):
                    whole[row][made_by == version] = every[row][made_by == version]
                    cut[row][made_by == version] = kept[row][made_by == version]
        loop.same(recorded, whole, "sampler_logprobs")
        loop.same(
            [a - b for a, b in zip(recorded, mass, strict=True)],
            cut,
            "sampler_logprobs - sampler_mass",
            1e-4,
        )
        assert min(float(m.min()) for m in mass) < -0.05, "nothing was cut: this compares nothing"
        loop.same(loop.column(step, "decoupled_policy_loss.proximal", "logprobs"), near, "proximal")
        score_of, gains = np.array(scored(base, step)), np.zeros(len(near))
        for rows in loop.groups(step.rows):
            gains[rows] = (score_of[rows] - score_of[rows].mean()) / (
                score_of[rows].std(ddof=1) + 1e-4
            )
        gain = loop.spread(gains.tolist(), step.rows)
        weight = [(n - c).exp() for n, c in zip(near, cut, strict=True)]
        kept_weight = [torch.where(w > 2.0, 0.0, w) for w in weight]
        for ours in step.updates:
            now = loop.logprobs(learner.module, step.rows, T)
            parts = [
                w * s for w, s in zip(kept_weight, loop.surrogate(now, near, gain), strict=True)
            ]
            learner.update(loop.token_mean(parts), ours, loop.by_row(parts))
        learner.end_step()
    assert stale > 0, "no row was stale: this is no test of a lag"
    same_weights(learner, trained["policy"])


def behaviour(
    module: Any, step: Step, versions: list[Tensor], version: int, top_p: float
) -> list[Tensor]:
    """What top-p left of a version's distribution, for the tokens that this version wrote."""
    return loop.cut_logprobs(module, step.rows, T, top_p, [v == version for v in versions])
