"""Advantages, returns and reward shaping: columns in, columns out.

Owns: the declarations and their formulas in NumPy, each with its source and, where peers
disagree, its dialects. Does not own: losses (losses.py), selection (select.py).

Holes in a completion's mask (tool output) get advantage 0, and returns pass through them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

from dataflow.batch import Ragged
from dataflow.limits import choice, flag, number, whole
from dataflow.node import Node, Port
from dataflow.operator import Input, declares
from dataflow.schema import Advantage, Completion, Logprobs, Returns, Reward, Rollout, TokenReward, Values
from dataflow.user import Columns, column_operator
from operators.weights import require_weights

Dialect = Literal["trl", "verl", "openrlhf"]
AnyAdvantage = TypeVar("AnyAdvantage", bound=Advantage)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDialect:
    """How a peer scales a group: epsilon is added to the (unbiased) standard deviation."""

    epsilon: float


GROUP_DIALECTS = {
    "trl": GroupDialect(epsilon=1e-4),
    "verl": GroupDialect(epsilon=1e-6),
    "openrlhf": GroupDialect(epsilon=1e-9),
}


def _group_advantage(
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
    centred = reward - _baseline(baseline, reward, total[group], count[group])
    if scale == "std":
        deviation = reward - (total / count)[group]
        squares = np.bincount(group, weights=deviation**2)
        std = np.sqrt(squares / np.maximum(count - 1, 1))
        centred = centred / (std[group] + GROUP_DIALECTS[dialect].epsilon)
    return _per_token(rollout, mask, centred)


def _baseline(kind: str, reward: np.ndarray, total: np.ndarray, count: np.ndarray) -> np.ndarray:
    if kind == "leave_one_out":
        return (total - reward) / np.maximum(count - 1, 1)
    return total / count if kind == "mean" else np.zeros_like(reward)


def _per_token(rows: Columns[Completion], mask: Ragged, value: np.ndarray) -> Columns[Advantage]:
    """A number of each row on each of its masked tokens."""
    tokens = np.repeat(value, mask.lengths) * mask.values
    return Columns.make(Advantage, like=rows, advantage=mask.like(tokens.astype(np.float32)))


def _baseline_advantage(
    rollout: Columns[Completion], score: Columns[Reward], baseline: Columns[Reward]
) -> Columns[Advantage]:
    return _per_token(rollout, rollout["completion_mask"], score["reward"].astype(np.float64) - baseline["reward"])


def _token_rewards(rollout: Columns[Completion], score: Columns[Reward]) -> np.ndarray:
    """float64 [tokens]: the reward of each token; a row's single number stands on its last masked token."""
    if "token_reward" in score.batch.names:
        return score["token_reward"].values.astype(np.float64)
    mask = rollout["completion_mask"]
    at = np.zeros(len(mask.values))
    position = np.where(mask.values > 0, np.arange(len(mask.values)), -1)
    filled = mask.lengths > 0
    last = np.maximum.reduceat(position, mask.offsets[:-1][filled]) if filled.any() else np.zeros(0, dtype=np.int64)
    valid = last >= 0
    at[last[valid]] = score["reward"][filled][valid]
    return at


