"""Advantages, returns and reward shaping: the formulas in NumPy, each on columns of rows.

Owns: the numbers, with their sources and, where peers disagree, their dialects. Does not own: the
operators that users call (advantage.py), losses (losses.py).

Holes in a completion's mask (tool output) get advantage 0, and returns pass through them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dataflow.batch import Ragged
from dataflow.schema import (
    Advantage,
    Completion,
    Logprobs,
    Returns,
    Reward,
    Rollout,
    TokenReward,
    Values,
)
from dataflow.user import Columns


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDialect:
    """How a peer normalises a group: epsilon is added to the (unbiased) standard deviation.

    lone: the advantage in a group of one row, which has nothing to compare with: 0, or the row's
    own reward, as if the mean were 0 and the deviation 1.
    """

    epsilon: float
    lone: Literal["zero", "reward"] = "zero"


GROUP_DIALECTS = {
    "trl": GroupDialect(epsilon=1e-4),
    "verl": GroupDialect(epsilon=1e-6, lone="reward"),
    "openrlhf": GroupDialect(epsilon=1e-9),
    "nemo_rl": GroupDialect(epsilon=1e-6),
}
"""TRL `GRPOTrainer` and `RLOOTrainer`, verl `core_algos`, OpenRLHF `experience_maker` (which has no
groups of one), NeMo-RL `grpo.py`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhitenDialect:
    """How a peer scales a Step to variance 1: what is subtracted from the count in the denominator,
    and whether 1e-8 is added to the variance or is its minimum.
    """

    freedom: int
    floor: Literal["added", "least"]


WHITEN_DIALECTS = {
    "trl": WhitenDialect(freedom=1, floor="added"),
    "verl": WhitenDialect(freedom=1, floor="added"),
    "openrlhf": WhitenDialect(freedom=0, floor="least"),
    "nemo_rl": WhitenDialect(freedom=1, floor="added"),
}
"""TRL and verl `masked_whiten`, OpenRLHF `experience_maker`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KLDialect:
    """Where a peer clamps: a token's KL estimate to [-10, 10], and the log ratio inside k3."""

    clamped: tuple[str, ...] = ()
    ratio: float | None = None


KL_DIALECTS = {
    "trl": KLDialect(),
    "verl": KLDialect(clamped=("k3",), ratio=20.0),
    "openrlhf": KLDialect(clamped=("k1", "k2", "k3")),
    "nemo_rl": KLDialect(),
}
"""TRL `PPOTrainer`, verl `kl_penalty`, OpenRLHF `compute_approx_kl`."""


def group_advantage(
    rollout: Columns[Completion],
    score: Columns[Reward],
    *,
    baseline: str,
    scale: str,
    ragged: bool,
    dialect: str,
) -> Columns[Advantage]:
    mask = rollout["completion_mask"]
    reward, group = score["reward"].astype(np.float64), rollout.groups
    count = np.bincount(group)
    total = np.bincount(group, weights=reward)
    how, lone = GROUP_DIALECTS[dialect], count[group] == 1
    centred = reward - _baseline(baseline, reward, total[group], count[group], how)
    if scale == "std":
        deviation = reward - (total / count)[group]
        squares = np.bincount(group, weights=deviation**2)
        std = np.sqrt(squares / np.maximum(count - 1, 1))[group]
        std[lone & (how.lone == "reward")] = 1.0
        centred = centred / (std + how.epsilon)
    return _per_token(rollout, mask, centred)


def _baseline(
    kind: str, reward: np.ndarray, total: np.ndarray, count: np.ndarray, how: GroupDialect
) -> np.ndarray:
    if kind == "none":
        return np.zeros_like(reward)
    found = (
        (total - reward) / np.maximum(count - 1, 1) if kind == "leave_one_out" else total / count
    )
    return np.where(count == 1, reward if how.lone == "zero" else 0.0, found)


