"""Formulas of policy losses: the gradient of an advantage, with or without a ratio.

Owns: each formula, in tensor methods, with its source. Does not own: how a graph names it
(policy_losses.py), other losses (loss_formulas.py), reduction to a number (the train kernel), torch
itself, which only type checking imports here: graph files import this module.

A formula gets `Now` (the trained model's numbers for the tokens) and the columns of its ports, and
returns unreduced terms. At tokens with mask 0 nothing affects loss or gradient, whatever is there.

Where a term does not depend on the model (a clip holds it, its weight is 0), its gradient is 0,
even if the model's number is infinite: not 0 times infinity. At a kink the gradient is the one on
the side where the term still follows the model.
"""

from __future__ import annotations

from math import inf, log
from typing import TYPE_CHECKING

from dataflow.loss import Now, Tensors, Terms
from dataflow.schema import Advantage, Logprobs
from operators.advantage_dialects import KL_DIALECTS, MOST
from operators.importance import Importance
from operators.loss_dialects import RATIO_DIALECTS
from operators.masked_numbers import (
    absence_error,
    mask_column,
    masked_difference,
    require_behaviour,
    require_logprobs,
    require_sampler_logprobs,
    sum_and_count,
)

if TYPE_CHECKING:
    from torch import Tensor


Metrics = dict[str, tuple["Tensor", "Tensor | float"]]

AREAL = Importance(above=5.0, over="mask")
"""AReaL drops a token whose policy has moved too far from its sampler."""

FLAT = 100.0
"""Beyond it 1 - sigmoid(x) is 0 in float32."""


def clipped_policy(
    now: Now,
    advantage: Tensors[Advantage],
    old: Tensors[Logprobs] | None = None,
    reference: Tensors[Logprobs] | None = None,
    *,
    clip: float | tuple[float, float] = 0.2,
    level: str = "token",
    beta: float = 0.0,
    kl: str = "k3",
    dual_clip: float | None = None,
    correction: Importance | None = None,
    dialect: str = "trl",
) -> Terms:
    """w max(-A r, -A clip(r, 1 - low, 1 + high)) + beta * KL(now | reference), r = exp(now - old)
    (arXiv:1707.06347).

    The KL term is GRPO's (arXiv:2402.03300, equation 4); two clip ranges are DAPO's
    (arXiv:2503.14476). dual_clip c > 1 limits the loss for a negative advantage to -A c
    (arXiv:1912.09729, equation 5). level: `sequence` and `sequence_token` take the row's ratio, the
    exponential of the mean over its trained tokens (GSPO, arXiv:2507.18071, equations 5, 7 and 14).
    old=None: as recorded at sampling. w: `weigh_tokens`; 1 without a correction.
    """
    name = "clipped_policy_loss"
    before = _choose_before(now, old, correction, name)
    gain = mask_column(now, advantage["advantage"])
    log_ratio = _move_to_level(now, _log_ratio(now, before), level)
    log_ratio = _clamp_as_peer(log_ratio, dialect, of_row=level != "token")
    log_weight, metrics = weigh_tokens(now, before, correction, name)
    loss, clipped = _clip_objective(log_ratio, gain, clip, dual_clip, log_weight)
    metrics["policy/clip_fraction"] = sum_and_count(now, clipped)
    if reference is not None:
        kl_reference = estimate_kl(now, reference["logprobs"], kl, dialect)
        # A schedule may reach 0, and 0 times infinity is not 0.
        if beta:
            loss = loss + beta * kl_reference
        metrics["policy/kl_reference"] = sum_and_count(now, kl_reference)
    return Terms(loss, metrics)


def policy_gradient(
    now: Now,
    advantage: Tensors[Advantage],
    old: Tensors[Logprobs] | None = None,
    *,
    correction: Importance | None = None,
) -> Terms:
    """-w A log pi(token): REINFORCE (Williams 1992, doi 10.1007/BF00992696); w as in
    `weigh_tokens`.
    """
    name = "policy_gradient_loss"
    gain = mask_column(now, advantage["advantage"])
    logprobs = require_logprobs(now, name)
    if correction is None:
        return Terms(_push(logprobs, gain))
    before = _choose_before(now, old, correction, name)
    log_weight, metrics = weigh_tokens(now, before, correction, name)
    return Terms(_push(logprobs, _weigh(gain, log_weight)), metrics)


def decoupled_policy(
    now: Now,
    advantage: Tensors[Advantage],
    proximal: Tensors[Logprobs],
    *,
    clip: float | tuple[float, float] = 0.2,
    dual_clip: float | None = None,
    correction: Importance = AREAL,
    dialect: str = "trl",
) -> Terms:
    """w * max(-A u, -A clip(u)), u = exp(now - proximal), w = exp(proximal - behaviour) (AReaL,
    arXiv:2505.24298): `clipped_policy` from `proximal`, with its correction.
    """
    before = proximal["logprobs"]
    gain = mask_column(now, advantage["advantage"])
    log_weight, metrics = weigh_tokens(now, before, correction, "decoupled_policy_loss")
    log_ratio = _clamp_as_peer(_log_ratio(now, before), dialect)
    loss, clipped = _clip_objective(log_ratio, gain, clip, dual_clip, log_weight)
    return Terms(loss, metrics | {"policy/clip_fraction": sum_and_count(now, clipped)})


