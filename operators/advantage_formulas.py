"""Advantages, returns and reward shaping: the formulas in NumPy, each on columns of rows.

Owns: the formulas, with their sources. Does not own: the numbers in which peers differ
(advantage_dialects.py), the operators that users call (advantage.py), losses (losses.py).

Holes in a completion's mask (tool output) get advantage 0, and returns pass through them. A
function here has its operator's name, which is part of every graph's digest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dataflow.batch import Keys, Ragged
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
    length = np.bincount(mask.segments(), weights=mask.values, minlength=len(mask))
    # Rows of one episode are compared with those of others as one.
    episode, first_rows = number_episodes(rollout)
    group = rollout.groups[first_rows]
    reward = np.bincount(episode, weights=score["reward"].astype(np.float64))
    length = np.bincount(episode, weights=length)
    peer = GROUP_DIALECTS[dialect]
    above = reward - _lowest_of_group(reward, group)
    centred = reward
    if baseline != "none":
        centred = above - _baseline(baseline, above, group, length)
    if (baseline, scale) != ("none", "none"):
        centred = _replace_lone_rows(centred, reward, group, peer)
    if scale == "mean":
        centred = _divide_by_mean(centred, reward, group, rollout.keys.take(first_rows))
    elif scale == "std":
        centred = centred / _divisor(_deviation(above, group), group, peer)
    elif scale == "leave_one_out_std":
        deviation = _deviation_of_others(reward, group)
        # No other peer has this scale: all take nemo_rl's epsilon, and what it does not divide.
        centred = centred / _divisor(deviation, group, GROUP_DIALECTS["nemo_rl"])
    return _spread_over_tokens(rollout, mask, centred[episode])


def number_episodes(rows: Columns[Completion]) -> tuple[np.ndarray, np.ndarray]:
    """int64: the number of each row's episode, in the order of the rows' keys, and of each episode
    its first row. Rows that are no Segments are an episode each.
    """
    if not {"episode", "segment"} <= set(rows.batch.names):
        every_row = np.arange(len(rows))
        return every_row, every_row
    return rows.keys.number_episodes(rows["segment"])


def _lowest_of_group(reward: np.ndarray, group: np.ndarray) -> np.ndarray:
    """[rows]: the lowest reward of each row's group. Above it, equal rewards are exactly 0, and so
    are their deviations, however large they are.
    """
    lowest = np.full(len(reward), np.inf)
    np.minimum.at(lowest, group, reward)
    return lowest[group]


def _group_mean(numbers: np.ndarray, group: np.ndarray) -> np.ndarray:
    """[rows]: the mean of each row's group."""
    return (np.bincount(group, weights=numbers) / np.bincount(group))[group]


def _baseline(kind: str, reward: np.ndarray, group: np.ndarray, length: np.ndarray) -> np.ndarray:
    """[rows]: what each reward is compared with."""
    if kind == "leave_one_out":
        total = np.bincount(group, weights=reward)[group]
        count = np.bincount(group)[group]
        return (total - reward) / np.maximum(count - 1, 1)
    if kind == "length_weighted":
        total = np.bincount(group, weights=length * reward)
        tokens = np.bincount(group, weights=length)
        return (total / np.maximum(tokens, 1.0))[group]
    return _group_mean(reward, group)


def _replace_lone_rows(
    centred: np.ndarray, reward: np.ndarray, group: np.ndarray, peer: GroupDialect
) -> np.ndarray:
    """[rows]: the same, but for a group's only row what the dialect gives it."""
    is_lone = np.bincount(group)[group] == 1
    lone_number = reward if peer.lone == "reward" else 0.0
    return np.where(is_lone, lone_number, centred)


def _divisor(deviation: np.ndarray, group: np.ndarray, peer: GroupDialect) -> np.ndarray:
    """[rows]: the deviation and epsilon, or 1 where the dialect does not divide."""
    is_lone = np.bincount(group)[group] == 1
    deviation = np.where(is_lone & (peer.lone == "reward"), 1.0, deviation)
    return np.where((deviation == 0.0) & peer.undivided, 1.0, deviation + peer.epsilon)


def _deviation(reward: np.ndarray, group: np.ndarray) -> np.ndarray:
    """[rows]: the unbiased standard deviation of each row's group; 0 of an only row."""
    squares = np.bincount(group, weights=(reward - _group_mean(reward, group)) ** 2)
    freedom = np.maximum(np.bincount(group) - 1, 1)
    return np.sqrt(squares / freedom)[group]


def _deviation_of_others(reward: np.ndarray, group: np.ndarray) -> np.ndarray:
    """[rows]: the unbiased standard deviation of the other rows of each row's group; 0 where they
    are all equal, or fewer than two.

    Of the others themselves, not from the group's sums: one reward that is far off would leave
    nothing of theirs but rounding.
    """
    order = np.argsort(group, kind="stable")
    sizes = np.bincount(group)[group]
    deviations = np.zeros(len(reward))
    # Groups of one size at a time: a matrix of [groups, size].
    for size in np.unique(sizes[sizes > 2]):
        rows = order[sizes[order] == size].reshape(-1, size)
        for i in range(size):
            others = np.delete(reward[rows], i, axis=1)
            # By 0 where they are equal: there rounding would leave a deviation above it.
            is_spread = np.ptp(others, axis=1) > 0
            deviation = others.std(axis=1, ddof=1)
            deviations[rows[:, i]] = deviation * is_spread
    return deviations


