"""Losses: the functions with which a graph names them, and their declarations.

Owns: parameters, their limits, what a loss reads. Does not own: the formulas (policy_formulas.py,
loss_formulas.py), reduction to a number (the train kernel).
"""

from __future__ import annotations

from typing import Literal

from dataflow.errors import Fault, GraphError
from dataflow.limits import choice, number
from dataflow.loss import Loss, loss_function, make_loss
from dataflow.model import Number
from dataflow.node import Port
from dataflow.operator import call_site, declares
from dataflow.schema import Advantage, Completion, Logprobs, Preference, Returns, Reward, Values
from operators import loss_formulas as formulas
from operators import policy_formulas as policy

Clip = Number | tuple[Number, Number]
"""How far a ratio may be from 1: one number, or one below and one above (DAPO's clip-higher)."""

Estimator = Literal["k1", "k2", "k3"]

_CLIP = number(0.0, above=True, pair=True, like=0.2)

CLIPPED_POLICY = loss_function(
    policy.clipped_policy,
    path="operators.losses:CLIPPED_POLICY",
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
POLICY_GRADIENT = loss_function(
    policy.policy_gradient,
    path="operators.losses:POLICY_GRADIENT",
    name="policy_gradient_loss",
    on_policy=True,
)
DECOUPLED_POLICY = loss_function(
    policy.decoupled_policy,
    path="operators.losses:DECOUPLED_POLICY",
    name="decoupled_policy_loss",
    recorded=True,
    limits={
        "clip": _CLIP,
        "cap": number(0.0, above=True, optional=True, like=5.0),
        "over_cap": choice("drop", "truncate"),
    },
)
ENTROPY = loss_function(
    formulas.entropy, path="operators.losses:ENTROPY", name="entropy_loss", entropy=True
)
SUPERVISED = loss_function(
    formulas.supervised, path="operators.losses:SUPERVISED", name="supervised_loss", supervised=True
)
VALUE = loss_function(
    formulas.value,
    path="operators.losses:VALUE",
    name="value_loss",
    head="scalar",
    limits={"clip": number(0.0, above=True, optional=True, like=0.2)},
)
DPO = loss_function(
    formulas.dpo,
    path="operators.losses:DPO",
    name="dpo_loss",
    scope="group",
    limits={"beta": number(0.0, above=True, like=0.1)},
)
TRAJECTORY_BALANCE = loss_function(
    formulas.trajectory_balance,
    path="operators.losses:TRAJECTORY_BALANCE",
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
    rows: Port[Completion] | None = None,
) -> Loss:
    """PPO's clipped objective, as GRPO and DAPO use it; see policy_formulas.py for the formula.

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
        CLIPPED_POLICY,
        {"advantage": advantage, "old": old, "reference": reference},
        params,
        rows=rows,
    )


@declares
def policy_gradient_loss(
    advantage: Port[Advantage], *, rows: Port[Completion] | None = None
) -> Loss:
    """REINFORCE: -A log pi; for rows made by the same policy that is trained."""
    return make_loss(POLICY_GRADIENT, {"advantage": advantage}, {}, rows=rows)


@declares
def decoupled_policy_loss(
    advantage: Port[Advantage],
    *,
    proximal: Port[Logprobs],
    clip: Clip = 0.2,
    cap: Number | None = 5.0,
    over_cap: Literal["drop", "truncate"] = "drop",
    rows: Port[Completion] | None = None,
) -> Loss:
    """AReaL's objective for stale rows, clipped around `proximal`, the policy before the Step."""
    params = {"clip": clip, "cap": cap, "over_cap": over_cap}
    return make_loss(
        DECOUPLED_POLICY, {"advantage": advantage, "proximal": proximal}, params, rows=rows
    )


@declares
def entropy_loss(*, rows: Port[Completion] | None = None) -> Loss:
    """The negative entropy: `a + 0.01 * entropy_loss()` rewards a policy for staying uncertain."""
    return make_loss(ENTROPY, {}, {}, rows=rows)


@declares
def supervised_loss(*, rows: Port[Completion] | None = None) -> Loss:
    """Cross-entropy on the rows' tokens with mask 1.

    rows: of any loss, those of its term, if they are not the train node's: `policy_loss + 0.1 *
    supervised_loss(rows=demonstrations(data, batch=32))`. The term's ports stand on them, its
    denominators count them, and they are trained at their own temperature.
    """
    return make_loss(SUPERVISED, {}, {}, rows=rows)


@declares
def value_loss(
    returns: Port[Returns],
    *,
    old: Port[Values] | None = None,
    clip: Number | None = None,
    rows: Port[Completion] | None = None,
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
    return make_loss(VALUE, {"returns": returns, "old": old}, {"clip": clip}, rows=rows)


@declares
def dpo_loss(
    pairs: Port[Preference],
    *,
    reference: Port[Logprobs],
    beta: Number = 0.1,
    rows: Port[Completion] | None = None,
) -> Loss:
    """Direct preference optimisation; each group is one pair, made by pair() and select()."""
    return make_loss(DPO, {"pairs": pairs, "reference": reference}, {"beta": beta}, rows=rows)


@declares
def trajectory_balance_loss(
    score: Port[Reward],
    *,
    reference: Port[Logprobs],
    beta: Number,
    rows: Port[Completion] | None = None,
) -> Loss:
    """Trajectory balance; estimates the partition function per group, takes rows of any age."""
    return make_loss(
        TRAJECTORY_BALANCE, {"score": score, "reference": reference}, {"beta": beta}, rows=rows
    )


def _refused(name: str, problem: str, fix: str) -> GraphError:
    return GraphError(Fault(rule="call", where=name, problem=problem, fix=fix, origin=call_site()))
