"""Formulas of losses besides those of a policy's advantage: of values, of pairs, of demonstrations.

Owns: each formula, in tensor methods, with its source. Does not own: how a graph names it
(losses.py), the losses of advantages (policy_formulas.py), whose rules on masks and kinks hold
here, too.
"""

from __future__ import annotations

from dataflow.loss import Now, Tensors, Terms
from dataflow.schema import Logprobs, Preference, Returns, Reward, Values
from operators.masked import absent, difference, logprobs_of, mean, trained
from operators.policy_formulas import divergence


def entropy(now: Now) -> Terms:
    """-H(next token), over the whole vocabulary: a small weight of it keeps a policy exploring."""
    if now.entropy is None:
        raise absent("entropy_loss", "the entropy of the next token", "a Model with head='lm'")
    return Terms(-now.entropy, {"policy/entropy": mean(now, now.entropy.detach())})


def kl(now: Now, reference: Tensors[Logprobs], *, kind: str = "k3") -> Terms:
    """An estimate of KL(now | reference) on the row's own token; `divergence` has the estimators
    (joschu.net/blog/kl-approx.html).
    """
    apart = divergence(now, reference["logprobs"], kind)
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
