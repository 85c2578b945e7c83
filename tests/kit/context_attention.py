"""Attention of packed tokens by context ranks, and by one: `main`, which each rank runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from operators.kernels.torch.attention import AttentionPass
from operators.kernels.torch.attention_kind import AttentionKind
from operators.kernels.torch.context_ranks import ContextRanks
from operators.kernels.torch.packed_pass import PackedPass
from operators.kernels.torch.packing import Packed, pack
from tests.kit.rows import random_rows
from tests.kit.training import gloo_world

HEADS, DIM = 4, 8
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """A layer's attention, with so many heads of keys."""

    key_heads: int = 2
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False


KINDS = {
    "plain": LayerKind(),
    "one head of keys": LayerKind(key_heads=1),
    "window": LayerKind(window=3),
    "capped": LayerKind(softcap=5.0),
    "sinks": LayerKind(has_sinks=True, key_heads=4),
}


def pack_rows() -> Packed:
    """Rows that share prompts, of an odd number of tokens."""
    rows = random_rows(3, 3, seed=1)
    packed = pack(rows.ragged("prompt_ids"), rows.ragged("completion_ids"), np.arange(9))
    if len(packed.ids) % 2:
        return packed
    return pack(rows.ragged("prompt_ids"), rows.ragged("completion_ids"), np.arange(9), whole=True)


def attend(kind: LayerKind, attention_pass: AttentionPass, own: slice, tokens: int) -> list[Tensor]:
    """The output for some tokens, and the gradients of what made it."""
    generator = torch.Generator().manual_seed(3)
    widths = {"query": HEADS, "key": kind.key_heads, "value": kind.key_heads}
    inputs: list[Tensor] = []
    for heads in widths.values():
        whole = torch.randn(tokens, heads, DIM, generator=generator)
        inputs.append(whole[own].clone().requires_grad_())
    sinks = torch.randn(HEADS, generator=generator).requires_grad_()
    layer = AttentionKind(scaling=DIM**-0.5, window=kind.window, softcap=kind.softcap)
    if kind.has_sinks:
        layer, inputs = replace(layer, sinks=sinks), [*inputs, sinks]
    output = attention_pass.attend(0, inputs[0], inputs[1], inputs[2], layer)
    weights = torch.randn(tokens, HEADS, DIM, generator=generator)[own]
    (output * weights).sum().backward()
    return [output.detach(), *(x.grad for x in inputs if x.grad is not None)]


def main(number: int, folder: Path, count: int) -> None:
    """Write what this rank of so many comes to, by kind."""
    with gloo_world(folder / "store", number, count):
        ranks, packed = ContextRanks(dist.group.WORLD, CPU), pack_rows()
        attention_pass: Any = ranks.divide(packed).attention_pass
        tokens = -(-len(packed.ids) // count) * count
        places = slice(number, None, count)
        reports = {
            name: attend(kind, attention_pass, places, tokens) for name, kind in KINDS.items()
        }
        torch.save(reports, folder / f"rank {number}.pt")


def attend_alone(kind: LayerKind, count: int) -> list[Tensor]:
    """What one rank comes to for the tokens that so many have."""
    packed = pack_rows()
    padded = -(-len(packed.ids) // count) * count
    return attend(kind, PackedPass(packed, CPU), slice(len(packed.ids)), padded)
