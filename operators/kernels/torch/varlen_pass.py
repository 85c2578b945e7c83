"""Attention over rows that share no prefix, by FlashAttention for rows of different lengths.

Owns: whether a layout's rows share a prefix, and the pass of those that do not. Does not own: the
layout (packing.py), when this path is taken (dataflow/attention_paths.py).

Half precision on CUDA only. Imported only where the path is taken, for all that it imports.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from operators.kernels.torch.attention_kind import AttentionKind
from operators.kernels.torch.packing import Packed

_attend_rows: Any = varlen_attn
if "enable_gqa" in inspect.signature(varlen_attn).parameters:
    # Before torch 2.12 it takes key heads that query heads share without a word, as its kernel
    # always could.
    _attend_rows = partial(varlen_attn, enable_gqa=True)


class VarlenPass:
    """The AttentionPass of a Packed layout in which no token has two successors."""

    def __init__(self, packed: Packed, device: torch.device | str) -> None:
        starts = np.flatnonzero(packed.positions == 0)
        bounds = np.append(starts, len(packed.ids)).astype(np.int32)
        self.longest = int(np.diff(bounds).max(initial=0))
        self.bounds = torch.from_numpy(bounds).to(device, non_blocking=True)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind
    ) -> Tensor:
        """See AttentionPass. The kind is plain."""
        # So many keys to the left of a query, none to its right; -1: as many as there are.
        left = -1 if kind.window is None else kind.window - 1
        return _attend_rows(
            query,
            key,
            value,
            self.bounds,
            self.bounds,
            self.longest,
            self.longest,
            scale=kind.scaling,
            window_size=(left, 0),
        )
