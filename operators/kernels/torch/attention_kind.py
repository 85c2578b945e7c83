"""How a layer's attention weighs keys: scale, sliding window, cap of the scores, sinks.

Owns: the description of a layer's attention, masks of tokens in a row, and attention that scaled
dot-product kernels do not have. Does not own: which tokens are in which row (the passes in cache.py
and shared_attention.py), what transformers passes (attention.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionKind:
    """One layer's attention.

    window: a query sees the last `window` tokens of its row, itself included; None: all. softcap:
    a score s becomes softcap * tanh(s / softcap) (Gemma 2, arXiv:2408.00118, section 2). sinks
    [heads]: the logit of one more key per head, whose value is zero (gpt-oss).
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether a scaled dot-product kernel computes it, given a mask."""
        return self.softcap is None and self.sinks is None

    def cap_scores(self, scores: Tensor) -> Tensor:
        """Cap scaled scores, before any mask, if this kind has a softcap."""
        if self.softcap is None:
            return scores
        return self.softcap * torch.tanh(scores / self.softcap)

    def weights(self, scores: Tensor) -> Tensor:
        """Softmax over keys in float32: [..., key heads, heads per key head, keys] -> the same."""
        if self.sinks is None:
            return torch.softmax(scores, -1, dtype=torch.float32)
        sinks = self.sinks.view(*scores.shape[-3:-1], 1)
        sink_scores = sinks.expand(*scores.shape[:-1], 1)
        with_sinks = torch.cat([scores, sink_scores], -1)
        weights = torch.softmax(with_sinks, -1, dtype=torch.float32)
        return weights[..., :-1]  # the value of a sink is zero


def attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, kind: AttentionKind
) -> Tensor:
    """Attend under a mask: query [b, heads, q, dim], keys and values [b, key heads, k, dim], mask
    bool [b or 1, 1, q, k] -> [b, heads, q, dim of values].

    The window of the kind is already in the mask.
    """
    key_heads = keys.shape[1]
    if kind.plain:
        return scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=mask,
            scale=kind.scaling,
            enable_gqa=query.shape[1] != key_heads,
        )
    count, heads, length, dim = query.shape
    # The query heads of one key head lie one after another, so keys are not repeated.
    q = query.reshape(count, key_heads, -1, dim)
    scores = kind.cap_scores((q @ keys.transpose(2, 3)) * kind.scaling)
    scores = scores.view(count, key_heads, heads // key_heads, length, -1)
    scores = scores.masked_fill(~mask.unsqueeze(2), -torch.inf)
    scores_by_query = scores.permute(0, 3, 1, 2, 4)
    weights = kind.weights(scores_by_query).permute(0, 2, 3, 1, 4)
    weights = weights.to(query.dtype).reshape(count, key_heads, -1, scores.shape[-1])
    return (weights @ values).view(count, heads, length, -1)


def causal(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Make a mask, bool [queries, keys]: what the last `queries` tokens of a row of `keys` tokens
    see.
    """
    before = keys - queries
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(before)
    if window is None:
        return mask
    return mask.triu(before - window + 1)


def attend_packed(query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind) -> Tensor:
    """Attend causally within right-padded rows: [rows, length, heads, dim] with [rows, length, key
    heads, dim].

    Padding is to the right of every real token, so causality alone keeps tokens from seeing it.
    """
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if kind.plain and kind.window is None:
        has_shared_keys = q.shape[1] != k.shape[1]
        out = scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=kind.scaling, enable_gqa=has_shared_keys
        )
    else:
        mask = causal(q.shape[2], k.shape[2], kind.window, q.device)
        out = attend(q, k, v, mask[None, None], kind)
    return out.transpose(1, 2)