def _divide_by_mean(
    centred: np.ndarray, reward: np.ndarray, group: np.ndarray, keys: Keys
) -> np.ndarray:
    """[rows]: divided by the mean reward of the group; 0 where that is 0, as then all rewards are.

    Raises DataError for a reward below 0: the mean would turn the sign, or divide by 0.
    """
    if len(reward) and reward.min() < 0:
        row = int(reward.argmin())
        raise DataError(
            f"expected rewards >= 0 for scale='mean', found {reward[row]:g} in row (position,"
            f" sample, attempt) {keys.rows()[row]}. Fix: a reward from 0 on, or"
            " scale='std'."
        )
    mean = _group_mean(reward, group)
    return np.divide(centred, mean, out=np.zeros_like(centred), where=mean > 0)


def _spread_over_tokens(
    rows: Columns[Completion], mask: Ragged, row_numbers: np.ndarray
) -> Columns[Advantage]:
    """A row's number on each of its masked tokens."""
    tokens = np.repeat(row_numbers, mask.lengths) * mask.values
    return Columns.make(Advantage, like=rows, advantage=mask.like(tokens.astype(np.float32)))


def baseline_advantage(
    rollout: Columns[Completion], score: Columns[Reward], baseline: Columns[Reward]
) -> Columns[Advantage]:
    episode, _ = number_episodes(rollout)
    reward = np.bincount(episode, weights=score["reward"].astype(np.float64))
    above = reward[episode] - baseline["reward"]
    return _spread_over_tokens(rollout, rollout["completion_mask"], above)


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
    rewards = np.zeros(len(mask.values))
    every_token = np.arange(len(mask.values))
    position = np.where(mask.values > 0, every_token, -1)
    # A row without tokens has no segment to reduce: reduceat would give it its neighbour's token.
    has_tokens = mask.lengths > 0
    last = np.zeros(0, dtype=np.int64)
    if has_tokens.any():
        starts = mask.offsets[:-1][has_tokens]
        last = np.maximum.reduceat(position, starts)
    has_trained = last >= 0
    rewards[last[has_trained]] = score["reward"][has_tokens][has_trained]
    return rewards


def _scan_back(
    mask: Ragged,
    reward: np.ndarray,
    values: np.ndarray,
    gamma: float,
    lam: float,
    peer: HoleDialect,
) -> np.ndarray:
    """Generalised advantages [tokens], backwards over the written tokens of each row.

    A hole (mask 0) has no value, and a reward on it goes to the written token before it. By the
    dialect it is a step of discount, or the scan skips it.
    """
    lengths, starts = mask.lengths, mask.offsets[:-1]
    advantage = np.zeros(len(reward))
    # By row: the advantage and the value of the token after, and what waits for a written one.
    running = np.zeros(len(lengths))
    next_value = np.zeros(len(lengths))
    held = np.zeros(len(lengths))
    # One token of each row at a time, from its last one on.
    for back in range(int(lengths.max(initial=0))):
        alive = np.flatnonzero(lengths > back)
        at = starts[alive] + lengths[alive] - 1 - back
        written = mask.values[at] > 0
        held[alive] += reward[at]
        if peer.counts:
            hole = alive[~written]
            running[hole] = gamma * (next_value[hole] + lam * running[hole])
            next_value[hole] = 0.0
        row, token = alive[written], at[written]
        delta = held[row] + gamma * next_value[row] - values[token]
        running[row] = delta + gamma * lam * running[row]
        advantage[token] = running[row]
        next_value[row] = values[token]
        held[row] = 0.0
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
    mask = rollout["completion_mask"]
    token_values = values["values"].values.astype(np.float64)
    rewards = _token_rewards(rollout, score)
    advantage = _scan_back(mask, rewards, token_values, gamma, lam, HOLE_DIALECTS[dialect])
    returns = np.where(mask.values > 0, advantage + token_values, 0.0)
    return _make_returns(rollout, mask, advantage, returns)


def returns(
    rollout: Columns[Completion], score: Columns[Reward], *, gamma: float, dialect: str
) -> Columns[Returns]:
    mask = rollout["completion_mask"]
    rewards = _token_rewards(rollout, score)
    # With lam 1 and no values the advantage is the discounted sum.
    no_values = np.zeros(len(mask.values))
    total = _scan_back(mask, rewards, no_values, gamma, 1.0, HOLE_DIALECTS[dialect])
    return _make_returns(rollout, mask, total, total)


def _make_returns(
    rows: Columns[Completion], mask: Ragged, advantage: np.ndarray, returns: np.ndarray
) -> Columns[Returns]:
    return Columns.make(
        Returns,
        like=rows,
        advantage=mask.like(advantage.astype(np.float32)),
        returns=mask.like(returns.astype(np.float32)),
    )


