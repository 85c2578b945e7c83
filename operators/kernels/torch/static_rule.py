"""Whether a module decodes at fixed places, by CUDA graphs.

Owns: what a graph cannot hold of a module. Does not own: graphs (captured_steps.py), steps
(static_step.py, shared_step.py).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from operators.kernels.torch.rotary import find_length_dependent
from operators.kernels.torch.side_modules import find_side

_CAPTURABLE_EXPERTS = ("grouped_mm", "batched_mm")
"""transformers' experts that route on the device; `eager` ones ask which experts have tokens."""


def decodes_statically(module: nn.Module) -> bool:
    """Whether a kernel decodes this module by StaticStep: on a CUDA device, where a graph can hold
    it. Elsewhere SharedStep needs less memory, and nothing is won by fixed places.
    """
    on_cuda = next(module.parameters()).device.type == "cuda"
    return on_cuda and find_capture_obstacle(module) is None


def find_capture_obstacle(module: nn.Module) -> str | None:
    """Find what no graph can hold of this module, as words; None if there is nothing known."""
    config: Any = module.config
    if find_side(module) is not None:
        return "a side module, whose hooks are Python"
    kind = find_length_dependent(module)
    if kind is not None:
        return f"rotary positions of kind {kind!r}, whose frequencies follow the longest row"
    if any(type(part).__name__.endswith("Experts") for part in module.modules()):
        experts = getattr(config, "_experts_implementation", None)
        if experts not in _CAPTURABLE_EXPERTS:
            return f"experts of kind {experts!r}, which ask the host where tokens go"
    for name, weight in module.named_parameters():
        if type(weight) not in (Tensor, nn.Parameter):
            return f"a weight of type {type(weight).__name__} ({name})"
    return None
