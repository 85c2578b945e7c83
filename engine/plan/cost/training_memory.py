"""Bytes of training where layers are computed again, weights are split by FSDP, or the optimizer's
state waits on the host; and of weights that wait there.

Owns: what each layout changes of a node's parts. Does not own: the parts without them
(memory.py), which layout a node has (passes/memory_fit.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from engine.plan.cost.memory import WIDTHS, Work, token_activations
from engine.plan.cost.models import Head, Shape

OFFLOADED_PART = "offloaded"
SUMS_PART = "sums"
BUCKET = 1 << 26
"""Weights whose state is on the device at once (kernels/torch/offload.py), or one larger weight."""
_PINNED = 1.5
"""Bytes of pinned memory over those that were asked for: torch 2.11 takes powers of two, so up to
twice as many (c10's PowerOf2Ceil in ATen/core/CachingHostAllocator.h).
"""
_FLOAT = 4


def recompute_parts(
    parts: Mapping[str, int], shape: Shape, work: Work, dtype: str
) -> dict[str, int]:
    """Change parts of training to those where each layer is computed again.

    Every layer keeps its input (Chen et al., arXiv:1604.06174, section 4), and one layer at a time
    has what `token_activations` says of a Model of one layer, with the float32 inputs of both norms
    of narrow ones. Logits and their gradient come while no layer has: they count as far as they are
    more. Counted tensor by tensor in a Qwen2 of 24 x 32 (rows of 32 tokens): 7.4 KB a token in
    float32, 4.0 in bfloat16, by this formula 7.9 and 4.2.
    """
    inputs = WIDTHS[dtype] * shape.layers * shape.hidden
    one_layer = token_activations(replace(shape, layers=1), dtype, work.gathered)
    if dtype != "float32":
        one_layer += 2 * shape.hidden * _FLOAT
    fitted_parts = dict(parts)
    fitted_parts["activations"] = work.at_once * (inputs + one_layer)
    more_logits = fitted_parts.pop("logits", 0) - work.at_once * one_layer
    if more_logits > 0:
        fitted_parts["logits"] = more_logits
    return fitted_parts


def offload_parts(
    parts: Mapping[str, int], parameters: int, shape: Shape | None, dtype: str
) -> dict[str, int]:
    """Change parts of training on a GPU to those where the optimizer's state waits on the host, and
    comes to the device in buckets. While a bucket is there, activations and logits are not: it
    counts as far as it is more. parameters: of this rank's part.
    """
    fitted_parts = dict(parts)
    state = fitted_parts.pop("optimizer")
    fitted_parts[OFFLOADED_PART] = pinned_bytes(state)
    largest_weight = 0 if shape is None else shape.vocabulary * shape.hidden
    in_bucket = min(parameters, max(BUCKET, largest_weight))
    numbers = 2 if dtype == "float32" else 3
    passing = parts.get("activations", 0) + parts.get("logits", 0)
    bucket = max(0, in_bucket * numbers * _FLOAT - passing)
    if bucket:
        fitted_parts["bucket"] = bucket
    return fitted_parts


def pinned_bytes(size: int) -> int:
    """Bytes of host memory that so many bytes of tensors take there."""
    return math.ceil(_PINNED * size)


def gathered_bytes(shape: Shape, dtype: str, head: Head) -> int:
    """Bytes of a tensor rank's weights that FSDP has gathered at most, and of gradients before they
    are summed: what is in no layer, a layer and the next one, and the gradients of one, once more
    in float32. shape: of that rank's part.
    """
    layer = shape.matrices // max(1, shape.layers)
    weights = shape.tables(head) + 2 * layer
    return WIDTHS[dtype] * (weights + layer) + _FLOAT * layer


def sum_parts(parts: Mapping[str, int], parameters: int, sums: int) -> dict[str, int]:
    """Change parts of training to those of a Step that comes part by part: so many float32 sums of
    gradients stay between two parts, and one of them is what a backward pass adds to.
    """
    summed_parts = dict(parts)
    one_sum = parameters * _FLOAT
    summed_parts[SUMS_PART] = sums * one_sum
    gradients = summed_parts.pop("gradients") - one_sum
    if gradients > 0:
        summed_parts["gradients"] = gradients
    return summed_parts
