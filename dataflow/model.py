"""State: named values that outlive a Step.

Owns: the three kinds of State. Does not own: who writes and who reads a State (derived from the
nodes), the weights themselves (kernels).

Only a State may close a loop in a graph. Version t of every State is its value after Step t.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVarTuple

from dataflow.adapters import Adapter, Lora, WeightSubset
from dataflow.calls import call_error, call_site, constructs, require
from dataflow.errors import Origin
from dataflow.limits import choice, number, text, whole
from dataflow.schedule import Number as Number
from dataflow.schedule import Schedule as Schedule
from dataflow.schedule import cosine as cosine
from dataflow.schedule import linear as linear
from dataflow.schedule import value_at as value_at
from dataflow.schedule import warmup as warmup
from dataflow.side_module import Side

Ts = TypeVarTuple("Ts")

Statistic = Literal["geometric_mean", "mean"]
"""What a Table keeps of the numbers of a row of the data."""
Part = Literal["", "adapter", "subset"]
AUTO = "auto"
"""The dtype of a Model that computes in its base's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What a Model computes at each token: `lm` (next-token logits) or `scalar` (one number)."""

    kind: Literal["lm", "scalar"] = "lm"
    outputs: int = 1


@constructs
@dataclass(frozen=True, slots=True)
class Model:
    """Weights. `base` is a Hugging Face model directory or hub name.

    trainable: some train node writes it; `subset(...)`: only some of its weights. adapter:
    `lora(...)` or `side(...)`: only weights beside those of the base, which stay as they are; a
    follower has its leader's. follows: another Model that this one copies when that is published,
    every `every` Steps, moving `rate` of the way (1.0 is a plain copy); with every=0 never, so that
    it stays as its leader was when the run, or the phase of a Program, began. head:
    `lm` or `scalar`. dtype: that it computes in; `auto`: bfloat16 if its base is in bfloat16, else
    float32; of a follower its leader's, and float32 if its rate is below 1.
    """

    name: str
    base: str
    trainable: bool | WeightSubset = field(default=False, kw_only=True)
    adapter: Adapter = field(default=None, kw_only=True)
    head: Literal["lm", "scalar"] = field(default="lm", kw_only=True)
    follows: Model | None = field(default=None, kw_only=True)
    rate: float = field(default=1.0, kw_only=True)
    every: int = field(default=1, kw_only=True)
    dtype: Literal["auto", "float32", "bfloat16"] = field(default=AUTO, kw_only=True)
    origin: Origin | None = field(default=None, kw_only=True, compare=False, repr=False)
    """Where it was made; by default the line of the call."""

    def __post_init__(self) -> None:
        if self.origin is None:
            object.__setattr__(self, "origin", call_site())
        where = f"Model {self.name!r:.60}"
        for name, limit in _LIMITS.items():
            argument = getattr(self, name)
            fits, expected = limit.accepts(argument), limit.describe(argument)
            fix = f"{name}={limit.suggestion(argument)!r}"
            require(where, name, argument, fits=fits, expected=expected, fix=fix)
        _require_tuned_part(where, self)
        has_base, expected = bool(self.base), "a model directory or name"
        require(where, "base", self.base, fits=has_base, expected=expected, fix=_BASE)
        fits = self.follows is None or isinstance(self.follows, Model)
        fix = "follows=policy, the Model itself"
        require(where, "follows", self.follows, fits=fits, expected="a Model or None", fix=fix)
        if self.follows is not None and self.trainable:
            problem = (
                "a follower is written by its leader, and trainable=True gives it a second writer"
            )
            raise call_error(where, problem, "trainable=False, or no follows=")
        if self.every == 0:
            _require_copy(where, self)
        if self.follows is not None and self.adapter is None:
            object.__setattr__(self, "adapter", self.follows.adapter)

    @property
    def subset(self) -> WeightSubset | None:
        """Which of the base's weights are trained, or follow those; None: all of them, or none."""
        if self.follows is not None:
            return self.follows.subset
        return self.trainable if isinstance(self.trainable, WeightSubset) else None

    @property
    def part(self) -> Part:
        """What it has beside weights of its base that never change; empty if those are all, or
        none.
        """
        if self.adapter is not None:
            return "adapter"
        return "" if self.subset is None else "subset"

    @property
    def is_partial(self) -> bool:
        """Whether it has weights of its base that never change, and others that do."""
        return bool(self.part)

    @property
    def leaves_base(self) -> bool:
        """Whether its base has weights that it never changes: all of a frozen Model's, some of one
        with an adapter or a subset.
        """
        return self.is_partial or (not self.trainable and self.follows is None)

    @property
    def copies(self) -> Model | None:
        """The leader of which this is a frozen copy; None for every other Model."""
        return self.follows if self.every == 0 else None