def clipped_weight(
    now: Now,
    advantage: Tensors[Advantage],
    old: Tensors[Logprobs] | None = None,
    *,
    cap: float | None = None,
    clip: float | tuple[float, float] | None = None,
    correction: Importance | None = None,
) -> Terms:
    """-w sg(r held within bounds) A log pi(token), r = exp(now - old): CISPO (arXiv:2506.13585,
    equations 4 and 5).

    sg: a constant, so that every token keeps its gradient. Bounds: at most `cap`, or 1 - low to 1 +
    high. old=None: as recorded at sampling.
    """
    name = "clipped_weight_loss"
    before = _choose_before(now, old, correction, name)
    ratio = _log_ratio(now, before).detach().exp()
    low, high = None, cap
    if clip is not None:
        low, high = _bounds(clip)
    held = ratio.clamp(low, high)
    log_weight, metrics = weigh_tokens(now, before, correction, name)
    is_held = held != ratio
    metrics["policy/clip_fraction"] = sum_and_count(now, is_held.to(ratio.dtype))
    gain = _weigh(mask_column(now, advantage["advantage"]) * held, log_weight)
    return Terms(_push(require_logprobs(now, name), gain), metrics)


def soft_clipped_policy(
    now: Now,
    advantage: Tensors[Advantage],
    old: Tensors[Logprobs] | None = None,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    correction: Importance | None = None,
    dialect: str = "trl",
) -> Terms:
    """-w A (4 / tau) sigmoid(tau (r - 1)), r = exp(now - old): SAPO (arXiv:2511.20347, equations 5
    and 6).

    tau is tau_pos where A > 0, else tau_neg. At r = 1 the gradient is that of -A log pi; it fades
    to both sides. old=None: as recorded at sampling.
    """
    name = "soft_clipped_policy_loss"
    gain = mask_column(now, advantage["advantage"])
    before = _choose_before(now, old, correction, name)
    log_weight, metrics = weigh_tokens(now, before, correction, name)
    tau = gain.new_full(gain.shape, tau_neg).masked_fill(gain > 0, tau_pos)
    gain = _weigh(gain, log_weight)
    log_ratio = _clamp_as_peer(_log_ratio(now, before), dialect)
    flat = tau * (log_ratio.detach().exp() - 1.0) > FLAT
    # A flat gate does not depend on the model, nor does a token without a gain.
    moving = log_ratio.masked_fill(flat | (gain == 0), 0.0)
    x = tau * (moving.exp() - 1.0)
    # 1 - sigmoid(-x) for x > 0, where sigmoid(x) has no digits left for its slope.
    gate = (1.0 - (-x).sigmoid()).where(x > 0, x.sigmoid())
    gate = gate.masked_fill(flat, 1.0)
    metrics["policy/gate_slope"] = sum_and_count(now, 4.0 * gate * (1.0 - gate))
    return Terms(-gain * (4.0 / tau) * gate, metrics)


def weigh_tokens(
    now: Now, before: Tensor, correction: Importance | None, name: str
) -> tuple[Tensor | None, Metrics]:
    """Compute the log of each token's constant weight, -inf for none, and metrics; None if all
    weigh 1.

    A weight is exp(before - behaviour) of the token, its product over the row's trained tokens or
    the geometric mean of these; beyond a bound that bound, or 0. Compared as numbers, kept as logs:
    the product of a weight and a ratio may be finite where one of them is not. behaviour: what the
    sampler really drew from (Now.behaviour).
    Sources: arXiv:2505.24298 (masked), fengyao.notion.site/off-policy-rl (truncated).
    """
    if correction is None:
        return None, {}
    log_weight = masked_difference(now, before, require_behaviour(now, name)).detach()
    if correction.level != "token":
        log_weight = _reduce_row(now, log_weight, average=correction.level == "geometric")
    weight = log_weight.exp()
    is_bounded = weight.isnan()
    for bound, is_beyond in ((correction.above, weight.gt), (correction.below, weight.lt)):
        if bound is not None:
            assert isinstance(bound, (int, float)), "train resolves schedules"
            outside = is_beyond(bound)
            log_bound = -inf if correction.over == "mask" else log(bound)
            log_weight = log_weight.masked_fill(outside, log_bound)
            is_bounded = is_bounded | outside
    metrics: Metrics = {
        "policy/importance_weight": sum_and_count(now, log_weight.exp()),
        "policy/importance_bounded": sum_and_count(now, is_bounded.to(weight.dtype)),
    }
    return log_weight, metrics


