"""Formulas of losses besides those of a policy's advantage: of values, of pairs, of demonstrations.

Owns: each formula, in tensor methods, with its source. Does not own: how a graph names it
(losses.py), the losses of advantages (policy_formulas.py), whose rules on masks and kinks hold
here, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dataflow.loss import Now, Tensors, Terms
from dataflow.schema import Logprobs, Preference, Returns, Reward, Values
from dataflow.top_logprobs import TopLogprobs
from operators.masked_numbers import absent, difference, logprobs_of, mean, trained
from operators.policy_formulas import divergence

if TYPE_CHECKING:
    from torch import Tensor

LEAST = 1e-7
"""The least probability of the tokens that a teacher did not tell: float32 knows no less of 1
(TRL 1.16 has the same).
"""


def entropy(now: Now) -> Terms:
    """-H(next token), over the whole vocabulary: a small weight of it keeps a policy exploring."""
    if now.entropy is None:
        raise absent("entropy_loss", "the entropy of the next token", "a Model with head='lm'")
    return Terms(-now.entropy, {"policy/entropy": mean(now, now.entropy.detach())})


def kl(now: Now, reference: Tensors[Logprobs], *, kind: str = "k3", dialect: str = "trl") -> Terms:
    """An estimate of KL(now | reference) on the row's own token; `divergence` has the estimators
    (joschu.net/blog/kl-approx.html).
    """
    apart = divergence(now, reference["logprobs"], kind, dialect)
    return Terms(apart, {"policy/kl_reference": mean(now, apart)})


def supervised(now: Now) -> Terms:
    """-log pi(token): cross-entropy on the rows' own tokens."""
    return Terms(-logprobs_of(now, "supervised_loss"))


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
        raise absent("value_loss", "values", 'Model(..., head="scalar")')
    goal = trained(now, returns["returns"])
    error = (now.values - goal).square()
    metrics = {"value/squared_error": mean(now, error.detach())}
    if old is not None and clip is not None:
        before = trained(now, old["values"])
        # Clamped by bounds, not as before + difference: inside them it is v itself, to the bit.
        held = now.values.clamp(before - clip, before + clip)
        other = (held - goal).square()
        metrics["value/clip_fraction"] = mean(now, (other > error).to(error.dtype))
        error = error.maximum(other)
    return Terms(0.5 * error, metrics)


def row_regression(now: Now, target: Tensors[Reward], *, huber: float | None = None) -> Terms:
    """e^2 / 2 of a row's error e = score - target, the score at its last token; beyond `huber` d
    linear, d (|e| - d / 2) (Huber 1964, doi 10.1214/aoms/1177703732).
    """
    if now.scores is None:
        raise absent("regression_loss", "scores", 'Model(..., head="scalar")')
    counts = now.row_sum(now.mask) > 0
    error = (now.scores - target["reward"]).masked_fill(~counts, 0.0)
    metrics = {"regression/squared_error": (error.detach().square().sum(), counts.sum())}
    return Terms(_squared(error, huber), metrics)


def token_regression(now: Now, target: Tensors[Values], *, huber: float | None = None) -> Terms:
    """`row_regression` of each token's value, before it is written."""
    if now.values is None:
        raise absent("regression_loss", "values", 'Model(..., head="scalar")')
    error = difference(now, now.values, target["values"])
    return Terms(_squared(error, huber), {"regression/squared_error": mean(now, error.square())})


def _squared(error: Tensor, huber: float | None) -> Tensor:
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
        raise absent("distillation_loss", "log-probs at the teacher's ids", 'Model(..., head="lm")')
    foreign = (now.mask == 0)[:, None]
    student, told = (x.masked_fill(foreign, 0.0) for x in (now.at_ids, teacher["top_logprobs"]))
    metrics = {
        "distill/student_mass": mean(now, student.exp().sum(-1)),
        "distill/teacher_mass": mean(now, told.exp().sum(-1)),
    }
    if tail == "renormalise":
        student, told = (x - x.logsumexp(-1, keepdim=True) for x in (student, told))
    elif tail == "bucket" and told.shape[1] != now.vocabulary:
        student, told = (_with_rest(x) for x in (student, told))
    if direction == "forward":
        student, told = told, student
    weight = student.exp()
    gap = (student - told).masked_fill(weight == 0, 0.0)  # 0 log 0 is 0
    return Terms((weight * gap).sum(-1).masked_fill(now.mask == 0, 0.0), metrics)


def _with_rest(logprobs: Tensor) -> Tensor:
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

    A row's margin is log pi(row) - log pi_reference(row), summed over its tokens.
    """
    margin = now.row_sum(difference(now, logprobs_of(now, "dpo_loss"), reference["logprobs"]))
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
        difference(now, logprobs_of(now, "trajectory_balance_loss"), reference["logprobs"])
    )
    gap = gap - score["reward"] / beta
    size = now.group_sum(gap.detach().new_ones(now.rows))
    partition = -(now.group_sum(gap.detach()) / size)
    loss = now.group_sum((partition[now.row_group] + gap).square()) / size
    return Terms(loss, {"policy/log_partition": (partition.sum(), now.groups)})
