"""Losses: the formulas, and the functions with which a graph names them.

Owns: each formula, in tensor methods, with its source. Does not own: reduction to a number (the
train kernel), torch itself, which only type checking imports here: graph files import this module.

A formula gets `Now` (the trained model's numbers for the tokens) and the columns of its ports, and
returns unreduced terms. At tokens with mask 0 nothing affects loss or gradient, whatever is there.

Where a term does not depend on the model (a clip holds it, its weight is 0), its gradient is 0,
even if the model's number is infinite: not 0 times infinity. At a kink the gradient is the one on
the side where the term still follows the model.
"""

from __future__ import annotations

from math import inf, log
from typing import TYPE_CHECKING, Literal

from dataflow.errors import Fault, GraphError
from dataflow.limits import choice, number
from dataflow.loss import Loss, Now, Tensors, Terms, loss_function, make_loss
from dataflow.model import Number
from dataflow.node import Port
from dataflow.operator import call_site, declares
from dataflow.schema import Advantage, Logprobs, Preference, Returns, Reward, Values

if TYPE_CHECKING:
    from torch import Tensor

Clip = Number | tuple[Number, Number]
"""How far a ratio may be from 1: one number, or one below and one above (DAPO's clip-higher)."""

Estimator = Literal["k1", "k2", "k3"]


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
    before = _recorded(now, "clipped_policy_loss") if old is None else old["logprobs"]
    gain = _trained(now, advantage["advantage"])
    loss, clipped = _clipped(
        _difference(now, _logprobs(now, "a policy loss"), before), gain, clip, dual_clip
    )
    metrics: dict[str, tuple[Tensor, Tensor | float]] = {
        "policy/clip_fraction": _mean(now, clipped)
    }
    if reference is not None:
        divergence = _divergence(now, reference["logprobs"], kl)
        if beta:  # a schedule may reach 0, and 0 times infinity is not 0
            loss = loss + beta * divergence
        metrics["policy/kl_reference"] = _mean(now, divergence)
    return Terms(loss, metrics)


def policy_gradient(now: Now, advantage: Tensors[Advantage]) -> Terms:
    """-A log pi(token): REINFORCE (Williams 1992, doi 10.1007/BF00992696)."""
    return Terms(-_trained(now, advantage["advantage"]) * _logprobs(now, "policy_gradient_loss"))


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
    log_weight = _difference(now, near, _behaviour(now, "decoupled_policy_loss")).detach()
    weight = log_weight.exp()
    metrics = {"policy/behaviour_weight": _mean(now, weight)}
    if cap is not None:
        over = weight > cap
        metrics["policy/cap_fraction"] = _mean(now, over.to(weight.dtype))
        log_weight = log_weight.masked_fill(over, -inf if over_cap == "drop" else log(cap))
    ahead = _difference(now, _logprobs(now, "a policy loss"), near)
    loss, clipped = _clipped(
        ahead, _trained(now, advantage["advantage"]), clip, log_weight=log_weight
    )
    return Terms(loss, metrics | {"policy/clip_fraction": _mean(now, clipped)})


def entropy(now: Now) -> Terms:
    """-H(next token), over the whole vocabulary: a small weight of it keeps a policy exploring."""
    if now.entropy is None:
        raise _absent("entropy_loss", "the entropy of the next token", "a Model with head='lm'")
    return Terms(-now.entropy, {"policy/entropy": _mean(now, now.entropy.detach())})


def supervised(now: Now) -> Terms:
    """-log pi(token): cross-entropy on the rows' own tokens."""
    return Terms(-_logprobs(now, "supervised_loss"))


def value(
    now: Now,
    returns: Tensors[Returns],
    old: Tensors[Values] | None = None,
    *,
    clip: float | None = None,
) -> Terms:
    """(v - R)^2 / 2; with clip the larger of that and the same for v held within `clip` of old
    (OpenAI baselines).
    """
    if now.values is None:
        raise _absent("value_loss", "values", 'Model(..., head="scalar")')
    goal = _trained(now, returns["returns"])
    error = (now.values - goal).square()
    metrics = {"value/squared_error": _mean(now, error.detach())}
    if old is not None and clip is not None:
        before = _trained(now, old["values"])
        # Clamped by bounds, not as before + difference: inside them it is v itself, to the bit.
        held = now.values.clamp(before - clip, before + clip)
        other = (held - goal).square()
        metrics["value/clip_fraction"] = _mean(now, (other > error).to(error.dtype))
        error = error.maximum(other)
    return Terms(0.5 * error, metrics)


