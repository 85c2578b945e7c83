"""Advantages, returns and reward shaping: the formulas in NumPy, each on columns of rows.

Owns: the formulas, with their sources. Does not own: the numbers in which peers differ
(advantage_dialects.py), the operators that users call (advantage.py), losses (losses.py).

Holes in a completion's mask (tool output) get advantage 0, and returns pass through them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dataflow.batch import Ragged
from dataflow.errors import DataError
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
from operators.advantage_dialects import (
    GROUP_DIALECTS,
    HOLE_DIALECTS,
    KL_DIALECTS,
    MOST,
    OVERLONG_DIALECTS,
    WHITEN_DIALECTS,
    GroupDialect,
    HoleDialect,
    KLDialect,
)


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
    how, above = GROUP_DIALECTS[dialect], reward - _lowest(reward, group)
    centred = reward
    if baseline != "none":
        centred = above - _baseline(baseline, above, group, mask)
    if (baseline, scale) != ("none", "none"):
        centred = _alone(centred, reward, group, how)
    if scale == "mean":
        centred = _by_mean(centred, reward, rollout)
    elif scale == "std":
        centred = centred / _divisor(_deviation(above, group), group, how)
    elif scale == "leave_one_out_std":
        deviation = _deviation_of_others(reward, group)
        centred = centred / _divisor(deviation, group, GROUP_DIALECTS["nemo_rl"])
    return _per_token(rollout, mask, centred)


def _lowest(reward: np.ndarray, group: np.ndarray) -> np.ndarray:
    """[rows]: the lowest reward of each row's group. Above it, equal rewards are exactly 0, and so
    are their deviations, however large they are.
    """
    found = np.full(len(reward), np.inf)
    np.minimum.at(found, group, reward)
    return found[group]


def _group_mean(value: np.ndarray, group: np.ndarray) -> np.ndarray:
    """[rows]: the mean of each row's group."""
    return (np.bincount(group, weights=value) / np.bincount(group))[group]


def _baseline(kind: str, reward: np.ndarray, group: np.ndarray, mask: Ragged) -> np.ndarray:
    """[rows]: what each reward is compared with."""
    if kind == "leave_one_out":
        total, count = np.bincount(group, weights=reward)[group], np.bincount(group)[group]
        return (total - reward) / np.maximum(count - 1, 1)
    if kind == "length_weighted":
        length = np.bincount(mask.segments(), weights=mask.values, minlength=len(mask))
        tokens = np.bincount(group, weights=length)
        return (np.bincount(group, weights=length * reward) / np.maximum(tokens, 1.0))[group]
    return _group_mean(reward, group)


def _alone(
    centred: np.ndarray, reward: np.ndarray, group: np.ndarray, how: GroupDialect
) -> np.ndarray:
    """[rows]: the same, but for a group's only row what the dialect gives it."""
    lone = np.bincount(group)[group] == 1
    return np.where(lone, reward if how.lone == "reward" else 0.0, centred)


def _divisor(deviation: np.ndarray, group: np.ndarray, how: GroupDialect) -> np.ndarray:
    """[rows]: the deviation and epsilon, or 1 where the dialect does not divide."""
    lone = np.bincount(group)[group] == 1
    deviation = np.where(lone & (how.lone == "reward"), 1.0, deviation)
    return np.where((deviation == 0.0) & how.undivided, 1.0, deviation + how.epsilon)


def _deviation(reward: np.ndarray, group: np.ndarray) -> np.ndarray:
    """[rows]: the unbiased standard deviation of each row's group; 0 of an only row."""
    squares = np.bincount(group, weights=(reward - _group_mean(reward, group)) ** 2)
    return np.sqrt(squares / np.maximum(np.bincount(group) - 1, 1))[group]


def _deviation_of_others(reward: np.ndarray, group: np.ndarray) -> np.ndarray:
    """[rows]: the unbiased standard deviation of the other rows of each row's group; 0 where they
    are all equal, or fewer than two.

    Of the others themselves, not from the group's sums: one reward that is far off would leave
    nothing of theirs but rounding.
    """
    order, sizes = np.argsort(group, kind="stable"), np.bincount(group)[group]
    found = np.zeros(len(reward))
    for size in np.unique(sizes[sizes > 2]):
        rows = order[sizes[order] == size].reshape(-1, size)
        for i in range(size):
            others = np.delete(reward[rows], i, axis=1)
            found[rows[:, i]] = others.std(axis=1, ddof=1) * (np.ptp(others, axis=1) > 0)
    return found


