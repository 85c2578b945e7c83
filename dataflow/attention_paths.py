"""Which path computes attention over packed tokens: one rule, for the plan and for the kernels.

Owns: the rule and its numbers. Does not own: the paths themselves (operators/kernels/torch), what a
plan knows of a Model (engine/plan/cost/attention.py). Imports no torch.

    path     computes                                                         keeps per layer
    dense    batched scaled dot-product attention, by blocks of queries       gathered keys, a mask
    flex     torch's FlexAttention under one block mask a micro-batch         nothing
    varlen   FlashAttention over rows one after another                       nothing

The kernels apply the rule to each call, with the tensors that are there; the plan to what a Model's
config.json says. A card below compute capability 8.0 has no bfloat16 and is not planned for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AttentionPath = Literal["dense", "flex", "varlen"]

FLEX_DTYPES = ("float32", "bfloat16", "float16")
"""FlexAttention adds up in float32, so float64 would lose digits."""

FLASH_DTYPES = ("bfloat16", "float16")
"""FlashAttention multiplies in half precision only."""

NARROWEST_HEAD = 16
"""The narrowest head that Triton's matrix product takes: FlexAttention raises for others."""

WIDEST_HEAD = 256
"""The widest head that FlashAttention takes, and for which FlexAttention has tiles that fit into
the shared memory of a card.
"""

FLASH_HEAD_MULTIPLE = 8
"""FlashAttention copies 16 bytes at once: heads are multiples of as many half-precision numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """What the rule looks at.

    device: torch's name of the kind of device, such as `cuda`. dtype: of queries, keys and values.
    head: numbers of one query head and key head. value_head: of one value head. plain: whether the
    scores are neither capped nor joined by sinks.
    """

    device: str
    dtype: str
    head: int
    value_head: int
    plain: bool


def choose_attention_path(call: AttentionCall, *, shares_prefix: bool) -> AttentionPath:
    """Choose the path of one call. shares_prefix: whether any row goes on from the middle of
    another, so that a token has several successors.
    """
    heads = (call.head, call.value_head)
    if call.device != "cuda" or call.dtype not in FLEX_DTYPES:
        return "dense"
    if min(heads) < NARROWEST_HEAD or max(heads) > WIDEST_HEAD:
        return "dense"
    if shares_prefix or not _fits_flash(call):
        return "flex"
    return "varlen"


def _fits_flash(call: AttentionCall) -> bool:
    """Whether FlashAttention computes the call, given rows one after another."""
    if not call.plain or call.dtype not in FLASH_DTYPES:
        return False
    return call.head == call.value_head and call.head % FLASH_HEAD_MULTIPLE == 0


def list_attention_paths(call: AttentionCall) -> tuple[AttentionPath, ...]:
    """List the paths that calls like this one may take: over the prefix tree, then the one where no
    prefix is shared, if that is another.
    """
    tree_path = choose_attention_path(call, shares_prefix=True)
    row_path = choose_attention_path(call, shares_prefix=False)
    return tuple(dict.fromkeys((tree_path, row_path)))


def describe_attention_paths(paths: tuple[AttentionPath, ...]) -> str:
    """Say in words what `list_attention_paths` returned."""
    text = f"{paths[0]} over the prefix tree"
    if len(paths) > 1:
        text = f"{text}, {paths[1]} where no prefix is shared"
    return text
