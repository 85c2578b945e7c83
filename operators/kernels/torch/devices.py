"""Freeing a device between turns: a module waits in host memory and returns to the same device.

Owns: moving weights and freeing the allocator's unused blocks. Does not own: whose turn it is (the
coordinator's device turns), what else a kernel holds (optimizer state: train.py).
"""

from __future__ import annotations

import torch
from torch import nn


def rest(module: nn.Module) -> None:
    """Move the module to host memory, in place: parameters stay the same objects, tied ones tied.

    The allocator's unused blocks go back to the device. On a CPU there is nothing to free.
    """
    device = next(module.parameters()).device
    if device.type == "cpu":
        return
    module.to("cpu")
    free_blocks(device)


def free_blocks(device: torch.device) -> None:
    """Give the allocator's unused blocks back to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def rise(module: nn.Module, device: torch.device) -> None:
    """Move the module back; does nothing if it is there already."""
    module.to(device)
