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
    absent,
    behaviour_of,
    difference,
    logprobs_of,
    mean,
    recorded_of,
    trained,
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
    old=None: as recorded at sampling. w: `weights`; 1 without a correction.
    """
    name = "clipped_policy_loss"
    before, gain = _before(now, old, correction, name), trained(now, advantage["advantage"])
    ahead = _within(_at_level(now, _ahead(now, before), level), dialect, of_row=level != "token")
    log_weight, metrics = weights(now, before, correction, name)
    loss, clipped = _clipped(ahead, gain, clip, dual_clip, log_weight)
    metrics["policy/clip_fraction"] = mean(now, clipped)
    if reference is not None:
        apart = divergence(now, reference["logprobs"], kl, dialect)
        if beta:  # a schedule may reach 0, and 0 times infinity is not 0
            loss = loss + beta * apart
        metrics["policy/kl_reference"] = mean(now, apart)
    return Terms(loss, metrics)


def policy_gradient(
    now: Now,
    advantage: Tensors[Advantage],
    old: Tensors[Logprobs] | None = None,
    *,
    correction: Importance | None = None,
) -> Terms:
    """-w A log pi(token): REINFORCE (Williams 1992, doi 10.1007/BF00992696); w as in `weights`."""
    name, gain = "policy_gradient_loss", trained(now, advantage["advantage"])
    said = logprobs_of(now, name)
    if correction is None:
        return Terms(_pushed(said, gain))
    log_weight, metrics = weights(now, _before(now, old, correction, name), correction, name)
    return Terms(_pushed(said, _weighed(gain, log_weight)), metrics)


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
    near, gain = proximal["logprobs"], trained(now, advantage["advantage"])
    log_weight, metrics = weights(now, near, correction, "decoupled_policy_loss")
    ahead = _within(_ahead(now, near), dialect)
    loss, clipped = _clipped(ahead, gain, clip, dual_clip, log_weight)
    return Terms(loss, metrics | {"policy/clip_fraction": mean(now, clipped)})


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
    before = _before(now, old, correction, name)
    ratio = _ahead(now, before).detach().exp()
    low, high = (None, cap) if clip is None else _bounds(clip)
    held = ratio.clamp(low, high)
    log_weight, metrics = weights(now, before, correction, name)
    metrics["policy/clip_fraction"] = mean(now, (held != ratio).to(ratio.dtype))
    gain = _weighed(trained(now, advantage["advantage"]) * held, log_weight)
    return Terms(_pushed(logprobs_of(now, name), gain), metrics)


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
    name, gain = "soft_clipped_policy_loss", trained(now, advantage["advantage"])
    before = _before(now, old, correction, name)
    log_weight, metrics = weights(now, before, correction, name)
    tau = gain.new_full(gain.shape, tau_neg).masked_fill(gain > 0, tau_pos)
    gain, ahead = _weighed(gain, log_weight), _within(_ahead(now, before), dialect)
    flat = tau * (ahead.detach().exp() - 1.0) > FLAT
    x = tau * (ahead.masked_fill(flat | (gain == 0), 0.0).exp() - 1.0)
    # 1 - sigmoid(-x) for x > 0, where sigmoid(x) has no digits left for its slope.
    gate = (1.0 - (-x).sigmoid()).where(x > 0, x.sigmoid()).masked_fill(flat, 1.0)
    metrics["policy/gate_slope"] = mean(now, 4.0 * gate * (1.0 - gate))
    return Terms(-gain * (4.0 / tau) * gate, metrics)


def weights(
    now: Now, before: Tensor, correction: Importance | None, name: str
) -> tuple[Tensor | None, Metrics]:
    """The log of each token's constant weight, -inf for none, and metrics; None if all weigh 1.

    exp(before - behaviour) of the token, its product over the row's trained tokens or the geometric
    mean of these; beyond a bound that bound, or 0. Compared as numbers, kept as logs: the product
    of a weight and a ratio may be finite where one of them is not. behaviour: what the sampler
    really drew from (Now.behaviour). Sources: arXiv:2505.24298 (masked), fengyao.notion.site/
    off-policy-rl (truncated).
    """
    if correction is None:
        return None, {}
    log_weight = difference(now, before, behaviour_of(now, name)).detach()
    if correction.level != "token":
        log_weight = _of_row(now, log_weight, average=correction.level == "geometric")
    weight, masks = log_weight.exp(), correction.over == "mask"
    outside = weight != weight
    for bound, beyond in ((correction.above, weight.gt), (correction.below, weight.lt)):
        if bound is not None:
            assert isinstance(bound, (int, float)), "train resolves schedules"
            out = beyond(bound)
            log_weight = log_weight.masked_fill(out, -inf if masks else log(bound))
            outside = outside | out
    metrics: Metrics = {
        "policy/importance_weight": mean(now, log_weight.exp()),
        "policy/importance_bounded": mean(now, outside.to(weight.dtype)),
    }
    return log_weight, metrics


def _before(
    now: Now, old: Tensors[Logprobs] | None, correction: Importance | None, name: str
) -> Tensor:
    """The log-probs that a ratio starts from: `old`, or what the sampler recorded."""
    if old is not None:
        return old["logprobs"]
    if correction is not None:
        fix = 'old=logprobs(policy, rows, name="old"), or correction=None'
        raise absent(name, "old=, which a correction compares with the sampler", fix)
    return recorded_of(now, name)


def _ahead(now: Now, before: Tensor) -> Tensor:
    """The log of each token's ratio."""
    return difference(now, logprobs_of(now, "a policy loss"), before)


