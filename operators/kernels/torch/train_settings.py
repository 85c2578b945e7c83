"""Settings of the train kernel, checked against its loss and its Model.

Owns: which parameters of the node training reads, their defaults and limits. Does not own: the
optimizer's parameters (optimizer.py), what an aggregate computes (reduce.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dataflow.errors import KernelError
from dataflow.kernel import KernelNode
from dataflow.loss import Loss, LossTerm
from dataflow.loss_terms import ROWS
from dataflow.model import Model, Schedule
from operators.kernels.torch.reduce import AGGREGATES, MASKED_ROWS
from operators.kernels.torch.temperatures import Given, Temperatures

_OF_A_SET = ("temperature", "sampler_temperature", "max_tokens", "step_rows", "own_samples")
"""What each row set has of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSet:
    """One set of rows and the terms of the loss on it. name: the input that has the rows."""

    name: str
    loss: Loss
    minibatches: int = 1
    temperature: Given = None
    sampler_temperature: Given = None
    max_tokens: float | None = None
    step_rows: int | None = None
    own_samples: bool | tuple[bool, ...] = True

    @property
    def own(self) -> np.ndarray:
        """Boolean, [1] or of each of a prompt's samples: whether the trained Model wrote it."""
        return np.atleast_1d(np.array(self.own_samples, dtype=bool))

    @property
    def at(self) -> Temperatures:
        """The temperatures of its log-probs."""
        return Temperatures.of(self.temperature)

    @property
    def as_sampled(self) -> np.ndarray:
        """Boolean, [1] or of each of a prompt's samples: whether its recorded log-probs have that
        temperature, too.
        """
        return self.at.equal(self.sampler_temperature)

    @property
    def atomic(self) -> bool:
        """Whether a micro-batch has whole groups: a term is a number for each."""
        return any(term.function.scope == "group" for term in self.loss.terms)

    @property
    def entropy(self) -> bool:
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
    temperature: Given = None
    sampler_temperature: Given = None
    max_tokens: float | None = None
    step_rows: int | None = None
    own_samples: bool | tuple[bool, ...] = True
    own_rows: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Of each row set but the node's: its temperatures, max_tokens, step_rows and own_samples."""

    @property
    def row_sets(self) -> tuple[RowSet, ...]:
        """The sets of rows that the terms of the loss stand on, the node's own first."""
        main = {name: getattr(self, name) for name in _OF_A_SET}
        parts = self.minibatches
        return tuple(
            RowSet(
                name=name,
                loss=self.loss.on(name),
                minibatches=parts,
                **(main if name == ROWS else self.own_rows.get(name, {})),
            )
            for name in self.loss.row_sets
        )

    @staticmethod
    def of(node: KernelNode, model: Model) -> TrainSettings:
        """A node's settings. Raises KernelError if loss, Model and aggregate do not fit."""
        known = {f.name for f in dataclasses.fields(TrainSettings)}
        settings = TrainSettings(**{k: v for k, v in node.params.items() if k in known})
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
    for rows in settings.row_sets if settings.aggregate == "constant" else ():
        if not (rows.max_tokens and rows.step_rows):
            of = "" if rows.name == ROWS else f" of {rows.name}"
            raise KernelError(
                f"{node}: aggregate='constant' divides by the rows of a Step times max_tokens,"
                f" found {rows.step_rows} and {rows.max_tokens}{of}. Fix: rows of a"
                " generate(max_tokens=...)."
            )


def _require_term(node: str, aggregate: str, term: LossTerm, model: Model) -> None:
    if term.function.head != model.head:
        raise KernelError(
            f"{node}: {term.label} needs a Model with head={term.function.head!r}, found"
            f" {model.name!r} with head={model.head!r}. Fix: Model(...,"
            f" head={term.function.head!r})."
        )
    own = "sequence_mean" if term.function.scope == "sequence" else "token_mean"
    if term.function.scope != "token" and aggregate not in ("token_mean", own):
        raise KernelError(
            f"{node}: {term.label} is a number a {term.function.scope}, and takes only their"
            f" mean, found aggregate={aggregate!r}. Fix: leave aggregate out."
        )
