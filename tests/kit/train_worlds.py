"""How many ranks train together in tests, what they divide, and which cases they train.

Owns: the worlds, by name. Does not own: the cases and what a rank does (train_ranks.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """How many ranks train; groups of `tensor` x `context` have the same rows; shard: split
    weights.
    """

    size: int = 2
    tensor: int = 1
    context: int = 1
    shard: bool = False
    cases: Sequence[str]

    @property
    def alike(self) -> int:
        """The number of ranks with the same rows."""
        return self.tensor * self.context

    @property
    def shares(self) -> int:
        """The number of shares of the rows."""
        return self.size // self.alike


_BY_ROWS = (
    *("grpo", "value", "group", "one prompt", "no row", "mute", "chunked"),
    *("two sets", "no row of a set"),
)
_IN_PARTS = (
    *("in parts", "a part on one rank", "values in parts", "groups in parts"),
    *("two sets in parts", "fitted in parts"),
)
_SPLIT_IN_PARTS = ("in parts", "groups in parts", "two sets in parts", "fitted in parts")
_BOTH_WAYS = ("grpo", "fitted", "value", "no row", "qwen3", "in parts", "two sets in parts")
_BY_MATRICES = ("grpo", "fitted", "value", "group", "chunked", "qwen3")
WORLDS = {
    "whole": World(cases=(*_BY_ROWS, "in parts", "two sets in parts")),
    "split": World(shard=True, cases=(*_BY_ROWS, "fitted", *_SPLIT_IN_PARTS)),
    "1 x 2": World(tensor=2, cases=(*_BY_MATRICES, "in parts", "groups in parts")),
    "2 x 2": World(size=4, tensor=2, cases=("value", "two sets", "two sets in parts")),
    "2 x 2, split": World(size=4, tensor=2, shard=True, cases=_BOTH_WAYS),
}
_BY_TOKENS = ("grpo", "value", "group", "mute", "chunked", "qwen3", "two sets")
CONTEXT_WORLDS = {
    "tokens": World(
        context=2, cases=(*_BY_TOKENS, "fitted", "side", "in parts", "groups in parts")
    ),
    "tokens in 4": World(size=4, context=4, cases=("grpo", "value", "chunked")),
    "rows and tokens": World(size=4, context=2, cases=("value", "two sets", "two sets in parts")),
    "rows and tokens, split": World(size=4, context=2, shard=True, cases=_BOTH_WAYS),
    "tokens and matrices": World(
        size=4, tensor=2, context=2, cases=("grpo", "fitted", "value", "qwen3", "in parts")
    ),
}
"""Worlds in which ranks divide the tokens of the same rows."""
THREE = World(size=3, cases=_IN_PARTS)
"""Which only trains in parts."""