def _per_token(rows: Columns[Completion], mask: Ragged, value: np.ndarray) -> Columns[Advantage]:
    """A row's number on each of its masked tokens."""
    tokens = np.repeat(value, mask.lengths) * mask.values
    return Columns.make(Advantage, like=rows, advantage=mask.like(tokens.astype(np.float32)))


def baseline_advantage(
    rollout: Columns[Completion], score: Columns[Reward], baseline: Columns[Reward]
) -> Columns[Advantage]:
    return _per_token(
        rollout, rollout["completion_mask"], score["reward"].astype(np.float64) - baseline["reward"]
    )


def _token_rewards(rollout: Columns[Completion], score: Columns[Reward]) -> np.ndarray:
    """float64 [tokens]: the reward of each token; a row's single number is on its last masked
    token.
    """
    if "token_reward" in score.batch.names:
        return score["token_reward"].values.astype(np.float64)
    mask = rollout["completion_mask"]
    at = np.zeros(len(mask.values))
    position = np.where(mask.values > 0, np.arange(len(mask.values)), -1)
    filled = mask.lengths > 0
    last = (
        np.maximum.reduceat(position, mask.offsets[:-1][filled])
        if filled.any()
        else np.zeros(0, dtype=np.int64)
    )
    valid = last >= 0
    at[last[valid]] = score["reward"][filled][valid]
    return at


def _scan(
    mask: Ragged, reward: np.ndarray, values: np.ndarray, gamma: float, lam: float
) -> np.ndarray:
    """Generalised advantages [tokens], backwards over the written tokens of each row.

    A hole (mask 0) has no value and is no step of discount: the scan skips it, and a reward on it
    goes to the written token before it.
    """
    lengths, starts = mask.lengths, mask.offsets[:-1]
    rows = len(lengths)
    advantage = np.zeros(len(reward))
    running, next_value, held = np.zeros(rows), np.zeros(rows), np.zeros(rows)
    for back in range(int(lengths.max(initial=0))):
        alive = np.flatnonzero(lengths > back)
        at = starts[alive] + lengths[alive] - 1 - back
        written = mask.values[at] > 0
        held[alive] += reward[at]
        row, token = alive[written], at[written]
        delta = held[row] + gamma * next_value[row] - values[token]
        running[row] = delta + gamma * lam * running[row]
        advantage[token] = running[row]
        next_value[row], held[row] = values[token], 0.0
    return advantage


def gae(
    rollout: Columns[Completion],
    score: Columns[Reward],
    values: Columns[Values],
    *,
    gamma: float,
    lam: float,
) -> Columns[Returns]:
    mask, value = rollout["completion_mask"], values["values"].values.astype(np.float64)
    advantage = _scan(mask, _token_rewards(rollout, score), value, gamma, lam)
    returns = np.where(mask.values > 0, advantage + value, 0.0)
    return _returns_columns(rollout, mask, advantage, returns)


def returns(
    rollout: Columns[Completion], score: Columns[Reward], *, gamma: float
) -> Columns[Returns]:
    mask = rollout["completion_mask"]
    total = _scan(mask, _token_rewards(rollout, score), np.zeros(len(mask.values)), gamma, 1.0)
    return _returns_columns(rollout, mask, total, total)


def _returns_columns(
    rows: Columns[Completion], mask: Ragged, advantage: np.ndarray, returns: np.ndarray
) -> Columns[Returns]:
    columns = {
        "advantage": mask.like(advantage.astype(np.float32)),
        "returns": mask.like(returns.astype(np.float32)),
    }
    return Columns.make(Returns, like=rows, **columns)


def whiten(
    advantage: Columns[Advantage], rollout: Columns[Completion], *, shift: bool, dialect: str
) -> Columns[Advantage]:
    mask = rollout["completion_mask"].values.astype(np.float64)
    value = advantage["advantage"].values.astype(np.float64)
    count = mask.sum()
    mean = (value * mask).sum() / max(count, 1.0)
    how = WHITEN_DIALECTS[dialect]
    variance = (((value - mean) * mask) ** 2).sum() / max(count - how.freedom, 1.0)
    whitened = (value - mean) / np.sqrt(
        variance + 1e-8 if how.floor == "added" else max(variance, 1e-8)
    )
    whitened = (whitened if shift else whitened + mean) * mask
    tokens = Ragged(whitened.astype(np.float32), rollout["completion_mask"].offsets)
    return advantage.set(advantage=tokens)


