"""Which parts of a module are its decoder layers.

Owns: that. Does not own: what is done with a layer as a whole (parallel.py splits its weights,
recompute.py its activations).
"""

from __future__ import annotations

from torch import nn


def find_decoder_layers(module: nn.Module) -> list[nn.Module]:
    """Find the module's decoder layers, in order: the parts that transformers never splits."""
    layer_classes = set(getattr(module, "_no_split_modules", None) or ())
    return [part for part in module.modules() if type(part).__name__ in layer_classes]