def _by_mean(centred: np.ndarray, reward: np.ndarray, rollout: Columns[Completion]) -> np.ndarray:
    """[rows]: divided by the mean reward of the group; 0 where that is 0, as then all rewards are.

    Raises DataError for a reward below 0: the mean would turn the sign, or divide by 0.
    """
    if len(reward) and reward.min() < 0:
        row = int(reward.argmin())
        raise DataError(
            f"expected rewards >= 0 for scale='mean', found {reward[row]:g} in row (position,"
            f" sample, attempt) {rollout.keys.rows()[row]}. Fix: a reward from 0 on, or"
            " scale='std'."
        )
    mean = _group_mean(reward, rollout.groups)
    return np.divide(centred, mean, out=np.zeros_like(centred), where=mean > 0)


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


def teacher_advantage(rollout: Columns[Rollout], teacher: Columns[Logprobs]) -> Columns[Advantage]:
    mask = rollout["completion_mask"]
    gap = teacher["logprobs"].values - rollout["sampler_logprobs"].values
    tokens = np.where(mask.values > 0, gap, np.float32(0.0))
    return Columns.make(Advantage, like=rollout, advantage=mask.like(tokens))


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
    mask: Ragged, reward: np.ndarray, values: np.ndarray, gamma: float, lam: float, how: HoleDialect
) -> np.ndarray:
    """Generalised advantages [tokens], backwards over the written tokens of each row.

    A hole (mask 0) has no value, and a reward on it goes to the written token before it. By the
    dialect it is a step of discount, or the scan skips it.
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
        if how.counts:
            hole = alive[~written]
            running[hole] = gamma * (next_value[hole] + lam * running[hole])
            next_value[hole] = 0.0
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
    dialect: str,
) -> Columns[Returns]:
    mask, value = rollout["completion_mask"], values["values"].values.astype(np.float64)
    how = HOLE_DIALECTS[dialect]
    advantage = _scan(mask, _token_rewards(rollout, score), value, gamma, lam, how)
    returns = np.where(mask.values > 0, advantage + value, 0.0)
    return _returns_columns(rollout, mask, advantage, returns)


def returns(
    rollout: Columns[Completion], score: Columns[Reward], *, gamma: float, dialect: str
) -> Columns[Returns]:
    mask, how = rollout["completion_mask"], HOLE_DIALECTS[dialect]
    zeros = np.zeros(len(mask.values))
    total = _scan(mask, _token_rewards(rollout, score), zeros, gamma, 1.0, how)
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
    value = np.where(mask > 0, advantage["advantage"].values.astype(np.float64), 0.0)
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
    penalty = kl_estimates(rollout, reference, kind=kind, dialect=dialect)
    tokens = _token_rewards(rollout, score) - beta * penalty
    total = np.bincount(mask.segments(), weights=tokens, minlength=len(mask))
    return Columns.make(
        TokenReward,
        like=rollout,
        reward=total.astype(np.float32),
        token_reward=mask.like(tokens.astype(np.float32)),
    )


def kl_estimates(
    rollout: Columns[Rollout], reference: Columns[Logprobs], *, kind: str, dialect: str
) -> np.ndarray:
    """Each token's KL estimate, [tokens]; 0 where the mask is."""
    mask = rollout["completion_mask"]
    ratio = rollout["sampler_logprobs"].values.astype(np.float64) - reference["logprobs"].values
    return _estimate(np.where(mask.values > 0, ratio, 0.0), kind, KL_DIALECTS[dialect])


def _estimate(ratio: np.ndarray, kind: str, how: KLDialect) -> np.ndarray:
    """Each token's KL estimate, from its log ratio."""
    if kind in how.inside:
        ratio = ratio.clip(-how.ratio, how.ratio)
    if kind == "k3":
        found = np.expm1(-ratio) + ratio
    else:
        found = ratio if kind == "k1" else ratio**2 / 2.0
    return found.clip(-MOST, MOST) if kind in how.clamped else found


def overlong_penalty(
    rollout: Columns[Completion],
    score: Columns[Reward],
    *,
    max_tokens: int,
    buffer: int,
    factor: float,
    dialect: str,
) -> Columns[Reward]:
    length = rollout["completion_ids"].lengths
    most = 1.0 if OVERLONG_DIALECTS[dialect].capped else np.inf
    penalty = factor * np.clip((length - (max_tokens - buffer)) / buffer, 0.0, most)
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
