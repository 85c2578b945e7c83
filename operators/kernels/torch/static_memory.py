"""What a generate kernel keeps on its device from chunk to chunk, so that graphs stay true.

Owns: keys and values, the state of each slot, the graphs that read them, and when these must go.
Does not own: which row is in which slot (static_step.py), captures (captured_steps.py).

A CUDA graph reads and writes the addresses that it was captured with: those of the weights, which
change in place from version to version, and those of these tensors. Graphs go when one of them
moves: the module went to host memory and came back, or keys needed more room. All of it goes when
a kernel sleeps. Kernels that decode by one module take turns, and share it.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from transformers import PreTrainedModel

from operators.kernels.torch.captured_steps import CapturedSteps
from operators.kernels.torch.device_sampling import NUMBERS
from operators.kernels.torch.flash_decode import computes_by_length
from operators.kernels.torch.result_copies import ResultCopies
from operators.kernels.torch.static_keys import StaticKeys

ID, POSITION, INDEX, SEED, LIVE = range(5)
"""Rows of the state: the token to feed, its position, the index of the token to draw in its answer,
the bits of the row's seed, and whether there is a row (1 or 0).
"""

FEWEST_ROWS = 8
"""Slots that a step computes at least: fewer take as long, and would be graphs of their own."""

FEWEST_KEYS = 64
"""Keys that a step reads of each slot at least, likewise."""


class StaticMemory:
    """Tensors at fixed addresses, and the graphs that know them. state: int64 [5, slots]; packed:
    int32 [NUMBERS * slots], a step's numbers.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        config: Any = module.config
        # The module finds it (find_static_memory): were the module held here, neither would go.
        self._module = weakref.ref(module)
        self._device = next(module.parameters()).device
        self.steps = CapturedSteps(self._device, config.name_or_path or config.model_type)
        self.copies = ResultCopies(self._device)
        self.reads_lengths = computes_by_length(self._device, module.dtype)
        self._addresses: tuple[int, ...] = ()
        self._make_empty()

    def _make_empty(self) -> None:
        self.keys = StaticKeys()
        self.state = torch.zeros(LIVE + 1, 0, dtype=torch.int64, device=self._device)
        self.packed = torch.zeros(0, dtype=torch.int32, device=self._device)

    def open(self, slots: int, length: int) -> None:
        """Make ready for a chunk of so many slots and tokens a row."""
        module = self._module()
        assert module is not None
        tensors = itertools.chain(module.parameters(), module.buffers())
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
        if addresses != self._addresses:
            self.steps.clear()
            self._addresses = addresses
        self.reserve(slots, length)

    def reserve(self, slots: int, length: int) -> None:
        """Make room for so many slots and tokens a row. What is there stays."""
        if slots <= self.keys.slots and length <= self.keys.length:
            return
        # First: their pool is room for what grows.
        self.steps.clear()
        self.keys.reserve(slots, length)
        more_slots = self.keys.slots - self.state.shape[1]
        if more_slots:
            self.state = torch.cat([self.state, self.state.new_zeros(LIVE + 1, more_slots)], 1)
            self.packed = self.packed.new_zeros(NUMBERS * self.keys.slots)

    def release(self) -> None:
        """Give everything back: the device is another's now, or keys are no numbers any more."""
        self.steps.clear()
        self._make_empty()


_MEMORIES: weakref.WeakKeyDictionary[PreTrainedModel, StaticMemory] = weakref.WeakKeyDictionary()


def find_static_memory(module: PreTrainedModel) -> StaticMemory:
    """Find the memory of the kernels that decode by this module; made for the first of them."""
    memory = _MEMORIES.get(module)
    if memory is None:
        memory = _MEMORIES[module] = StaticMemory(module)
    return memory


def round_up(count: int, fewest: int) -> int:
    """The next power of two that is at least both numbers."""
    return 1 << (max(count, fewest) - 1).bit_length()


def round_up_keys(count: int, fewest: int) -> int:
    """The next power of two, or middle between two, that is at least both numbers: a third of the
    keys that a step reads is hidden at most, and as much of their room is unused.
    """
    power = round_up(count, fewest)
    middle = power // 4 * 3
    return middle if middle >= max(count, fewest) else power
