"""Whole graphs, run by the engine, against a plain loop over a Hugging Face model.

The engine samples. From its token ids the loop computes and updates everything else itself:
rewards, log-probs, advantages, losses by row, gradients, weights. All that we record is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.node import Node, Port
from dataflow.schema import Preference, Reward, Rollout
from dataflow.user import Columns, operator
from operators.advantage import gae, group_advantage, kl_in_reward, whiten
from operators.data import preferences
from operators.forward import logprobs, values
from operators.generate import generate
from operators.losses import (
    clipped_policy_loss,
    decoupled_policy_loss,
    dpo_loss,
    importance,
    policy_gradient_loss,
    supervised_loss,
    trajectory_balance_loss,
    value_loss,
)
from operators.optimizers import AdamW
from operators.reward import reward
from operators.select import best_of, pair, select
from operators.train import train
from tests.kit import plain_loop as loop
from tests.kit.files import save_jsonl
from tests.kit.plain_loop import Learner, TrainedStep
from tests.kit.run_graphs import policy_and_prompts, vowels
from tests.kit.tiny_runs import TinyRuns

pytestmark = pytest.mark.timeout(180)
LR, T = 2e-3, 0.8


class Ours:
    """The engine's side: graphs on the tiny model, and what its train kernels did with them."""

    def __init__(self, tiny: TinyRuns, monkeypatch: pytest.MonkeyPatch) -> None:
        self.base = str(tiny.folder / "model")
        self._tiny, self._monkeypatch = tiny, monkeypatch

    def sampled(self, n: int, **how: Any) -> tuple[Model, Port[Rollout], Port[Reward], Model]:
        """Policy, rows, rewards, reference."""
        policy, asked = policy_and_prompts(self._tiny.folder)
        heat = {"temperature": T} | how
        rollout = generate(policy, asked, n=n, max_tokens=5, name="rollout", **heat)
        return policy, rollout, reward(vowels, rollout, name="score"), Model("reference", self.base)

    def run(self, *sinks: Node, steps: int = 2) -> list[TrainedStep]:
        """What our train kernels did; `self.trained` is what they left."""
        watched = loop.watched(self._monkeypatch)
        result = self._tiny.run(Graph("compared", *sinks), steps, inproc=True)
        self.trained = {name: Path(path) for name, path in result.trained.items()}
        return watched

    def rewards(self, step: TrainedStep) -> list[float]:
        return loop.rewards(self.base, step.rows, vowels)

    def require_weights(self, learner: Learner, model: str = "policy") -> None:
        """Those on disk are those that the loop came to, and not those that both began with."""
        saved, moved = load_file(self.trained[model] / "model.safetensors"), 0.0
        for name, weight in learner.module.named_parameters():
            if name in saved:
                wanted = weight.detach()
                loop.require_close([saved[name]], [wanted], name)
                moved = max(moved, float((wanted - learner.versions[0][name]).abs().max()))
        assert moved > 1e-4


@pytest.fixture
def ours(tiny: TinyRuns, monkeypatch: pytest.MonkeyPatch) -> Ours:
    return Ours(tiny, monkeypatch)


def updated(model: Model, rollout: Port[Rollout], loss: Any, **how: Any) -> Node:
    return train(model, rollout, loss=loss, lr=LR, optimizer=AdamW(eps=loop.EPS), **how)


def sampled_by(learner: Learner, step: TrainedStep) -> list[Tensor]:
    """The log-probs of the Step's rows, which have to be those that we recorded."""
    own = without_gradient(learner, step)
    require_column(step, "rows", "sampler_logprobs", own)
    return own


def without_gradient(learner: Learner, step: TrainedStep, temperature: float = T) -> list[Tensor]:
    """Log-probs of a Step's rows."""
    with torch.no_grad():
        return loop.logprobs(learner.module, step.rows, temperature)


