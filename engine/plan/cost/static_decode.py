"""Bytes of generation by torch on a GPU, whose keys are at fixed places.

Owns: the formulas and their assumptions. Does not own: those of a prefill or of logits (memory.py),
what the kernel does (operators/kernels/torch/static_memory.py).

There each row has a copy of its prompt, slots are a power of two, and a row's room is one, or the
middle between two. All of it stays from chunk to chunk, and so does what the kernel's CUDA graphs
compute with: it lasts, as an engine's cache does, until the Worker sleeps.
"""

from __future__ import annotations

from engine.plan.cost.memory import WIDTHS, Work, token_forward, token_pass
from engine.plan.cost.models import Shape

_FEWEST_ROWS = 8
_FEWEST_KEYS = 64
"""Slots, and tokens of a row, at least (kernels/torch/static_memory.py)."""

_BLOCK = 1 << 26
"""Numbers that sampling takes at once (kernels/torch/device_sampling.py)."""

_FLOAT = 4


def static_decode_parts(shape: Shape, work: Work, dtype: str) -> dict[str, int]:
    """Parts of generation at fixed places: keys with what a step computes, a prefill's activations
    and keys, and the logits after it.

    Of a Qwen2 of 1.5 B parameters in bfloat16 and 256 rows of 256 + 512 tokens, 5.3 GiB of keys.
    """
    slots = _round_up(work.decoded_at_once, _FEWEST_ROWS)
    room = _round_up_keys(work.lengths.row)
    token_keys = 2 * shape.layers * shape.kv * WIDTHS[dtype]
    logits = sampled_bytes(shape, slots, dtype)
    step = slots * token_forward(shape, dtype) + logits
    prefill = min(work.prompts * work.lengths.prompt, max(work.budget, work.lengths.prompt))
    # A layer's smaller keys are there beside the larger ones that take their place.
    grown = slots * room * shape.kv * WIDTHS[dtype]
    return {
        "cache": slots * room * token_keys + step,
        # A prompt's keys are made apart, and copied to its rows.
        "activations": prefill * (token_pass(shape, dtype) + token_keys) + grown,
        "logits": logits,
    }


def sampled_bytes(shape: Shape, rows: int, dtype: str) -> int:
    """Bytes of logits and, for a block of rows, their float32 copy, log-probs and weights."""
    numbers = rows * shape.vocabulary
    block = min(numbers, max(_BLOCK, shape.vocabulary))
    return numbers * WIDTHS[dtype] + 3 * block * _FLOAT


def _round_up(count: int, fewest: int) -> int:
    return 1 << (max(count, fewest) - 1).bit_length()


def _round_up_keys(count: int) -> int:
    power = _round_up(count, _FEWEST_KEYS)
    middle = power // 4 * 3
    return middle if middle >= max(count, _FEWEST_KEYS) else power
