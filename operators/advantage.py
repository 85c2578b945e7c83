"""Advantages, returns and reward shaping: the operators.

Owns: their declarations and the functions that users call. Does not own: the formulas
(advantage_formulas.py), what peers do differently (advantage_dialects.py), losses (losses.py),
selection (select.py).

A `dialect` of None is the graph's (`Graph(..., dialect="verl")`, else "trl").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar, get_args

from dataflow.calls import require
from dataflow.convention import DIALECT_LIMIT, Dialect
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
from dataflow.user import column_operator
from operators import advantage_dialects as dialects
from operators import advantage_formulas as formulas
from operators.weights import require_weights

Baseline = Literal["mean", "leave_one_out", "length_weighted", "none"]
Scale = Literal["std", "leave_one_out_std", "mean", "none"]
AnyAdvantage = TypeVar("AnyAdvantage", bound=Advantage)
AnyReward = TypeVar("AnyReward", bound=Reward)


_MASK = ("completion_mask",)
_OF_EPISODE = (*_MASK, "episode", "segment")
"""What tells which rows are of one episode; rows without such a column are one each."""
_REWARDS = ("reward", "token_reward")
_DISCOUNT = number(0.0, 1.0, like=1.0)

GROUP_ADVANTAGE = column_operator(
    formulas.group_advantage,
    "operators.advantage:GROUP_ADVANTAGE",
    name="group_advantage",
    scope="group",
    columns={"rollout": _OF_EPISODE, "score": ("reward",)},
    limits={
        "baseline": choice(*get_args(Baseline)),
        "scale": choice(*get_args(Scale)),
        "ragged": flag(),
        "dialect": DIALECT_LIMIT,
    },
    normalises="group",
    conventions=dialects.GROUP_CONVENTIONS,
)
BASELINE_ADVANTAGE = column_operator(
    formulas.baseline_advantage,
    "operators.advantage:BASELINE_ADVANTAGE",
    name="baseline_advantage",
    columns={"rollout": _OF_EPISODE, "score": ("reward",), "baseline": ("reward",)},
    parent=("baseline",),
)
TEACHER_ADVANTAGE = column_operator(
    formulas.teacher_advantage,
    "operators.advantage:TEACHER_ADVANTAGE",
    name="teacher_advantage",
    columns={"rollout": ("completion_mask", "sampler_logprobs"), "teacher": ("logprobs",)},
)
GAE = column_operator(
    formulas.gae,
    "operators.advantage:GAE",
    name="gae",
    whole_episodes=True,
    columns={"rollout": _MASK, "score": _REWARDS},
    limits={
        "gamma": _DISCOUNT,
        "lam": number(0.0, 1.0, like=0.95),
        "dialect": DIALECT_LIMIT,
    },
    conventions=dialects.GAE_CONVENTIONS,
)
RETURNS = column_operator(
    formulas.returns,
    "operators.advantage:RETURNS",
    name="returns",
    whole_episodes=True,
    columns={"rollout": _MASK, "score": _REWARDS},
    limits={"gamma": _DISCOUNT, "dialect": DIALECT_LIMIT},
    conventions=dialects.RETURNS_CONVENTIONS,
)
WHITEN = column_operator(
    formulas.whiten,
    "operators.advantage:WHITEN",
    name="whiten",
    scope="batch",
    columns={"rollout": _MASK},
    limits={"shift": flag(), "dialect": DIALECT_LIMIT},
    normalises="batch",
    conventions=dialects.WHITEN_CONVENTIONS,
)
KL_IN_REWARD = column_operator(
    formulas.kl_in_reward,
    "operators.advantage:KL_IN_REWARD",
    name="kl_in_reward",
    columns={"rollout": ("completion_mask", "sampler_logprobs"), "reference": ("logprobs",)},
    limits={
        "beta": number(0.0, like=0.05),
        "kind": choice("k1", "k2", "k3"),
        "dialect": DIALECT_LIMIT,
    },
    conventions=dialects.KL_CONVENTIONS,
    kernel="operators.kernels.kl_in_reward:KlInReward",
)
OVERLONG_PENALTY = column_operator(
    formulas.overlong_penalty,
    "operators.advantage:OVERLONG_PENALTY",
    name="overlong_penalty",
    columns={"rollout": ("completion_ids",)},
    limits={
        "max_tokens": whole(1, like=512),
        "buffer": whole(1, like=64),
        "factor": number(0.0, like=1.0),
        "dialect": DIALECT_LIMIT,
    },
    conventions=dialects.OVERLONG_CONVENTIONS,
    repeats=("max_tokens",),
)
ADD = column_operator(
    formulas.add,
    "operators.advantage:ADD",
    name="add",
    variadic=Input(name="score", schema=Reward),
)


@declares
def group_advantage(
    rollout: Port[Completion],
    score: Port[Reward],
    *,
    baseline: Baseline = "mean",
    scale: Scale = "std",
    ragged: bool = False,
    dialect: Dialect | None = None,
    name: str = "group_advantage",
) -> Port[Advantage]:
    """(reward - baseline) / scale, both of the row's group, on each of its written tokens.

    baseline: `mean` of the group's rewards; `leave_one_out`, that of the other rows;
    `length_weighted`, sum(tokens * reward) / sum(tokens), tokens being those that the model wrote
    (OPO, arXiv:2505.23585); `none`, 0. scale: `std`, the unbiased standard deviation of the group +
    epsilon; `leave_one_out_std`, that of the other rows; `mean`, the group's mean reward, without
    an epsilon (MaxRL, arXiv:2602.02710): 0 where that is 0, and a reward below 0 is an error;
    `none`, 1.

    GRPO (arXiv:2402.03300, section 4.1.2) has the defaults; RLOO (arXiv:2402.14740) leave_one_out
    and scale="none"; Dr. GRPO (arXiv:2503.20783) scale="none"; REINFORCE++-baseline
    (arXiv:2501.03262) scale="none", then `whiten`; OPO length_weighted and scale="none".

    dialect: epsilon, and the advantage of a group's only row, unless nothing of the group counts
    (baseline and scale none): trl 1e-4, 0; verl 1e-6, its own reward; openrlhf 1e-9, 0; nemo_rl
    1e-6, 0, and a row is not divided where the deviation is 0. The deviation of the other rows is
    always nemo_rl's, and 0 if there are fewer than two. ragged: accept groups that a selection took
    rows from; then all numbers are those of the rows left.
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
    """reward - a baseline for the prompt (or another ancestor), the same for all of its answers.

    ReMax (arXiv:2310.10505) takes the greedy answer's reward: `mean_over(reward(fn, greedy),
    prompt)`.
    """
    return Node(
        BASELINE_ADVANTAGE, name, inputs={"rollout": rollout, "score": score, "baseline": baseline}
    ).port()


