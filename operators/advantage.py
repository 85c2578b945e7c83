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
from dataflow.user import Columns, column_operator
from operators.weights import require_weights

Dialect = Literal["trl", "verl", "openrlhf"]
AnyAdvantage = TypeVar("AnyAdvantage", bound=Advantage)
AnyReward = TypeVar("AnyReward", bound=Reward)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDialect:
    """How a peer does a group: epsilon is added to the (unbiased) standard deviation. lone: what a
    group of one row gets, which has nobody to be compared with: 0, or its own reward, as if its
    mean were 0 and its deviation 1.
    """

    epsilon: float
    lone: Literal["zero", "reward"] = "zero"


GROUP_DIALECTS = {
    "trl": GroupDialect(epsilon=1e-4),
    "verl": GroupDialect(epsilon=1e-6, lone="reward"),
    "openrlhf": GroupDialect(epsilon=1e-9),
}
"""TRL `GRPOTrainer` and `RLOOTrainer`, verl `core_algos`, OpenRLHF `experience_maker` (it has no
group of one).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhitenDialect:
    """How a peer makes the variance of a Step 1: what is taken from the count that divides the
    squares, and whether 1e-8 is added to the variance or its least value.
    """

    freedom: int
    floor: Literal["added", "least"]


WHITEN_DIALECTS = {
    "trl": WhitenDialect(freedom=1, floor="added"),
    "verl": WhitenDialect(freedom=1, floor="added"),
    "openrlhf": WhitenDialect(freedom=0, floor="least"),
}
"""TRL and verl `masked_whiten`, OpenRLHF `experience_maker`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KLDialect:
    """Where a peer clamps a token's KL estimate to [-10, 10], and the log ratio that its k3 is made
    of.
    """

    clamped: tuple[str, ...] = ()
    ratio: float | None = None


KL_DIALECTS = {
    "trl": KLDialect(),
    "verl": KLDialect(clamped=("k3",), ratio=20.0),
    "openrlhf": KLDialect(clamped=("k1", "k2", "k3")),
}
"""TRL `PPOTrainer`, verl `kl_penalty`, OpenRLHF `compute_approx_kl`."""


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
    """A number of each row on each of its masked tokens."""
    tokens = np.repeat(value, mask.lengths) * mask.values
    return Columns.make(Advantage, like=rows, advantage=mask.like(tokens.astype(np.float32)))


def _baseline_advantage(
    rollout: Columns[Completion], score: Columns[Reward], baseline: Columns[Reward]
) -> Columns[Advantage]:
    return _per_token(
        rollout, rollout["completion_mask"], score["reward"].astype(np.float64) - baseline["reward"]
    )


def _token_rewards(rollout: Columns[Completion], score: Columns[Reward]) -> np.ndarray:
    """float64 [tokens]: the reward of each token; a row's single number stands on its last masked
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

    A hole (mask 0) has no value and no step of discount: the scan passes over it, and a reward that
    stands on it goes to the written token before it.
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


def _returns(
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


def _whiten(
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


def _kl_in_reward(
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
    """The KL estimate of each token from its log ratio."""
    if kind == "k3":
        bounded = ratio if how.ratio is None else ratio.clip(-how.ratio, how.ratio)
        found = np.expm1(-bounded) + bounded
    else:
        found = ratio if kind == "k1" else ratio**2 / 2.0
    return found.clip(-10.0, 10.0) if kind in how.clamped else found


def _overlong_penalty(
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


def _add(*scores: Columns[Reward], weights: Sequence[float] | None) -> Columns[Reward]:
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
    """float64 [tokens]: the reward of each token; a row's single number stands on its last
    token.
    """
    if "token_reward" in score.batch.names:
        return score["token_reward"].values.astype(np.float64)
    return _on_last(shape, score["reward"].astype(np.float64))


def _on_last(shape: Ragged, value: np.ndarray) -> np.ndarray:
    """[tokens]: a number of each row on its last token, be it a hole: returns give it to the
    written one before.
    """
    at = np.zeros(len(shape.values))
    filled = shape.lengths > 0
    at[shape.offsets[1:][filled] - 1] = value[filled]
    return at


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
    limits={"beta": number(0.0, like=0.05), "kind": choice("k1", "k2", "k3"), "dialect": _DIALECT},
)
OVERLONG_PENALTY = column_operator(
    _overlong_penalty,
    "operators.advantage:OVERLONG_PENALTY",
    name="overlong_penalty",
    columns={"rollout": ("completion_ids",)},
    limits={
        "max_tokens": whole(1, like=512),
        "buffer": whole(1, like=64),
        "factor": number(0.0, like=1.0),
    },
)
ADD = column_operator(
    _add, "operators.advantage:ADD", name="add", variadic=Input(name="score", schema=Reward)
)


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

    GRPO (arXiv:2402.03300, eq. 3); baseline="leave_one_out", scale="none" is RLOO
    (arXiv:2402.14740). dialect names epsilon: trl 1e-4, verl 1e-6, openrlhf 1e-9 (all use the
    unbiased deviation), and what a group of which one row is left gets: verl its own reward, the
    others 0. ragged: accept groups of which a selection took rows away.
    """
    params = {"baseline": baseline, "scale": scale, "ragged": ragged, "dialect": dialect}
    return Node(
        GROUP_ADVANTAGE, name, inputs={"rollout": rollout, "score": score}, params=params
    ).port()