def require_column(
    step: TrainedStep, key: str, name: str, wanted: Sequence[Tensor], atol: float = 2e-5
) -> None:
    """Our column is what the loop computed."""
    loop.require_close(loop.column(step, key, name), wanted, f"{key} {name}", atol)


def against_their_group(numbers: Sequence[float], step: TrainedStep) -> list[Tensor]:
    """Each row's number against the mean of its group, in its standard deviations."""
    array, gains = np.array(numbers), np.zeros(len(numbers))
    for rows in loop.groups(step.rows):
        gains[rows] = (array[rows] - array[rows].mean()) / (array[rows].std(ddof=1) + 1e-4)
    return loop.spread(gains.tolist(), step.rows)


@pytest.mark.long
def test_grpo(ours: Ours) -> None:
    policy, rollout, score, reference = ours.sampled(4)
    advantage = group_advantage(rollout, score, name="advantage")
    loss = clipped_policy_loss(advantage, reference=logprobs(reference, rollout), beta=0.04)
    steps = ours.run(updated(policy, rollout, loss, epochs=2))
    learner, fixed = loop.policy(ours.base, LR), loop.policy(ours.base, LR)
    for step in steps:
        old, anchor = sampled_by(learner, step), without_gradient(fixed, step)
        require_column(step, "clipped_policy_loss.reference", "logprobs", anchor)
        gain = against_their_group(ours.rewards(step), step)
        require_column(step, "clipped_policy_loss.advantage", "advantage", gain)
        for update in step.updates:
            now = loop.logprobs(learner.module, step.rows, T)
            away = [n - a for n, a in zip(now, anchor, strict=True)]
            pairs = zip(loop.surrogate(now, old, gain), away, strict=True)
            parts = [s + 0.04 * (torch.exp(-d) - 1 + d) for s, d in pairs]
            learner.update(loop.token_mean(parts), update, loop.by_row(parts))
        learner.end_step()
    assert [len(step.updates) for step in steps] == [2, 2]
    ours.require_weights(learner)


@pytest.mark.long
def test_rloo(ours: Ours) -> None:
    policy, rollout, score, reference = ours.sampled(4)
    shaped = kl_in_reward(rollout, score, logprobs(reference, rollout), beta=0.05)
    how: Any = {"baseline": "leave_one_out", "scale": "none", "name": "advantage"}
    loss = policy_gradient_loss(group_advantage(rollout, shaped, **how))
    steps = ours.run(updated(policy, rollout, loss, aggregate="sequence_sum"))
    learner, fixed = loop.policy(ours.base, LR), loop.policy(ours.base, LR)
    for step in steps:
        own, anchor = sampled_by(learner, step), without_gradient(fixed, step)
        kl = np.array([float((a - b).sum()) for a, b in zip(own, anchor, strict=True)])
        total, gains = np.array(ours.rewards(step)) - 0.05 * kl, np.zeros(len(own))
        for rows in loop.groups(step.rows):
            for row in rows:
                gains[row] = total[row] - np.mean([total[r] for r in rows if r != row])
        gain = loop.spread(gains.tolist(), step.rows)
        require_column(step, "policy_gradient_loss.advantage", "advantage", gain)
        (update,) = step.updates
        now = loop.logprobs(learner.module, step.rows, T)
        parts = [-g * n for g, n in zip(gain, now, strict=True)]
        learner.update(sum(p.sum() for p in parts) / len(parts), update, loop.by_row(parts))
        learner.end_step()
    ours.require_weights(learner)


