"""The train kernel: all updates of a Step on one module.

Owns: the order of things (minibatches, micro-batches, backward, update), metrics of training,
and the kernel's state on disk. Does not own: formulas (operators/losses.py), reduction
(reduce.py), packing (packing.py), the optimizer (optimizer.py).

The module may be the one that generates in this process: it stays in eval mode, its weights are
changed in place, and no gradient outlives a Step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataflow.errors import KernelError
from dataflow.kernel import Assignment, KernelNode, Layout, Piece, Session
from dataflow.loss import Loss, LossTerm, Now
from dataflow.model import Model, Schedule, value_at
from operators.kernels.tensors import gather
from operators.kernels.torch.heads import predictions, values
from operators.kernels.torch.minibatches import minibatches
from operators.kernels.torch.models import load_model, load_pieces, pieces, save_model
from operators.kernels.torch.optimizer import Optimizer, chosen
from operators.kernels.torch.packing import Packed, micro_batches, pack
from operators.kernels.torch.reduce import AGGREGATES, Sums, Weights, bad_row, count_weights, reduced
from operators.kernels.torch.steprows import StepRows, now_of, step_rows, tensors_of

OPTIMIZER_FILE = "optimizer.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """The node's parameters, as the kernel uses them."""

    loss: Loss
    lr: float | Schedule
    aggregate: str = "token_mean"
    epochs: int = 1
    minibatches: int = 1
    clip_norm: float | None = 1.0
    start: int = 0
    temperature: float | None = None
    max_tokens: int | None = None


class TorchTrain:
    """train: `step` makes epochs * minibatches updates, one optimizer step each.

    params beside those of `train`: temperature, of the rollout whose log-probs are compared (None or 0.0 is 1.0);
    max_tokens, the divisor of aggregate="constant". Metrics: optim/lr, optim/grad_norm (mean over updates),
    optim/updates, optim/skipped (updates without a trained token), loss/<label>, train/tokens (trained tokens, each
    epoch's counted), train/fed_tokens, train/micro_batches, policy/mismatch_kl, and those of the formulas.
    """

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        """Raises KernelError for parameters that this kernel cannot honour."""
        model = node.models["model"]
        known = {f.name for f in dataclasses.fields(_Settings)}
        self._name, self._model, self._seed = node.name, model, session.seed
        self._settings = _Settings(**{k: v for k, v in node.params.items() if k in known})
        _require(node.name, self._settings, model)
        self._budget = layout.tokens
        self._temperature = float(self._settings.temperature or 1.0)
        self._module = session.module(model, lambda: load_model(model))
        self._device = next(self._module.parameters()).device
        settings = chosen(node.params.get("optimizer", "adamw"), node.name)
        self._optimizer = Optimizer(self._module, settings, self._settings.clip_norm)
        self._steps = 0

    def step(self, assignment: Assignment) -> Mapping[str, float]:
        """All updates of one Step. Raises KernelError where loss or gradient is not finite; the Step is lost then."""
        settings = self._settings
        lr = value_at(settings.lr, assignment.step)
        sums, counts = Sums(), {"optim/updates": 0.0, "optim/skipped": 0.0, "train/tokens": 0.0}
        counts |= {"train/fed_tokens": 0.0, "train/micro_batches": 0.0}
        self._steps = assignment.step
        if assignment.step < settings.start or not len(assignment.keys):
            return counts | {"optim/lr": lr}
        rows = step_rows(assignment, settings.loss, self._name)
        split = minibatches(
            rows.keys.position,
            epochs=settings.epochs,
            count=settings.minibatches,
            seed=self._seed,
            node=self._name,
            step=assignment.step,
        )
        for update, picked in enumerate(split):
            self._update(rows, picked, assignment.step, lr, sums, counts, first=update == 0)
        return counts | {"optim/lr": lr} | sums.means()

    def _update(
        self,
        rows: StepRows,
        picked: np.ndarray,
        step: int,
        lr: float,
        sums: Sums,
        counts: dict[str, float],
        *,
        first: bool,
    ) -> None:
        """One optimizer step on the picked rows; skipped, and counted, where none has a trained token."""
        aggregate, cap = self._settings.aggregate, self._settings.max_tokens
        weights = count_weights(rows.trained, rows.groups, picked, aggregate=aggregate, max_tokens=cap)
        if not weights.tokens:
            counts["optim/skipped"] += 1
            return
        for part in self._parts(rows, picked, weights):
            packed = pack(rows.prompts, rows.completions, part)
            self._backward(rows, packed, weights, step, sums, first=first)
            counts["train/micro_batches"] += 1
            counts["train/fed_tokens"] += len(packed.ids)
        for term in self._settings.loss.terms:
            sums.add(f"loss/{term.label}", 0.0, 1.0)
        norm = self._optimizer.norm()
        if not torch.isfinite(norm):
            self._optimizer.clear()
            raise self._not_finite("a gradient norm", float(norm), rows, picked[:1], step)
        self._optimizer.step(lr, norm)
        sums.add("optim/grad_norm", norm, 1.0)
        counts["optim/updates"] += 1
        counts["train/tokens"] += weights.tokens

    def _parts(self, rows: StepRows, picked: np.ndarray, weights: Weights) -> list[np.ndarray]:
        """The micro-batches of an update: of its live rows, or, for a loss over groups, of whole groups."""
        atomic = any(term.function.scope == "group" for term in self._settings.loss.terms)
        wanted = picked if atomic else picked[weights.live[picked]]
        groups = (rows.groups if atomic else rows.prompt_groups)[wanted]
        return micro_batches(rows.prompts, rows.completions, wanted, groups, tokens=self._budget, atomic=atomic)

    def _backward(
        self, rows: StepRows, packed: Packed, weights: Weights, step: int, sums: Sums, *, first: bool
    ) -> None:
        """Forward, loss and backward of one micro-batch."""
        now = now_of(rows, packed, step, self._device)
        self._ask_model(rows, packed, now)
        if first:
            _mismatch(now, sums)
        total = torch.zeros((), device=self._device)
        for term in self._settings.loss.terms:
            total = total + self._term(term, rows, packed, now, weights, step, sums)
        if not torch.isfinite(total):
            self._optimizer.clear()
            raise self._not_finite(
                "a loss", float(total.detach()), rows, self._first_bad(rows, packed, now, step), step
            )
        total.backward()
        self._optimizer.collect()

    def _ask_model(self, rows: StepRows, packed: Packed, now: Now) -> None:
        """Fill in what the loss reads of the model."""
        if self._model.head == "scalar":
            now.values = values(self._module, packed, self._device)
            return
        written = gather(rows.completions.values, packed.tokens, self._device, torch.int64)
        entropy = any(term.function.entropy for term in self._settings.loss.terms)
        found = predictions(self._module, packed, written, temperature=self._temperature, entropy=entropy)
        now.logprobs, now.entropy = found.logprobs, found.entropy

    def _term(
        self, term: LossTerm, rows: StepRows, packed: Packed, now: Now, weights: Weights, step: int, sums: Sums
    ) -> Tensor:
        """One term's share of the loss, times its weight."""
        params = {name: resolved(value, step) for name, value in term.params}
        terms = term.function.fn(now, **tensors_of(rows, term, packed, now), **params)
        share = reduced(terms, term.function.scope, term.label, now, weights, packed.rows)
        sums.add_all(terms.metrics)
        sums.add(f"loss/{term.label}", share, 0.0)
        return value_at(term.weight, step) * share

    @torch.no_grad()
    def _first_bad(self, rows: StepRows, packed: Packed, now: Now, step: int) -> np.ndarray:
        """The first row with a term that is not finite; the micro-batch's first where only their sum is not."""
        found = []
        for term in self._settings.loss.terms:
            params = {name: resolved(value, step) for name, value in term.params}
            loss = term.function.fn(now, **tensors_of(rows, term, packed, now), **params).loss
            found.append(bad_row(loss, term.function.scope, now))
        return packed.rows[[min((row for row in found if row is not None), default=0)]]

    def _not_finite(self, what: str, found: float, rows: StepRows, row: np.ndarray, step: int) -> KernelError:
        key = rows.keys.take(row).rows()[0]
        return KernelError(
            f"{self._name}: step {step}: expected {what} that is finite, found {found}; first row {key}. "
            "Fix: a lower lr, or look at that row's advantage and log-probs."
        )

    def pieces(self) -> Iterable[Piece]:
        """The module's own tensors: whoever keeps them copies them."""
        return pieces(self._module)

    def save(self, directory: Path) -> None:
        """Write the Hugging Face directory of the Model, and optimizer.pt beside its weights."""
        save_model(self._module, directory)
        self._optimizer.save(directory / OPTIMIZER_FILE, self._steps)

    def restore(self, directory: Path) -> None:
        """Read what `save` wrote; the next Step gives the same bits as it would have."""
        saved = load_model(dataclasses.replace(self._model, base=str(directory)), self._device)
        load_pieces(self._module, pieces(saved))
        self._steps = self._optimizer.restore(directory / OPTIMIZER_FILE)

    def close(self) -> None:
        del self._module, self._optimizer