def whiten(
    advantage: Columns[Advantage], rollout: Columns[Completion], *, shift: bool, dialect: str
) -> Columns[Advantage]:
    mask = rollout["completion_mask"].values.astype(np.float64)
    tokens = advantage["advantage"].values.astype(np.float64)
    tokens = np.where(mask > 0, tokens, 0.0)
    count = mask.sum()
    mean = (tokens * mask).sum() / max(count, 1.0)
    peer = WHITEN_DIALECTS[dialect]
    squares = ((tokens - mean) * mask) ** 2
    variance = squares.sum() / max(count - peer.freedom, 1.0)
    if peer.floor == "added":
        variance = variance + 1e-8
    else:
        variance = max(variance, 1e-8)
    whitened = (tokens - mean) / np.sqrt(variance)
    if not shift:
        whitened = whitened + mean
    whitened = whitened * mask
    column = Ragged(whitened.astype(np.float32), rollout["completion_mask"].offsets)
    return advantage.set(advantage=column)


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
    penalty = estimate_token_kl(rollout, reference, kind=kind, dialect=dialect)
    tokens = _token_rewards(rollout, score) - beta * penalty
    total = np.bincount(mask.segments(), weights=tokens, minlength=len(mask))
    return Columns.make(
        TokenReward,
        like=rollout,
        reward=total.astype(np.float32),
        token_reward=mask.like(tokens.astype(np.float32)),
    )


def estimate_token_kl(
    rollout: Columns[Rollout], reference: Columns[Logprobs], *, kind: str, dialect: str
) -> np.ndarray:
    """Estimate each token's KL, [tokens]; 0 where the mask is."""
    mask = rollout["completion_mask"]
    sampler_logprobs = rollout["sampler_logprobs"].values.astype(np.float64)
    ratio = sampler_logprobs - reference["logprobs"].values
    ratio = np.where(mask.values > 0, ratio, 0.0)
    return _estimate_kl(ratio, kind, KL_DIALECTS[dialect])


def _estimate_kl(ratio: np.ndarray, kind: str, peer: KLDialect) -> np.ndarray:
    """Each token's KL estimate, from its log ratio."""
    if kind in peer.inside:
        ratio = ratio.clip(-peer.ratio, peer.ratio)
    if kind == "k3":
        # expm1, because exp(-x) - 1 loses all digits for small x.
        estimate = np.expm1(-ratio) + ratio
    elif kind == "k1":
        estimate = ratio
    else:
        estimate = ratio**2 / 2.0
    if kind in peer.clamped:
        return estimate.clip(-MOST, MOST)
    return estimate


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
    reach = (length - (max_tokens - buffer)) / buffer
    penalty = factor * np.clip(reach, 0.0, most)
    reward = (score["reward"] - penalty).astype(np.float32)
    if "token_reward" not in score.batch.names:
        return score.set(reward=reward)
    token_reward = score["token_reward"]
    tokens = token_reward.values - _put_on_last(token_reward, penalty)
    return score.set(reward=reward, token_reward=token_reward.like(tokens.astype(np.float32)))


def add(*scores: Columns[Reward], weights: Sequence[float] | None) -> Columns[Reward]:
    factors = [1.0] * len(scores) if weights is None else weights
    weighted = list(zip(factors, scores, strict=True))
    total = sum(w * score["reward"].astype(np.float64) for w, score in weighted)
    reward = np.asarray(total, dtype=np.float32)
    token_rewards = (s["token_reward"] for s in scores if "token_reward" in s.batch.names)
    shape = next(token_rewards, None)
    if shape is None:
        return Columns.make(Reward, like=scores[0], reward=reward, **_rewards_by_function(scores))
    tokens = sum(w * _spread_reward(score, shape) for w, score in weighted)
    token_reward = shape.like(np.asarray(tokens, dtype=np.float32))
    return Columns.make(
        TokenReward,
        like=scores[0],
        reward=reward,
        **_rewards_by_function(scores),
        token_reward=token_reward,
    )


def _rewards_by_function(scores: Sequence[Columns[Reward]]) -> dict[str, object]:
    """The columns `reward/<function>` of all scores; of one name the last score's."""
    columns: dict[str, object] = {}
    for score in scores:
        for name in score.batch.names:
            if name.startswith("reward/"):
                columns[name] = score.batch.array(name)
    return columns


def _spread_reward(score: Columns[Reward], shape: Ragged) -> np.ndarray:
    """float64 [tokens]: the reward of each token; a row's single number is on its last token."""
    if "token_reward" in score.batch.names:
        return score["token_reward"].values.astype(np.float64)
    return _put_on_last(shape, score["reward"].astype(np.float64))


def _put_on_last(shape: Ragged, row_numbers: np.ndarray) -> np.ndarray:
    """[tokens]: a row's number on its last token, even if that is a hole: returns give it to the
    written token before it.
    """
    tokens = np.zeros(len(shape.values))
    has_tokens = shape.lengths > 0
    last = shape.offsets[1:][has_tokens] - 1
    tokens[last] = row_numbers[has_tokens]
    return tokens
