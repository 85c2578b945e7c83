"""The loss of an order: a ranker learns which rows come first, not by how much.

Owns: the declarations of `ranks` and `rank_loss`. Does not own: the formulas (rank_formulas.py),
scores (forward.py), what is ranked (row_weights.py).
"""

from __future__ import annotations

from dataflow.loss import Loss, loss_function, make_loss
from dataflow.node import Node, Port
from dataflow.operator import declares
from dataflow.schema import Completion, RankTerms, Reward
from dataflow.user import column_operator
from operators import rank_formulas as formulas

_NUMBER = ("reward",)

RANKS = column_operator(
    formulas.ranks,
    "operators.rank_losses:RANKS",
    name="ranks",
    scope="batch",
    columns={"score": _NUMBER, "target": _NUMBER},
)

RANK = loss_function(
    formulas.rank,
    path="operators.rank_losses:RANK",
    name="rank_loss",
    scope="sequence",
    head="scalar",
    scores=True,
)


@declares
def ranks(score: Port[Reward], target: Port[Reward], *, name: str = "ranks") -> Port[RankTerms]:
    """How far the scores are from the order of the targets, the greatest first: ListMLE (Xia et
    al., 2008) over all rows of a Step, one list, for `rank_loss`.

    A row's term is the negative log-probability that it is drawn first, at odds exp(score), of all
    rows whose target is not greater; rows of equal targets are in each other's lists, so that their
    order plays no part. score: of the Model that is trained, as `scores` gives it: at lag 0 also
    that of the weight, as nothing has changed the Model since.
    """
    inputs = {"score": score, "target": target}
    return Node(RANKS, name, inputs=inputs).port()


@declares
def rank_loss(ranks: Port[RankTerms], *, rows: Port[Completion] | None = None) -> Loss:
    """The listwise loss of a Model with head="scalar", at each row's last token: `train(ranker,
    tasks, loss=rank_loss(ranks(score, mean_over(answer_length(rollout), prompt))))`.

    It is the tangent of the mean of all terms of `ranks`, at the scores that `ranks` had: in a
    Step's first update its value and gradient are those of ListMLE over the whole Step, however its
    rows are cut into micro-batches and ranks. Further updates, or scores of older weights, move
    along the same tangent.
    """
    ports = {"ranks": ranks}
    return make_loss(RANK, ports, {}, rows=rows)
