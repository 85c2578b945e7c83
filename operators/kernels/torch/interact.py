"""The torch kernel of `interact`.

Owns: nothing but which loop writes. Does not own: the module and its weights (generate.py), what
all kernels of `interact` share (interacting.py), the loop (turns.py).
"""

from __future__ import annotations

from dataclasses import replace

from dataflow.memory_limits import MemoryLimits
from operators.kernels.decoding import DecodeTask
from operators.kernels.interacting import Interacting
from operators.kernels.torch.generate import TorchGenerate
from operators.kernels.torch.turns import TurnDecoder


class TorchInteract(TorchGenerate, Interacting):
    """Writes turns with a Hugging Face module; turns.py explains what rows keep between them."""

    writes_as = TorchGenerate

    def _make_turn_loop(self, task: DecodeTask) -> TurnDecoder:
        return TurnDecoder(self._module, task, self._version, self._static)

    def limit(self, limits: MemoryLimits) -> None:
        """As in Limited: fewer episodes write at once."""
        super().limit(limits)
        self._parts = replace(self._parts, slots=limits.slots)

    def close(self) -> None:
        """End the environments, drop the module and the tokenizer."""
        self.close_environments()
        super().close()
