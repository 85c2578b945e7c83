"""The backward pass of one micro-batch: forward, the terms of the loss, gradients.

Owns: what the model is asked for, the sum of the terms, their metrics, and which row has a loss
that is not finite. Does not own: which rows are a micro-batch and how gradients become an update
(train.py), the formulas (operators), reduction (reduce.py), packing (packing.py).

The loss is that of the graph's terms alone: the auxiliary loss that balances a router's experts
(Qwen3-MoE, Mixtral) is no part of it, whatever config.json says.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

import numpy as np
import torch
from torch import Tensor, nn

from dataflow.batch import Keys, Ragged
from dataflow.errors import KernelError
from dataflow.loss import LossTerm, Now, Terms
from dataflow.model import value_at
from operators.kernels.tensors import gather
from operators.kernels.torch.context_ranks import ContextRanks, TokenShare
from operators.kernels.torch.heads import predict_values, predict_values_and_scores, predictions
from operators.kernels.torch.loss_call import LossFault, call_loss, resolve_parameter
from operators.kernels.torch.mismatch import add_mismatch, find_recorded_alike
from operators.kernels.torch.model_numbers import (
    ModelNumbers,
    NowByTerm,
    complete_now,
    ids_of,
    reads_scores,
)
from operators.kernels.torch.optimizer import Optimizer
from operators.kernels.torch.packing import Packed, pack
from operators.kernels.torch.parallel import Sharded, Turns
from operators.kernels.torch.probe import vocabulary_of
from operators.kernels.torch.reduce import find_bad_row, reduce_term
from operators.kernels.torch.slices import Slices
from operators.kernels.torch.steprows import now_of, tensors_of
from operators.kernels.torch.temperatures import Temperature
from operators.kernels.torch.train_settings import RowSet
from operators.kernels.torch.updates import Part, StepUpdate

ONE_TOKEN = Ragged(np.zeros(1, dtype=np.int32), np.array([0, 1]))
"""Prompt and completion of the row that a rank without rows feeds to take part in a collective."""

MicroBatch = tuple[Part, np.ndarray]
"""Rows of one set."""


def not_finite(node: str, what: str, number: float, step: int, keys: Keys) -> KernelError:
    """Make the error for a loss or gradient that is not finite. keys: of rows that it may come
    from, the likeliest first.
    """
    return KernelError(
        f"{node}: step {step}: expected {what} that is finite, found {number}; first row"
        f" {keys.rows()[0]}. Fix: a lower lr, or look at that row's advantage and log-probs."
    )


class LossBackward:
    """Of one train node. split, slices: what splits the module's weights, None where whole;
    context: what divides its tokens, likewise.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        row_sets: tuple[RowSet, ...],
        optimizer: Optimizer,
        *,
        scalar: bool,
        split: Sharded | None,
        slices: Slices | None,
        context: ContextRanks | None = None,
    ) -> None:
        """row_sets: of the loss. scalar: whether the Model has a scalar head."""
        self._name, self._module, self._row_sets = name, module, row_sets
        self._optimizer, self._scalar = optimizer, scalar
        self._split, self._slices, self._context = split, slices, context
        self._device = next(module.parameters()).device
        self._vocabulary = vocabulary_of(module)

    def run(
        self, update: StepUpdate, part: Part, rows: np.ndarray, turns: Turns[MicroBatch]
    ) -> None:
        """Run forward, loss and backward of one micro-batch; gradients are added up in the
        optimizer's masters. rows: indices in the part's. Raises KernelError for a loss that is not
        finite, or fails.
        """
        whole = reads_scores(part.row_set.loss)
        packed = pack(part.rows.prompts, part.rows.completions, rows, whole=whole)
        now = now_of(part.rows, packed, update.step, self._device)
        now.vocabulary = self._vocabulary
        ids = ids_of(part.rows, part.row_set.loss, packed, self._device)
        samples = part.rows.keys.sample[packed.rows]
        temperature = part.row_set.temperatures.of_tokens(samples, packed.row)
        numbers = self._ask(part.rows.completions, packed, part.row_set, ids, temperature)
        with ExitStack() as where_it_fails:
            where_it_fails.callback(turns.through, numbers.tokens)
            now_by_term = complete_now(now, numbers, ids, scalar=self._scalar)
            total = self._total(update, part, packed, now_by_term)
            where_it_fails.pop_all()
        total.backward()
        self._optimizer.collect()
        update.sums.count("train/micro_batches", 1)
        update.sums.count("train/fed_tokens", len(packed.ids))

    def idle(self) -> None:
        """Run a forward and a backward of one token, with weight 0, as other ranks run theirs."""
        packed = pack(ONE_TOKEN, ONE_TOKEN, np.zeros(1, dtype=np.int64))
        numbers = self._ask(ONE_TOKEN, packed, self._row_sets[0], {}, 1.0)
        (0.0 * numbers.tokens.sum()).backward()
        self._optimizer.collect()

    def _total(
        self, update: StepUpdate, part: Part, packed: Packed, now_by_term: NowByTerm
    ) -> Tensor:
        """Sum the terms of the loss of one micro-batch."""
        if update.first:  # the others begin with weights that this Step has changed
            recorded_alike = find_recorded_alike(part.row_set, part.rows, packed, self._device)
            add_mismatch(now_by_term.now, update.sums, recorded_alike)
        total = torch.zeros((), device=self._device)
        for term in part.row_set.loss.terms:
            total = total + self._share(term, update, part, packed, now_by_term.of(term))
        if not torch.isfinite(total):
            bad_rows = self._first_bad(update, part, packed, now_by_term)
            keys = part.rows.keys.take(bad_rows)
            raise not_finite(self._name, "a loss", float(total.detach()), update.step, keys)
        if not total.requires_grad:
            raise KernelError(
                f"{self._name}: expected a loss that depends on what the model says, found a"
                " constant. Fix: compute it from now.logprobs, now.values or now.entropy, without"
                " detach()."
            )
        return total

    def _ask(
        self,
        completions: Ragged,
        packed: Packed,
        row_set: RowSet,
        ids: Mapping[str, Tensor],
        temperature: Temperature,
    ) -> ModelNumbers:
        """Compute values or log-probs of the completion tokens, and what else the set's losses
        read, in one forward. temperature: of the tokens.
        """
        share = TokenShare.of(packed, self._context)
        written = gather(completions.values, share.packed.tokens, self._device, torch.int64)
        other_ids = torch.cat([*ids.values()], dim=1) if ids else None
        other_ids = share.take_ids(other_ids)
        at = (self._module, share.packed)

        def ask() -> ModelNumbers:
            if self._scalar and reads_scores(row_set.loss):
                values, scores = predict_values_and_scores(*at, self._device, share.attention_pass)
                return ModelNumbers(tokens=values, scores=scores)
            if self._scalar:
                values = predict_values(*at, self._device, share.attention_pass)
                return ModelNumbers(tokens=values)
            predicted = predictions(
                *at,
                written,
                temperature=share.take_temperature(temperature),
                entropy=row_set.reads_entropy,
                ids=other_ids,
                attention_pass=share.attention_pass,
            )
            return ModelNumbers(
                tokens=predicted.logprobs, entropy=predicted.entropy, at_ids=predicted.at_ids
            )

        # Split weights are gathered by Sharded.forward, so all that computes runs inside it.
        numbers = self._split(ask) if self._split else ask()
        numbers = numbers.each(self._slices.same) if self._slices else numbers
        return share.join(numbers)

    def _share(
        self, term: LossTerm, update: StepUpdate, part: Part, packed: Packed, now: Now
    ) -> Tensor:
        """Compute this micro-batch's share of one term of the loss, times the term's weight."""
        terms = self._terms(term, update, part, packed, now)
        share = reduce_term(terms, term.function.scope, term.label, now, part.weights, packed.rows)
        update.sums.add_all(terms.metrics)
        update.losses.count(f"loss/{term.label}", share.detach())
        return value_at(term.weight, update.step) * share

    def _terms(
        self, term: LossTerm, update: StepUpdate, part: Part, packed: Packed, now: Now
    ) -> Terms:
        """Call the term's formula. Raises KernelError if it raises or returns no Terms."""
        params = {name: resolve_parameter(param, update.step) for name, param in term.params}
        ports = tensors_of(part.rows, term, packed, now)
        try:
            return call_loss(term.function.fn, now, ports, params)
        except LossFault as fault:
            raise KernelError(
                f"{self._name}: step {update.step}: loss {term.label!r} failed: {fault}"
            ) from None

    @torch.no_grad()
    def _first_bad(
        self, update: StepUpdate, part: Part, packed: Packed, now_by_term: NowByTerm
    ) -> np.ndarray:
        """Find the first row with a non-finite term; the first of all if only the sum is not
        finite.
        """
        bad_rows: list[int] = []
        for term in part.row_set.loss.terms:
            terms = self._terms(term, update, part, packed, now_by_term.of(term))
            row = find_bad_row(terms.loss, term.function.scope, now_by_term.now)
            if row is not None:
                bad_rows.append(row)
        return packed.rows[[min(bad_rows, default=0)]]
