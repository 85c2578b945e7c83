"""Giving a device back between turns: a module rests in host memory and comes back to the same
device.

Owns: moving weights and letting the allocator's free blocks go. Does not own: whose turn it is (the
coordinator's leases), nor what else a kernel holds (optimizer state: train.py).
"""

from __future__ import annotations

import torch
from torch import nn


def rest(module: nn.Module) -> None:
    """Move the module to host memory, in place: parameters stay the same objects, tied ones tied.
    What the allocator kept free is given back to the device. On a CPU there is nothing to give.
    """
    if next(module.parameters()).device.type == "cpu":
        return
    module.to("cpu")
    torch.cuda.empty_cache()


def rise(module: nn.Module, device: torch.device) -> None:
    """Move the module back; nothing happens where it is there already."""
    module.to(device)
