"""The vLLM kernel of `generate`.

Owns: the engine's size, its weights, its leases. Does not own: what all kernels of `generate` share
(generating.py), the engine (engine.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dataflow.batch import Keys, Ragged
from dataflow.errors import DataError, KernelError
from dataflow.kernel import Chunk, Piece
from dataflow.kernel_abilities import Probeable, Sleeper
from operators.kernels.decoding import DecodeTask
from operators.kernels.generating import Generating
from operators.kernels.torch.models import find_position_limit, load_dtype, make_meta_module
from operators.kernels.torch.saving import exact_folder
from operators.kernels.vllm.decode import VllmDecoder
from operators.kernels.vllm.engine import Engine
from operators.kernels.vllm.startup import BLOCK, EngineSize

PROMPT = 4096
"""Tokens of a prompt for which an engine has room if the node does not say max_prompt_tokens."""

CACHE = 4 << 30
"""The most bytes of keys and values, unless one row needs more: rows beyond it wait."""


class VllmGenerate(Generating, Sleeper, Probeable):
    """Decodes with a vLLM engine in this process, by the project's own sampling law
    (sampling_processor.py).

    The engine has its own copy of the weights. Its KV cache is forgotten after each load and before
    each chunk: equal chunks give equal bits, whatever ran before.
    """

    def _start(self) -> None:
        self._engine: Engine = self._session.module(self._model, self._make_engine)

    def _make_engine(self) -> Engine:
        model = self._model
        module = make_meta_module(model)
        dtype = load_dtype(model)
        size = self._size(module.config, dtype)
        is_merged = bool(self._node.params.get("merge"))
        return Engine(model, module, exact_folder(model.base), dtype, size, is_merged=is_merged)

    def _size(self, config: Any, dtype: str) -> EngineSize:
        prompt = self._node.params.get("max_prompt_tokens") or PROMPT
        limit = find_position_limit(self._model.base)
        whole = self._node.params.get("max_context") or prompt + self._max_tokens
        length = self._layout.longest or whole
        if limit is not None:
            length = min(limit, length)
        blocks = -(-length // BLOCK) + 1
        row_bytes = blocks * BLOCK * _token_bytes(config, dtype)
        cache_bytes = max(row_bytes, min(self._layout.slots * row_bytes, CACHE))
        return EngineSize(
            slots=self._layout.slots,
            tokens=self._layout.tokens,
            length=length,
            cache=self._layout.cache_bytes or cache_bytes,
            tensor=self._layout.inner,
            threads=self._layout.threads,
        )

    def _positions(self) -> int | None:
        return find_position_limit(self._model.base)

    def _encode(self, chunk: Chunk) -> tuple[np.ndarray, Ragged]:
        fitting, prompts = super()._encode(chunk)
        self._require_room(chunk.keys.take(fitting), prompts)
        return fitting, prompts

    def _require_room(self, keys: Keys, prompts: Ragged) -> None:
        """Raise DataError for a prompt that the Model has positions for, and its engine has not:
        the engine is as long as the plan knew of the data. Where the node states max_context, no
        row is longer than that, whatever its prompt.
        """
        params = self._node.params
        positions = find_position_limit(self._model.base)
        limits = [limit for limit in (params.get("max_context"), positions) if limit]
        length = self._engine.size.length
        if params.get("max_context") and min(limits) <= length:
            return
        room = length - self._max_tokens
        if not len(prompts) or int(prompts.lengths.max()) <= room:
            return
        row = int(prompts.lengths.argmax())
        longest = int(prompts.lengths[row])
        bound = 1 << (longest - 1).bit_length()  # the next power of two
        if positions is not None:
            bound = min(bound, positions - self._max_tokens)
        fix = f"max_prompt_tokens={bound}"
        if "max_context" in params:
            fix = f"max_context={bound + self._max_tokens}"
        raise DataError(
            f"{self._node.name}: row {keys.rows()[row]}: expected a prompt of at most {room}"
            f" tokens, for which the engine of Model {self._model.name!r} has room, found"
            f" {longest}. Fix: --set {self._node.name}.{fix}, for which the engine then has room."
        )

    def _decoder(self, task: DecodeTask) -> VllmDecoder:
        if self._engine.idle:
            self._engine.forget()
        return VllmDecoder(self._engine, task, self._version)

    @property
    def vocabulary(self) -> int:
        """How many token ids the module knows."""
        return self._engine.vocabulary

    def load(self, pieces: Iterable[Piece], version: int, rate: float = 1.0) -> None:
        """Copy these weights; no pieces if the engine has this version already, by another node.
        Raises KernelError for a rate: vLLM's module cannot move in part.
        """
        if rate != 1.0:
            raise KernelError(
                f"{self._node.name}: expected whole weights, found a follower's rate of {rate}."
                f" Fix: --kernel {self._node.name}=torch."
            )
        if weights := list(pieces):
            self._engine.load(weights, version)
            if self._engine.merging is not None:
                self._session.metric("generate/merge_error", self._engine.merging.error)
        elif version != self._engine.version:
            raise KernelError(
                f"{self._node.name}: expected the weights of version {version}, found none, and the"
                f" engine has version {self._engine.version}. Fix: send all pieces."
            )
        self._version = version

    def probe(self, ids: Ragged) -> np.ndarray:
        """The engine's numbers for these rows, by the weights that it decodes with."""
        return self._engine.probe(ids)

    def save(self, directory: Path) -> None:
        """Never asked: only a follower's weights are a reader's to save."""
        raise KernelError(f"{self._node.name}: its weights are its writer's to save.")

    def restore(self, directory: Path) -> None:
        """Never asked, as `save`."""
        raise KernelError(f"{self._node.name}: its weights are its writer's to restore.")

    def sleep(self) -> None:
        """Free the device between two chunks (vLLM's sleep level 1); on CPU this frees nothing."""
        if torch.cuda.is_available():
            self._engine.sleep()

    def wake(self) -> None:
        """Take the device again."""
        if torch.cuda.is_available():
            self._engine.wake()

    def close(self) -> None:
        """End the engine unless another node has ended it, drop the tokenizer."""
        engine, self._engine, self._tokenizer = self._engine, None, None  # type: ignore[assignment]
        engine.close()


def _token_bytes(config: Any, dtype: str) -> int:
    """Keys and values of one token, in all layers."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * size * getattr(torch, dtype).itemsize