def _require_tuned_part(where: str, model: Model) -> None:
    """Refuse what is neither all of a Model, nor a part of it that somebody trains or has saved."""
    trainable, adapter = model.trainable, model.adapter
    fits, expected = isinstance(trainable, bool | WeightSubset), "True, False or subset(...)"
    require(where, "trainable", trainable, fits=fits, expected=expected, fix="trainable=True")
    fits = adapter is None or isinstance(adapter, Lora | Side)
    fix, expected = "adapter=lora(rank=16)", "lora(...), side(...) or None"
    require(where, "adapter", adapter, fits=fits, expected=expected, fix=fix)
    if adapter is None:
        return
    if model.subset is not None:
        problem = "with an adapter no weight of the base is trained, and it names a subset of them"
        raise call_error(where, problem, "trainable=True, or no adapter=")
    if not model.trainable and model.follows is None and adapter.start is None:
        problem = "its adapter is trained by nobody and begins as nothing"
        raise call_error(where, problem, "trainable=True, or start=FOLDER, or no adapter=")


def _require_copy(where: str, model: Model) -> None:
    """Refuse every=0 without a leader, or with a rate: nothing ever moves."""
    if model.follows is None:
        problem = "every=0 keeps a copy of the Model that it follows, and it follows none"
        raise call_error(where, problem, "follows=policy, or no every=")
    if model.rate != 1.0:
        problem = f"every=0 never moves it, so that rate={model.rate:g} would mean nothing"
        raise call_error(where, problem, "every=1, or no rate=")


_BASE = 'Model("policy", "path/to/model")'
_LIMITS = {
    "name": text(like="policy"),
    "base": text(like="path/to/model"),
    "head": choice("lm", "scalar"),
    "rate": number(0.0, 1.0, above=True, like=1.0),
    "every": whole(0, like=1),
    "dtype": choice(AUTO, "float32", "bfloat16"),
}


@constructs
@dataclass(frozen=True, slots=True)
class Buffer(Generic[*Ts]):
    """Rows kept for later draws; written by one `store`, read by any number of `replay`."""

    name: str
    writer: Any = field(kw_only=True)
    """The store Node, through which the graph reaches the Buffer."""

    def __post_init__(self) -> None:
        fits, fix = isinstance(self.name, str), 'Buffer("old", ...)'
        require("Buffer", "name", self.name, fits=fits, expected="text", fix=fix)
        # A Node, whose module needs this one.
        fits = hasattr(self.writer, "operator") and hasattr(self.writer, "digest")
        expected, fix = "the store node", "writer=store(...)"
        require("Buffer", "writer", self.writer, fits=fits, expected=expected, fix=fix)


@constructs
@dataclass(frozen=True, slots=True)
class Table:
    """A number for each row of the data: the mean over all visits to it. Positions never repeat,
    rows of the data do, once in each epoch.

    It is written by one `record` and read by any number of `lookup`, and it is empty as a run, or a
    phase of a Program, begins. statistic: `geometric_mean`, exp of the mean of the logs, for
    lengths, which differ by factors; `mean`.
    """

    name: str
    statistic: Statistic = field(default="geometric_mean", kw_only=True)
    origin: Origin | None = field(default=None, kw_only=True, compare=False, repr=False)
    """Where it was made; by default the line of the call."""

    def __post_init__(self) -> None:
        if self.origin is None:
            object.__setattr__(self, "origin", call_site())
        where = f"Table {self.name!r:.60}"
        for name, limit in _TABLE_LIMITS.items():
            argument = getattr(self, name)
            fits, expected = limit.accepts(argument), limit.describe(argument)
            fix = f"{name}={limit.suggestion(argument)!r}"
            require(where, name, argument, fits=fits, expected=expected, fix=fix)


_TABLE_LIMITS = {"name": text(like="lengths"), "statistic": choice("geometric_mean", "mean")}


State = Model | Buffer[Any] | Table