@pytest.mark.long
def test_ppo(ours: Ours) -> None:
    policy, rollout, score, reference = ours.sampled(1)
    critic = Model("critic", ours.base, trainable=True, head="scalar")
    old, value = logprobs(policy, rollout, name="old"), values(critic, rollout)
    shaped = kl_in_reward(rollout, score, logprobs(reference, rollout), beta=0.05)
    returns = gae(rollout, shaped, value, gamma=0.99, lam=0.9)
    steps = ours.run(
        updated(policy, rollout, clipped_policy_loss(whiten(returns, rollout), old=old), epochs=2),
        updated(critic, rollout, value_loss(returns, old=value, clip=0.2), epochs=2),
    )
    actor, judge, fixed = (
        loop.policy(ours.base, LR),
        loop.critic(ours.base, LR),
        loop.policy(ours.base, LR),
    )
    for step, of_critic in zip(steps[::2], steps[1::2], strict=True):
        own, anchor = sampled_by(actor, step), without_gradient(fixed, step)
        require_column(step, "clipped_policy_loss.old", "logprobs", own)
        with torch.no_grad():
            before = loop.values(judge.module, step.rows)
        require_column(of_critic, "value_loss.old", "values", before)
        raw, goals = [], []
        for row, number in enumerate(ours.rewards(step)):
            by_token = -0.05 * (own[row] - anchor[row])
            by_token[-1] += number
            raw.append(loop.generalised(by_token, before[row], 0.99, 0.9))
            goals.append(raw[-1] + before[row])
        require_column(of_critic, "value_loss.returns", "returns", goals)
        every = torch.cat(raw)
        gain = [(g - every.mean()) / (every.var(unbiased=True) + 1e-8).sqrt() for g in raw]
        require_column(step, "clipped_policy_loss.advantage", "advantage", gain, 1e-4)
        for update, critics in zip(step.updates, of_critic.updates, strict=True):
            parts = loop.surrogate(loop.logprobs(actor.module, step.rows, T), own, gain)
            actor.update(loop.token_mean(parts), update, loop.by_row(parts))
            errors = []
            for v, b, goal in zip(loop.values(judge.module, step.rows), before, goals, strict=True):
                held = b + (v - b).clamp(-0.2, 0.2)
                errors.append(0.5 * torch.maximum((v - goal) ** 2, (held - goal) ** 2))
            judge.update(loop.token_mean(errors), critics, loop.by_row(errors))
        actor.end_step()
        judge.end_step()
    assert [step.node for step in steps] == ["train_policy", "train_critic"] * 2
    ours.require_weights(actor)
    ours.require_weights(judge, "critic")


@operator(scope="group")
def better_of_two(score: Columns[Reward]) -> Columns[Preference]:
    """Of each two answers the better one, the first where they are equal."""
    first, second = score["reward"][::2], score["reward"][1::2]
    sign = np.where(first >= second, 1, -1)
    signs = np.stack([sign, -sign], 1).ravel().astype(np.int8)
    keep = np.ones(len(signs), np.uint8)
    return Columns.make(Preference, like=score, keep=keep, sign=signs)


Tokens = Sequence[Tensor]
"""Log-probs of each row's tokens."""
Numbers = Sequence[float]
"""The reward of each row."""
GroupLoss = Callable[[Sequence[int], Tokens, Tokens, Numbers], Any]


def require_trained_on_groups(ours: Ours, steps: Sequence[TrainedStep], loss_of: GroupLoss) -> None:
    """The weights of a plain loop; loss: the mean of loss_of(rows, now, reference, rewards)."""
    learner, fixed = loop.policy(ours.base, LR), loop.policy(ours.base, LR)
    for step in steps:
        sampled_by(learner, step)
        numbers, anchor = ours.rewards(step), without_gradient(fixed, step)
        for update in step.updates:
            now = loop.logprobs(learner.module, step.rows, T)
            groups = loop.groups(step.rows)
            losses = {rows[0]: loss_of(rows, now, anchor, numbers) for rows in groups}
            whole = torch.stack(list(losses.values())).mean()
            by_row = {row: float(loss.detach()) for row, loss in losses.items()}
            learner.update(whole, update, by_row)
        learner.end_step()
    ours.require_weights(learner)


