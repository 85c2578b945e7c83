"""Formulas of losses besides those of a policy's advantage: of values, of pairs, of demonstrations.

Owns: each formula, in tensor methods, with its source. Does not own: how a graph names it
(losses.py), the losses of advantages (policy_formulas.py), whose rules on masks and kinks hold
here, too. Every graph.json names these functions, so that their names stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dataflow.loss import Now, Tensors, Terms
from dataflow.schema import Logprobs, Preference, Returns, Reward, Values
from dataflow.top_logprobs import TopLogprobs
from operators.masked_numbers import (
    absence_error,
    mask_column,
    masked_difference,
    require_logprobs,
    sum_and_count,
)
from operators.policy_formulas import estimate_kl

if TYPE_CHECKING:
    from torch import Tensor

LEAST = 1e-7
"""The least probability of the tokens that a teacher did not tell: float32 knows no less of 1
(TRL 1.16 has the same).
"""


def entropy(now: Now) -> Terms:
    """-H(next token), over the whole vocabulary: a small weight of it keeps a policy exploring."""
    if now.entropy is None:
        raise absence_error(
            "entropy_loss", "the entropy of the next token", "a Model with head='lm'"
        )
    metrics = {"policy/entropy": sum_and_count(now, now.entropy.detach())}
    return Terms(-now.entropy, metrics)


def kl(now: Now, reference: Tensors[Logprobs], *, kind: str = "k3", dialect: str = "trl") -> Terms:
    """An estimate of KL(now | reference) on the row's own token; `estimate_kl` has the estimators
    (joschu.net/blog/kl-approx.html).
    """
    kl_now = estimate_kl(now, reference["logprobs"], kind, dialect)
    return Terms(kl_now, {"policy/kl_reference": sum_and_count(now, kl_now)})


def supervised(now: Now) -> Terms:
    """-log pi(token): cross-entropy on the rows' own tokens."""
    return Terms(-require_logprobs(now, "supervised_loss"))


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
        raise absence_error("value_loss", "values", 'Model(..., head="scalar")')
    goal = mask_column(now, returns["returns"])
    error = (now.values - goal).square()
    metrics = {"value/squared_error": sum_and_count(now, error.detach())}
    if old is not None and clip is not None:
        before = mask_column(now, old["values"])
        # Clamped by bounds, not as before + difference: inside them it is v itself, to the bit.
        held = now.values.clamp(before - clip, before + clip)
        held_error = (held - goal).square()
        is_clipped = held_error > error
        metrics["value/clip_fraction"] = sum_and_count(now, is_clipped.to(error.dtype))
        error = error.maximum(held_error)
    return Terms(0.5 * error, metrics)


def row_regression(now: Now, target: Tensors[Reward], *, huber: float | None = None) -> Terms:
    """e^2 / 2 of a row's error e = score - target, the score at its last token; beyond `huber` d
    linear, d (|e| - d / 2) (Huber 1964, doi 10.1214/aoms/1177703732).
    """
    if now.scores is None:
        raise absence_error("regression_loss", "scores", 'Model(..., head="scalar")')
    is_trained = now.row_sum(now.mask) > 0
    error = (now.scores - target["reward"]).masked_fill(~is_trained, 0.0)
    squares = error.detach().square()
    metrics = {"regression/squared_error": (squares.sum(), is_trained.sum())}
    return Terms(_square_error(error, huber), metrics)


def token_regression(now: Now, target: Tensors[Values], *, huber: float | None = None) -> Terms:
    """`row_regression` of each token's value, before it is written."""
    if now.values is None:
        raise absence_error("regression_loss", "values", 'Model(..., head="scalar")')
    error = masked_difference(now, now.values, target["values"])
    metrics = {"regression/squared_error": sum_and_count(now, error.square())}
    return Terms(_square_error(error, huber), metrics)


def _square_error(error: Tensor, huber: float | None) -> Tensor:
    if huber is None:
        return 0.5 * error.square()
    inside = error.clamp(-huber, huber)
    return inside * (error - 0.5 * inside)


