"""Losses of an advantage: the functions with which a graph names them, and their declarations.

Owns: parameters, their limits, what a loss reads. Does not own: the formulas (policy_formulas.py),
what peers do differently (loss_dialects.py), other losses, and the place from which users import
all (losses.py), reduction to a number (the train kernel). A `dialect` of None is the graph's.
"""

from __future__ import annotations

from typing import Literal

from dataflow.calls import call_error
from dataflow.convention import DIALECT_LIMIT, Dialect
from dataflow.limits import choice, instance, number
from dataflow.loss import Loss, loss_function, make_loss
from dataflow.model import Number
from dataflow.node import Port
from dataflow.operator import declares
from dataflow.schema import Advantage, Completion, Logprobs
from operators import loss_dialects as dialects
from operators import policy_formulas as policy
from operators.importance import Importance

Clip = Number | tuple[Number, Number]

"""How far a ratio may be from 1: one number, or one below and one above (DAPO's clip-higher)."""

Estimator = Literal["k1", "k2", "k3"]

_CLIP = number(0.0, above=True, pair=True, like=0.2)

_DUAL = number(1.0, above=True, optional=True, like=3.0)

KIND = choice("k1", "k2", "k3")

_CORRECTION = instance(Importance, like=Importance(), optional=True)

CLIPPED_POLICY = loss_function(
    policy.clipped_policy,
    path="operators.policy_losses:CLIPPED_POLICY",
    name="clipped_policy_loss",
    recorded=True,
    correction="correction",
    zero={"reference": "beta"},
    limits={
        "clip": _CLIP,
        "level": choice("token", "sequence", "sequence_token"),
        "beta": number(0.0, like=0.04),
        "kl": KIND,
        "dual_clip": _DUAL,
        "correction": _CORRECTION,
        "dialect": DIALECT_LIMIT,
    },
    conventions=dialects.CLIPPED_CONVENTIONS,
)

POLICY_GRADIENT = loss_function(
    policy.policy_gradient,
    path="operators.policy_losses:POLICY_GRADIENT",
    name="policy_gradient_loss",
    on_policy=True,
    correction="correction",
    limits={"correction": _CORRECTION},
)

DECOUPLED_POLICY = loss_function(
    policy.decoupled_policy,
    path="operators.policy_losses:DECOUPLED_POLICY",
    name="decoupled_policy_loss",
    correction="correction",
    limits={
        "clip": _CLIP,
        "dual_clip": _DUAL,
        "correction": instance(Importance, like=policy.AREAL),
        "dialect": DIALECT_LIMIT,
    },
    conventions=dialects.DECOUPLED_CONVENTIONS,
)

CLIPPED_WEIGHT = loss_function(
    policy.clipped_weight,
    path="operators.policy_losses:CLIPPED_WEIGHT",
    name="clipped_weight_loss",
    recorded=True,
    correction="correction",
    limits={
        "cap": number(1.0, optional=True, like=5.0),
        "clip": number(0.0, above=True, pair=True, optional=True, like=(1.0, 4.0)),
        "correction": _CORRECTION,
    },
)

SOFT_CLIPPED_POLICY = loss_function(
    policy.soft_clipped_policy,
    path="operators.policy_losses:SOFT_CLIPPED_POLICY",
    name="soft_clipped_policy_loss",
    recorded=True,
    correction="correction",
    limits={
        "tau_pos": number(0.0, above=True, like=1.0),
        "tau_neg": number(0.0, above=True, like=1.05),
        "correction": _CORRECTION,
        "dialect": DIALECT_LIMIT,
    },
    conventions=dialects.SOFT_CLIPPED_CONVENTIONS,
)


@declares
def clipped_policy_loss(
    advantage: Port[Advantage],
    *,
    old: Port[Logprobs] | None = None,
    reference: Port[Logprobs] | None = None,
    clip: Clip = 0.2,
    level: Literal["token", "sequence", "sequence_token"] = "token",
    beta: Number = 0.0,
    kl: Estimator = "k3",
    dual_clip: float | None = None,
    correction: Importance | None = None,
    dialect: Dialect | None = None,
    rows: Port[Completion] | None = None,
) -> Loss:
    """PPO's clipped objective, as GRPO, DAPO and GSPO use it: max(-A r, -A clip(r)), r = now / old.

    old: None is the sampler's recorded log-probs; logprobs(policy, rollout, name="old") recomputes
    them. clip: 0.2, or (0.2, 0.28) below and above 1 (DAPO's clip-higher). level: what r is of.
    `token`; `sequence`, one r for a row, the geometric mean over its trained tokens (GSPO, with
    clip=(3e-4, 4e-4)); `sequence_token`, that number with each token's own gradient (GSPO-token,
    for advantages that differ within a row). GSPO's paper averages over rows:
    train(aggregate="sequence_mean"); `token_mean` weighs rows by their length, as verl does.
    dual_clip c: no loss above -A c where A < 0 (TRL's delta). beta: weight of the divergence from
    `reference`, of tokens at every level. kl: its estimator; see kl_loss. correction: weights of
    tokens; see importance. dialect: where the log of r and the estimator are clamped (a constant
    beyond): trl neither; verl that of a token within 20, of a row at 10, k3 within 10 and its log
    ratio within 20; openrlhf that of a token within 20, estimators within 10; nemo_rl estimators
    within 10, log ratios in them within 20. Formula: policy_formulas.py.
    """
    name = "clipped_policy_loss"
    if reference is None and beta != 0.0:
        fix = 'reference=logprobs(Model("reference", base), rollout), or beta=0.0'
        raise call_error(name, f"beta={beta} needs reference=, none given", fix)
    _require_old(name, old, correction)
    ports = {"advantage": advantage, "old": old, "reference": reference}
    params = {
        "clip": clip,
        "level": level,
        "beta": beta,
        "kl": kl,
        "dual_clip": dual_clip,
        "correction": correction,
        "dialect": dialect,
    }
    return make_loss(CLIPPED_POLICY, ports, params, rows=rows)