def _scan(mask: Ragged, reward: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """Generalised advantages [tokens], backwards over the written tokens of each row.

    A hole (mask 0) has no value and no step of discount: the scan passes over it, and a reward that stands on it goes
    to the written token before it.
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


def _gae(
    rollout: Columns[Completion], score: Columns[Reward], values: Columns[Values], *, gamma: float, lam: float
) -> Columns[Returns]:
    mask, value = rollout["completion_mask"], values["values"].values.astype(np.float64)
    advantage = _scan(mask, _token_rewards(rollout, score), value, gamma, lam)
    returns = np.where(mask.values > 0, advantage + value, 0.0)
    return _returns_columns(rollout, mask, advantage, returns)


def _returns(rollout: Columns[Completion], score: Columns[Reward], *, gamma: float) -> Columns[Returns]:
    mask = rollout["completion_mask"]
    total = _scan(mask, _token_rewards(rollout, score), np.zeros(len(mask.values)), gamma, 1.0)
    return _returns_columns(rollout, mask, total, total)


def _returns_columns(
    rows: Columns[Completion], mask: Ragged, advantage: np.ndarray, returns: np.ndarray
) -> Columns[Returns]:
    columns = {"advantage": mask.like(advantage.astype(np.float32)), "returns": mask.like(returns.astype(np.float32))}
    return Columns.make(Returns, like=rows, **columns)


def _whiten(
    advantage: Columns[Advantage], rollout: Columns[Completion], *, shift: bool, dialect: str
) -> Columns[Advantage]:
    mask = rollout["completion_mask"].values.astype(np.float64)
    value = advantage["advantage"].values.astype(np.float64)
    count = mask.sum()
    mean = (value * mask).sum() / max(count, 1.0)
    squares = (((value - mean) * mask) ** 2).sum()
    freedom = count if dialect == "openrlhf" else count - 1.0
    whitened = (value - mean) / np.sqrt(squares / max(freedom, 1.0) + 1e-8)
    whitened = (whitened if shift else whitened + mean) * mask
    tokens = Ragged(whitened.astype(np.float32), rollout["completion_mask"].offsets)
    return advantage.set(advantage=tokens)


def _kl_in_reward(
    rollout: Columns[Rollout], score: Columns[Reward], reference: Columns[Logprobs], *, beta: float, kind: str
) -> Columns[TokenReward]:
    mask = rollout["completion_mask"]
    ratio = rollout["sampler_logprobs"].values.astype(np.float64) - reference["logprobs"].values
    penalty = {"k1": ratio, "k2": ratio**2 / 2.0, "k3": np.expm1(-ratio) + ratio}[kind] * mask.values
    tokens = _token_rewards(rollout, score) - beta * penalty
    total = np.bincount(mask.segments(), weights=tokens, minlength=len(mask))
    return Columns.make(
        TokenReward, like=rollout, reward=total.astype(np.float32), token_reward=mask.like(tokens.astype(np.float32))
    )


def _overlong_penalty(
    rollout: Columns[Completion], score: Columns[Reward], *, max_tokens: int, buffer: int, factor: float
) -> Columns[Reward]:
    length = rollout["completion_ids"].lengths
    over = np.clip((length - (max_tokens - buffer)) / buffer, 0.0, 1.0)
    return score.set(reward=(score["reward"] - factor * over).astype(np.float32))


def _add(*scores: Columns[Reward], weights: Sequence[float] | None) -> Columns[Reward]:
    factors = [1.0] * len(scores) if weights is None else weights
    total = sum(w * s["reward"].astype(np.float64) for w, s in zip(factors, scores, strict=True))
    parts = {name: s.batch.array(name) for s in scores for name in s.batch.names if name.startswith("reward/")}
    return Columns.make(Reward, like=scores[0], reward=np.asarray(total, dtype=np.float32), **parts)


_MASK = ("completion_mask",)
_DIALECT = choice(*GROUP_DIALECTS)
_DISCOUNT = number(0.0, 1.0, like=1.0)

GROUP_ADVANTAGE = column_operator(
    _group_advantage,
    "operators.advantage:GROUP_ADVANTAGE",
    name="group_advantage",
    scope="group",
    columns={"rollout": _MASK, "score": ("reward",)},
    limits={
        "baseline": choice("mean", "leave_one_out", "none"),
        "scale": choice("std", "none"),
        "ragged": flag(),
        "dialect": _DIALECT,
    },
    normalises="group",
)
BASELINE_ADVANTAGE = column_operator(
    _baseline_advantage,
    "operators.advantage:BASELINE_ADVANTAGE",
    name="baseline_advantage",
    columns={"rollout": _MASK, "score": ("reward",), "baseline": ("reward",)},
    parent=("baseline",),
)
GAE = column_operator(
    _gae,
    "operators.advantage:GAE",
    name="gae",
    columns={"rollout": _MASK},
    limits={"gamma": _DISCOUNT, "lam": number(0.0, 1.0, like=0.95)},
)
RETURNS = column_operator(
    _returns,
    "operators.advantage:RETURNS",
    name="returns",
    columns={"rollout": _MASK},
    limits={"gamma": _DISCOUNT},
)
WHITEN = column_operator(
    _whiten,
    "operators.advantage:WHITEN",
    name="whiten",
    scope="batch",
    columns={"rollout": _MASK},
    limits={"shift": flag(), "dialect": _DIALECT},
    normalises="batch",
)
KL_IN_REWARD = column_operator(
    _kl_in_reward,
    "operators.advantage:KL_IN_REWARD",
    name="kl_in_reward",
    columns={"rollout": ("completion_mask", "sampler_logprobs")},
    limits={"beta": number(0.0, like=0.05), "kind": choice("k1", "k2", "k3")},
)
OVERLONG_PENALTY = column_operator(
    _overlong_penalty,
    "operators.advantage:OVERLONG_PENALTY",
    name="overlong_penalty",
    columns={"rollout": ("completion_ids",)},
    limits={"max_tokens": whole(1, like=512), "buffer": whole(1, like=64), "factor": number(0.0, like=1.0)},
)
ADD = column_operator(_add, "operators.advantage:ADD", name="add", variadic=Input(name="score", schema=Reward))


@declares
def group_advantage(
    rollout: Port[Completion],
    score: Port[Reward],
    *,
    baseline: Literal["mean", "leave_one_out", "none"] = "mean",
    scale: Literal["std", "none"] = "std",
    ragged: bool = False,
    dialect: Dialect = "trl",
    name: str = "group_advantage",
) -> Port[Advantage]:
    """(reward - baseline of its group) / (std of its group + epsilon), on each token of the row.

    GRPO (arXiv:2402.03300, eq. 3); baseline="leave_one_out", scale="none" is RLOO (arXiv:2402.14740). dialect names
    epsilon: trl 1e-4, verl 1e-6, openrlhf 1e-9; all use the unbiased deviation. ragged: accept groups of which a
    selection took rows away.
    """
    params = {"baseline": baseline, "scale": scale, "ragged": ragged, "dialect": dialect}
    return Node(GROUP_ADVANTAGE, name, inputs={"rollout": rollout, "score": score}, params=params).port()


@declares
def baseline_advantage(
    rollout: Port[Completion], score: Port[Reward], baseline: Port[Reward], *, name: str = "baseline_advantage"
) -> Port[Advantage]:
    """reward - the reward of another answer to the same prompt (ReMax, arXiv:2310.10505: the greedy one)."""
    return Node(BASELINE_ADVANTAGE, name, inputs={"rollout": rollout, "score": score, "baseline": baseline}).port()


@declares
def gae(
    rollout: Port[Completion],
    score: Port[Reward],
    values: Port[Values],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    name: str = "gae",
) -> Port[Returns]:
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16) and its returns, advantage + value.

    A TokenReward is taken as it is; a Reward stands on the last written token. A hole in the mask is passed over.
    """
    params = {"gamma": gamma, "lam": lam}
    return Node(GAE, name, inputs={"rollout": rollout, "score": score, "values": values}, params=params).port()


@declares
def returns(
    rollout: Port[Completion], score: Port[Reward], *, gamma: float = 1.0, name: str = "returns"
) -> Port[Returns]:
    """Discounted sum of the rewards from each token on; the advantage of REINFORCE without a baseline."""
    return Node(RETURNS, name, inputs={"rollout": rollout, "score": score}, params={"gamma": gamma}).port()


@declares
def whiten(
    advantage: Port[AnyAdvantage],
    rollout: Port[Completion],
    *,
    shift: bool = True,
    dialect: Dialect = "trl",
    name: str = "whiten",
) -> Port[AnyAdvantage]:
    """Zero mean (if shift) and unit variance over the written tokens of the Step.

    dialect: trl and verl divide by count - 1, openrlhf by count. A Step-wide mean: no streaming past here.
    """
    params = {"shift": shift, "dialect": dialect}
    schemas = (advantage.schema,) if isinstance(advantage, Port) else None
    return Node(
        WHITEN, name, inputs={"advantage": advantage, "rollout": rollout}, params=params, schemas=schemas
    ).port()


@declares
def kl_in_reward(
    rollout: Port[Rollout],
    score: Port[Reward],
    reference: Port[Logprobs],
    *,
    beta: float,
    kind: Literal["k1", "k2", "k3"] = "k1",
    name: str = "kl_in_reward",
) -> Port[TokenReward]:
    """The reward less beta times the KL estimate of each token (k1, k2, k3: joschu.net/blog/kl-approx.html)."""
    inputs = {"rollout": rollout, "score": score, "reference": reference}
    return Node(KL_IN_REWARD, name, inputs=inputs, params={"beta": beta, "kind": kind}).port()


@declares
def overlong_penalty(
    rollout: Port[Completion],
    score: Port[Reward],
    *,
    max_tokens: int,
    buffer: int,
    factor: float = 1.0,
    name: str = "overlong_penalty",
) -> Port[Reward]:
    """The reward less factor times how far the answer reaches into the last `buffer` of max_tokens (DAPO, eq. 13)."""
    params = {"max_tokens": max_tokens, "buffer": buffer, "factor": factor}
    return Node(OVERLONG_PENALTY, name, inputs={"rollout": rollout, "score": score}, params=params).port()


@declares
def add(*scores: Port[Reward], weights: Sequence[float] | None = None, name: str = "add") -> Port[Reward]:
    """The weighted sum of rewards on the same rows."""
    require_weights("add", weights, len(scores), "score")
    params = {"weights": None if weights is None else tuple(weights)}
    return Node(ADD, name, inputs={f"score{i}": s for i, s in enumerate(scores)}, params=params).port()
