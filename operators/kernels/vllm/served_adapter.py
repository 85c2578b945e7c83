"""An adapter as vLLM takes it: a folder in peft's format, in memory, under one id.

Owns: the folder, and the requests for it. Does not own: peft's format (torch/adapter_files.py),
when a version is loaded (engine.py).

vLLM reads adapters from folders. This one has links to files in memory, which end with this
process, however it ends; of the folder only the links would be left.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dataflow.adapters import Lora
from dataflow.errors import KernelError
from dataflow.model import Model
from operators.kernels.torch.adapter_files import CONFIG, WEIGHTS, encode_adapter
from operators.vllm_needs import ADAPTER_RANKS


class ServedAdapter:
    """The adapter of one Model, in each of its versions."""

    def __init__(self, model: Model, config: Mapping[str, Any]) -> None:
        """config: peft's, as values of JSON. Raises KernelError for a rank that vLLM has no room
        for.
        """
        assert isinstance(model.adapter, Lora)
        most = ADAPTER_RANKS[-1]
        if model.adapter.rank > most:
            raise KernelError(
                f"Model {model.name!r}: expected an adapter of rank {most} at most for vLLM, found"
                f" {model.adapter.rank}. Fix: a lower rank, or --kernel NODE=torch."
            )
        self.name = model.name
        self.is_loaded = False
        """Whether vLLM has a version; a fresh adapter is none, as it changes no number."""
        self.room = next(rank for rank in ADAPTER_RANKS if rank >= model.adapter.rank)
        self._config = config
        self._folder = Path(tempfile.mkdtemp(prefix="adapter-"))
        self._files = [os.memfd_create(name) for name in (WEIGHTS, CONFIG)]
        for name, file in zip((WEIGHTS, CONFIG), self._files, strict=True):
            (self._folder / name).symlink_to(f"/proc/{os.getpid()}/fd/{file}")

    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Put the weights of a version in the place of the last one's."""
        for name, content in encode_adapter(self._config, weights).items():
            (self._folder / name).write_bytes(content)

    def make_request(self, *, load: bool) -> Any:
        """What names the adapter to vLLM. load: read it again; else use what was read."""
        from vllm.lora.request import LoRARequest

        return LoRARequest(self.name, 1, str(self._folder), load_inplace=load)

    def close(self) -> None:
        """Free the memory and remove the folder."""
        for file in self._files:
            os.close(file)
        for name in (WEIGHTS, CONFIG):
            (self._folder / name).unlink()
        self._folder.rmdir()
