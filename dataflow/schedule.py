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
        if self.kind == "constant":
            call = repr(self.start)
        else:
            call = f"{self.kind}({self.start!r}, {self.stop!r}, {self.steps})"
        return f"warmup({self.warmup}, {call})" if self.warmup else call

    def at(self, step: int) -> float:
        """The value at a Step >= 1."""
        if step <= self.warmup:
            return self.start * step / self.warmup
        if self.kind == "constant":
            return self.start
        progress = 1.0
        if self.steps:
            # The first Step is at `start`, and Step `steps` at `stop`.
            progress = min(1.0, (step - self.warmup - 1) / max(1, self.steps - 1))
        if self.kind == "cosine":
            progress = (1.0 - math.cos(math.pi * progress)) / 2.0
        return self.start + (self.stop - self.start) * progress


Number = float | Schedule
"""For a parameter marked schedulable."""


def _default_stop(function: Callable[..., Schedule]) -> Callable[..., Schedule]:
    """A decay of which `stop` may be left out, by name or between the other two; it is then 0."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Schedule:
        if len(args) == 2 and not kwargs:
            start, steps = args
            return function(start, 0.0, steps)
        # Without steps= it is for `function` to say what is missing.
        if len(args) <= 1 and "stop" not in kwargs and "steps" in kwargs:
            return function(*args, **{"stop": 0.0, **kwargs})
        return function(*args, **kwargs)

    return call


@overload
def linear(start: float, steps: int, /) -> Schedule: ...
@overload
def linear(start: float, stop: float = 0.0, *, steps: int) -> Schedule: ...
@overload
def linear(start: float, stop: float, steps: int) -> Schedule: ...
@_default_stop
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
@_default_stop
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
    fits = isinstance(steps, int) and not isinstance(steps, bool) and steps >= 0
    require(where, "steps", steps, fits=fits, expected="a whole number >= 0", fix="steps=1000")
    for name, number in numbers.items():
        fits, fix = _is_finite(number), f"{name}=0.1"
        require(where, name, number, fits=fits, expected="a finite number", fix=fix)


def _is_finite(number: object) -> bool:
    if not isinstance(number, (int, float)) or isinstance(number, bool):
        return False
    return math.isfinite(number)