@declares
def teacher_advantage(
    rollout: Port[Rollout], teacher: Port[Logprobs], *, name: str = "teacher_advantage"
) -> Port[Advantage]:
    """log p_teacher - log p_sampler of each token: distillation by sampled tokens alone.

    With policy_gradient_loss its gradient is that of KL(policy | teacher), token by token without a
    look ahead (on-policy distillation, arXiv:2306.13649, section 3; thinkingmachines.ai/blog/
    on-policy-distillation). distillation_loss has the whole sum over tokens instead.
    """
    inputs = {"rollout": rollout, "teacher": teacher}
    return Node(TEACHER_ADVANTAGE, name, inputs=inputs).port()


@declares
def gae(
    rollout: Port[Completion],
    score: Port[Reward],
    values: Port[Values],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    dialect: Dialect | None = None,
    name: str = "gae",
) -> Port[Returns]:
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16); its returns are advantage +
    value.

    A TokenReward is used as it is; a Reward counts at the last written token, with nothing after
    it. A reward on a hole of the mask goes to the written token before it. dialect: a hole is
    skipped (trl, verl, nemo_rl) or a step of discount with value 0 (openrlhf).
    """
    params = {"gamma": gamma, "lam": lam, "dialect": dialect}
    return Node(
        GAE, name, inputs={"rollout": rollout, "score": score, "values": values}, params=params
    ).port()


@declares
def returns(
    rollout: Port[Completion],
    score: Port[Reward],
    *,
    gamma: float = 1.0,
    dialect: Dialect | None = None,
    name: str = "returns",
) -> Port[Returns]:
    """Discounted sum of rewards from each token on: REINFORCE's advantage without a baseline.

    Rewards and holes as in `gae`; only with gamma < 1 does it matter whether a hole is a step.
    """
    params = {"gamma": gamma, "dialect": dialect}
    return Node(RETURNS, name, inputs={"rollout": rollout, "score": score}, params=params).port()


@declares
def whiten(
    advantage: Port[AnyAdvantage],
    rollout: Port[Completion],
    *,
    shift: bool = True,
    dialect: Dialect | None = None,
    name: str = "whiten",
) -> Port[AnyAdvantage]:
    """Zero mean (if shift) and unit variance over the written tokens of the Step.

    dialect: trl and verl divide by count - 1 and add 1e-8 to the variance; openrlhf and nemo_rl
    divide by count, and their variance is at least 1e-8. A mean over the Step: rows do not stream
    past it.
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
    dialect: Dialect | None = None,
    name: str = "kl_in_reward",
) -> Port[TokenReward]:
    """The reward minus beta times each token's KL estimate (k1, k2, k3:
    joschu.net/blog/kl-approx.html).

    dialect: trl clamps nothing; verl clamps k3's log ratio to [-20, 20] and k3 to [-10, 10];
    openrlhf clamps each of the three estimates to [-10, 10]; nemo_rl both, for all three. An
    answer's holes have no KL.
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
    dialect: Dialect | None = None,
    name: str = "overlong_penalty",
) -> Port[AnyReward]:
    """The reward minus factor times how far the answer reaches into the last `buffer` of
    max_tokens, which are those of the generation (DAPO, eq. 13).

    An answer's length is that of all its tokens, holes included. In a TokenReward the last token
    bears the penalty; the others do not change. dialect: an answer longer than max_tokens costs
    factor and no more (trl, openrlhf), or in proportion (verl, nemo_rl).
    """
    _require_buffer(max_tokens, buffer)
    params = {"max_tokens": max_tokens, "buffer": buffer, "factor": factor, "dialect": dialect}
    schemas = (score.schema,) if isinstance(score, Port) else None
    inputs = {"rollout": rollout, "score": score}
    return Node(OVERLONG_PENALTY, name, inputs=inputs, params=params, schemas=schemas).port()


def _require_buffer(max_tokens: object, buffer: object) -> None:
    """Raise GraphError for more tokens at the end than there are."""
    # What is no number is refused by its limit.
    if not (isinstance(max_tokens, int) and isinstance(buffer, int)):
        return
    if buffer > max_tokens >= 1:
        expected = f"at most max_tokens={max_tokens}, whose last tokens it counts"
        fix = f"buffer={max(1, max_tokens // 4)}"
        require("overlong_penalty", "buffer", buffer, fits=False, expected=expected, fix=fix)


@declares
def add(
    *scores: Port[Reward], weights: Sequence[float] | None = None, name: str = "add"
) -> Port[Reward]:
    """The weighted sum of rewards on the same rows; a TokenReward if one of them is.

    Then a plain Reward counts at the last token of its row.
    """
    require_weights("add", weights, len(scores), "score")
    params = {"weights": None if weights is None else tuple(weights)}
    schemas = [score.schema for score in scores if isinstance(score, Port)]
    schema = Reward
    if any(issubclass(each, TokenReward) for each in schemas):
        schema = TokenReward
    inputs = {f"score{i}": score for i, score in enumerate(scores)}
    return Node(ADD, name, inputs=inputs, params=params, schemas=(schema,)).port()