def resolved(value: Any, step: int) -> Any:
    """A parameter of a loss at a Step: schedules become numbers, inside tuples too."""
    if isinstance(value, Schedule):
        return value.at(step)
    return tuple(resolved(v, step) for v in value) if isinstance(value, tuple) else value


def _mismatch(now: Now, sums: Sums) -> None:
    """policy/mismatch_kl: KL(sampler | trainer) by the k3 estimator, before the Step's first update."""
    if now.logprobs is None or now.sampler_logprobs is None:
        return
    d = (now.logprobs.detach() - now.sampler_logprobs).masked_fill(now.mask == 0, 0.0)
    sums.add("policy/mismatch_kl", (d.exp() - 1.0 - d).sum(), now.mask.sum())


def _require(node: str, settings: _Settings, model: Model) -> None:
    """Raise KernelError for a loss and a Model, or an aggregate, that do not go together."""
    if settings.aggregate not in AGGREGATES:
        raise KernelError(
            f"{node}: expected aggregate to be one of {', '.join(AGGREGATES)}, found {settings.aggregate!r}. "
            "Fix: aggregate='token_mean'."
        )
    if settings.aggregate == "constant" and not settings.max_tokens:
        raise KernelError(
            f"{node}: aggregate='constant' divides by max_tokens, found none. Fix: rows of a generate(max_tokens=...)."
        )
    for term in settings.loss.terms:
        if term.function.head != model.head:
            raise KernelError(
                f"{node}: {term.label} needs a Model with head={term.function.head!r}, found {model.name!r} with "
                f"head={model.head!r}. Fix: Model(..., head={term.function.head!r})."
            )
        if term.function.scope != "token" and settings.aggregate != "token_mean":
            raise KernelError(
                f"{node}: {term.label} is a number a {term.function.scope}, and takes only their mean, found "
                f"aggregate={settings.aggregate!r}. Fix: leave aggregate out."
            )
