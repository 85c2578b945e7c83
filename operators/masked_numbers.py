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


def difference(now: Now, a: Tensor, b: Tensor) -> Tensor:
    """a - b where the mask is 1, else 0, so that no infinity of another's token spreads."""
    return (a - b).masked_fill(now.mask == 0, 0.0)


def trained(now: Now, column: Tensor) -> Tensor:
    """A port's column where the mask is 1, else 0."""
    return column.masked_fill(now.mask == 0, 0.0)


def mean(now: Now, tokens: Tensor) -> tuple[Tensor, Tensor | float]:
    """A metric's (sum, count) over the trained tokens."""
    return (tokens.detach().masked_fill(now.mask == 0, 0.0).sum(), now.mask.sum())


def logprobs_of(now: Now, name: str) -> Tensor:
    if now.logprobs is None:
        raise absent(name, "log-probs", 'Model(..., head="lm")')
    return now.logprobs


def recorded_of(now: Now, name: str) -> Tensor:
    if now.sampler_logprobs is None:
        fix = 'rows that are a Rollout, or old=logprobs(policy, rows, name="old")'
        raise absent(name, "the sampler's log-probs", fix)
    return now.sampler_logprobs


def behaviour_of(now: Now, name: str) -> Tensor:
    recorded_of(now, name)
    assert now.behaviour is not None
    return now.behaviour


def absent(name: str, what: str, fix: str) -> GraphError:
    return GraphError(
        Fault(rule="loss", where=name, problem=f"expected {what}, found none", fix=fix)
    )
