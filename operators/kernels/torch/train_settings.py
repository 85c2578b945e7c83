"""Settings of the train kernel, checked against its loss and its Model.

Owns: which parameters of the node training reads, their defaults and limits. Does not own: the
optimizer's parameters (optimizer.py), what an aggregate computes (reduce.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dataflow.errors import KernelError
from dataflow.kernel import KernelNode
from dataflow.loss import Loss, LossTerm
from dataflow.loss_terms import ROWS
from dataflow.model import Model, Schedule
from operators.kernels.torch.reduce import AGGREGATES, MASKED_ROWS
from operators.kernels.torch.temperatures import NodeTemperature, Temperatures


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSet:
    """One set of rows and the terms of the loss on it. name: the input that has the rows."""

    name: str
    loss: Loss
    minibatches: int = 1
    temperature: NodeTemperature = None
    sampler_temperature: NodeTemperature = None
    max_tokens: float | None = None
    step_rows: int | None = None
    own_samples: bool | tuple[bool, ...] = True

    @property
    def written_by_model(self) -> np.ndarray:
        """Boolean, [1] or of each of a prompt's samples: whether the trained Model wrote it."""
        return np.atleast_1d(np.array(self.own_samples, dtype=bool))

    @property
    def temperatures(self) -> Temperatures:
        """The temperatures of its log-probs."""
        return Temperatures.of(self.temperature)

    @property
    def sampled_alike(self) -> np.ndarray:
        """Boolean, [1] or of each of a prompt's samples: whether its recorded log-probs have that
        temperature, too.
        """
        return self.temperatures.equal(self.sampler_temperature)

    @property
    def atomic(self) -> bool:
        """Whether micro-batches keep groups whole, as a term that is one number a group needs."""
        return any(term.function.scope == "group" for term in self.loss.terms)

    @property
    def reads_entropy(self) -> bool:
        """Whether a term reads the entropy of the next token."""
        return any(term.function.entropy for term in self.loss.terms)

    @property
    def constant(self) -> float:
        """The divisor of aggregate="constant": the most tokens that a full update may have."""
        return (self.step_rows or 1) / self.minibatches * (self.max_tokens or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """The node's parameters that training reads."""

    loss: Loss
    lr: float | Schedule
    aggregate: str = "token_mean"
    masked_rows: str = "skip"
    epochs: int = 1
    minibatches: int = 1
    clip_norm: float | None = 1.0
    start: int = 0
    every: int = 1
    temperature: NodeTemperature = None
    sampler_temperature: NodeTemperature = None
    max_tokens: float | None = None
    step_rows: int | None = None
    own_samples: bool | tuple[bool, ...] = True
    own_rows: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Of each row set but the node's: its temperatures, max_tokens, step_rows and own_samples."""

    def trains_at(self, step: int) -> bool:
        """Whether this Step makes updates; the others only consume their rows."""
        return step >= self.start and step % self.every == 0

    @property
    def row_sets(self) -> tuple[RowSet, ...]:
        """The sets of rows that the terms of the loss stand on, the node's own first."""
        return tuple(self._row_set(name) for name in self.loss.row_sets)

    def _row_set(self, name: str) -> RowSet:
        if name != ROWS:
            bare = RowSet(name=name, loss=self.loss.on(name), minibatches=self.minibatches)
            return replace(bare, **self.own_rows.get(name, {}))
        return RowSet(
            name=name,
            loss=self.loss.on(name),
            minibatches=self.minibatches,
            temperature=self.temperature,
            sampler_temperature=self.sampler_temperature,
            max_tokens=self.max_tokens,
            step_rows=self.step_rows,
            own_samples=self.own_samples,
        )

    @staticmethod
    def of(node: KernelNode, model: Model) -> TrainSettings:
        """Read a node's settings. Raises KernelError if loss, Model and aggregate do not fit."""
        names = {field.name for field in dataclasses.fields(TrainSettings)}
        # The node has other parameters, too: the optimizer's are read by optimizer.py.
        settings = TrainSettings(**{k: v for k, v in node.params.items() if k in names})
        _require_aggregate(node.name, settings)
        for term in settings.loss.terms:
            _require_term(node.name, settings.aggregate, term, model)
        return settings


def _require_aggregate(node: str, settings: TrainSettings) -> None:
    if settings.aggregate not in AGGREGATES:
        raise KernelError(
            f"{node}: expected aggregate to be one of {', '.join(AGGREGATES)}, found"
            f" {settings.aggregate!r}. Fix: aggregate='token_mean'."
        )
    if settings.masked_rows not in MASKED_ROWS:
        raise KernelError(
            f"{node}: expected masked_rows to be one of {', '.join(MASKED_ROWS)}, found"
            f" {settings.masked_rows!r}. Fix: masked_rows='skip'."
        )
    if settings.aggregate == "constant":
        for row_set in settings.row_sets:
            _require_divisor(node, row_set)


def _require_divisor(node: str, row_set: RowSet) -> None:
    """Raise KernelError if the divisor of aggregate="constant" is not known for a row set."""
    if row_set.max_tokens and row_set.step_rows:
        return
    place = "" if row_set.name == ROWS else f" of {row_set.name}"
    raise KernelError(
        f"{node}: aggregate='constant' divides by the rows of a Step times max_tokens,"
        f" found {row_set.step_rows} and {row_set.max_tokens}{place}. Fix: rows of a"
        " generate(max_tokens=...)."
    )


def _require_term(node: str, aggregate: str, term: LossTerm, model: Model) -> None:
    if term.function.head != model.head:
        raise KernelError(
            f"{node}: {term.label} needs a Model with head={term.function.head!r}, found"
            f" {model.name!r} with head={model.head!r}. Fix: Model(...,"
            f" head={term.function.head!r})."
        )
    # The default may stay: such a term takes the mean of its numbers whatever aggregate says.
    fitting = {"token_mean"}
    if term.function.scope == "sequence":
        fitting.add("sequence_mean")
    if term.function.scope != "token" and aggregate not in fitting:
        raise KernelError(
            f"{node}: {term.label} is a number a {term.function.scope}, and takes only their"
            f" mean, found aggregate={aggregate!r}. Fix: leave aggregate out."
        )