@declares
def baseline_advantage(
    rollout: Port[Completion],
    score: Port[Reward],
    baseline: Port[Reward],
    *,
    name: str = "baseline_advantage",
) -> Port[Advantage]:
    """reward - a baseline of the prompt (or of other rows that these come from), the same for all
    of its answers.

    ReMax (arXiv:2310.10505) takes the greedy answer's reward: `mean_over(reward(fn, greedy),
    prompt)`.
    """
    return Node(
        BASELINE_ADVANTAGE, name, inputs={"rollout": rollout, "score": score, "baseline": baseline}
    ).port()


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
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16) and its returns, advantage +
    value.

    A TokenReward is taken as it is; a Reward stands on the last written token. A hole in the mask
    is passed over.
    """
    params = {"gamma": gamma, "lam": lam}
    return Node(
        GAE, name, inputs={"rollout": rollout, "score": score, "values": values}, params=params
    ).port()


@declares
def returns(
    rollout: Port[Completion], score: Port[Reward], *, gamma: float = 1.0, name: str = "returns"
) -> Port[Returns]:
    """Discounted sum of the rewards from each token on; the advantage of REINFORCE without a
    baseline.
    """
    return Node(
        RETURNS, name, inputs={"rollout": rollout, "score": score}, params={"gamma": gamma}
    ).port()


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

    dialect: trl and verl divide by count - 1 and add 1e-8 to the variance, openrlhf divides by
    count and takes 1e-8 as the least variance. A Step-wide mean: no streaming past here.
    """
    params = {"shift": shift, "dialect": dialect}
    schemas = (advantage.schema,) if isinstance(advantage, Port) else None
    return Node(
        WHITEN,
        name,
        inputs={"advantage": advantage, "rollout": rollout},
        params=params,
        schemas=schemas,
    ).port()


@declares
def kl_in_reward(
    rollout: Port[Rollout],
    score: Port[Reward],
    reference: Port[Logprobs],
    *,
    beta: float,
    kind: Literal["k1", "k2", "k3"] = "k1",
    dialect: Dialect = "trl",
    name: str = "kl_in_reward",
) -> Port[TokenReward]:
    """The reward less beta times the KL estimate of each token (k1, k2, k3:
    joschu.net/blog/kl-approx.html).

    dialect: trl clamps nothing; verl clamps the log ratio of k3 to 20 and k3 to 10, either way;
    openrlhf each of the three estimates to 10.
    """
    inputs = {"rollout": rollout, "score": score, "reference": reference}
    return Node(
        KL_IN_REWARD, name, inputs=inputs, params={"beta": beta, "kind": kind, "dialect": dialect}
    ).port()


@declares
def overlong_penalty(
    rollout: Port[Completion],
    score: Port[AnyReward],
    *,
    max_tokens: int,
    buffer: int,
    factor: float = 1.0,
    name: str = "overlong_penalty",
) -> Port[AnyReward]:
    """The reward less factor times how far the answer reaches into the last `buffer` of max_tokens
    (DAPO, eq. 13).

    Of a TokenReward the last token bears the penalty, and the others stay as they are.
    """
    params = {"max_tokens": max_tokens, "buffer": buffer, "factor": factor}
    schemas = (score.schema,) if isinstance(score, Port) else None
    inputs = {"rollout": rollout, "score": score}
    return Node(OVERLONG_PENALTY, name, inputs=inputs, params=params, schemas=schemas).port()


@declares
def add(
    *scores: Port[Reward], weights: Sequence[float] | None = None, name: str = "add"
) -> Port[Reward]:
    """The weighted sum of rewards on the same rows; with a TokenReward among them it is one.

    Then tokens are added to tokens, and the number of a plain Reward stands on the last token of
    its row.
    """
    require_weights("add", weights, len(scores), "score")
    params = {"weights": None if weights is None else tuple(weights)}
    spread = any(isinstance(s, Port) and issubclass(s.schema, TokenReward) for s in scores)
    inputs = {f"score{i}": s for i, s in enumerate(scores)}
    return Node(
        ADD, name, inputs=inputs, params=params, schemas=(TokenReward if spread else Reward,)
    ).port()