@pytest.mark.long
def test_online_dpo(ours: Ours) -> None:
    policy, rollout, score, reference = ours.sampled(2)
    pairs = better_of_two(score)
    rollout, pairs = select(rollout, pairs, where=pairs, refill=True)
    loss = dpo_loss(pairs, reference=logprobs(reference, rollout), beta=0.3)
    steps = ours.run(updated(policy, rollout, loss, epochs=2))

    def loss_of(rows: Sequence[int], now: Tokens, anchor: Tokens, numbers: Numbers) -> Tensor:
        first, second = rows
        win, lose = (first, second) if numbers[first] >= numbers[second] else (second, first)
        margin = (now[win] - anchor[win]).sum() - (now[lose] - anchor[lose]).sum()
        return -torch.nn.functional.logsigmoid(0.3 * margin)

    # The very first update has all margins at 0, where each pair has the slope of one half.
    require_trained_on_groups(ours, steps, loss_of)


def logsigmoid_of_margins(rows: Sequence[int], now: Tokens, anchor: Tokens, sign: int) -> Tensor:
    """DPO's loss of a pair whose first row is the chosen one (sign 1) or the rejected one."""
    first, second = ((now[row] - anchor[row]).sum() for row in rows)
    return -torch.nn.functional.logsigmoid(0.3 * sign * (first - second))


def test_dpo_of_a_file_of_preferences(ours: Ours, tmp_path: Path) -> None:
    names = ("ab", "ba", "cd", "dc")
    told = [{"prompt": n, "chosen": n[0] * 2, "rejected": n[1]} for n in names]
    data = save_jsonl(tmp_path / "pairs.jsonl", *told)
    rows, pairs = preferences(data, batch=2)
    policy = Model("policy", ours.base, trainable=True)
    reference = logprobs(Model("reference", ours.base), rows)
    loss = dpo_loss(pairs, reference=reference, beta=0.3)
    steps = ours.run(updated(policy, rows, loss, epochs=2))
    learner, fixed = loop.policy(ours.base, LR), loop.policy(ours.base, LR)
    seen: list[int] = []
    for step in steps:
        seen += step.rows.keys.position.tolist()
        assert step.inputs["dpo_loss.pairs"].flat("sign").tolist() == [1, -1, 1, -1]
        anchor = without_gradient(fixed, step, 1.0)
        require_column(step, "dpo_loss.reference", "logprobs", anchor)
        for update in step.updates:
            now = loop.logprobs(learner.module, step.rows)
            losses = {r: logsigmoid_of_margins((r, r + 1), now, anchor, 1) for r in (0, 2)}
            by_row = {row: float(loss.detach()) for row, loss in losses.items()}
            learner.update(torch.stack(list(losses.values())).mean(), update, by_row)
        learner.end_step()
    assert seen == [0, 0, 1, 1, 2, 2, 3, 3]
    ours.require_weights(learner)


@pytest.mark.long
def test_dpo_of_the_best_and_the_worst_of_four(ours: Ours) -> None:
    policy, rollout, score, reference = ours.sampled(4)
    pairs = pair(score)
    rollout, pairs = select(rollout, pairs, where=pairs, refill=True)
    loss = dpo_loss(pairs, reference=logprobs(reference, rollout), beta=0.3)
    steps = ours.run(updated(policy, rollout, loss, epochs=2))

    def loss_of(rows: Sequence[int], now: Tokens, anchor: Tokens, numbers: Numbers) -> Tensor:
        first, second = rows
        assert numbers[first] != numbers[second]
        return logsigmoid_of_margins(
            rows, now, anchor, 1 if numbers[first] > numbers[second] else -1
        )

    require_trained_on_groups(ours, steps, loss_of)


@pytest.mark.long
def test_trajectory_balance(ours: Ours) -> None:
    policy, rollout, score, reference = ours.sampled(4)
    loss = trajectory_balance_loss(score, reference=logprobs(reference, rollout), beta=0.5)
    steps = ours.run(updated(policy, rollout, loss, epochs=2))

    def loss_of(rows: Sequence[int], now: Tokens, anchor: Tokens, numbers: Numbers) -> Tensor:
        fixed = [float((anchor[r] - now[r].detach()).sum()) + numbers[r] / 0.5 for r in rows]
        log_z = np.mean(fixed)
        errors = [log_z + (now[r] - anchor[r]).sum() - numbers[r] / 0.5 for r in rows]
        return torch.stack([error**2 for error in errors]).mean()

    require_trained_on_groups(ours, steps, loss_of)


