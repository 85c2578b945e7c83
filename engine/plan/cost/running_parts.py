"""Bytes of what a node has of a Model, whatever it does with it.

Owns: which formulas count for which kind of pass and layout. Does not own: the formulas (memory.py,
static_decode.py, training_memory.py), what a Worker shares (engine/plan/passes/estimate.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dataflow.kernel import Layout
from engine.plan.cost import memory
from engine.plan.cost.devices import Kind
from engine.plan.cost.memory import Work
from engine.plan.cost.model_passes import exchanged_bytes
from engine.plan.cost.models import Head, Shape
from engine.plan.cost.static_decode import static_decode_parts
from engine.plan.cost.training_memory import (
    OFFLOADED_PART,
    gathered_bytes,
    offload_parts,
    pinned_bytes,
    recompute_parts,
    sum_parts,
)

_SHARDED = ("weights", "own_weights", "gradients", "sums", "optimizer", "offloaded")
"""Parts that data and context ranks divide among them with shard."""
_OF_TOKENS = frozenset({"activations", "logits"})
"""Parts that context ranks divide among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningKernel:
    """What bytes depend on besides Model and rows. has_static_keys: as static_decode.py says.
    gradient_sums: that a train node keeps between the parts of a Step; 0 where it gets it whole.
    passed_layers: that its backward pass goes through; None for all. read_layers: whose states a
    side module reads. narrow: numbers of a token that an adapter keeps. parameters: of its part.
    """

    kind: Kind
    layout: Layout
    dtype: str
    head: Head = "lm"
    is_on_gpu: bool = False
    has_static_keys: bool = False
    gradient_sums: int = 0
    passed_layers: int | None = None
    read_layers: int = 0
    narrow: int = 0
    parameters: int = 0

    @property
    def has_waiting_weights(self) -> bool:
        """Whether its weights wait in host memory between passes."""
        return self.layout.offload == "weights" and self.is_on_gpu


def weight_parts(
    parameters: int, kernel: RunningKernel, *, beside: int = 0, merged: int = 0
) -> dict[str, int]:
    """Bytes of one rank's weights, where they are between passes. parameters: that it counts of its
    part; beside: of what the Model has beside its base; merged: of copies of the base's matrices
    with the adapter in them.
    """
    width = memory.WIDTHS[kernel.dtype]
    if kernel.has_waiting_weights:
        return {OFFLOADED_PART: pinned_bytes((parameters + beside) * width)}
    parts: dict[str, int] = {}
    if parameters:
        parts["weights"] = parameters * width
    if beside:
        parts["own_weights"] = beside * width
    if merged:
        parts["merged"] = merged * width
    return parts


def running_parts(
    parameters: int, shape: Shape | None, works: Sequence[Work], kernel: RunningKernel
) -> dict[str, int]:
    """Bytes of one rank beside its weights, by part. parameters: that it trains; shape: of its part
    of the Model.
    works: of each row set, of which a pass has one; the largest counts.
    """
    parts = _passing_parts(parameters, shape, works, kernel)
    if shape is not None and kernel.read_layers:
        parts = _add_states(parts, shape, works, kernel)
    return parts


