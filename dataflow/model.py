"""State: named values that outlive a Step.

Owns: the three kinds of State, and schedules of the Step. Does not own: who writes and
who reads a State (derived from the nodes), nor the weights themselves (kernels).

Only a State may close a loop in a graph. Version t of every State is its value after
Step t.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVarTuple

from dataflow.errors import Fault, GraphError, Origin

Ts = TypeVarTuple("Ts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What a Model computes at each token: `lm` (next-token logits) or `scalar` (one number)."""

    kind: Literal["lm", "scalar"] = "lm"
    outputs: int = 1


@dataclass(frozen=True, slots=True)
class Model:
    """Weights. `base` is a Hugging Face model directory or hub name.

    trainable: some train node writes it. follows: another Model that this one copies at that one's publish, every
    `every` Steps, moving `rate` of the way (1.0 is a plain copy). head: `lm` or `scalar`.
    """

    name: str
    base: str
    trainable: bool = field(default=False, kw_only=True)
    head: Literal["lm", "scalar"] = field(default="lm", kw_only=True)
    follows: Model | None = field(default=None, kw_only=True)
    rate: float = field(default=1.0, kw_only=True)
    every: int = field(default=1, kw_only=True)
    dtype: Literal["float32", "bfloat16"] = field(default="float32", kw_only=True)
    origin: Origin | None = field(default=None, kw_only=True, compare=False, repr=False)

    def __post_init__(self) -> None:
        problem, fix = _model_fault(self)
        if problem:
            raise GraphError(Fault(rule="state", where=f"Model {self.name!r}", problem=problem, fix=fix))


def _model_fault(model: Model) -> tuple[str, str]:
    if not isinstance(model.base, str) or not model.base:
        return (
            f"expected a model directory or name as its base, found {model.base!r}",
            'Model("policy", "path/to/model")',
        )
    if model.follows is not None and model.trainable:
        return (
            "a follower is written by its leader, and trainable=True gives it a second writer",
            "trainable=False, or no follows=",
        )
    if not 0.0 < model.rate <= 1.0:
        return f"expected a rate in (0, 1], found {model.rate}", "rate=1.0 to copy"
    return ("", "") if model.every >= 1 else (f"expected every >= 1, found {model.every}", "every=1")


@dataclass(frozen=True, slots=True)
class Buffer(Generic[*Ts]):
    """Rows that are kept for later draws; written by one `store`, read by any number of `replay`."""

    name: str
    writer: Any = field(kw_only=True)
    """The store Node. A Buffer is reached by the graph through it."""


@dataclass(frozen=True, slots=True)
class Table:
    """Numbers by key, for curricula; read at the fixed version Step - max_lag - 1."""

    name: str
    key: str = field(default="prompt", kw_only=True)


State = Model | Buffer[Any] | Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A number as a function of the Step (first Step: 1): from `start` to `stop` over `steps`, then `stop`.

    A warm-up runs from 0 to `start` over the first `warmup` Steps; the decay follows it.
    """

    kind: Literal["linear", "cosine", "constant"]
    start: float
    stop: float
    steps: int
    warmup: int = 0

    def at(self, step: int) -> float:
        """The value at a Step >= 1."""
        if step <= self.warmup:
            return self.start * step / self.warmup
        done = min(1.0, (step - self.warmup - 1) / max(1, self.steps - 1)) if self.steps else 1.0
        if self.kind == "cosine":
            done = (1.0 - math.cos(math.pi * done)) / 2.0
        return self.start if self.kind == "constant" else self.start + (self.stop - self.start) * done


Number = float | Schedule
"""A parameter marked schedulable."""


def linear(start: float, stop: float, steps: int) -> Schedule:
    """From start at Step 1 to stop at Step `steps`, then constant."""
    return Schedule(kind="linear", start=start, stop=stop, steps=steps)


def cosine(start: float, stop: float, steps: int) -> Schedule:
    """Half a cosine from start at Step 1 to stop at Step `steps`, then constant."""
    return Schedule(kind="cosine", start=start, stop=stop, steps=steps)


def warmup(steps: int, then: Number) -> Schedule:
    """Linear from 0 to the first value of `then` over `steps` Steps, then as `then` says."""
    if isinstance(then, Schedule):
        return Schedule(kind=then.kind, start=then.start, stop=then.stop, steps=then.steps, warmup=steps)
    return Schedule(kind="constant", start=then, stop=then, steps=0, warmup=steps)


def value_at(number: Number, step: int) -> float:
    """The number at a Step; a plain number is the same at all of them."""
    return number.at(step) if isinstance(number, Schedule) else float(number)
