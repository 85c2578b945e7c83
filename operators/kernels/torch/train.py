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
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataflow.batch import Keys, Ragged
from dataflow.errors import KernelError
from dataflow.kernel import (
    Assignment,
    KernelNode,
    Layout,
    Piece,
    Probeable,
    Session,
    Sleeper,
)
from dataflow.loss import LossTerm, Now, Terms
from dataflow.model import Schedule, value_at
from operators.kernels.overlong import require_positions
from operators.kernels.tensors import gather
from operators.kernels.text import require_embedded_ids
from operators.kernels.torch.heads import predictions, values, values_and_scores
from operators.kernels.torch.loss_call import LossFault, call_loss
from operators.kernels.torch.mismatch import mismatch
from operators.kernels.torch.models import load_model, load_pieces, pieces, positions
from operators.kernels.torch.optimizer import Optimizer, chosen, save_state
from operators.kernels.torch.packing import Packed, micro_batches, pack
from operators.kernels.torch.parallel import Ranks, Turns, collected, like, split
from operators.kernels.torch.probe import probed, vocabulary_of
from operators.kernels.torch.reduce import MetricSums, bad_row, reduced
from operators.kernels.torch.said import ModelNumbers, Said, ids_of, reads_scores, require_ids, said
from operators.kernels.torch.saving import save_model
from operators.kernels.torch.slices import Slices
from operators.kernels.torch.steprows import now_of, step_rows, tensors_of
from operators.kernels.torch.temperatures import Temperature, of_rows
from operators.kernels.torch.train_settings import RowSet, TrainSettings
from operators.kernels.torch.updates import EveryRow, Part, StepSet, StepUpdate, parts_of
from operators.kernels.torch.weight_sample import WeightSample

OPTIMIZER_FILE = "optimizer.pt"

ONE_TOKEN = Ragged(np.zeros(1, dtype=np.int32), np.array([0, 1]))
"""Prompt and completion of the row that a rank without rows feeds to take part in a collective."""

