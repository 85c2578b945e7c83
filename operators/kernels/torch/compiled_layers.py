"""Decoder layers compiled by torch.compile: few kernels in the place of many.

Owns: which parts of a module are compiled, and where a compiled part ends. Does not own: whether a
node's layers are (the plan), attention (the passes), what a backward pass computes again
(recompute.py).

A layer's norms, rotations, residuals and activations are small kernels that each read and write a
whole hidden state; compiled, they become a few. All layers of one class share what was compiled of
it, for rows of any length. Attention is no part of it: a pass is Python, which knows who attends to
whom. Rounding differs from that of the single kernels, so bits do, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dataflow.errors import KernelError
from operators.kernels.torch.attention import ATTENTION, attention
from operators.kernels.torch.decoder_layers import find_decoder_layers
from operators.kernels.torch.torch_compiler import compile_for_all_lengths


def compile_layers(module: nn.Module) -> None:
    """Compile each decoder layer at its first call, in place; weights and names stay as they are.
    Does nothing to layers that something wraps already, as nodes may share a module: this comes
    before all that wraps layers.

    A call raises KernelError where the compiler fails.
    """
    # Here and not at import: torch.compiler brings in a second of modules.
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, torch.compiler.disable(attention))
    compiled_by_class: dict[type, Callable[..., Any]] = {}
    for layer in find_decoder_layers(module):
        kind = type(layer)
        if "forward" not in vars(layer):
            if kind not in compiled_by_class:
                compiled_by_class[kind] = compile_for_all_lengths(kind.forward)
            layer.forward = _CompiledForward(layer, compiled_by_class[kind])


class _CompiledForward:
    """The forward of one layer, compiled; the compiler's failures are told in our words."""

    def __init__(self, layer: nn.Module, compiled: Callable[..., Any]) -> None:
        # The layer holds this object: were the layer held here, a closed kernel's weights would
        # stay on the device until the garbage collector runs.
        self._layer = weakref.ref(layer)
        self._compiled = compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the layer."""
        from torch._dynamo.exc import TorchDynamoException

        layer = self._layer()
        try:
            return self._compiled(layer, *args, **kwargs)
        except TorchDynamoException as error:
            first_line = str(error).strip().partition("\n")[0]
            raise KernelError(
                f"{type(layer).__name__}: expected layers that torch.compile can compile, found"
                f" {type(error).__name__}: {first_line}. Fix: --compiled none."
            ) from error