def distillation(
    now: Now,
    teacher: Tensors[TopLogprobs],
    *,
    direction: str = "reverse",
    tail: str = "bucket",
) -> Terms:
    """KL of the next token between the trained model s and its teacher t, over the teacher's k most
    likely ones: forward sum t (log t - log s), reverse sum s (log s - log t) (arXiv:2306.13649,
    section 2).

    With k the whole vocabulary it is exact. Else the rest of both is a bucket of its own
    (`bucket`, of at least LEAST), left out (`drop`: then it is no divergence, and may be negative),
    or both are scaled to 1 over the k tokens (`renormalise`).
    """
    if now.at_ids is None:
        raise absence_error(
            "distillation_loss", "log-probs at the teacher's ids", 'Model(..., head="lm")'
        )
    untrained = (now.mask == 0)[:, None]
    s_logprobs = now.at_ids.masked_fill(untrained, 0.0)
    t_logprobs = teacher["top_logprobs"].masked_fill(untrained, 0.0)
    s_mass = s_logprobs.exp().sum(-1)
    t_mass = t_logprobs.exp().sum(-1)
    metrics = {
        "distill/student_mass": sum_and_count(now, s_mass),
        "distill/teacher_mass": sum_and_count(now, t_mass),
    }
    if tail == "renormalise":
        s_logprobs = s_logprobs - s_logprobs.logsumexp(-1, keepdim=True)
        t_logprobs = t_logprobs - t_logprobs.logsumexp(-1, keepdim=True)
    elif tail == "bucket" and t_logprobs.shape[1] != now.vocabulary:
        s_logprobs, t_logprobs = _append_rest(s_logprobs), _append_rest(t_logprobs)
    if direction == "forward":
        s_logprobs, t_logprobs = t_logprobs, s_logprobs
    weight = s_logprobs.exp()
    # 0 log 0 is 0.
    gap = (s_logprobs - t_logprobs).masked_fill(weight == 0, 0.0)
    loss = (weight * gap).sum(-1)
    return Terms(loss.masked_fill(now.mask == 0, 0.0), metrics)


def _append_rest(logprobs: Tensor) -> Tensor:
    """[tokens, k + 1]: one more, the log of what is left of 1."""
    total = logprobs.logsumexp(-1, keepdim=True).clamp(max=-LEAST)
    count, k = logprobs.shape
    whole = logprobs.new_zeros(count, k + 1).slice_scatter(logprobs, dim=1, end=k)
    return whole.slice_scatter((-total.expm1()).log(), dim=1, start=k)


def dpo(
    now: Now, pairs: Tensors[Preference], reference: Tensors[Logprobs], *, beta: float = 0.1
) -> Terms:
    """-log sigmoid(beta * (margin of the chosen row - margin of the rejected one)) for each group
    of two rows (arXiv:2305.18290).

    A row's margin is log pi(row) - log pi_reference(row), summed over its tokens. A group of which
    only one of the two is left, as the other failed, has loss 0 and no part in the metrics.
    """
    logprobs = require_logprobs(now, "dpo_loss")
    sign = pairs["sign"]
    chosen, rejected = now.group_sum((sign > 0).float()), now.group_sum((sign < 0).float())
    is_pair = (chosen > 0) & (rejected > 0)
    margin = now.row_sum(masked_difference(now, logprobs, reference["logprobs"]))
    logit = (beta * now.group_sum(margin * sign)).masked_fill(~is_pair, 0.0)
    # log(exp(-x) + 1) = -log sigmoid(x), smooth at 0.
    loss = (-logit).logaddexp(logit.new_zeros(()))
    right = (logit.detach() > 0).to(loss.dtype)
    count = is_pair.sum()
    metrics = {
        "dpo/accuracy": (right.sum(), count),
        "dpo/margin": (logit.detach().sum(), count),
    }
    return Terms(loss.masked_fill(~is_pair, 0.0), metrics)


def trajectory_balance(
    now: Now, score: Tensors[Reward], reference: Tensors[Logprobs], *, beta: float
) -> Terms:
    """Mean over a group of (log Z + log pi - log pi_ref - r / beta)^2 (TBA, arXiv:2503.18929).

    Z is estimated from the group: log Z = mean(log pi_ref - log pi + r / beta), held constant.
    Valid for rows from any sampler with full support.
    """
    logprobs = require_logprobs(now, "trajectory_balance_loss")
    gap = now.row_sum(masked_difference(now, logprobs, reference["logprobs"]))
    gap = gap - score["reward"] / beta
    size = now.group_sum(gap.detach().new_ones(now.rows))
    partition = -(now.group_sum(gap.detach()) / size)
    error = partition[now.row_group] + gap
    loss = now.group_sum(error.square()) / size
    return Terms(loss, {"policy/log_partition": (partition.sum(), now.groups)})
