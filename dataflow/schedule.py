"""Schedules: numbers as functions of the Step.

Owns: their forms, and their value at a Step. Does not own: which parameters take one (the
declarations), the values that a parameter takes (limits.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, overload

from dataflow.calls import declares, require


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Schedule:
    """A number as a function of the Step (first Step: 1): from `start` to `stop` over `steps`, then
    `stop`. A warm-up runs from 0 to `start` over the first `warmup` Steps; the decay follows it.
    """

    kind: Literal["linear", "cosine", "constant"]
    start: float
    stop: float
    steps: int
    warmup: int = 0

    def __repr__(self) -> str:
        """The call that makes it."""
        body = f"{self.kind}({self.start!r}, {self.stop!r}, {self.steps})"
        body = repr(self.start) if self.kind == "constant" else body
        return f"warmup({self.warmup}, {body})" if self.warmup else body

    def at(self, step: int) -> float:
        """The value at a Step >= 1."""
        if step <= self.warmup:
            return self.start * step / self.warmup
        done = min(1.0, (step - self.warmup - 1) / max(1, self.steps - 1)) if self.steps else 1.0
        if self.kind == "cosine":
            done = (1.0 - math.cos(math.pi * done)) / 2.0
        return (
            self.start if self.kind == "constant" else self.start + (self.stop - self.start) * done
        )


Number = float | Schedule
"""For a parameter marked schedulable."""


def _to_zero(function: Callable[..., Schedule]) -> Callable[..., Schedule]:
    """A decay of which `stop` may be left out, by name or between the other two; it is then 0."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Schedule:
        if len(args) == 2 and not kwargs:
            return function(args[0], 0.0, args[1])
        ends = len(args) > 1 or "stop" in kwargs or "steps" not in kwargs
        return function(*args, **kwargs if ends else {"stop": 0.0, **kwargs})

    return call


@overload
def linear(start: float, steps: int, /) -> Schedule: ...
@overload
def linear(start: float, stop: float = 0.0, *, steps: int) -> Schedule: ...
@overload
def linear(start: float, stop: float, steps: int) -> Schedule: ...
@_to_zero
@declares
def linear(start: float, stop: float, steps: int) -> Schedule:
    """From start at Step 1 to stop at Step `steps`, then constant. `linear(1e-6, 100)` goes to 0 in
    100 Steps.
    """
    _require("linear", steps, start=start, stop=stop)
    return Schedule(kind="linear", start=start, stop=stop, steps=steps)


@overload
def cosine(start: float, steps: int, /) -> Schedule: ...
@overload
def cosine(start: float, stop: float = 0.0, *, steps: int) -> Schedule: ...
@overload
def cosine(start: float, stop: float, steps: int) -> Schedule: ...
@_to_zero
@declares
def cosine(start: float, stop: float, steps: int) -> Schedule:
    """Half a cosine from start at Step 1 to stop at Step `steps`, then constant. `cosine(1e-6,
    100)` goes to 0 in 100 Steps.
    """
    _require("cosine", steps, start=start, stop=stop)
    return Schedule(kind="cosine", start=start, stop=stop, steps=steps)


@declares
def warmup(steps: int, then: Number) -> Schedule:
    """Linear from 0 to the first value of `then` over `steps` Steps, then `then`."""
    if isinstance(then, Schedule):
        _require("warmup", steps)
        return Schedule(
            kind=then.kind, start=then.start, stop=then.stop, steps=then.steps, warmup=steps
        )
    _require("warmup", steps, then=then)
    return Schedule(kind="constant", start=then, stop=then, steps=0, warmup=steps)


def value_at(number: Number, step: int) -> float:
    """The number at a Step; a plain number is constant."""
    return number.at(step) if isinstance(number, Schedule) else float(number)


def _require(where: str, steps: object, **numbers: object) -> None:
    """Raise GraphError for anything but a whole number of Steps and finite numbers."""
    whole = isinstance(steps, int) and not isinstance(steps, bool) and steps >= 0
    require(where, "steps", steps, fits=whole, expected="a whole number >= 0", fix="steps=1000")
    for name, value in numbers.items():
        fits = (
            isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        )
        require(where, name, value, fits=fits, expected="a finite number", fix=f"{name}=0.1")
