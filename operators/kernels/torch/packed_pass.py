"""The attention pass of packed tokens by whichever path the rule chooses.

Owns: applying the rule (dataflow/attention_paths.py) to each call, with the tensors that are there.
Does not own: the rule, or any path (shared_attention.py, flex_pass.py, varlen_pass.py).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dataflow.attention_paths import AttentionCall, AttentionPath, choose_attention_path
from operators.kernels.torch.attention import AttentionPass
from operators.kernels.torch.attention_kind import AttentionKind
from operators.kernels.torch.packing import Packed
from operators.kernels.torch.shared_attention import TreePass


class PackedPass:
    """The AttentionPass of a Packed layout, of training and of forward passes: each path's own pass
    is made once, by the first layer that takes the path.
    """

    def __init__(self, packed: Packed, device: torch.device | str) -> None:
        self.longest = int(packed.positions.max(initial=-1)) + 1
        self._packed, self._device = packed, device
        self._shares_prefix = shares_prefix(packed)
        self.passes: dict[AttentionPath, AttentionPass] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind
    ) -> Tensor:
        """See AttentionPass."""
        call = AttentionCall(
            device=query.device.type,
            dtype=str(query.dtype).removeprefix("torch."),
            head=query.shape[2],
            value_head=value.shape[2],
            plain=kind.plain,
        )
        path = choose_attention_path(call, shares_prefix=self._shares_prefix)
        chosen_pass = self.passes.get(path)
        if chosen_pass is None:
            chosen_pass = make_path_pass(path, self._packed, self._device)
            self.passes[path] = chosen_pass
        return chosen_pass.attend(layer, query, key, value, kind)


def make_path_pass(
    path: AttentionPath, packed: Packed, device: torch.device | str
) -> AttentionPass:
    """Make the pass of one path. The modules of the others import much, and are not imported."""
    if path == "flex":
        from operators.kernels.torch.flex_pass import FlexPass

        return FlexPass(packed, device)
    if path == "varlen":
        from operators.kernels.torch.varlen_pass import VarlenPass

        return VarlenPass(packed, device)
    return TreePass(packed, device)


def shares_prefix(packed: Packed) -> bool:
    """Whether any token has several successors. If none has, each token but a row's first follows
    the one before it, and the layout is rows one after another.
    """
    positions = packed.positions
    is_first = positions[1:] == 0
    follows = positions[1:] == positions[:-1] + 1
    return not bool(np.all(is_first | follows))
