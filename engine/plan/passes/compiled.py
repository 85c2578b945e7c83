"""Which nodes' layers are compiled.

Owns: that, as Layout.compiled. Does not own: what is compiled of a layer
(operators/kernels/torch/compiled_layers.py).
"""

from __future__ import annotations

from dataclasses import replace

from engine.plan.draft import Draft
from engine.plan.passes.side_modules import has_side
from engine.plan.plan import PlannedNode

_TORCH_KERNELS = "operators.kernels.torch."


def choose_compiled(draft: Draft) -> Draft:
    """Compile the layers of nodes that compute with torch kernels: of all, of none, or of those on
    GPUs. What is compiled rounds otherwise, and on a CPU the same graph promises the same bits.
    """
    nodes: list[PlannedNode] = []
    for node in draft.nodes:
        layout = replace(node.layout, compiled=_is_compiled(draft, node))
        nodes.append(replace(node, layout=layout))
    return replace(draft, nodes=tuple(nodes))


def _is_compiled(draft: Draft, node: PlannedNode) -> bool:
    if not node.traits.computes or not node.kernel.startswith(_TORCH_KERNELS):
        return False
    if node.layout.tensor > 1:
        # Its matrices are split by hooks and tensors that torch.compile has no part in.
        return False
    if has_side(draft, node):
        # Hooks gather what its layers leave, in a list.
        return False
    if draft.placing.compiled == "auto":
        return draft.is_on_gpus(node)
    return draft.placing.compiled == "layers"
