"""Numbers of the trained tokens alone, for the formulas of losses.

Owns: differences, columns and means where the mask is 1, and the errors of numbers that are not
there. Does not own: any formula (policy_formulas.py, loss_formulas.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dataflow.errors import Fault, GraphError
from dataflow.loss import Now

if TYPE_CHECKING:
    from torch import Tensor


def masked_difference(now: Now, a: Tensor, b: Tensor) -> Tensor:
    """Subtract b from a where the mask is 1; 0 elsewhere, so that no infinity of another's token
    spreads.
    """
    return (a - b).masked_fill(now.mask == 0, 0.0)


def mask_column(now: Now, column: Tensor) -> Tensor:
    """Put 0 in a port's column where the mask is 0."""
    return column.masked_fill(now.mask == 0, 0.0)


def sum_and_count(now: Now, tokens: Tensor) -> tuple[Tensor, Tensor | float]:
    """Make a metric's (sum, count) over the trained tokens."""
    counted = tokens.detach().masked_fill(now.mask == 0, 0.0)
    return counted.sum(), now.mask.sum()


def require_logprobs(now: Now, name: str) -> Tensor:
    """The model's log-probs. name: of the loss. Raises GraphError if it has none."""
    if now.logprobs is None:
        raise absence_error(name, "log-probs", 'Model(..., head="lm")')
    return now.logprobs


def require_sampler_logprobs(now: Now, name: str) -> Tensor:
    """The log-probs that the sampler recorded. name: of the loss. Raises GraphError if there are
    none.
    """
    if now.sampler_logprobs is None:
        fix = 'rows that are a Rollout, or old=logprobs(policy, rows, name="old")'
        raise absence_error(name, "the sampler's log-probs", fix)
    return now.sampler_logprobs


def require_behaviour(now: Now, name: str) -> Tensor:
    """The log-probs of what was drawn. name: of the loss. Raises GraphError if there are none."""
    require_sampler_logprobs(now, name)
    behaviour = now.behaviour
    assert behaviour is not None, "it is there if the recorded log-probs are"
    return behaviour


def absence_error(name: str, what: str, fix: str) -> GraphError:
    """What a loss raises for numbers that are not there. name: of the loss."""
    problem = f"expected {what}, found none"
    return GraphError(Fault(rule="loss", where=name, problem=problem, fix=fix))