def dpo(
    now: Now, pairs: Tensors[Preference], reference: Tensors[Logprobs], *, beta: float = 0.1
) -> Terms:
    """-log sigmoid(beta * (margin of the chosen row - margin of the rejected one)) for each group
    of two rows (arXiv:2305.18290).

    A row's margin is log pi(row) - log pi_reference(row), summed over its tokens.
    """
    margin = now.row_sum(_difference(now, _logprobs(now, "dpo_loss"), reference["logprobs"]))
    logit = beta * now.group_sum(margin * pairs["sign"])
    # log(exp(-x) + 1) = -log sigmoid(x), smooth at 0.
    loss = (-logit).logaddexp(logit.new_zeros(()))
    right = (logit.detach() > 0).to(loss.dtype)
    return Terms(
        loss,
        {
            "dpo/accuracy": (right.sum(), now.groups),
            "dpo/margin": (logit.detach().sum(), now.groups),
        },
    )


def trajectory_balance(
    now: Now, score: Tensors[Reward], reference: Tensors[Logprobs], *, beta: float
) -> Terms:
    """Mean over a group of (log Z + log pi - log pi_ref - r / beta)^2 (TBA, arXiv:2503.18929).

    Z is estimated from the group: log Z = mean(log pi_ref - log pi + r / beta), held constant.
    Valid for rows from any sampler with full support.
    """
    gap = now.row_sum(
        _difference(now, _logprobs(now, "trajectory_balance_loss"), reference["logprobs"])
    )
    gap = gap - score["reward"] / beta
    size = now.group_sum(gap.detach().new_ones(now.rows))
    partition = -(now.group_sum(gap.detach()) / size)
    loss = now.group_sum((partition[now.row_group] + gap).square()) / size
    return Terms(loss, {"policy/log_partition": (partition.sum(), now.groups)})


_CLIP = number(0.0, above=True, pair=True, like=0.2)

CLIPPED_POLICY = loss_function(
    clipped_policy,
    name="clipped_policy_loss",
    recorded=True,
    zero={"reference": "beta"},
    limits={
        "clip": _CLIP,
        "beta": number(0.0, like=0.04),
        "kl": choice("k1", "k2", "k3"),
        "dual_clip": number(1.0, above=True, optional=True, like=3.0),
    },
)
POLICY_GRADIENT = loss_function(policy_gradient, name="policy_gradient_loss", on_policy=True)
DECOUPLED_POLICY = loss_function(
    decoupled_policy,
    name="decoupled_policy_loss",
    recorded=True,
    limits={
        "clip": _CLIP,
        "cap": number(0.0, above=True, optional=True, like=5.0),
        "over_cap": choice("drop", "truncate"),
    },
)
ENTROPY = loss_function(entropy, name="entropy_loss", entropy=True)
SUPERVISED = loss_function(supervised, name="supervised_loss", supervised=True)
VALUE = loss_function(
    value,
    name="value_loss",
    head="scalar",
    limits={"clip": number(0.0, above=True, optional=True, like=0.2)},
)
DPO = loss_function(
    dpo, name="dpo_loss", scope="group", limits={"beta": number(0.0, above=True, like=0.1)}
)
TRAJECTORY_BALANCE = loss_function(
    trajectory_balance,
    name="trajectory_balance_loss",
    scope="group",
    limits={"beta": number(0.0, above=True, like=0.01)},
)


@declares
def clipped_policy_loss(
    advantage: Port[Advantage],
    *,
    old: Port[Logprobs] | None = None,
    reference: Port[Logprobs] | None = None,
    clip: Clip = 0.2,
    beta: Number = 0.0,
    kl: Estimator = "k3",
    dual_clip: float | None = None,
) -> Loss:
    """PPO's clipped objective, as GRPO and DAPO use it; see `clipped_policy` for the formula.

    old: None is the sampler's recorded log-probs; logprobs(policy, rollout, name="old") recomputes
    them. clip: 0.2, or (0.2, 0.28) below and above. beta: weight of the divergence from
    `reference`. kl: its estimator (joschu.net/blog/kl-approx.html): k1 d, k2 d^2 / 2, k3 exp(-d) -
    1 + d, with d = now - reference.
    """
    if reference is None and beta != 0.0:
        fix = 'reference=logprobs(Model("reference", base), rollout), or beta=0.0'
        raise _refused("clipped_policy_loss", f"beta={beta} needs reference=, none given", fix)
    params = {"clip": clip, "beta": beta, "kl": kl, "dual_clip": dual_clip}
    return make_loss(
        CLIPPED_POLICY, {"advantage": advantage, "old": old, "reference": reference}, params
    )


