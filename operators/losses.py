"""Losses: the functions with which a graph names them, and their declarations.

Owns: parameters, their limits, what a loss reads. Does not own: the formulas (loss_formulas.py),
losses of an advantage (policy_losses.py, handed on), what peers do differently (loss_dialects.py),
reduction to a number (the train kernel). A `dialect` of None is the graph's.
"""

from __future__ import annotations

from typing import Literal

from dataflow.calls import call_error
from dataflow.convention import DIALECT_LIMIT, Dialect
from dataflow.limits import choice, number
from dataflow.loss import Loss, loss_function, make_loss
from dataflow.model import Number
from dataflow.node import Port
from dataflow.operator import declares
from dataflow.schema import Completion, Logprobs, Preference, Returns, Reward, Values
from dataflow.top_logprobs import TopLogprobs
from operators import loss_dialects as dialects
from operators import loss_formulas as formulas
from operators.importance import importance as importance
from operators.policy_losses import CLIPPED_POLICY as CLIPPED_POLICY
from operators.policy_losses import CLIPPED_WEIGHT as CLIPPED_WEIGHT
from operators.policy_losses import DECOUPLED_POLICY as DECOUPLED_POLICY
from operators.policy_losses import KIND, Estimator
from operators.policy_losses import POLICY_GRADIENT as POLICY_GRADIENT
from operators.policy_losses import SOFT_CLIPPED_POLICY as SOFT_CLIPPED_POLICY
from operators.policy_losses import Clip as Clip
from operators.policy_losses import clipped_policy_loss as clipped_policy_loss
from operators.policy_losses import clipped_weight_loss as clipped_weight_loss
from operators.policy_losses import decoupled_policy_loss as decoupled_policy_loss
from operators.policy_losses import policy_gradient_loss as policy_gradient_loss
from operators.policy_losses import soft_clipped_policy_loss as soft_clipped_policy_loss
from operators.rank_losses import RANK as RANK
from operators.rank_losses import rank_loss as rank_loss
from operators.rank_losses import ranks as ranks

KL = loss_function(
    formulas.kl,
    path="operators.losses:KL",
    name="kl_loss",
    limits={"kind": KIND, "dialect": DIALECT_LIMIT},
    conventions=dialects.KL_CONVENTIONS,
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
    only_with={"old": "clip"},
    limits={"clip": number(0.0, above=True, optional=True, like=0.2)},
)

ROW_REGRESSION = loss_function(
    formulas.row_regression,
    path="operators.losses:ROW_REGRESSION",
    name="regression_loss",
    scope="sequence",
    head="scalar",
    scores=True,
    limits={"huber": number(0.0, above=True, optional=True, like=1.0)},
)

TOKEN_REGRESSION = loss_function(
    formulas.token_regression,
    path="operators.losses:TOKEN_REGRESSION",
    name="regression_loss",
    head="scalar",
    limits={"huber": number(0.0, above=True, optional=True, like=1.0)},
)

DISTILLATION = loss_function(
    formulas.distillation,
    path="operators.losses:DISTILLATION",
    name="distillation_loss",
    ids=("teacher", "top_ids"),
    limits={
        "direction": choice("reverse", "forward"),
        "tail": choice("bucket", "drop", "renormalise"),
    },
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
def kl_loss(
    reference: Port[Logprobs],
    *,
    kind: Estimator = "k3",
    dialect: Dialect | None = None,
    rows: Port[Completion] | None = None,
) -> Loss:
    """The divergence KL(now | reference) of each token, to be added: `a + 0.04 * kl_loss(ref)`.

    kind: the estimator on the row's own tokens (joschu.net/blog/kl-approx.html): k1 d, k2 d^2 / 2,
    k3 exp(-d) - 1 + d, with d = now - reference. As a loss only k2 has the gradient of the
    divergence on average (of rows from the policy itself); that of k1 is 0 on average, so k1
    belongs in the reward (kl_in_reward). dialect: where it is clamped, as in clipped_policy_loss.
    """
    params = {"kind": kind, "dialect": dialect}
    return make_loss(KL, {"reference": reference}, params, rows=rows)


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
    before the Step or those of a Model that follows it. Without clip `old` is not read.
    """
    if clip is not None and old is None:
        raise call_error(
            "value_loss",
            f"clip={clip} needs old=, none given",
            "old=values(critic, rollout), or clip=None",
        )
    return make_loss(VALUE, {"returns": returns, "old": old}, {"clip": clip}, rows=rows)


@declares
def regression_loss(
    target: Port[Reward] | Port[Values],
    *,
    huber: Number | None = None,
    rows: Port[Completion] | None = None,
) -> Loss:
    """Half the squared error of a Model with head="scalar", for reward models and critics.

    target: a Reward, then of the number that `scores` reads, at each row's last token, and a mean
    over rows; or Values, then of the number before each token. huber: beyond this error the loss
    grows linearly.
    """
    of_tokens = isinstance(target, Port) and issubclass(target.schema, Values)
    function = TOKEN_REGRESSION if of_tokens else ROW_REGRESSION
    return make_loss(function, {"target": target}, {"huber": huber}, rows=rows)


@declares
def distillation_loss(
    teacher: Port[TopLogprobs],
    *,
    direction: Literal["reverse", "forward"] = "reverse",
    tail: Literal["bucket", "drop", "renormalise"] = "bucket",
    rows: Port[Completion] | None = None,
) -> Loss:
    """KL between the trained Model's next token and a teacher's, of each token of the rows.

    teacher: logprobs(Model("teacher", big), rollout, top_k=64); exact with top_k the vocabulary.
    direction: `reverse`, KL(trained | teacher), which seeks the teacher's modes (GKD and MiniLLM;
    for rows that the policy wrote); `forward`, KL(teacher | trained), which covers all that the
    teacher does. tail: what the tokens beyond the k are: `bucket`, one token more (TRL's
    loss_add_tail); `drop`, nothing (verl's forward_kl_topk); `renormalise`, no tokens: both
    distributions are scaled to the k. Of sampled tokens alone: teacher_advantage.
    """
    params = {"direction": direction, "tail": tail}
    return make_loss(DISTILLATION, {"teacher": teacher}, params, rows=rows)


@declares
def dpo_loss(
    pairs: Port[Preference],
    *,
    reference: Port[Logprobs],
    beta: Number = 0.1,
    rows: Port[Completion] | None = None,
) -> Loss:
    """Direct preference optimisation; each group is one pair, made by pair() and select(). A group
    of which one of the two rows failed teaches nothing.
    """
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
