"""Seconds of a node, from the operations that it needs.

Owns: the counts, and the rough rates that turn them into seconds. Does not own: measured times.

Rough numbers at the greatest lengths, to find the slowest node, not to promise a time. At the true
lengths of one run (2 layers x 128, 32 prompts of 54 tokens x 8 answers of 6, two cores): 89 ms for
training (measured: 104-110 ms), 30 ms for generation (52-63 ms).
"""

from __future__ import annotations

from engine.cost.memory import WIDTHS, Work
from engine.cost.models import Shape

CORE_RATE = 5e10
"""Operations a second and core that training reaches. Two cores of an x86-64 server (AMD EPYC) did
218 GFLOP/s in float32 matrix products, and small models reached a little less than half of it.
"""

MEMORY_RATE = 2e10
"""Bytes a second that one host reads from memory: memcpy of 256 MB on the same machine."""

COLUMN_RATE = 2e8
"""Bytes of columns a second that NumPy expressions go through: some ten passes over memory."""


def matmul_parameters(parameters: int, shape: Shape, head: str) -> int:
    """Parameters that each token is multiplied with: all but an embedding that is looked up."""
    looked_up = shape.vocabulary * shape.hidden
    return parameters - (0 if shape.tied and head == "lm" else looked_up)


def forward_operations(
    parameters: int, shape: Shape, tokens: int, context: float, head: str = "lm"
) -> float:
    """2 a parameter and token, and two products of attention: 4 * layers * width a token and key
    (Kaplan et al., arXiv:2001.08361, section 2.1). context: mean number of keys that a token sees.
    """
    attention = 4.0 * shape.layers * shape.attention * context
    return tokens * (2.0 * matmul_parameters(parameters, shape, head) + attention)


def train_seconds(
    parameters: int, shape: Shape, work: Work, *, epochs: int, cores: int, head: str
) -> float:
    """Forward and backward, three times a forward (6 a parameter and token), in each epoch."""
    return 3.0 * epochs * forward_seconds(parameters, shape, work, cores=cores, head=head)


def forward_seconds(parameters: int, shape: Shape, work: Work, *, cores: int, head: str) -> float:
    """All rows of a Step, each prompt once; a token sees half of its row in the mean."""
    operations = forward_operations(parameters, shape, work.fed, work.lengths.row / 2.0, head)
    return operations / (CORE_RATE * cores)


def decode_seconds(parameters: int, shape: Shape, work: Work, *, cores: int, dtype: str) -> float:
    """Prefill, then a forward pass a token with all slots full: the slower of compute and reads of
    all weights and the rows' cache (Pope et al., arXiv:2211.05102, section 2).
    """
    prompts, lengths = work.prompts * work.lengths.prompt, work.lengths
    rate = CORE_RATE * cores
    prefill = forward_operations(parameters, shape, prompts, lengths.prompt / 2.0) / rate
    slots = min(work.slots, work.rows)
    steps = -(-work.rows // max(1, slots)) * lengths.completion
    mean = lengths.prompt + lengths.completion / 2.0
    computing = forward_operations(parameters, shape, slots, mean) / rate
    cache = 2 * shape.layers * shape.kv * WIDTHS[dtype] * mean * slots
    reading = (parameters * WIDTHS[dtype] + cache) / MEMORY_RATE
    return prefill + steps * max(computing, reading)


def column_seconds(size: int) -> float:
    """A column function of the vocabulary over its inputs of so many bytes."""
    return size / COLUMN_RATE
