"""The train kernel: all updates of a Step on one module.

Owns: the order of micro-batches, backward and update, training metrics, and the kernel's state on
disk. Does not own: settings (train_settings.py), which rows make an update (updates.py), formulas
(operators), reduction (reduce.py), packing (packing.py), the optimizer (optimizer.py), collectives
(parallel.py), sampler against trainer (mismatch.py), which weights changed (weight_sample.py).

The loss is that of the graph's terms alone: the auxiliary loss that balances a router's experts
(Qwen3-MoE, Mixtral) is no part of it, whatever config.json says.

The module may also generate in this process: it stays in eval mode, its weights change in place,
and no gradient outlives a Step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataflow.batch import Keys, Ragged
from dataflow.errors import KernelError
from dataflow.kernel import Assignment, KernelNode, Layout, Piece, Session
from dataflow.kernel_abilities import Probeable, Sleeper
from dataflow.loss import LossTerm, Now, Terms
from dataflow.model import value_at
from operators.kernels.overlong import require_positions
from operators.kernels.tensors import gather
from operators.kernels.text import require_embedded_ids
from operators.kernels.torch.heads import predict_values, predict_values_and_scores, predictions
from operators.kernels.torch.loss_call import LossFault, call_loss, resolve_parameter
from operators.kernels.torch.mismatch import add_mismatch, add_sampled_entropy, find_recorded_alike
from operators.kernels.torch.model_numbers import (
    ModelNumbers,
    NowByTerm,
    complete_now,
    ids_of,
    reads_scores,
    require_ids,
)
from operators.kernels.torch.models import find_position_limit, load_model, load_pieces, pieces
from operators.kernels.torch.optimizer import Optimizer, require_adamw, save_optimizer_state
from operators.kernels.torch.packing import Packed, micro_batches, pack
from operators.kernels.torch.parallel import Ranks, Turns, collect_pieces, part_like
from operators.kernels.torch.probe import compute_probe, vocabulary_of
from operators.kernels.torch.reduce import MetricSums, find_bad_row, reduce_term
from operators.kernels.torch.saving import save_model
from operators.kernels.torch.steprows import now_of, step_rows, tensors_of
from operators.kernels.torch.temperatures import Temperature
from operators.kernels.torch.train_settings import RowSet, TrainSettings
from operators.kernels.torch.training_module import prepare_module, require_one_split
from operators.kernels.torch.updates import EveryRow, Part, StepSet, StepUpdate, draw_parts
from operators.kernels.torch.weight_sample import WeightSample

OPTIMIZER_FILE = "optimizer.pt"

ONE_TOKEN = Ragged(np.zeros(1, dtype=np.int32), np.array([0, 1]))
"""Prompt and completion of the row that a rank without rows feeds to take part in a collective."""

COUNTS = (
    "optim/updates", "optim/skipped", "train/tokens", "train/fed_tokens", "train/micro_batches",
)  # fmt: skip
"""Metrics that add up over the updates of a Step."""


_MicroBatch = tuple[Part, np.ndarray]
"""Rows of one set."""


class TorchTrain(Sleeper, Probeable):
    """train: `step` makes epochs * minibatches updates, one optimizer step each.

    params besides those of `train`: sampler_temperature of the recorded log-probs (None: the same;
    rows where it differs, as 0.0 does, are not in policy/mismatch); max_tokens and step_rows:
    the longest answer (the mean of several samplers' longest) and the rows of a full Step, whose
    product divides aggregate="constant"; own_rows: these four of each row set that terms of the
    loss have of their own. temperature None or 0.0 means 1.0; it and sampler_temperature may be
    tuples, with one number for each of a prompt's samples. Metrics: optim/lr, optim/grad_norm (mean
    over updates), optim/updates, optim/skipped (updates without a trained token), optim/changed
    (weight_sample.py; only if an update was made), loss/<label>, train/tokens (trained tokens of
    all epochs), train/fed_tokens, train/micro_batches, policy/sampled_entropy, those of
    mismatch.py, and those of the formulas. own_samples: whether the trained Model wrote the rows,
    one bool or one for each of a prompt's samples; only those count in policy/sampled_entropy.
    """

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        """Raises KernelError for parameters that this kernel cannot honour."""
        torch.set_num_threads(layout.threads)
        model = node.models["model"]
        self._name, self._model, self._seed = node.name, model, session.seed
        self._settings = TrainSettings.of(node, model)
        require_one_split(layout, node.name)
        self._budget = layout.tokens
        self._position_limit = find_position_limit(model.base)
        self._module = session.module(model, lambda: load_model(model))
        self._device = next(self._module.parameters()).device
        self._ranks = Ranks(session, self._device, node.name, layout.tensor)
        self._split, self._slices = prepare_module(
            self._module, layout, session, self._ranks, node.name
        )
        settings = require_adamw(node.params.get("optimizer", "adamw"), node.name)
        # After the splitting: the optimizer takes this rank's part of each weight.
        clip_norm, offload = self._settings.clip_norm, layout.offload == "optimizer"
        self._optimizer = Optimizer(
            self._module, settings, clip_norm, self._slices, offload=offload
        )
        self._steps = 0

    def step(self, assignment: Assignment) -> Mapping[str, float]:
        """Make all updates of one Step. Raises KernelError if a loss or gradient is not finite.

        A Step that fails is lost; it fails on all ranks, with the same message.
        """
        settings, self._steps = self._settings, assignment.step
        sums = MetricSums()
        for name in COUNTS:
            sums.count(name, 0.0)
        lr = value_at(settings.lr, assignment.step)
        # A set without a row in this Step is on no rank, so all ranks leave it out alike.
        row_sets = [each for each in settings.row_sets if assignment.rows_of(each.name) is not None]
        if settings.trains_at(assignment.step) and row_sets:
            sample, tokens = WeightSample(self._optimizer.stored_masters), 0
            for update in self._updates(assignment, row_sets, lr, sums):
                self._update(update)
                tokens += update.tokens
            if tokens:
                sums.add("optim/changed", sample.count_changed(), len(sample))
        return {"optim/lr": lr} | sums.means(self._ranks.add_up, self._ranks.greatest)

    def _updates(
        self, assignment: Assignment, row_sets: Sequence[RowSet], lr: float, sums: MetricSums
    ) -> Iterator[StepUpdate]:
        """Draw the updates from the rows of all ranks, of each set by itself; this rank's part of
        each.
        """
        with self._ranks.together():
            step_sets = [self._read(assignment, row_set) for row_set in row_sets]
        for step_set in step_sets:
            add_sampled_entropy(step_set.row_set, step_set.rows, sums)
        parts_by_set = [self._draw(assignment, step_set) for step_set in step_sets]
        first = True
        for update_parts in zip(*parts_by_set, strict=True):
            parts, keys = zip(*update_parts, strict=True)
            update = StepUpdate(parts, Keys.concat(keys), assignment.step, lr, first, sums)
            yield update
            first = first and not update.tokens  # without a token it is skipped

    def _read(self, assignment: Assignment, row_set: RowSet) -> StepSet:
        """Read this rank's rows of a set. Raises for rows that the Model cannot read."""
        rows = step_rows(assignment, self._settings.loss, self._name, row_set.name)
        name, limit = self._model.name, self._position_limit
        require_positions(self._name, name, limit, rows.keys, rows.prompts, rows.completions)
        for ids in (rows.prompts, rows.completions):
            require_embedded_ids(self._name, name, ids, rows.keys, self.vocabulary)
        if len(rows.keys):
            require_ids(self._name, name, rows, row_set.loss, self.vocabulary)
        assigned = assignment.rows_of(row_set.name)
        assert assigned is not None
        return StepSet(row_set, rows, assigned)

    def _draw(self, assignment: Assignment, step_set: StepSet) -> Iterator[tuple[Part, Keys]]:
        """Draw the rows of a set in each update."""
        every = EveryRow.of(step_set, self._ranks)
        settings, name, step = self._settings, self._name, assignment.step
        return draw_parts(step_set, every, settings, seed=self._seed, node=name, step=step)

    def _update(self, update: StepUpdate) -> None:
        """Make one optimizer step; skipped, and counted, if no row has a trained token."""
        sums, lead = update.sums, self._ranks.lead
        if not update.tokens:
            sums.count("optim/skipped", lead)
            return
        with ExitStack() as where_it_fails:
            where_it_fails.callback(self._optimizer.clear)
            norm = self._gradient(update)
            where_it_fails.pop_all()
        self._optimizer.step(update.lr, norm)
        sums.add("optim/grad_norm", norm, 1.0)
        # All ranks have these numbers: the first alone reports them, so that sums count them once.
        sums.count("optim/updates", lead)
        sums.count("train/tokens", lead * update.tokens)
        for part in update.parts:
            if not part.weights.tokens:
                continue
            for term in part.row_set.loss.terms:
                # The shares of micro-batches were added with a count of 0: one count an update.
                sums.add(f"loss/{term.label}", 0.0, lead)

    def _gradient(self, update: StepUpdate) -> Tensor:
        """Run all micro-batches. Returns the norm of the gradient over all ranks' rows."""
        idle = self._idle if self._split else None
        batches: list[_MicroBatch] = []
        for part in update.parts:
            batches += self._micro_batches(part)
        with self._ranks.together(batches, idle) as turns:
            for part, rows in turns:
                whole = reads_scores(part.row_set.loss)
                packed = pack(part.rows.prompts, part.rows.completions, rows, whole=whole)
                self._backward(update, part, packed, turns)
                update.sums.count("train/micro_batches", 1)
                update.sums.count("train/fed_tokens", len(packed.ids))
        if not self._split:  # FSDP sums them within each backward
            self._ranks.sum_gradients(self._optimizer.masters)
        norm = self._optimizer.norm()
        # Waits for the device, once an update: weights must not be updated by what is no number.
        if not torch.isfinite(norm):
            raise self._not_finite("a gradient norm", float(norm), update.step, update.keys)
        return norm

    def _micro_batches(self, part: Part) -> list[_MicroBatch]:
        """Cut an update's rows of a set: the live ones, or whole groups for a loss over groups."""
        rows, picked, atomic = part.rows, part.picked, part.row_set.atomic
        if atomic:
            groups = rows.groups[picked]
        else:
            picked = picked[part.weights.live[picked]]
            groups = rows.prompt_groups[picked]
        index_sets = micro_batches(
            rows.prompts, rows.completions, picked, groups, tokens=self._budget, atomic=atomic
        )
        return [(part, indices) for indices in index_sets]

    def _backward(
        self, update: StepUpdate, part: Part, packed: Packed, turns: Turns[_MicroBatch]
    ) -> None:
        """Run forward, loss and backward of one micro-batch."""
        now = now_of(part.rows, packed, update.step, self._device)
        now.vocabulary = self.vocabulary
        ids = ids_of(part.rows, part.row_set.loss, packed, self._device)
        samples = part.rows.keys.sample[packed.rows]
        temperature = part.row_set.temperatures.of_tokens(samples, packed.row)
        numbers = self._ask(part.rows.completions, packed, part.row_set, ids, temperature)
        with ExitStack() as where_it_fails:
            where_it_fails.callback(turns.through, numbers.tokens)
            scalar = self._model.head == "scalar"
            now_by_term = complete_now(now, numbers, ids, scalar=scalar)
            total = self._total(update, part, packed, now_by_term)
            where_it_fails.pop_all()
        total.backward()
        self._optimizer.collect()

    def _idle(self) -> None:
        """Run a forward and a backward of one token, with weight 0."""
        packed = pack(ONE_TOKEN, ONE_TOKEN, np.zeros(1, dtype=np.int64))
        numbers = self._ask(ONE_TOKEN, packed, self._settings.row_sets[0], {}, 1.0)
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
            raise self._not_finite("a loss", float(total.detach()), update.step, keys)
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
        scalar = self._model.head == "scalar"
        written = gather(completions.values, packed.tokens, self._device, torch.int64)
        other_ids = torch.cat([*ids.values()], dim=1) if ids else None

        def ask() -> ModelNumbers:
            if scalar and reads_scores(row_set.loss):
                values, scores = predict_values_and_scores(self._module, packed, self._device)
                return ModelNumbers(tokens=values, scores=scores)
            if scalar:
                return ModelNumbers(tokens=predict_values(self._module, packed, self._device))
            predicted = predictions(
                self._module,
                packed,
                written,
                temperature=temperature,
                entropy=row_set.reads_entropy,
                ids=other_ids,
            )
            return ModelNumbers(
                tokens=predicted.logprobs, entropy=predicted.entropy, at_ids=predicted.at_ids
            )

        # Split weights are gathered by Sharded.forward, so all that computes runs inside it.
        numbers = self._split(ask) if self._split else ask()
        return numbers.each(self._slices.same) if self._slices else numbers

    def _share(
        self, term: LossTerm, update: StepUpdate, part: Part, packed: Packed, now: Now
    ) -> Tensor:
        """Compute this micro-batch's share of one term of the loss, times the term's weight."""
        terms = self._terms(term, update, part, packed, now)
        share = reduce_term(terms, term.function.scope, term.label, now, part.weights, packed.rows)
        update.sums.add_all(terms.metrics)
        update.sums.add(f"loss/{term.label}", share, 0.0)
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

    def _not_finite(self, what: str, number: float, step: int, keys: Keys) -> KernelError:
        return KernelError(
            f"{self._name}: step {step}: expected {what} that is finite, found {number}; first row"
            f" {keys.rows()[0]}. Fix: a lower lr, or look at that row's advantage and log-probs."
        )

    def pieces(self) -> Iterable[Piece]:
        """The module's own tensors: a caller that keeps them must copy them.

        Split weights are gathered as the first rank takes them; the others take part and get none.
        """
        module_pieces = pieces(self._module)
        if not self._partial:
            return module_pieces
        return collect_pieces(self._ranks, module_pieces)

    @property
    def _partial(self) -> bool:
        """Whether this rank has only a part of the weights."""
        return self._split is not None or self._slices is not None

    @property
    def vocabulary(self) -> int:
        """How many token ids the module knows."""
        return vocabulary_of(self._module)

    def probe(self, ids: Ragged) -> np.ndarray:
        """The module's numbers for these rows (probe.py)."""
        within = self._split and self._split.look
        return compute_probe(self._module, ids, head=self._model.head, within=within)

    def save(self, directory: Path) -> None:
        """Write the Model's Hugging Face directory, and optimizer.pt next to its weights."""
        weights, state = self._gather_weights(), None
        # Split state is gathered, which needs every rank; only the first one writes.
        if self._partial or self._ranks.lead:
            state = self._optimizer.state(self._steps)
        if state is not None and self._ranks.lead:
            save_model(self._module, directory, weights, exact=True)
            save_optimizer_state(state, directory / OPTIMIZER_FILE)

    def save_weights(self, directory: Path) -> None:
        """Write the Model's Hugging Face directory, without the state that only training needs."""
        weights = self._gather_weights()
        if self._ranks.lead:
            save_model(self._module, directory, weights)

    def _gather_weights(self) -> dict[str, Tensor] | None:
        """Gather split weights on the first rank's host; None if they are not split.

        Gathers all before anything is written: a full disk must not leave other ranks waiting.
        """
        if not self._partial:
            return None
        return {piece.name: piece.data.cpu() for piece in self.pieces()}

    def restore(self, directory: Path) -> None:
        """Read what `save` wrote, on any number of ranks; the next Step gives the same bits."""
        targets = {piece.name: piece.data for piece in pieces(self._module)}
        saved_model = replace(self._model, base=str(directory))
        saved = load_model(saved_model, self._device)
        parts: list[Piece] = []
        for piece in pieces(saved):
            target = targets.get(piece.name, piece.data)
            parts.append(Piece(piece.name, part_like(target, piece.data)))
        load_pieces(self._module, parts)
        self._steps = self._optimizer.restore(directory / OPTIMIZER_FILE)

    def sleep(self) -> None:
        """Move weights and optimizer to the host and free the device; between two Steps."""
        self._move(torch.device("cpu"))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Move everything back to where it was."""
        self._move(self._device)

    def _move(self, device: torch.device) -> None:
        self._optimizer.clear()
        module: Any = self._split or self._module
        module.to(device)
        self._optimizer.move(device)

    def close(self) -> None:
        """Drop the module and the optimizer, if they were created."""
        for name in ("_optimizer", "_split", "_slices", "_module"):
            vars(self).pop(name, None)