COUNTS = (
    "optim/updates",
    "optim/skipped",
    "train/tokens",
    "train/fed_tokens",
    "train/micro_batches",
)
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
        if layout.shard and layout.tensor > 1:
            raise KernelError(
                f"{node.name}: expected weights split in one way, found shard and"
                f" tensor={layout.tensor}. Fix: one of both."
            )
        self._budget, self._positions = layout.tokens, positions(model.base)
        self._module = session.module(model, lambda: load_model(model))
        self._device = next(self._module.parameters()).device
        self._ranks = Ranks(session, self._device, node.name, layout.tensor)
        sharded = layout.shard and session.world > 1
        self._split = split(self._module, session, self._device) if sharded else None
        mesh = self._ranks.mesh
        self._slices = Slices(self._module, mesh, node.name) if mesh is not None else None
        settings = chosen(node.params.get("optimizer", "adamw"), node.name)
        self._optimizer = Optimizer(self._module, settings, self._settings.clip_norm, self._slices)
        self._steps = 0

    def step(self, assignment: Assignment) -> Mapping[str, float]:
        """All updates of one Step. Raises KernelError if a loss or gradient is not finite.

        A Step that fails is lost; it fails on all ranks, with the same message.
        """
        settings, self._steps = self._settings, assignment.step
        sums = MetricSums()
        for name in COUNTS:
            sums.count(name, 0.0)
        lr = value_at(settings.lr, assignment.step)
        there = [of for of in settings.row_sets if assignment.rows_of(of.name) is not None]
        if assignment.step >= settings.start and there:
            sample, tokens = WeightSample(self._optimizer.masters), 0
            for update in self._updates(assignment, there, lr, sums):
                self._update(update)
                tokens += update.tokens
            if tokens:
                sums.add("optim/changed", sample.changed(), len(sample))
        return {"optim/lr": lr} | sums.means(self._ranks.add_up, self._ranks.greatest)

    def _updates(
        self, assignment: Assignment, there: Sequence[RowSet], lr: float, sums: MetricSums
    ) -> Iterator[StepUpdate]:
        """This rank's part of each update; updates are drawn from the rows of all ranks, of each
        set by itself.
        """
        with self._ranks.together():
            read = [self._read(assignment, of) for of in there]
        for rows in read:
            _sampled_entropy(rows, sums)
        each = [self._drawn(assignment, rows) for rows in read]
        first = True
        for drawn in zip(*each, strict=True):
            parts, keys = zip(*drawn, strict=True)
            update = StepUpdate(parts, Keys.concat(keys), assignment.step, lr, first, sums)
            yield update
            first = first and not update.tokens  # without a token it is skipped

    def _read(self, assignment: Assignment, of: RowSet) -> StepSet:
        """This rank's rows of a set. Raises for rows that the Model cannot read."""
        rows = step_rows(assignment, self._settings.loss, self._name, of.name)
        name, limit = self._model.name, self._positions
        require_positions(self._name, name, limit, rows.keys, rows.prompts, rows.completions)
        for ids in (rows.prompts, rows.completions):
            require_embedded_ids(self._name, name, ids, rows.keys, self.vocabulary)
        if len(rows.keys):
            require_ids(self._name, name, rows, of.loss, self.vocabulary)
        assigned = assignment.rows_of(of.name)
        assert assigned is not None
        return StepSet(of, rows, assigned)

    def _drawn(self, assignment: Assignment, read: StepSet) -> Iterator[tuple[Part, Keys]]:
        """The rows of a set in each update."""
        every = EveryRow.of(read, self._ranks)
        settings, name, step = self._settings, self._name, assignment.step
        return parts_of(read, every, settings, seed=self._seed, node=name, step=step)

    def _update(self, update: StepUpdate) -> None:
        """One optimizer step; skipped, and counted, if no row has a trained token."""
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
        sums.count("optim/updates", lead)
        sums.count("train/tokens", lead * update.tokens)
        for part in (part for part in update.parts if part.weights.tokens):
            for term in part.of.loss.terms:
                sums.add(f"loss/{term.label}", 0.0, lead)

    def _gradient(self, update: StepUpdate) -> Tensor:
        """Run all micro-batches; returns the norm of the gradient over all ranks' rows."""
        idle = self._idle if self._split else None
        batches = [each for part in update.parts for each in self._micro_batches(part)]
        with self._ranks.together(batches, idle) as turns:
            for part, rows in turns:
                whole = reads_scores(part.of.loss)
                packed = pack(part.rows.prompts, part.rows.completions, rows, whole=whole)
                self._backward(update, part, packed, turns)
                update.sums.count("train/micro_batches", 1)
                update.sums.count("train/fed_tokens", len(packed.ids))
        if not self._split:
            self._ranks.sum_gradients(self._optimizer.masters)
        norm = self._optimizer.norm()
        if not torch.isfinite(norm):
            raise self._not_finite("a gradient norm", float(norm), update.step, update.whole)
        return norm

    def _micro_batches(self, part: Part) -> list[_MicroBatch]:
        """Those of an update's rows of a set: the live ones, or whole groups for a loss over
        groups.
        """
        rows, picked, atomic = part.rows, part.picked, part.of.atomic
        wanted = picked if atomic else picked[part.weights.live[picked]]
        groups = (rows.groups if atomic else rows.prompt_groups)[wanted]
        found = micro_batches(
            rows.prompts, rows.completions, wanted, groups, tokens=self._budget, atomic=atomic
        )
        return [(part, each) for each in found]

    def _backward(
        self, update: StepUpdate, part: Part, packed: Packed, turns: Turns[_MicroBatch]
    ) -> None:
        """Forward, loss and backward of one micro-batch."""
        now = now_of(part.rows, packed, update.step, self._device)
        now.vocabulary = self.vocabulary
        ids = ids_of(part.rows, part.of.loss, packed, self._device)
        at = part.of.at.of_tokens(part.rows.keys.sample[packed.rows], packed.row)
        answers = self._ask(part.rows.completions, packed, part.of, ids, at)
        with ExitStack() as where_it_fails:
            where_it_fails.callback(turns.through, answers.tokens)
            heard = said(now, answers, ids, scalar=self._model.head == "scalar")
            total = self._total(update, part, packed, heard)
            where_it_fails.pop_all()
        total.backward()
        self._optimizer.collect()

    def _idle(self) -> None:
        """A forward and a backward of one token, with weight 0."""
        packed = pack(ONE_TOKEN, ONE_TOKEN, np.zeros(1, dtype=np.int64))
        answers = self._ask(ONE_TOKEN, packed, self._settings.row_sets[0], {}, 1.0)
        (0.0 * answers.tokens.sum()).backward()
        self._optimizer.collect()

    def _total(self, update: StepUpdate, part: Part, packed: Packed, heard: Said) -> Tensor:
        """The loss of one micro-batch."""
        if update.first:
            mismatch(heard.now, update.sums, self._recorded_so(part, packed))
        total = torch.zeros((), device=self._device)
        for term in part.of.loss.terms:
            total = total + self._share(term, update, part, packed, heard.to(term))
        if not torch.isfinite(total):
            keys = part.rows.keys.take(self._first_bad(update, part, packed, heard))
            raise self._not_finite("a loss", float(total.detach()), update.step, keys)
        if not total.requires_grad:
            raise KernelError(
                f"{self._name}: expected a loss that depends on what the model says, found a"
                " constant. Fix: compute it from now.logprobs, now.values or now.entropy, without"
                " detach()."
            )
        return total

    def _recorded_so(self, part: Part, packed: Packed) -> Tensor | None:
        """[tokens]: 1 where the recorded log-probs have the temperature of training; None if none
        has.
        """
        found = of_rows(part.of.as_sampled, part.rows.keys.sample[packed.rows])
        if not found.any():
            return None
        return torch.from_numpy(found[packed.row].astype(np.float32)).to(self._device)

    def _ask(
        self,
        completions: Ragged,
        packed: Packed,
        of: RowSet,
        ids: Mapping[str, Tensor],
        temperature: Temperature,
    ) -> ModelNumbers:
        """Values or log-probs of the completion tokens, and what else the set's losses read, of one
        forward. temperature: of the tokens.
        """
        scalar = self._model.head == "scalar"
        written = gather(completions.values, packed.tokens, self._device, torch.int64)
        others = torch.cat([*ids.values()], dim=1) if ids else None

        def ask() -> ModelNumbers:
            if scalar and reads_scores(of.loss):
                own, scores = values_and_scores(self._module, packed, self._device)
                return ModelNumbers(tokens=own, scores=scores)
            if scalar:
                return ModelNumbers(tokens=values(self._module, packed, self._device))
            also = {"entropy": of.entropy, "ids": others}
            found = predictions(self._module, packed, written, temperature=temperature, **also)
            return ModelNumbers(tokens=found.logprobs, entropy=found.entropy, at=found.at)

        answers = self._split(ask) if self._split else ask()
        return answers.each(self._slices.same) if self._slices else answers

    def _share(
        self, term: LossTerm, update: StepUpdate, part: Part, packed: Packed, now: Now
    ) -> Tensor:
        """This micro-batch's share of one term of the loss, times the term's weight."""
        terms = self._terms(term, update, part, packed, now)
        share = reduced(terms, term.function.scope, term.label, now, part.weights, packed.rows)
        update.sums.add_all(terms.metrics)
        update.sums.add(f"loss/{term.label}", share, 0.0)
        return value_at(term.weight, update.step) * share

    def _terms(
        self, term: LossTerm, update: StepUpdate, part: Part, packed: Packed, now: Now
    ) -> Terms:
        """What the term's formula returns. Raises KernelError if it raises or returns no Terms."""
        params = {name: resolved(value, update.step) for name, value in term.params}
        ports = tensors_of(part.rows, term, packed, now)
        try:
            return call_loss(term.function.fn, now, ports, params)
        except LossFault as fault:
            raise KernelError(
                f"{self._name}: step {update.step}: loss {term.label!r} failed: {fault}"
            ) from None

    @torch.no_grad()
    def _first_bad(self, update: StepUpdate, part: Part, packed: Packed, heard: Said) -> np.ndarray:
        """The first row with a non-finite term; the first of all if only the sum is not finite."""
        found = []
        for term in part.of.loss.terms:
            terms = self._terms(term, update, part, packed, heard.to(term))
            found.append(bad_row(terms.loss, term.function.scope, heard.now))
        return packed.rows[[min((row for row in found if row is not None), default=0)]]

    def _not_finite(self, what: str, found: float, step: int, keys: Keys) -> KernelError:
        return KernelError(
            f"{self._name}: step {step}: expected {what} that is finite, found {found}; first row"
            f" {keys.rows()[0]}. Fix: a lower lr, or look at that row's advantage and log-probs."
        )

    def pieces(self) -> Iterable[Piece]:
        """The module's own tensors: a caller that keeps them must copy them.

        Split weights are gathered as the first rank takes them; the others take part and get none.
        """
        own = pieces(self._module)
        return collected(self._ranks, own) if self._partial else own

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
        return probed(self._module, ids, head=self._model.head, within=within)

    def save(self, directory: Path) -> None:
        """Write the Model's Hugging Face directory, and optimizer.pt next to its weights."""
        weights, state = self._whole(), None
        if self._partial or self._ranks.lead:
            state = self._optimizer.state(self._steps)
        if state is not None and self._ranks.lead:
            save_model(self._module, directory, weights, exact=True)
            save_state(state, directory / OPTIMIZER_FILE)

    def save_weights(self, directory: Path) -> None:
        """Write the Model's Hugging Face directory, without the state that only training needs."""
        weights = self._whole()
        if self._ranks.lead:
            save_model(self._module, directory, weights)

    def _whole(self) -> dict[str, Tensor] | None:
        """Split weights gathered on the first rank's host; None if they are not split.

        Gathers all before anything is written: a full disk must not leave other ranks waiting.
        """
        return {piece.name: piece.data.cpu() for piece in self.pieces()} if self._partial else None

    def restore(self, directory: Path) -> None:
        """Read what `save` wrote, on any number of ranks; the next Step gives the same bits."""
        targets = {piece.name: piece.data for piece in pieces(self._module)}
        saved = load_model(replace(self._model, base=str(directory)), self._device)
        given = [Piece(p.name, like(targets.get(p.name, p.data), p.data)) for p in pieces(saved)]
        load_pieces(self._module, given)
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


def resolved(value: Any, step: int) -> Any:
    """A loss parameter at a Step: schedules become numbers, also within tuples and values."""
    if isinstance(value, Schedule):
        return value.at(step)
    if is_dataclass(value) and not isinstance(value, type):
        given = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        found = {name: resolved(part, step) for name, part in given.items()}
        return replace(value, **found) if found != given else value
    return tuple(resolved(v, step) for v in value) if isinstance(value, tuple) else value


def _sampled_entropy(read: StepSet, sums: MetricSums) -> None:
    """policy/sampled_entropy: mean over trained tokens of -log p, p as their sampler recorded it;
    of rows that the trained Model wrote.
    """
    rows = read.rows
    if rows.sampler_logprobs is None:
        return
    own = of_rows(read.of.own, rows.keys.sample)[rows.completions.segments()]
    counts = (rows.mask > 0) & own
    total = -float(rows.sampler_logprobs[counts].sum(dtype=np.float64))
    sums.add("policy/sampled_entropy", total, float(counts.sum()))