def _choose_before(
    now: Now, old: Tensors[Logprobs] | None, correction: Importance | None, name: str
) -> Tensor:
    """The log-probs that a ratio starts from: `old`, or what the sampler recorded."""
    if old is not None:
        return old["logprobs"]
    if correction is not None:
        fix = 'old=logprobs(policy, rows, name="old"), or correction=None'
        raise absence_error(name, "old=, which a correction compares with the sampler", fix)
    return require_sampler_logprobs(now, name)


def _log_ratio(now: Now, before: Tensor) -> Tensor:
    """The log of each token's ratio."""
    return masked_difference(now, require_logprobs(now, "a policy loss"), before)


def _clamp_as_peer(log_ratio: Tensor, dialect: str, *, of_row: bool = False) -> Tensor:
    """The log of the ratio within the bounds of its peer; beyond, a constant."""
    peer = RATIO_DIALECTS[dialect]
    low, high = -peer.token, peer.token
    if of_row:
        low, high = -inf, peer.row
    if high == inf:
        return log_ratio
    return log_ratio.clamp(low, high)


def _move_to_level(now: Now, log_ratio: Tensor, level: str) -> Tensor:
    """The log of the ratio by which a token is clipped. `sequence_token`: the row's as a number,
    the token's own as a gradient.
    """
    if level == "token":
        return log_ratio
    row = _reduce_row(now, log_ratio, average=True)
    if level == "sequence":
        return row
    # Infinity less infinity is nan.
    token = log_ratio.masked_fill(~log_ratio.isfinite(), 0.0)
    return row.detach() + (token - token.detach())


def _reduce_row(now: Now, tokens: Tensor, *, average: bool) -> Tensor:
    """[tokens]: the sum or mean over the trained tokens of the token's row, 0 where untrained."""
    total = now.row_sum(tokens)
    if average:
        total = total / now.row_sum(now.mask).clamp(min=1.0)
    return mask_column(now, total[now.row])


def _weigh(gain: Tensor, log_weight: Tensor | None) -> Tensor:
    """gain times the weight, 0 where the gain is, even if the weight is infinite."""
    if log_weight is None:
        return gain
    return gain * log_weight.exp().masked_fill(gain == 0, 0.0)


def _push(logprobs: Tensor, gain: Tensor) -> Tensor:
    """-gain * logprobs, 0 where the gain is, even if the model gives a token no probability."""
    return -gain * logprobs.masked_fill(gain == 0, 0.0)


def _bounds(clip: float | tuple[float, float]) -> tuple[float, float]:
    """Of a ratio; a single number is both below and above."""
    low, high = clip if isinstance(clip, tuple) else (clip, clip)
    return 1.0 - low, 1.0 + high


def _clip_objective(
    log_ratio: Tensor,
    gain: Tensor,
    clip: float | tuple[float, float],
    dual_clip: float | None = None,
    log_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The clipped objective by token, and 1.0 where the clip holds it.

    Which tokens are held is decided on constants. They get the held number, and a ratio of 1
    instead of their own: if that were infinite, the gradient would be 0 times infinity. A weight is
    added to the log of the ratio: their product may be finite where one of them is not.
    """
    ratio = log_ratio.detach().exp()
    held = -gain * ratio.clamp(*_bounds(clip))
    clipped = (held > -gain * ratio) & (gain != 0)
    idle = gain == 0
    constant = clipped
    if dual_clip is not None:
        most = -gain * dual_clip
        over = (gain < 0) & (held.maximum(-gain * ratio) > most)
        held = most.where(over, held)
        constant = constant | over
    if log_weight is not None:
        idle = idle | (log_weight == -inf)
        held = held * log_weight.exp()
        log_ratio = log_ratio + log_weight
    free = -gain * log_ratio.masked_fill(constant | idle, 0.0).exp()
    loss = held.where(constant, free).masked_fill(idle, 0.0)
    return loss, clipped.to(free.dtype)


def estimate_kl(now: Now, reference: Tensor, kl: str, dialect: str = "trl") -> Tensor:
    """Estimate each token's KL(now | reference): k1 d, k2 d^2 / 2, k3 exp(-d) - 1 + d, with
    d = now - reference (joschu.net/blog/kl-approx.html). Beyond what its peer clamps, a constant.
    """
    d = masked_difference(now, require_logprobs(now, "a policy loss"), reference)
    peer = KL_DIALECTS[dialect]
    if kl in peer.inside:
        d = d.clamp(-peer.ratio, peer.ratio)
    if kl not in peer.clamped:
        return _apply_estimator(d, kl)
    constant = _apply_estimator(d.detach(), kl)
    beyond = constant.abs() > MOST
    inside = _apply_estimator(d.masked_fill(beyond, 0.0), kl)
    return constant.clamp(-MOST, MOST).where(beyond, inside)


def _apply_estimator(d: Tensor, kl: str) -> Tensor:
    if kl == "k1":
        return d
    if kl == "k2":
        return 0.5 * d.square()
    # expm1, because exp(-d) - 1 loses all digits for small d, as at the start of every run.
    return (-d).expm1() + d
