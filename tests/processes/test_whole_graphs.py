"""Whole graphs that are not shipped, run by the engine, against a plain loop over a Hugging Face
model. Those that are shipped: test_graphs_run.py.

The engine samples. From its token ids the loop computes and updates everything else itself:
rewards, log-probs, advantages, losses by row, gradients, weights. All that we record is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.node import Node, Port
from dataflow.schema import Reward, Rollout
from operators.advantage import group_advantage
from operators.forward import logprobs
from operators.generate import generate
from operators.losses import (
    clipped_policy_loss,
    decoupled_policy_loss,
    importance,
    trajectory_balance_loss,
)
from operators.optimizers import AdamW
from operators.reward import reward
from operators.train import train
from tests.kit import plain_loop as loop
from tests.kit.plain_algorithms import spread, standardised
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

    def sampled(self, **how: Any) -> tuple[Model, Port[Rollout], Port[Reward], Model]:
        """Policy, rows, rewards, reference."""
        policy, asked = policy_and_prompts(self._tiny.folder)
        rollout = generate(policy, asked, n=4, max_tokens=5, temperature=T, name="rollout", **how)
        return policy, rollout, reward(vowels, rollout, name="score"), Model("reference", self.base)

    def run(self, sink: Node, steps: int = 2) -> list[TrainedStep]:
        """What our train kernel did; `self.trained` is what it left."""
        watched = loop.watched(self._monkeypatch)
        result = self._tiny.run(Graph("compared", sink), steps, inproc=True)
        self.trained = load_file(result.trained["policy"] / "model.safetensors")
        return watched

    def rewards(self, step: TrainedStep) -> list[float]:
        return loop.rewards(self.base, step.rows, vowels)

    def require_weights(self, learner: Learner) -> None:
        """Those on disk are those that the loop came to, and not those that both began with."""
        moved = 0.0
        for name, weight in learner.module.named_parameters():
            if name in self.trained:
                wanted = weight.detach()
                loop.require_close([self.trained[name]], [wanted], name)
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


def without_gradient(learner: Learner, step: TrainedStep) -> list[Tensor]:
    """Log-probs of a Step's rows."""
    with torch.no_grad():
        return loop.logprobs(learner.module, step.rows, T)


def require_column(step: TrainedStep, key: str, name: str, wanted: Sequence[Tensor]) -> None:
    """Our column is what the loop computed."""
    loop.require_close(loop.column(step, key, name), wanted, f"{key} {name}")


def against_their_group(numbers: Sequence[float], step: TrainedStep) -> list[Tensor]:
    """Each row's number against the mean of its group, in its standard deviations."""
    return spread(standardised(np.array(numbers), loop.groups(step.rows)), step.rows)


@pytest.mark.long
def test_grpo(ours: Ours) -> None:
    policy, rollout, score, reference = ours.sampled()
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
def test_trajectory_balance(ours: Ours) -> None:
    policy, rollout, score, reference = ours.sampled()
    loss = trajectory_balance_loss(score, reference=logprobs(reference, rollout), beta=0.5)
    steps = ours.run(updated(policy, rollout, loss, epochs=2))
    learner, fixed = loop.policy(ours.base, LR), loop.policy(ours.base, LR)
    for step in steps:
        sampled_by(learner, step)
        numbers, anchor = ours.rewards(step), without_gradient(fixed, step)
        for update in step.updates:
            now = loop.logprobs(learner.module, step.rows, T)
            losses = {}
            for rows in loop.groups(step.rows):
                gaps = [(now[r] - anchor[r]).sum() - numbers[r] / 0.5 for r in rows]
                log_z = -torch.stack(gaps).detach().mean()
                losses[rows[0]] = torch.stack([(log_z + gap) ** 2 for gap in gaps]).mean()
            by_row = {row: float(loss.detach()) for row, loss in losses.items()}
            learner.update(torch.stack(list(losses.values())).mean(), update, by_row)
        learner.end_step()
    ours.require_weights(learner)


def test_decoupled_at_lag_1_behind_top_p(ours: Ours) -> None:
    top_p = 0.7
    policy, rollout, score, _ = ours.sampled(top_p=top_p, max_lag=1)
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
