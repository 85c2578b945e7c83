"""A module as a layout trains it: layers computed again, weights split.

Owns: what is done to a module before it is trained, and in which order. Does not own: how any of it
is done (recompute.py, parallel.py, slices.py).
"""

from __future__ import annotations

from torch import nn

from dataflow.kernel import Layout, Session
from operators.kernels.torch.compiled_layers import compile_layers
from operators.kernels.torch.parallel import Ranks, Sharded, split_module
from operators.kernels.torch.recompute import recompute_layers
from operators.kernels.torch.slices import Slices, slice_module


def prepare_module(
    module: nn.Module, layout: Layout, session: Session, ranks: Ranks, node: str
) -> tuple[Sharded | None, Slices | None]:
    """Change a module in place as its layout says. Returns what splits its weights: over
    data-parallel ranks, and over tensor ranks; None where they are whole.
    """
    if layout.compiled:
        compile_layers(module)
    # Before the splitting: FSDP's hooks stay outside of what is computed again, so that a layer is
    # gathered once for that and for its backward pass.
    if layout.recompute == "layers":
        recompute_layers(module)
    slices: Slices | None = None
    if ranks.mesh is not None:
        slices = slice_module(module, ranks.mesh, node)
    if not layout.shard or session.world == layout.tensor:
        return None, slices
    # Matrices first: FSDP then splits each tensor rank's part of them.
    device = next(module.parameters()).device
    split = split_module(module, session, device, ranks.data_mesh)
    if slices is not None:
        slices.note_sharding(session.group)
    return split, slices