@declares
def policy_gradient_loss(advantage: Port[Advantage]) -> Loss:
    """REINFORCE: -A log pi; for rows made by the same policy that is trained."""
    return make_loss(POLICY_GRADIENT, {"advantage": advantage}, {})


@declares
def decoupled_policy_loss(
    advantage: Port[Advantage],
    *,
    proximal: Port[Logprobs],
    clip: Clip = 0.2,
    cap: Number | None = 5.0,
    over_cap: Literal["drop", "truncate"] = "drop",
) -> Loss:
    """AReaL's objective for stale rows, clipped around `proximal`, the policy before the Step."""
    params = {"clip": clip, "cap": cap, "over_cap": over_cap}
    return make_loss(DECOUPLED_POLICY, {"advantage": advantage, "proximal": proximal}, params)


@declares
def entropy_loss() -> Loss:
    """The negative entropy: `a + 0.01 * entropy_loss()` rewards a policy for staying uncertain."""
    return make_loss(ENTROPY, {}, {})


@declares
def supervised_loss() -> Loss:
    """Cross-entropy on the rows' tokens with mask 1."""
    return make_loss(SUPERVISED, {}, {})


@declares
def value_loss(
    returns: Port[Returns], *, old: Port[Values] | None = None, clip: Number | None = None
) -> Loss:
    """Squared error of a critic (a Model with head="scalar"); clip keeps it near `old`, its values
    before the Step.
    """
    if clip is not None and old is None:
        raise _refused(
            "value_loss",
            f"clip={clip} needs old=, none given",
            "old=values(critic, rollout), or clip=None",
        )
    return make_loss(VALUE, {"returns": returns, "old": old}, {"clip": clip})


@declares
def dpo_loss(pairs: Port[Preference], *, reference: Port[Logprobs], beta: Number = 0.1) -> Loss:
    """Direct preference optimisation; each group is one pair, made by pair() and select()."""
    return make_loss(DPO, {"pairs": pairs, "reference": reference}, {"beta": beta})


@declares
def trajectory_balance_loss(
    score: Port[Reward], *, reference: Port[Logprobs], beta: Number
) -> Loss:
    """Trajectory balance; estimates the partition function per group, takes rows of any age."""
    return make_loss(TRAJECTORY_BALANCE, {"score": score, "reference": reference}, {"beta": beta})


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


def _divergence(now: Now, reference: Tensor, kl: str) -> Tensor:
    d = _difference(now, _logprobs(now, "a policy loss"), reference)
    if kl == "k1":
        return d
    # expm1, because exp(-d) - 1 loses all digits for small d, as at the start of every run.
    return 0.5 * d.square() if kl == "k2" else (-d).expm1() + d


def _difference(now: Now, a: Tensor, b: Tensor) -> Tensor:
    """a - b where the mask is 1, else 0, so that no infinity of another's token spreads."""
    return (a - b).masked_fill(now.mask == 0, 0.0)


def _trained(now: Now, column: Tensor) -> Tensor:
    """A port's column where the mask is 1, else 0."""
    return column.masked_fill(now.mask == 0, 0.0)


def _mean(now: Now, tokens: Tensor) -> tuple[Tensor, Tensor | float]:
    """A metric's (sum, count) over the trained tokens."""
    return (tokens.detach().masked_fill(now.mask == 0, 0.0).sum(), now.mask.sum())


def _logprobs(now: Now, name: str) -> Tensor:
    if now.logprobs is None:
        raise _absent(name, "log-probs", 'Model(..., head="lm")')
    return now.logprobs


def _recorded(now: Now, name: str) -> Tensor:
    if now.sampler_logprobs is None:
        fix = 'rows that are a Rollout, or old=logprobs(policy, rows, name="old")'
        raise _absent(name, "the sampler's log-probs", fix)
    return now.sampler_logprobs


def _behaviour(now: Now, name: str) -> Tensor:
    _recorded(now, name)
    assert now.behaviour is not None
    return now.behaviour


def _absent(name: str, what: str, fix: str) -> GraphError:
    return GraphError(
        Fault(rule="loss", where=name, problem=f"expected {what}, found none", fix=fix)
    )


def _refused(name: str, problem: str, fix: str) -> GraphError:
    return GraphError(Fault(rule="call", where=name, problem=problem, fix=fix, origin=call_site()))