@declares
def policy_gradient_loss(
    advantage: Port[Advantage],
    *,
    old: Port[Logprobs] | None = None,
    correction: Importance | None = None,
    rows: Port[Completion] | None = None,
) -> Loss:
    """REINFORCE: -A log pi; for rows made by the same policy that is trained.

    correction: weights of tokens by old / sampler, where sampler and trainer differ, or rows are
    stale; it alone reads `old`. See importance.
    """
    name = "policy_gradient_loss"
    _require_old(name, old, correction)
    if old is not None and correction is None:
        problem = "old= is read by a correction, none given"
        raise call_error(name, problem, f"correction={Importance()}, or leave old= out")
    ports = {"advantage": advantage, "old": old}
    return make_loss(POLICY_GRADIENT, ports, {"correction": correction}, rows=rows)


@declares
def decoupled_policy_loss(
    advantage: Port[Advantage],
    *,
    proximal: Port[Logprobs],
    clip: Clip = 0.2,
    dual_clip: float | None = None,
    correction: Importance = policy.AREAL,
    dialect: Dialect | None = None,
    rows: Port[Completion] | None = None,
) -> Loss:
    """AReaL's objective for stale rows, clipped around `proximal`, the policy before the Step, and
    weighted by proximal / sampler. By default tokens of a weight above 5 are dropped. dialect: as
    in clipped_policy_loss.
    """
    params = {"clip": clip, "dual_clip": dual_clip, "correction": correction, "dialect": dialect}
    return make_loss(
        DECOUPLED_POLICY, {"advantage": advantage, "proximal": proximal}, params, rows=rows
    )


@declares
def clipped_weight_loss(
    advantage: Port[Advantage],
    *,
    old: Port[Logprobs] | None = None,
    cap: Number | None = None,
    clip: Clip | None = None,
    correction: Importance | None = None,
    rows: Port[Completion] | None = None,
) -> Loss:
    """CISPO (MiniMax-M1): -sg(r held within bounds) A log pi; clips a weight, not the gradient.

    Bounds are one of two: cap, the largest r itself (5.0 if neither is given; ScaleRL, and TRL's
    epsilon_high), without a smallest; or clip, how far r may be from 1, as the paper and verl have
    it: (1.0, 4.0) is from 0 to 5. old, correction: as in clipped_policy_loss. The paper's
    denominator is aggregate="token_mean".
    """
    name = "clipped_weight_loss"
    if cap is not None and clip is not None:
        problem = f"expected cap= or clip=, found cap={cap} and clip={clip}"
        raise call_error(name, problem, f"cap={cap}")
    _require_old(name, old, correction)
    if cap is None and clip is None:
        cap = 5.0
    ports = {"advantage": advantage, "old": old}
    params = {"cap": cap, "clip": clip, "correction": correction}
    return make_loss(CLIPPED_WEIGHT, ports, params, rows=rows)


@declares
def soft_clipped_policy_loss(
    advantage: Port[Advantage],
    *,
    old: Port[Logprobs] | None = None,
    tau_pos: Number = 1.0,
    tau_neg: Number = 1.05,
    correction: Importance | None = None,
    dialect: Dialect | None = None,
    rows: Port[Completion] | None = None,
) -> Loss:
    """SAPO (soft adaptive policy optimization): -A (4 / tau) sigmoid(tau (r - 1)), a gate that
    closes smoothly where clipped_policy_loss cuts.

    tau_pos, tau_neg: how fast it closes where A > 0, and elsewhere. old, correction: as in
    clipped_policy_loss. The paper's denominators are aggregate="sequence_mean". dialect: the
    log of a token's ratio as in clipped_policy_loss.
    """
    _require_old("soft_clipped_policy_loss", old, correction)
    params = {"tau_pos": tau_pos, "tau_neg": tau_neg, "correction": correction, "dialect": dialect}
    return make_loss(SOFT_CLIPPED_POLICY, {"advantage": advantage, "old": old}, params, rows=rows)


def _require_old(name: str, old: object, correction: object) -> None:
    """Raise GraphError for a correction without the trainer's own log-probs."""
    if correction is not None and old is None:
        problem = (
            f"correction={correction!r:.60} needs old=, none given: without it a ratio starts from"
            " the sampler's own log-probs, and nothing is left to correct"
        )
        raise call_error(name, problem, 'old=logprobs(policy, rollout, name="old")')
