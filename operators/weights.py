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
    like = f"weights={[1.0] * max(count, 1)}"
    fits = (
        isinstance(weights, Sequence)
        and not isinstance(weights, str)
        and all(map(_WEIGHT.accepts, weights))
    )
    require(
        where, "weights", weights, fits=fits, expected="a list of finite numbers or None", fix=like
    )
    assert isinstance(weights, Sequence)
    if len(weights) != count:
        raise call_error(
            where, f"{count} {what}s with {len(weights)} weights", f"one weight a {what}"
        )
