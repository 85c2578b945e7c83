"""Activations computed again: of each decoder layer, training keeps the input alone.

Owns: how a layer's forward is wrapped for that, and which state of a layer it then runs with. Does
not own: whether a node's layers are (the plan), what a layer computes, how weights are split
(parallel.py, whose hooks stay outside of what is wrapped here).

The backward pass computes a layer once more from its input, just before it needs what the layer
made (Chen et al., arXiv:1604.06174), with the same kernels and so to the same bits. All that a
layer is called with, the attention pass too, is as it was the first time. So is the state that
says which adapters it computes with: one module may compute for two Models, and the other one's
pass may come before this one's backward pass.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dataflow.errors import KernelError
from operators.kernels.torch.decoder_layers import find_decoder_layers

ADAPTER_STATE = ("_active_adapter", "_disable_adapters")
"""Attributes of a layer's parts that say which adapters it computes with, as peft has them
(peft.tuners.tuners_utils.BaseTunerLayer).
"""


def recompute_layers(module: nn.Module, known_layers: Sequence[nn.Module] = ()) -> None:
    """Let backward passes compute each decoder layer again, in place; weights and names stay as
    they are, and passes without gradient run as before. Does nothing to layers of which that is
    true already, as nodes may share a module.

    Before the module is split by FSDP, which gathers a layer's weights once for both; after its
    layers are compiled, which cannot be done to what is wrapped here. known_layers: of one that is
    split already, as it tells them no more. Raises KernelError for a module whose layers cannot be
    told.
    """
    layers = known_layers or find_decoder_layers(module)
    if not layers:
        raise KernelError(
            f"{type(module).__name__}: expected decoder layers that transformers names"
            " (_no_split_modules), found none. Fix: recompute none for its node."
        )
    for layer in layers:
        if not isinstance(layer.forward, _RecomputedForward):
            layer.forward = _RecomputedForward(layer)


class _RecomputedForward:
    """The forward of one layer, whose backward pass computes it again."""

    def __init__(self, layer: nn.Module) -> None:
        # The layer holds this object: were the layer held here, a closed kernel's weights would
        # stay on the device until the garbage collector runs.
        self._layer = weakref.ref(layer)
        self._wrapped: Callable[..., Any] | None = vars(layer).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the layer."""
        layer = self._layer()
        assert layer is not None
        forward = self._wrapped or type(layer).forward.__get__(layer)
        if torch.is_grad_enabled():
            state = _LayerState(layer)
            forward = partial(
                checkpoint,
                forward,
                use_reentrant=False,
                # Dropout is off (models.py), and nothing else in a layer draws.
                preserve_rng_state=False,
                context_fn=lambda: (contextlib.nullcontext(), state),
            )
        return forward(*args, **kwargs)


class _LayerState:
    """The adapter state of a layer as it is now; inside it, the layer has it again."""

    def __init__(self, layer: nn.Module) -> None:
        self._attributes: list[tuple[nn.Module, str, Any]] = []
        for part in layer.modules():
            for name in ADAPTER_STATE:
                # Without a look at what a module has by __getattr__, which would take as long as
                # all else here.
                if name in vars(part) or hasattr(type(part), name):
                    self._attributes.append((part, name, getattr(part, name)))
        self._present: list[Any] = []

    def __enter__(self) -> None:
        self._present = [getattr(part, name) for part, name, _ in self._attributes]
        for part, name, setting in self._attributes:
            setattr(part, name, setting)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Also after the exception by which torch ends what is computed again.
        for (part, name, _), setting in zip(self._attributes, self._present, strict=True):
            setattr(part, name, setting)
