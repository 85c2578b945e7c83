"""Kernels of the forward operators: log-probs, values and scores of finished rows.

Owns: rows in, numbers out, in key order. Does not own: a model's numbers at a token (heads.py),
weights (models.py), which version they are (the engine loads it).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dataflow.batch import Batch, Keys, Ragged
from dataflow.errors import DataError, KernelError
from dataflow.kernel import Chunk, KernelNode, Layout, Piece, Session
from dataflow.kernel_abilities import Limited, Probeable, Sleeper
from dataflow.memory_limits import MemoryLimits, MemoryNeed
from dataflow.model import Model
from dataflow.schema import Logprobs, Reward, Schema, Values
from dataflow.top_logprobs import TopLogprobs
from operators.kernels.overlong import require_positions
from operators.kernels.tensors import gather, make_batch
from operators.kernels.text import require_embedded_ids
from operators.kernels.torch.compiled_layers import compile_layers
from operators.kernels.torch.context_ranks import ContextRanks, TokenShare
from operators.kernels.torch.devices import free_blocks, rest, rise
from operators.kernels.torch.heads import predict_scores, predict_values, predictions
from operators.kernels.torch.models import (
    find_position_limit,
    load_pieces,
    open_module,
    restore_model,
)
from operators.kernels.torch.packing import (
    describe_need,
    micro_batches,
    pack,
    prompt_groups,
)
from operators.kernels.torch.probe import compute_probe, vocabulary_of
from operators.kernels.torch.saving import save_model
from operators.kernels.torch.slices import split_over_replica
from operators.kernels.torch.temperatures import Temperatures
from operators.kernels.torch.waiting_weights import WaitingWeights, keep_on_host


class _Forward(Limited, Sleeper, Probeable):
    """What the three kernels share: loading, packing, and restoring the order of the rows."""

    schema: type[Schema]
    column: ClassVar[str]
    per_token: ClassVar[bool] = True

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        self._model: Model = node.models["model"]
        model = self._model
        self._session, self._tokens = session, layout.tokens
        self._temperatures = Temperatures.of(node.params.get("temperature"))
        is_split = layout.tensor > 1
        self._module: PreTrainedModel = open_module(session, model, is_split=is_split)
        self._context: ContextRanks | None = None
        if is_split:
            split_over_replica(self._module, session, node.name)
        elif session.world > 1:
            self._context = ContextRanks.of_replica(self._module, session, node.name)
        if layout.compiled:
            compile_layers(self._module)
        self._waiting: WaitingWeights | None = None
        if layout.offload == "weights":
            self._waiting = keep_on_host(self._module)
            self._device = self._waiting.device
        else:
            self._device = next(self._module.parameters()).device
        self._name, self._position_limit = node.name, find_position_limit(model.base)
        self._need = MemoryNeed()
        self.version = 0

    def load(self, pieces: Iterable[Piece], version: int, rate: float = 1.0) -> None:
        """Copy these weights, or move towards them; no pieces if the shared module has them."""
        load_pieces(self._module, pieces, rate)
        self.version = version

    def save(self, directory: Path) -> None:
        """Write the Model as a Hugging Face directory (a follower's weights are only here)."""
        save_model(self._module, directory, exact=True)

    def restore(self, directory: Path) -> None:
        """Read what `save` wrote."""
        restore_model(self._module, self._model, directory)

    def limit(self, limits: MemoryLimits) -> None:
        """As in Limited: fewer tokens in a pass."""
        self._tokens = limits.tokens

    def give_back(self) -> MemoryNeed:
        """As in Limited: a chunk leaves nothing behind. Ranks cannot go on: the others are
        in a collective.
        """
        need, self._need = self._need, MemoryNeed()
        return replace(need, is_kept=self._session.world == 1)

    def sleep(self) -> None:
        """Free the device between two chunks; a module shared by several kernels moves once."""
        if self._waiting is None:
            rest(self._module)
        else:
            free_blocks(self._device)

    def wake(self) -> None:
        """Move the module back to its device, unless its weights wait for a pass."""
        if self._waiting is None:
            rise(self._module, self._device)

    def _have_weights(self) -> AbstractContextManager[None]:
        """Have the weights on the device while the block runs."""
        return nullcontext() if self._waiting is None else self._waiting.on_device()

    @property
    def vocabulary(self) -> int:
        """How many token ids the module knows."""
        return vocabulary_of(self._module)

    def probe(self, ids: Ragged) -> np.ndarray:
        """The module's numbers for these rows (probe.py)."""
        with self._have_weights():
            return compute_probe(self._module, ids, head=self._model.head)

    def close(self) -> None:
        """Drop the module, if it was loaded."""
        vars(self).pop("_module", None)
        vars(self).pop("_waiting", None)

    @torch.inference_mode()
    def run(self, chunk: Chunk) -> Iterator[Batch]:
        """One batch for the whole chunk: rows do not finish one by one here."""
        rows = chunk.inputs["rows"]
        prompts, completions = rows.ragged("prompt_ids"), rows.ragged("completion_ids")
        require_positions(
            self._name, self._model.name, self._position_limit, rows.keys, prompts, completions
        )
        for ids in (prompts, completions):
            require_embedded_ids(self._name, self._model.name, ids, rows.keys, self.vocabulary)
        columns = self.compute(rows.keys, prompts, completions)
        offsets = completions.offsets if self.per_token else None
        yield make_batch(rows.keys, columns, offsets, self.schema)

    def compute(self, keys: Keys, prompts: Ragged, completions: Ragged) -> dict[str, Tensor]:
        """Compute each column of these rows, float32 [tokens] or [rows], in memory of the
        session.
        """
        count = int(completions.offsets[-1]) if self.per_token else len(keys)
        memory = self._allocate_columns(count)
        columns = {name: torch.from_numpy(array).zero_() for name, array in memory.items()}
        groups = prompt_groups(keys.position, prompts)
        index_sets = micro_batches(
            prompts,
            completions,
            np.arange(len(keys)),
            groups,
            tokens=self._tokens,
            atomic=False,
        )
        with self._have_weights():
            for indices in index_sets:
                self._note_need(keys, prompts, completions, indices)
                packed = pack(prompts, completions, indices, whole=not self.per_token)
                if self.per_token and not len(packed.tokens):
                    continue  # empty answers: nothing is predicted
                where = torch.from_numpy(packed.tokens if self.per_token else packed.rows)
                share = TokenShare.of(packed, self._context)
                sample = keys.sample[packed.rows]
                for name, numbers in self._compute_packed(share, completions, sample).items():
                    columns[name][where] = numbers.cpu()
        _require_finite(columns[self.column], keys, completions, self.column)
        return columns

    def _note_need(
        self, keys: Keys, prompts: Ragged, completions: Ragged, rows: np.ndarray
    ) -> None:
        is_divisible = len(rows) > 1
        self._need = describe_need(
            "a forward pass", keys, prompts, completions, rows, is_divisible=is_divisible
        )

    def _allocate_columns(self, count: int) -> dict[str, np.ndarray]:
        """Allocate the memory of each column, for so many numbers."""
        return {self.column: self._session.allocate(count, np.float32)}

    def _compute_packed(
        self, share: TokenShare, completions: Ragged, sample: np.ndarray
    ) -> dict[str, Tensor]:
        """Compute the columns of a layout from this rank's tokens. sample: of each packed row."""
        raise TypeError(f"{type(self).__name__} computes nothing; use one of its subclasses")


class TorchLogprobs(_Forward):
    """logprobs: of each completion token. params: temperature, of all rows or of each of a prompt's
    samples (None or 0.0 is 1.0); top_k: how many of the most likely tokens are told as well, if a
    column of them is read.
    """

    schema = Logprobs
    column = "logprobs"

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        """Raises KernelError for a top_k beyond the vocabulary."""
        super().open(node, layout, session)
        top_k = node.params.get("top_k", 0)
        if top_k > self.vocabulary:
            raise KernelError(
                f"{node.name}: expected top_k of at most the {self.vocabulary} tokens that Model"
                f" {self._model.name!r} knows, found {top_k}. Fix: top_k={self.vocabulary}, the"
                " whole distribution."
            )
        # Not computed where no node reads a column of them.
        is_read = bool({"top_ids", "top_logprobs"} & set(node.returns))
        self._top_k = top_k if is_read else 0

    def _allocate_columns(self, count: int) -> dict[str, np.ndarray]:
        if not self._top_k:
            return super()._allocate_columns(count)
        self.schema = TopLogprobs.of(self._top_k)
        columns: dict[str, np.ndarray] = {}
        for name, kind in (("top_ids", np.int32), ("top_logprobs", np.float32)):
            memory = self._session.allocate(count * self._top_k, kind)
            columns[name] = memory.reshape(count, -1)
        return super()._allocate_columns(count) | columns

    def _compute_packed(
        self, share: TokenShare, completions: Ragged, sample: np.ndarray
    ) -> dict[str, Tensor]:
        packed = share.packed
        predicted = predictions(
            self._module,
            packed,
            gather(completions.values, packed.tokens, self._device, torch.int64),
            temperature=self._temperatures.of_tokens(sample, packed.row),
            top_k=self._top_k,
            attention_pass=share.attention_pass,
        )
        columns = {"logprobs": share.join_tokens(predicted.logprobs)}
        if predicted.top_ids is not None and predicted.top_logprobs is not None:
            columns["top_ids"] = share.join_tokens(predicted.top_ids.int())
            columns["top_logprobs"] = share.join_tokens(predicted.top_logprobs)
        return columns


class TorchValues(_Forward):
    """values: the scalar head before each completion token."""

    schema = Values
    column = "values"

    def _compute_packed(
        self, share: TokenShare, completions: Ragged, sample: np.ndarray
    ) -> dict[str, Tensor]:
        del completions, sample
        at = (self._module, share.packed, self._device)
        return {"values": share.join_tokens(predict_values(*at, share.attention_pass))}


class TorchScores(_Forward):
    """scores: the scalar head at the last token of each row."""

    schema = Reward
    column = "reward"
    per_token = False

    def _compute_packed(
        self, share: TokenShare, completions: Ragged, sample: np.ndarray
    ) -> dict[str, Tensor]:
        del completions, sample
        at = (self._module, share.packed, self._device)
        return {"reward": share.join_rows(predict_scores(*at, share.attention_pass))}


def _require_finite(numbers: Tensor, keys: Keys, completions: Ragged, column: str) -> None:
    """Raise DataError for a number that is not finite: checked once, where they are created."""
    bad = torch.nonzero(~torch.isfinite(numbers)).flatten()
    if not len(bad):
        return
    at = int(bad[0])
    row = at if column == "reward" else int(completions.segments()[at])
    raise DataError(
        f"{column}: row {keys.rows()[row]} has {float(numbers[at])}, expected a finite"
        " number. Fix: look for a Model that diverged, or for a token that it gives no"
        " probability."
    )
