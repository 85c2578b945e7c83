"""A step's numbers on their way to the host: one copy a step, which need not be waited for at once.

Owns: the host memory, and when a copy has arrived. Does not own: what the numbers mean
(device_sampling.py).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class ResultCopy:
    """One copy that has been started; `read` waits for it."""

    def __init__(self, numbers: Tensor, arrival: torch.cuda.Event | None) -> None:
        self._numbers, self._arrival = numbers, arrival

    def read(self) -> np.ndarray:
        """The numbers, int32 [any]."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._numbers.numpy()


class ResultCopies:
    """Copies int32 [any] from a device to the host, without waiting. started: how many so far."""

    def __init__(self, device: torch.device) -> None:
        self.started = 0
        self._on_cuda = device.type == "cuda"

    def start(self, numbers: Tensor) -> ResultCopy:
        """Start a copy of these contiguous numbers."""
        self.started += 1
        if not self._on_cuda:
            return ResultCopy(numbers.clone(), None)
        # Pinned, so that the host goes on meanwhile. torch keeps such memory, and gives it out
        # again only once the copy has arrived, even if nobody reads it.
        host_numbers = torch.empty(len(numbers), dtype=numbers.dtype, pin_memory=True)
        host_numbers.copy_(numbers, non_blocking=True)
        arrival = torch.cuda.Event()
        arrival.record()
        return ResultCopy(host_numbers, arrival)
