"""Ten Steps that train an adapter: its base, how it begins, and the rows, all by names and numbers.

Owns: what a peer's trainer and ours are both given. Does not own: either. It needs the standard
library alone, as `inputs.py`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

STEPS, GROUPS, SAMPLES = 10, 2, 3
RANK, ALPHA = 2, 4.0
LR, CLIP_NORM, BETAS = 1e-2, 1.0, (0.9, 0.99)
CLIP, BETA = 0.2, 0.1
"""Of GRPO's loss: where ratios are clipped, and the weight of the KL to the base."""
CONFIG: dict[str, Any] = {
    "vocab_size": 98,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "pad_token_id": 96,
    "eos_token_id": 97,
    "bos_token_id": None,
}
"""Of the base, a Qwen2."""
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """A prompt, an answer and what it is worth. group: rows of one prompt have the same."""

    group: int
    prompt: list[int]
    answer: list[int]
    reward: float


def list_rows(step: int) -> list[StepRow]:
    """The rows of a Step, one group after the other."""
    draw = random.Random(step)

    def tokens(least: int, most: int) -> list[int]:
        return [draw.randrange(CONFIG["pad_token_id"]) for _ in range(draw.randint(least, most))]

    rows: list[StepRow] = []
    for group in range(GROUPS):
        prompt = tokens(2, 5)
        for _ in range(SAMPLES):
            reward = draw.randint(-8, 8) / 4
            rows.append(StepRow(group=group, prompt=prompt, answer=tokens(1, 6), reward=reward))
    return rows


def draw_weight(name: str, shape: tuple[int, ...]) -> list[float]:
    """The numbers of a weight of the base, row by row; of a norm, around 1."""
    draw = random.Random(name)
    middle, deviation = (1.0, 0.1) if "norm" in name else (0.0, 0.3)
    return [draw.gauss(middle, deviation) for _ in range(math.prod(shape))]


def draw_adapter(name: str, shape: tuple[int, ...]) -> list[float]:
    """The numbers of a matrix of the adapter as it begins: of A around 0, of B all 0."""
    if ".lora_B." in name:
        return [0.0] * math.prod(shape)
    draw = random.Random(name)
    bound = 1 / math.sqrt(shape[-1])
    return [draw.uniform(-bound, bound) for _ in range(math.prod(shape))]


def list_steps() -> Iterator[list[StepRow]]:
    """The rows of all Steps."""
    for step in range(1, STEPS + 1):
        yield list_rows(step)