def _within(ahead: Tensor, dialect: str, *, of_row: bool = False) -> Tensor:
    """The log of the ratio where its peer clamps it; beyond, a constant."""
    how = RATIO_DIALECTS[dialect]
    low, high = (-inf, how.row) if of_row else (-how.token, how.token)
    return ahead if high == inf else ahead.clamp(low, high)


def _at_level(now: Now, ahead: Tensor, level: str) -> Tensor:
    """The log of the ratio by which a token is clipped. `sequence_token`: the row's as a number,
    the token's own as a gradient.
    """
    if level == "token":
        return ahead
    row = _of_row(now, ahead, average=True)
    if level == "sequence":
        return row
    own = ahead.masked_fill(~ahead.isfinite(), 0.0)
    return row.detach() + (own - own.detach())


def _of_row(now: Now, tokens: Tensor, *, average: bool) -> Tensor:
    """[tokens]: the sum or mean over the trained tokens of the token's row, 0 where untrained."""
    total = now.row_sum(tokens)
    if average:
        total = total / now.row_sum(now.mask).clamp(min=1.0)
    return trained(now, total[now.row])


def _weighed(gain: Tensor, log_weight: Tensor | None) -> Tensor:
    """gain times the weight, 0 where the gain is, even if the weight is infinite."""
    return gain if log_weight is None else gain * log_weight.exp().masked_fill(gain == 0, 0.0)


def _pushed(said: Tensor, gain: Tensor) -> Tensor:
    """-gain * said, 0 where the gain is, even if the model gives a token no probability."""
    return -gain * said.masked_fill(gain == 0, 0.0)


def _bounds(clip: float | tuple[float, float]) -> tuple[float, float]:
    low, high = clip if isinstance(clip, tuple) else (clip, clip)
    return 1.0 - low, 1.0 + high


def _clipped(
    ahead: Tensor,
    gain: Tensor,
    clip: float | tuple[float, float],
    dual_clip: float | None = None,
    log_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The clipped objective by token, and 1.0 where the clip holds it. ahead: log of the ratio.

    Which tokens are held is decided on constants. They get the held number, and a ratio of 1
    instead of their own: if that were infinite, the gradient would be 0 times infinity. A weight is
    added to the log of the ratio: their product may be finite where one of them is not.
    """
    ratio = ahead.detach().exp()
    held = -gain * ratio.clamp(*_bounds(clip))
    clipped = (held > -gain * ratio) & (gain != 0)
    idle = gain == 0
    constant = clipped
    if dual_clip is not None:
        most = -gain * dual_clip
        over = (gain < 0) & (held.maximum(-gain * ratio) > most)
        held, constant = most.where(over, held), constant | over
    if log_weight is not None:
        idle = idle | (log_weight == -inf)
        held, ahead = held * log_weight.exp(), ahead + log_weight
    free = -gain * ahead.masked_fill(constant | idle, 0.0).exp()
    return held.where(constant, free).masked_fill(idle, 0.0), clipped.to(free.dtype)


def divergence(now: Now, reference: Tensor, kl: str, dialect: str = "trl") -> Tensor:
    """Each token's estimate of KL(now | reference): k1 d, k2 d^2 / 2, k3 exp(-d) - 1 + d, with
    d = now - reference (joschu.net/blog/kl-approx.html). Beyond what its peer clamps, a constant.
    """
    d, how = difference(now, logprobs_of(now, "a policy loss"), reference), KL_DIALECTS[dialect]
    d = d.clamp(-how.ratio, how.ratio) if kl in how.inside else d
    if kl not in how.clamped:
        return _estimate(d, kl)
    found = _estimate(d.detach(), kl)
    beyond = found.abs() > MOST
    return found.clamp(-MOST, MOST).where(beyond, _estimate(d.masked_fill(beyond, 0.0), kl))


def _estimate(d: Tensor, kl: str) -> Tensor:
    if kl == "k1":
        return d
    # expm1, because exp(-d) - 1 loses all digits for small d, as at the start of every run.
    return 0.5 * d.square() if kl == "k2" else (-d).expm1() + d