@pytest.mark.long
def test_the_best_of_several_at_a_low_temperature(ours: Ours) -> None:
    policy, rollout, score, _ = ours.sampled(4, temperature=0.3)
    best = select(rollout, where=best_of(score, k=1))
    steps = ours.run(updated(policy, best, supervised_loss()))
    learner = loop.policy(ours.base, LR)
    for step in steps:
        assert len(step.rows) == 4
        cold = without_gradient(learner, step, 0.3)
        require_column(step, "rows", "sampler_logprobs", cold, 1e-4)
        (update,) = step.updates
        parts = [-x for x in loop.logprobs(learner.module, step.rows, 1.0)]
        learner.update(loop.token_mean(parts), update, loop.by_row(parts))
        learner.end_step()
    ours.require_weights(learner)


def test_decoupled_at_lag_1_behind_top_p(ours: Ours) -> None:
    top_p = 0.7
    policy, rollout, score, _ = ours.sampled(4, top_p=top_p, max_lag=1)
    proximal = logprobs(policy, rollout, name="proximal")
    loss = decoupled_policy_loss(
        group_advantage(rollout, score),
        proximal=proximal,
        correction=importance(above=2.0, over="mask"),
    )
    steps = ours.run(updated(policy, rollout, loss, epochs=2), steps=4)
    learner, stale = loop.policy(ours.base, LR), 0
    for step in steps:
        stale += sum(
            int((v < len(learner.versions) - 1).sum()) for v in loop.column(step, "rows", "version")
        )
        cut = sampled_behind_top_p(learner, step, top_p)
        near = without_gradient(learner, step)
        require_column(step, "decoupled_policy_loss.proximal", "logprobs", near)
        gain = against_their_group(ours.rewards(step), step)
        weights = [(n - c).exp() for n, c in zip(near, cut, strict=True)]
        kept = [torch.where(w > 2.0, 0.0, w) for w in weights]
        for update in step.updates:
            now = loop.logprobs(learner.module, step.rows, T)
            pairs = zip(kept, loop.surrogate(now, near, gain), strict=True)
            parts = [weight * part for weight, part in pairs]
            learner.update(loop.token_mean(parts), update, loop.by_row(parts))
        learner.end_step()
    assert stale > 0, "no row was stale: this is no test of a lag"
    ours.require_weights(learner)


def sampled_behind_top_p(learner: Learner, step: TrainedStep, top_p: float) -> list[Tensor]:
    """The log-probs of the Step's rows within top-p, by each token's version."""
    names = ("sampler_logprobs", "sampler_mass", "version")
    recorded, mass, versions = (loop.column(step, "rows", name) for name in names)
    whole, cut = [torch.zeros_like(x) for x in recorded], [torch.zeros_like(x) for x in recorded]
    for version in {int(x) for of_row in versions for x in of_row}:
        then, wrote = learner.at(version), [of_row == version for of_row in versions]
        with torch.no_grad():
            every = loop.logprobs(then, step.rows, T)
            kept = loop.cut_logprobs(then, step.rows, T, top_p, wrote)
        for row, by_it in enumerate(wrote):
            whole[row][by_it] = every[row][by_it]
            cut[row][by_it] = kept[row][by_it]
    loop.require_close(recorded, whole, "sampler_logprobs")
    behind = [a - b for a, b in zip(recorded, mass, strict=True)]
    loop.require_close(behind, cut, "sampler_logprobs - sampler_mass", 1e-4)
    assert min(float(x.min()) for x in mass) < -0.05, "nothing was cut: this compares nothing"
    return cut
