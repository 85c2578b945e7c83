"""Weights of a module that wait in host memory between the passes of its kernels.

Owns: where the weights wait, and their copy on the device while a pass runs. Does not own: whether
a node's weights wait (the plan: `Layout.offload`), what is written into them (models.py), state of
an optimizer that waits (offload.py).

A pass without gradient changes no weight, so nothing is copied back: each parameter points to its
copy on the device for as long as the pass runs, then to host memory again. In between it is a
weight on the host for all who load, save or hash it.

    open: to the host      pass: copied to the device, computed with, dropped      load: on the host

The copies are of the same bits, and so are the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from operators.kernels.torch.offload import has_own_memory, wait_for_host


def keep_on_host(module: nn.Module) -> WaitingWeights:
    """Move the weights of a module, or of this rank's part of it, to host memory, unless they wait
    there already: kernels may share it.
    """
    waiting = _WAITING.get(module)
    if waiting is None:
        waiting = _WAITING[module] = WaitingWeights(module)
    return waiting


class WaitingWeights:
    """The weights of a module; where the device is the host, they stay as they are.

    device: where a pass has them.
    """

    @torch.no_grad()
    def __init__(self, module: nn.Module) -> None:
        self.device = next(module.parameters()).device
        self._weights: list[Tensor] = []
        if has_own_memory(self.device):
            self._weights = [_find_part(weight) for weight in module.parameters()]
        for weight in self._weights:
            weight.data = _copy_to_host(weight.data)

    def on_device(self) -> AbstractContextManager[None]:
        """Have the weights on the device while the block runs."""
        return self._copied() if self._weights else nullcontext()

    @contextmanager
    def _copied(self) -> Iterator[None]:
        host_memory = [weight.data for weight in self._weights]
        try:
            # A tensor made in inference mode cannot be a parameter's.
            with torch.inference_mode(mode=False), torch.no_grad():
                for weight in self._weights:
                    weight.data = weight.data.to(self.device, non_blocking=True, copy=True)
            yield
        finally:
            for weight, waiting in zip(self._weights, host_memory, strict=True):
                weight.data = waiting
            # What is loaded next is written where these copies came from.
            wait_for_host(self.device)


_WAITING: WeakKeyDictionary[nn.Module, WaitingWeights] = WeakKeyDictionary()
"""Those of each module whose weights wait."""


def _find_part(weight: Tensor) -> Tensor:
    """The tensor that has the numbers of a weight, or of this rank's part of it."""
    # Without gradients `to_local` gives the part itself, not a view of it.
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _copy_to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, pinned where that makes copies fast."""
    memory = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
    return memory.copy_(tensor)
