"""Weights of a sum: what `reward(weights=)` and `add(weights=)` take.

Owns: refusing anything but one finite number for each thing to weigh. Does not own: the sums.
"""

from __future__ import annotations

from collections.abc import Sequence

from dataflow.calls import call_error, require
from dataflow.limits import number

_WEIGHT = number(like=1.0)


def require_weights(where: str, weights: object, count: int, what: str) -> None:
    """Raise GraphError unless these are None or one finite number for each of `count` things."""
    if weights is None:
        return
    require(
        where,
        "weights",
        weights,
        fits=_are_weights(weights),
        expected="a list of finite numbers or None",
        fix=f"weights={[1.0] * max(count, 1)}",
    )
    assert isinstance(weights, Sequence)
    if len(weights) != count:
        problem = f"{count} {what}s with {len(weights)} weights"
        raise call_error(where, problem, f"one weight a {what}")


def _are_weights(weights: object) -> bool:
    if not isinstance(weights, Sequence) or isinstance(weights, str):
        return False
    return all(map(_WEIGHT.accepts, weights))
