"""What the plain loops of the algorithms share: a run's learners, and textbook formulas.

From the recorded rows (token ids, and what their sampler recorded) each computes everything else:
rewards, log-probs, values, advantages, and the loss of each update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dataflow.batch import Batch
from tests.kit import plain_loop as loop
from tests.kit.plain_loop import Learner, spread, token_mean
from tests.kit.rows import plain
from tests.kit.run_graphs import vowels

Tokens = list[Tensor]
"""A number for each completion token, by row."""
UpdateLoss = Callable[[Sequence[int]], Tensor]
"""The loss of an update on these rows of the Step, with gradient."""
Mean = Callable[[Sequence[Tensor]], Tensor]

EPSILON = 1e-4
"""TRL's, added to a group's standard deviation."""


@dataclass(kw_only=True)
class PlainRun:
    """What the loop knows: the base, a learner for each trained Model, and notes of the Step."""

    base: str
    learners: Mapping[str, Learner]
    numbers: Mapping[str, Any]
    """The graph's arguments."""
    notes: dict[str, Any] = field(default_factory=dict)
    """What a train node's turn leaves for another one's in the same Step."""

    def now(self, rows: Batch, model: str = "policy", temperature: float = 1.0) -> Tokens:
        """Log-probs with gradient."""
        return loop.logprobs(self.learners[model].module, rows, temperature)

    def before(self, rows: Batch, model: str = "policy", temperature: float = 1.0) -> Tokens:
        """Log-probs as they are now, constants."""
        with torch.no_grad():
            return self.now(rows, model, temperature)

    def anchor(self, rows: Batch) -> Tokens:
        """Log-probs of the base."""
        fixed = Learner(plain(self.base), 0.0)
        with torch.no_grad():
            return loop.logprobs(fixed.module, rows)

    def rewards(self, rows: Batch) -> np.ndarray:
        return np.array(loop.rewards(self.base, rows, vowels))


def surrogate(now: Tensor, old: Any, gain: Any, low: float = 0.2, high: float = 0.2) -> Tensor:
    """PPO's clipped loss of each token."""
    ratio = (now - old).exp()
    return -torch.minimum(ratio * gain, ratio.clamp(1 - low, 1 + high) * gain)


def sequence_sum(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack([part.sum() for part in parts]).mean()


def centred(numbers: np.ndarray, groups: Sequence[Sequence[int]]) -> np.ndarray:
    """Each number minus its group's mean."""
    found = np.zeros(len(numbers))
    for rows in groups:
        found[rows] = numbers[rows] - numbers[rows].mean()
    return found


def standardised(numbers: np.ndarray, groups: Sequence[Sequence[int]]) -> np.ndarray:
    """The same, in standard deviations of the group."""
    found = centred(numbers, groups)
    for rows in groups:
        found[rows] /= numbers[rows].std(ddof=1) + EPSILON
    return found


def whitened(gains: Tokens) -> Tokens:
    """Mean 0 and variance 1 over all tokens."""
    every = torch.cat(gains)
    return [(g - every.mean()) / (every.var(unbiased=True) + 1e-8).sqrt() for g in gains]


def against_group(world: PlainRun, rows: Batch) -> Tokens:
    """Each row's reward, compared with its group."""
    return spread(standardised(world.rewards(rows), loop.groups(rows)), rows)


def mean_of(
    world: PlainRun,
    rows: Batch,
    part: Callable[[int, Tensor], Tensor],
    mean: Mean = token_mean,
    model: str = "policy",
    temperature: float = 1.0,
) -> UpdateLoss:
    """The mean of what `part` makes of each row of an update: of its number and its log-probs."""

    def loss(chosen: Sequence[int]) -> Tensor:
        now = world.now(rows, model, temperature)
        return mean([part(i, now[i]) for i in chosen])

    return loss


def clipped(
    world: PlainRun,
    rows: Batch,
    gain: Tokens,
    clip: tuple[float, float] = (0.2, 0.2),
    mean: Mean = token_mean,
    model: str = "policy",
) -> UpdateLoss:
    """The mean over an update's tokens of PPO's loss, around the Model before the Step."""
    old = world.before(rows, model)
    part = lambda i, now: surrogate(now, old[i], gain[i], *clip)
    return mean_of(world, rows, part, mean, model)


def reinforced(world: PlainRun, rows: Batch, gain: Tokens, mean: Mean = sequence_sum) -> UpdateLoss:
    """REINFORCE: the mean over rows of -A log pi(row)."""
    return mean_of(world, rows, lambda i, now: -gain[i] * now, mean)


def imitated(world: PlainRun, rows: Batch) -> UpdateLoss:
    return mean_of(world, rows, lambda i, now: -now)


def punished(world: PlainRun, rows: Batch, beta: float) -> Tokens:
    """Each token's reward: -beta times its KL estimate, and on the last one the row's reward."""
    own, anchor = world.before(rows), world.anchor(rows)
    found = [-beta * (a - b) for a, b in zip(own, anchor, strict=True)]
    for tokens, number in zip(found, world.rewards(rows), strict=True):
        tokens[-1] += number
    return found


def learner_of(base: str, lr: float, *, scalar: bool) -> Learner:
    """A fresh learner with the engine's AdamW; of a critic, with a head of zeros."""
    return loop.critic(base, lr) if scalar else Learner(plain(base), lr)


def gradients(module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of each weight that has one."""
    module.zero_grad()
    loss.backward()
    named = module.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}