def kl_in_reward(
    rollout: Columns[Rollout],
    score: Columns[Reward],
    reference: Columns[Logprobs],
    *,
    beta: float,
    kind: str,
    dialect: str,
) -> Columns[TokenReward]:
    mask = rollout["completion_mask"]
    ratio = rollout["sampler_logprobs"].values.astype(np.float64) - reference["logprobs"].values
    penalty = _estimate(np.where(mask.values > 0, ratio, 0.0), kind, KL_DIALECTS[dialect])
    tokens = _token_rewards(rollout, score) - beta * penalty
    total = np.bincount(mask.segments(), weights=tokens, minlength=len(mask))
    return Columns.make(
        TokenReward,
        like=rollout,
        reward=total.astype(np.float32),
        token_reward=mask.like(tokens.astype(np.float32)),
    )


def _estimate(ratio: np.ndarray, kind: str, how: KLDialect) -> np.ndarray:
    """Each token's KL estimate, from its log ratio."""
    if kind == "k3":
        bounded = ratio if how.ratio is None else ratio.clip(-how.ratio, how.ratio)
        found = np.expm1(-bounded) + bounded
    else:
        found = ratio if kind == "k1" else ratio**2 / 2.0
    return found.clip(-10.0, 10.0) if kind in how.clamped else found


def overlong_penalty(
    rollout: Columns[Completion],
    score: Columns[Reward],
    *,
    max_tokens: int,
    buffer: int,
    factor: float,
) -> Columns[Reward]:
    length = rollout["completion_ids"].lengths
    penalty = factor * np.clip((length - (max_tokens - buffer)) / buffer, 0.0, 1.0)
    changed: dict[str, object] = {"reward": (score["reward"] - penalty).astype(np.float32)}
    if "token_reward" in score.batch.names:
        tokens = score["token_reward"]
        changed["token_reward"] = tokens.like(
            (tokens.values - _on_last(tokens, penalty)).astype(np.float32)
        )
    return score.set(**changed)


def add(*scores: Columns[Reward], weights: Sequence[float] | None) -> Columns[Reward]:
    factors = [1.0] * len(scores) if weights is None else weights
    total = sum(w * s["reward"].astype(np.float64) for w, s in zip(factors, scores, strict=True))
    columns: dict[str, object] = {"reward": np.asarray(total, dtype=np.float32)}
    columns |= {
        name: s.batch.array(name)
        for s in scores
        for name in s.batch.names
        if name.startswith("reward/")
    }
    shape = next((s["token_reward"] for s in scores if "token_reward" in s.batch.names), None)
    if shape is None:
        return Columns.make(Reward, like=scores[0], **columns)
    tokens = sum(w * _spread(s, shape) for w, s in zip(factors, scores, strict=True))
    columns["token_reward"] = shape.like(np.asarray(tokens, dtype=np.float32))
    return Columns.make(TokenReward, like=scores[0], **columns)


def _spread(score: Columns[Reward], shape: Ragged) -> np.ndarray:
    """float64 [tokens]: the reward of each token; a row's single number is on its last token."""
    if "token_reward" in score.batch.names:
        return score["token_reward"].values.astype(np.float64)
    return _on_last(shape, score["reward"].astype(np.float64))


def _on_last(shape: Ragged, value: np.ndarray) -> np.ndarray:
    """[tokens]: a row's number on its last token, even if that is a hole: returns give it to the
    written token before it.
    """
    at = np.zeros(len(shape.values))
    filled = shape.lengths > 0
    at[shape.offsets[1:][filled] - 1] = value[filled]
    return at
