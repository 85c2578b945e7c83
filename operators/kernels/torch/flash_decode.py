"""Attention of one new token per row by FlashAttention, which reads as many keys as each row has.

Owns: the call of torch's kernel, and whether to trust it on a device. Does not own: the tensors, or
attention of any other kind (static_keys.py).

A masked kernel reads all keys up to the longest row's, also of slots without a row, only to hide
them. Decoding is bound by these reads. torch 2.11 has lengths of keys only in the operator below
its public functions (2.13 also in `varlen_attn`), so a device must first show that it computes what
it should.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from operators.kernels.torch.attention_kind import AttentionKind
from operators.kernels.torch.cache import Level

_log = logging.getLogger(__name__)

_WIDEST_HEAD = 256
"""Numbers of the widest head that FlashAttention 2 has kernels for (arXiv:2307.08691)."""

_NEWEST_BASE = (8, 0)
"""The compute capability from which on it runs."""


def suits_flash(level: Level, kind: AttentionKind) -> bool:
    """Whether the kernel has this kind of attention, for these keys and values."""
    dim = level.keys.shape[3]
    alike = dim == level.values.shape[3]
    fits = dim % 8 == 0 and dim <= _WIDEST_HEAD
    # Windows it has too, but then it does not compute the query heads of a key head together.
    return kind.plain and kind.window is None and alike and fits


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLengths:
    """How many keys each row has, as the kernel asks for it; made once for all layers of a step.

    query_starts, key_starts int32 [rows + 1]: where each row begins among all queries and all keys.
    used int32 [rows]. longest: no row has more.
    """

    query_starts: Tensor
    key_starts: Tensor
    used: Tensor
    longest: int


def make_key_lengths(positions: Tensor, room: int, longest: int) -> KeyLengths:
    """The lengths of rows whose new tokens are at these positions, int64 [rows]. room: tokens that
    the keys of a slot have room for.
    """
    starts = torch.arange(len(positions) + 1, dtype=torch.int32, device=positions.device)
    return KeyLengths(
        query_starts=starts,
        key_starts=starts * room,
        used=(positions + 1).int(),
        longest=longest,
    )


def attend_by_length(query: Tensor, level: Level, lengths: KeyLengths, scaling: float) -> Tensor:
    """Attend with query [rows, heads, D] to the first keys of each of the first slots: [rows,
    heads, D]. level: [slots, length, K, D].
    """
    rows = len(query)
    out, *_ = torch.ops.aten._flash_attention_forward(
        query.contiguous(),
        level.keys[:rows].flatten(0, 1),
        level.values[:rows].flatten(0, 1),
        lengths.query_starts,
        lengths.key_starts,
        1,  # the most queries of a row
        lengths.longest,
        0.0,  # dropout
        False,  # causal: the only query of a row sees all that it has
        False,
        scale=scaling,
        seqused_k=lengths.used,
    )
    return out


@cache
def computes_by_length(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel runs on this device in this type, and says what masked attention says.
    Warns if it should and does not.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    if torch.cuda.get_device_capability(device) < _NEWEST_BASE:
        return False
    if not torch.backends.cuda.is_flash_attention_available():
        return False
    try:
        difference = _compare_with_masked(device, dtype)
    except (RuntimeError, TypeError) as error:
        _log.warning(
            "FlashAttention with lengths: expected that it runs on %s, found %s: %s. Decoding masks"
            " keys instead, which reads more of them.",
            torch.cuda.get_device_name(device), type(error).__name__, error,
        )  # fmt: skip
        return False
    if difference < 0.05:
        return True
    _log.warning(
        "FlashAttention with lengths: expected the numbers of masked attention on %s, found a"
        " difference of %.3f. Decoding masks keys instead, which reads more of them.",
        torch.cuda.get_device_name(device), difference,
    )  # fmt: skip
    return False


@torch.inference_mode()
def _compare_with_masked(device: torch.device, dtype: torch.dtype) -> float:
    """The greatest difference from masked attention, of rows of several lengths whose further keys
    would change much.
    """
    rows, heads, key_heads, room, dim = 5, 6, 2, 192, 64
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    query = draw(rows, heads, dim)
    level = Level(draw(rows + 2, room, key_heads, dim), draw(rows + 2, room, key_heads, dim))
    lengths = torch.tensor([1, 17, 64, 100, 128], device=device)
    for row, length in enumerate(lengths.tolist()):
        level.values[row, length:] = 100.0
    key_lengths = make_key_lengths(lengths - 1, room, 128)
    out = attend_by_length(query, level, key_lengths, dim**-0.5)
    visible = torch.arange(room, device=device) < lengths[:, None]
    expected = scaled_dot_product_attention(
        query.unflatten(1, (key_heads, -1)).float(),
        level.keys[:rows].transpose(1, 2).float(),
        level.values[:rows].transpose(1, 2).float(),
        attn_mask=visible[:, None, None],
    )
    return float((out.float() - expected.flatten(1, 2)).abs().max())
