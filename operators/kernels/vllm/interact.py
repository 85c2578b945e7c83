"""The vLLM kernel of `interact`.

Owns: nothing but which loop writes. Does not own: the engine and its weights (generate.py), what
all kernels of `interact` share (interacting.py), the loop (turns.py).
"""

from __future__ import annotations

from dataflow.batch import Keys, Ragged
from operators.kernels.decoding import DecodeTask
from operators.kernels.interacting import Interacting
from operators.kernels.vllm.generate import VllmGenerate
from operators.kernels.vllm.turns import VllmTurnDecoder


class VllmInteract(VllmGenerate, Interacting):
    """Writes turns with a vLLM engine; turns.py explains what it keeps between them."""

    writes_as = VllmGenerate

    def _make_turn_loop(self, task: DecodeTask) -> VllmTurnDecoder:
        if self._engine.idle:
            self._engine.forget()
        return VllmTurnDecoder(self._engine, task, self._version)

    def _require_fit(self, keys: Keys, prompts: Ragged) -> None:
        self._require_room(keys, prompts)

    def close(self) -> None:
        """End the environments; the engine, unless another node has ended it."""
        self.close_environments()
        super().close()
