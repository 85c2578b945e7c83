"""How large an engine's memory for keys and values is, which is fixed when it starts.

Owns: the sizes. Does not own: memory that grows with the rows (memory.py), the engine.
"""

from __future__ import annotations

from engine.plan.cost.lengths import Lengths
from engine.plan.cost.memory import WIDTHS
from engine.plan.cost.models import Shape

BLOCK = 32
"""Tokens of a block, the unit in which memory is given to a row."""

MOST = 4 << 30
"""The most bytes for all rows, unless one needs more: the others wait until there is room. On a
GPU of its own an engine may have more (`most_beside`).
"""

GPU_SHARE = 0.8
"""Of a GPU's memory, for weights and cache together: the rest is for what passes (AReaL's
configurations say 0.8, vLLM 0.9 with what passes).
"""

UNSTATED_PROMPT = 4096
"""Tokens of a prompt for which there is room where neither `max_prompt_tokens` nor the data says
how long it can be.
"""


def longest_row(lengths: Lengths, context: int, most_prompt: int | None = None) -> int:
    """Most tokens of a row. context: of the Model, 0 if unknown. most_prompt: tokens of its prompt;
    None if nobody knows how long it can be, for which there is some room.
    """
    prompt = lengths.prompt
    if most_prompt is not None:
        prompt = most_prompt
    elif lengths.bound:  # a guess
        prompt = max(prompt, UNSTATED_PROMPT)
    limits = [limit for limit in (context, lengths.context) if limit]
    return min([prompt + lengths.completion, *limits])


def most_beside(weights: int, memory: int) -> int:
    """The most bytes of one rank's cache beside so many of weights, on a GPU that it has alone."""
    return max(MOST, int(GPU_SHARE * memory) - weights)


def cache_bytes(
    shape: Shape, lengths: Lengths, *, rows: int, longest: int, dtype: str, most: int = MOST
) -> int:
    """Bytes for so many rows at once, in whole blocks: at least the longest, and all within `most`.

    A token has 2 * layers * key heads * head dim numbers (Pope et al., arXiv:2211.05102, section
    2); a block more a row, since blocks are given before they are needed.
    """
    token = 2 * shape.layers * shape.kv * WIDTHS[dtype]
    usual_row = _blocks(min(lengths.row, longest)) * BLOCK * token
    longest_one = _blocks(longest) * BLOCK * token
    return max(longest_one, min(rows * usual_row, most))


def _blocks(tokens: int) -> int:
    """Blocks that a row of so many tokens has, with the one that is given in advance."""
    return -(-tokens // BLOCK) + 1
