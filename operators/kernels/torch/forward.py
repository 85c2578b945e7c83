"""Kernels of the forward operators: log-probs, values and scores of finished rows.

Owns: rows in, numbers out, in key order. Does not own: a model's numbers at a token (heads.py),
weights (models.py), which version they are (the engine loads it).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dataflow.batch import Batch, Keys, Ragged
from dataflow.errors import DataError, KernelError
from dataflow.kernel import Chunk, KernelNode, Layout, Piece, Probeable, Session, Sleeper
from dataflow.model import Model
from dataflow.schema import Logprobs, Reward, Schema, Values
from dataflow.top_logprobs import TopLogprobs
from operators.kernels.overlong import require_positions
from operators.kernels.tensors import gather, make_batch
from operators.kernels.text import require_embedded_ids
from operators.kernels.torch.devices import rest, rise
from operators.kernels.torch.heads import predictions, scores, values
from operators.kernels.torch.models import load_model, load_pieces, positions, restore_model
from operators.kernels.torch.packing import Packed, micro_batches, pack, prompt_groups
from operators.kernels.torch.probe import probed, vocabulary_of
from operators.kernels.torch.saving import save_model
from operators.kernels.torch.temperatures import Temperatures


class _Forward(Sleeper, Probeable):
    """What the three kernels share: loading, packing, and restoring the order of the rows."""

    schema: type[Schema]
    column: ClassVar[str]
    per_token: ClassVar[bool] = True

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        self._model: Model = node.models["model"]
        model = self._model
        self._session, self._tokens = session, layout.tokens
        self._temperatures = Temperatures.of(node.params.get("temperature"))
        self._module: PreTrainedModel = session.module(model, lambda: load_model(model))
        self._device = next(self._module.parameters()).device
        self._name, self._positions = node.name, positions(model.base)
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

    def sleep(self) -> None:
        """Free the device between two chunks; a module shared by several kernels moves once."""
        rest(self._module)

    def wake(self) -> None:
        """Move the module back to its device."""
        rise(self._module, self._device)

    @property
    def vocabulary(self) -> int:
        """How many token ids the module knows."""
        return vocabulary_of(self._module)

    def probe(self, ids: Ragged) -> np.ndarray:
        """The module's numbers for these rows (probe.py)."""
        return probed(self._module, ids, head=self._model.head)

    def close(self) -> None:
        """Drop the module, if it was loaded."""
        vars(self).pop("_module", None)

    @torch.inference_mode()
    def run(self, chunk: Chunk) -> Iterator[Batch]:
        """One batch for the whole chunk: rows do not finish one by one here."""
        rows = chunk.inputs["rows"]
        prompts, completions = rows.ragged("prompt_ids"), rows.ragged("completion_ids")
        require_positions(
            self._name, self._model.name, self._positions, rows.keys, prompts, completions
        )
        for ids in (prompts, completions):
            require_embedded_ids(self._name, self._model.name, ids, rows.keys, self.vocabulary)
        made = self.computed(rows.keys, prompts, completions)
        yield make_batch(
            rows.keys, made, completions.offsets if self.per_token else None, self.schema
        )

    def computed(self, keys: Keys, prompts: Ragged, completions: Ragged) -> dict[str, Tensor]:
        """Each column of these rows, float32 [tokens] or [rows], in memory of the session."""
        count = int(completions.offsets[-1]) if self.per_token else len(keys)
        made = {n: torch.from_numpy(v).zero_() for n, v in self._columns(count).items()}
        groups = prompt_groups(keys.position, prompts)
        every = np.arange(len(keys))
        for part in micro_batches(
            prompts, completions, every, groups, tokens=self._tokens, atomic=False
        ):
            packed = pack(prompts, completions, part, whole=not self.per_token)
            if len(packed.tokens) or not self.per_token:
                where = torch.from_numpy(packed.tokens if self.per_token else packed.rows)
                for name, values in self._compute(packed, completions, keys).items():
                    made[name][where] = values.cpu()
        _require_finite(made[self.column], keys, completions, self.column)
        return made

    def _columns(self, count: int) -> dict[str, np.ndarray]:
        """The memory of each column, for so many values."""
        return {self.column: self._session.allocate(count, np.float32)}

    def _compute(self, packed: Packed, completions: Ragged, keys: Keys) -> dict[str, Tensor]:
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
        asked = node.params.get("top_k", 0)
        if asked > self.vocabulary:
            raise KernelError(
                f"{node.name}: expected top_k of at most the {self.vocabulary} tokens that Model"
                f" {self._model.name!r} knows, found {asked}. Fix: top_k={self.vocabulary}, the"
                " whole distribution."
            )
        self._top_k = asked if {"top_ids", "top_logprobs"} & set(node.returns) else 0

    def _columns(self, count: int) -> dict[str, np.ndarray]:
        if not self._top_k:
            return super()._columns(count)
        self.schema = TopLogprobs.of(self._top_k)
        tops = {
            name: self._session.allocate(count * self._top_k, kind).reshape(count, -1)
            for name, kind in (("top_ids", np.int32), ("top_logprobs", np.float32))
        }
        return super()._columns(count) | tops

    def _compute(self, packed: Packed, completions: Ragged, keys: Keys) -> dict[str, Tensor]:
        written = gather(completions.values, packed.tokens, self._device, torch.int64)
        at = self._temperatures.of_tokens(keys.sample[packed.rows], packed.row)
        found = predictions(self._module, packed, written, temperature=at, top_k=self._top_k)
        if found.top_ids is None or found.top_logprobs is None:
            return {"logprobs": found.logprobs}
        tops = {"top_ids": found.top_ids.int(), "top_logprobs": found.top_logprobs}
        return {"logprobs": found.logprobs} | tops


class TorchValues(_Forward):
    """values: the scalar head before each completion token."""

    schema = Values
    column = "values"

    def _compute(self, packed: Packed, completions: Ragged, keys: Keys) -> dict[str, Tensor]:
        return {"values": values(self._module, packed, self._device)}


class TorchScores(_Forward):
    """scores: the scalar head at the last token of each row."""

    schema = Reward
    column = "reward"
    per_token = False

    def _compute(self, packed: Packed, completions: Ragged, keys: Keys) -> dict[str, Tensor]:
        return {"reward": scores(self._module, packed, self._device)}


def _require_finite(found: Tensor, keys: Keys, completions: Ragged, column: str) -> None:
    """Values are checked once, where they are created."""
    bad = torch.nonzero(~torch.isfinite(found)).flatten()
    if len(bad):
        at = int(bad[0])
        row = (
            at
            if len(found) == len(keys) and column == "reward"
            else int(completions.segments()[at])
        )
        raise DataError(
            f"{column}: row {keys.rows()[row]} has {float(found[at])}, expected a finite"
            " number. Fix: look for a Model that diverged, or for a token that it gives no"
            " probability."
        )
