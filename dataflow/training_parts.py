"""Parts of a Step's rows: whether a train node can be trained on them one after another.

Owns: what each term of a loss is divided by, so which sums of gradients are kept until the whole
Step is counted, and why a node needs all rows of a Step at once. Does not own: the sums themselves
(the train kernel), which rows make a part (the coordinator). Imports no torch.

Until its last row has come, nobody knows what a Step's sums are divided by. Terms with one count
are added up together; a set of rows of its own has a sum of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from dataflow.loss_terms import Loss, LossTerm

Divisor = Literal["tokens", "rows", "groups", "constant"]
"""What a term's sum over a Step is divided by: a count of one set of rows, or a number that is
known before.
"""

_OF_SCOPE: Mapping[str, Divisor] = {"sequence": "rows", "group": "groups"}
_OF_AGGREGATE: Mapping[str, Divisor] = {
    "token_mean": "tokens",
    "sequence_mean": "rows",
    "sequence_sum": "rows",
    "constant": "constant",
}


def divisor_of(term: LossTerm, aggregate: str) -> Divisor:
    """Find what a term is divided by. aggregate: of its train node."""
    scope = term.function.scope
    if scope == "token":
        return _OF_AGGREGATE[aggregate]
    return _OF_SCOPE[scope]


def count_gradient_sums(loss: Loss) -> int:
    """Count the sums of gradients, each as large as the weights in float32, that are kept between
    the parts of a Step: one for each set of rows.
    """
    return len({term.on for term in loss.terms})


def why_not_in_parts(loss: Loss, params: Mapping[str, Any]) -> str:
    """Say why a train node needs all rows of a Step at once, and what to change; empty if its
    gradients can be summed part by part.

    loss: bound, as in the node. params: of the node; what is absent has train's default. Schedules
    need the Step's number alone, and AdamW the gradient alone.
    """
    for name in ("epochs", "minibatches"):
        count = params.get(name, 1)
        if count != 1:
            return (
                f"{name}={count}, and an update before the last part would change the weights that"
                f" compute it. Fix: {name}=1"
            )
    aggregate = params.get("aggregate", "token_mean")
    for row_set in loss.row_sets:
        problem = _find_other_divisor(loss.on(row_set), aggregate)
        if problem:
            return problem
    return ""


def _find_other_divisor(loss: Loss, aggregate: str) -> str:
    """Say which of a row set's terms is divided by another count than the first; empty if all have
    one. Two sums over the same rows would take two backward passes.
    """
    if not loss.terms:
        return ""
    first = loss.terms[0]
    divisor = divisor_of(first, aggregate)
    for term in loss.terms[1:]:
        other = divisor_of(term, aggregate)
        if other != divisor:
            return (
                f"{first.label} is divided by the Step's {divisor}, and {term.label} on the same"
                f" rows by its {other}. Fix: an aggregate with which both have one count, such as"
                f" aggregate='sequence_mean' for tokens and rows, or two train nodes"
            )
    return ""