def _add_states(
    parts: Mapping[str, int], shape: Shape, works: Sequence[Work], kernel: RunningKernel
) -> dict[str, int]:
    """Add what each layer leaves, until a side module has read it."""
    tokens = -(-max(work.at_once for work in works) // kernel.layout.context)
    states = tokens * kernel.read_layers * shape.hidden * memory.WIDTHS[kernel.dtype]
    fitted_parts = dict(parts)
    fitted_parts["activations"] = parts.get("activations", 0) + states
    if kernel.kind == "train" and "logits" in parts:
        # No layer keeps anything, so that logits are where a layer's tensors were.
        of_one_layer = tokens * memory.token_forward(shape, kernel.dtype)
        fitted_parts["logits"] = max(0, parts["logits"] - of_one_layer)
    return fitted_parts


def _passing_parts(
    parameters: int, shape: Shape | None, works: Sequence[Work], kernel: RunningKernel
) -> dict[str, int]:
    if kernel.kind == "train":
        return _training_parts(parameters, shape, works, kernel)
    if kernel.kind == "forward":
        return _forward_parts(shape, works, kernel)
    if shape is None:
        return {}
    (work,) = works
    if kernel.has_static_keys:
        parts = static_decode_parts(shape, work, kernel.dtype)
    else:
        parts = memory.decode_parts(shape, work, kernel.dtype)
    if kernel.layout.cache_bytes:
        parts.pop("kv_cache", None)  # held always, by the engine
    return parts


def _training_parts(
    parameters: int, shape: Shape | None, works: Sequence[Work], kernel: RunningKernel
) -> dict[str, int]:
    layout, parts, passed = kernel.layout, dict[str, int](), shape
    if shape is not None and kernel.passed_layers is not None:
        # Nothing is kept of the others.
        passed = replace(shape, layers=kernel.passed_layers)
    for work in works:
        row_set = memory.train_parts(parameters, passed, work, kernel.dtype, kernel.head)
        if layout.recompute == "layers" and passed is not None:
            row_set = recompute_parts(row_set, passed, work, kernel.dtype)
        if passed is not None:
            row_set["activations"] += work.at_once * _narrow_bytes(passed, kernel)
        for part, size in _divide_tokens(row_set, layout).items():
            parts[part] = max(size, parts.get(part, 0))
    if kernel.gradient_sums:
        parts = sum_parts(parts, parameters, kernel.gradient_sums)
    if layout.shard and shape is not None:
        parts["gathered"] = gathered_bytes(shape, kernel.dtype, kernel.head)
    if layout.offload == "optimizer" and kernel.is_on_gpu:
        ranks = layout.data * layout.context if layout.shard else 1
        parts = offload_parts(parts, parameters // ranks, shape, kernel.dtype)
    return parts


def _divide_tokens(parts: Mapping[str, int], layout: Layout) -> dict[str, int]:
    """Bytes of one of the ranks that divide tokens."""
    divided = dict(parts)
    for part in _OF_TOKENS & divided.keys():
        divided[part] = -(-divided[part] // layout.context)
    return divided


def _narrow_bytes(passed: Shape, kernel: RunningKernel) -> int:
    """Bytes of a token between the matrices of an adapter: of all layers, or of the one that is
    computed again. passed: of the layers that the backward pass goes through.
    """
    size = kernel.narrow * memory.WIDTHS[kernel.dtype]
    if kernel.layout.recompute == "layers":
        return size // max(1, passed.layers)
    return size


def _forward_parts(
    shape: Shape | None, works: Sequence[Work], kernel: RunningKernel
) -> dict[str, int]:
    parts = dict[str, int]()
    if shape is not None:
        (work,) = works
        parts = memory.forward_parts(shape, work, kernel.dtype, kernel.head)
        parts = _divide_tokens(parts, kernel.layout)
    if kernel.has_waiting_weights:
        parts["loaded"] = kernel.parameters * memory.WIDTHS[kernel.dtype]
    return parts


def count_exchanged(shape: Shape | None, works: Iterable[Work], kernel: RunningKernel) -> int:
    """Bytes that each context rank sends in the largest pass, and in the backward one if there is
    one; 0 without such ranks. shape: of a tensor rank's part.
    """
    layout = kernel.layout
    if shape is None or layout.context == 1:
        return 0
    passes = 1 if kernel.kind == "forward" else 2 + (layout.recompute == "layers")
    of_token = exchanged_bytes(shape, memory.WIDTHS[kernel.dtype], 1, layout.context)
    return int(passes * of_token * max(work.at_once for work in works))


def divide_among_ranks(parts: Mapping[str, int], layout: Layout) -> dict[str, int]:
    """Bytes of one rank, where data and context ranks may each keep a part of what their tensor
    rank has.
    """
    divided, ranks = dict(parts), layout.data * layout.context
    if layout.shard:
        for part in _SHARDED:
            if part in divided:
                divided[part] = -(-divided[part] // ranks)
    return divided
