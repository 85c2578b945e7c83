"""The torch kernel of `generate`: the module and its weights.

Owns: the module, its weights and threads. Does not own: what all kernels of `generate` share
(generating.py), the decode loop (decode.py), how weights get here (`load` receives pieces).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dataflow.batch import Batch, Ragged
from dataflow.errors import KernelError
from dataflow.kernel import Chunk, Piece
from dataflow.kernel_abilities import Limited, Probeable, Sleeper
from dataflow.memory_limits import MemoryLimits, MemoryNeed
from operators.kernels.decoding import DecodeTask
from operators.kernels.generating import Generating
from operators.kernels.torch.compiled_layers import compile_layers
from operators.kernels.torch.decode import Decoder
from operators.kernels.torch.devices import rest, rise
from operators.kernels.torch.merged_matrices import find_merged
from operators.kernels.torch.merged_probe import require_agreement
from operators.kernels.torch.models import (
    find_position_limit,
    load_pieces,
    open_module,
    restore_model,
)
from operators.kernels.torch.probe import compute_probe, vocabulary_of
from operators.kernels.torch.rank_tokens import RankTokens
from operators.kernels.torch.saving import save_model
from operators.kernels.torch.slices import split_over_replica
from operators.kernels.torch.static_memory import StaticMemory, find_static_memory
from operators.kernels.torch.static_rule import decodes_statically
from operators.kernels.torch.vocabulary_part import find_vocabulary_part


class TorchGenerate(Generating, Limited, Sleeper, Probeable):
    """Decodes with a Hugging Face module; decode.py explains how rows share slots, decode_step.py
    where their keys are. With merge=True its matrices have the Model's adapter merged into them;
    generate/merge_error is the share of each version's update that rounding takes from them.
    """

    def _start(self) -> None:
        model = self._model
        if self._sampler != "keyed":
            raise KernelError(
                f"{self._node.name}: expected sampler='keyed', found {self._sampler!r}. Fix:"
                f" sampler='keyed', or --kernel {self._node.name}={self._sampler}."
            )
        session, is_split = self._session, self._session.world > 1
        is_merged = bool(self._node.params.get("merge"))
        self._module: Any = open_module(session, model, is_split=is_split, is_merged=is_merged)
        if is_split:
            split_over_replica(self._module, session, self._node.name)
        self._require_agreement()
        if self._layout.compiled:
            compile_layers(self._module)
        self._device = next(self._module.parameters()).device
        self._ranks: RankTokens | None = None
        if is_split:
            part = find_vocabulary_part(self._module)
            self._ranks = RankTokens(
                session.group, session.rank, self._device, part, super()._was_interrupted
            )
        # Over all chunks: graphs are captured once. None: each chunk's keys are its own.
        self._static: StaticMemory | None = None
        if decodes_statically(self._module):
            self._static = find_static_memory(self._module)

    def _positions(self) -> int | None:
        return find_position_limit(self._model.base)

    def _decoder(self, task: DecodeTask) -> Decoder:
        return Decoder(self._module, task, self._version, self._static, self._ranks)

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        """As Generating.run, with the plan's threads."""
        if torch.get_num_threads() != self._layout.threads:
            torch.set_num_threads(self._layout.threads)
        yield from super().run(chunk)

    def _was_interrupted(self) -> bool:
        """As of Generating; of several ranks, whether the first one was."""
        return super()._was_interrupted() if self._ranks is None else self._ranks.take_stop()

    def load(self, pieces: Iterable[Piece], version: int, rate: float = 1.0) -> None:
        """Copy these weights, or move towards them; no pieces if the shared module has them. Raises
        KernelError if they are merged, and compute other log-probs than unmerged.
        """
        count = load_pieces(self._module, pieces, rate)
        self._version = version
        if count:
            self._require_agreement()
            self._report_merge()

    def _report_merge(self) -> None:
        merged = find_merged(self._module)
        if merged is not None:
            self._session.metric("generate/merge_error", merged.measure_error())

    def _require_agreement(self) -> None:
        require_agreement(
            self._module,
            self._model,
            node=self._node.name,
            version=self._version,
            seed=self._session.seed,
        )

    def save(self, directory: Path) -> None:
        """Write the Model as a Hugging Face directory (a follower's weights are only here)."""
        save_model(self._module, directory, exact=True)

    def restore(self, directory: Path) -> None:
        """Read what `save` wrote."""
        restore_model(self._module, self._model, directory)
        self._require_agreement()

    @property
    def vocabulary(self) -> int:
        """How many token ids the module knows."""
        return vocabulary_of(self._module)

    def probe(self, ids: Ragged) -> np.ndarray:
        """The module's numbers for these rows (probe.py)."""
        return compute_probe(self._module, ids, head=self._model.head)

    def limit(self, limits: MemoryLimits) -> None:
        """As in Limited: fewer rows at once."""
        self._layout = replace(self._layout, slots=limits.slots, tokens=limits.tokens)

    def give_back(self) -> MemoryNeed:
        """As in Limited: the loop is gone with its run, and keys that outlive one go, too."""
        self._release()
        need, self._need = self._need, MemoryNeed()
        return need

    def sleep(self) -> None:
        """Free the device between two chunks; no keys and values are needed after a chunk."""
        self._release()
        rest(self._module)

    def wake(self) -> None:
        """Move the module back to its device."""
        rise(self._module, self._device)

    def close(self) -> None:
        """Drop the module and the tokenizer."""
        self._release()
        self._module, self._tokenizer = None, None

    def _release(self) -> None:
        # Not there if the kernel could not be opened.
        static = getattr(self, "_static", None)
        if static is not None:
            static.release()
