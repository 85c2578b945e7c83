"""Formulas of policy losses: the gradient of an advantage, with or without a ratio.

Owns: each formula, in tensor methods, with its source. Does not own: how a graph names it
(losses.py), other losses (loss_formulas.py), reduction to a number (the train kernel), torch
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
from operators.masked import behaviour_of, difference, logprobs_of, mean, recorded_of, trained

if TYPE_CHECKING:
    from torch import Tensor


def clipped_policy(
    now: Now,
    advantage: Tensors[Advantage],
    old: Tensors[Logprobs] | None = None,
    reference: Tensors[Logprobs] | None = None,
    *,
    clip: float | tuple[float, float] = 0.2,
    beta: float = 0.0,
    kl: str = "k3",
    dual_clip: float | None = None,
) -> Terms:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) + beta * KL(now | reference), r = exp(now - old)
    (arXiv:1707.06347).

    The KL term is GRPO's (arXiv:2402.03300, equation 4); two clip ranges are DAPO's
    (arXiv:2503.14476). dual_clip c > 1 limits the loss for a negative advantage to -A c
    (arXiv:1912.09729, equation 5). old=None: as recorded at sampling.
    """
    before = recorded_of(now, "clipped_policy_loss") if old is None else old["logprobs"]
    gain = trained(now, advantage["advantage"])
    loss, clipped = _clipped(
        difference(now, logprobs_of(now, "a policy loss"), before), gain, clip, dual_clip
    )
    metrics: dict[str, tuple[Tensor, Tensor | float]] = {"policy/clip_fraction": mean(now, clipped)}
    if reference is not None:
        apart = divergence(now, reference["logprobs"], kl)
        if beta:  # a schedule may reach 0, and 0 times infinity is not 0
            loss = loss + beta * apart
        metrics["policy/kl_reference"] = mean(now, apart)
    return Terms(loss, metrics)


def policy_gradient(now: Now, advantage: Tensors[Advantage]) -> Terms:
    """-A log pi(token): REINFORCE (Williams 1992, doi 10.1007/BF00992696)."""
    return Terms(-trained(now, advantage["advantage"]) * logprobs_of(now, "policy_gradient_loss"))


def decoupled_policy(
    now: Now,
    advantage: Tensors[Advantage],
    proximal: Tensors[Logprobs],
    *,
    clip: float | tuple[float, float] = 0.2,
    cap: float | None = 5.0,
    over_cap: str = "drop",
) -> Terms:
    """w * max(-A u, -A clip(u)), u = exp(now - proximal), w = exp(proximal - behaviour) (AReaL,
    arXiv:2505.24298).

    behaviour is what the sampler really drew from: if top-k or top-p truncate, the recorded
    log-probs minus the log of the kept mass (Now.behaviour). w is a constant. A token with w above
    `cap` counts nothing (over_cap="drop") or counts as `cap` ("truncate"); the denominator includes
    it in both cases.
    """
    near = proximal["logprobs"]
    log_weight = difference(now, near, behaviour_of(now, "decoupled_policy_loss")).detach()
    weight = log_weight.exp()
    metrics = {"policy/behaviour_weight": mean(now, weight)}
    if cap is not None:
        over = weight > cap
        metrics["policy/cap_fraction"] = mean(now, over.to(weight.dtype))
        log_weight = log_weight.masked_fill(over, -inf if over_cap == "drop" else log(cap))
    ahead = difference(now, logprobs_of(now, "a policy loss"), near)
    loss, clipped = _clipped(
        ahead, trained(now, advantage["advantage"]), clip, log_weight=log_weight
    )
    return Terms(loss, metrics | {"policy/clip_fraction": mean(now, clipped)})


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
    low, high = clip if isinstance(clip, tuple) else (clip, clip)
    ratio = ahead.detach().exp()
    held = -gain * ratio.clamp(1.0 - low, 1.0 + high)
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


def divergence(now: Now, reference: Tensor, kl: str) -> Tensor:
    d = difference(now, logprobs_of(now, "a policy loss"), reference)
    if kl == "k1":
        return d
    # expm1, because exp(-d) - 1 loses all digits for small d, as at the start of every run.
    return 0.5 * d.square() if kl == "k2" else (-d).expm1() + d
