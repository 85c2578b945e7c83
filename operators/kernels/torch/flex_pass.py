"""Attention over a prefix tree by torch's FlexAttention, which skips blocks of tokens that see
nothing of each other.

Owns: the block mask of a layout, made by blocks; the modifications of scores; sinks by the
log-sum-exp. Does not own: the tree (packing.py), when this path is taken
(dataflow/attention_paths.py). Imports torch's compiler: imported only where the path is taken.

    j is visible to i    where    j <= i < end[j]    (packing.py), and in a window where
                                  positions[i] - positions[j] < window

Whether any token, or every token, of a block of queries sees one of a block of keys follows from
the least and greatest end and position of each block: nothing here is tokens x tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad

from operators.kernels.torch.attention_kind import AttentionKind
from operators.kernels.torch.packing import Packed
from operators.kernels.torch.torch_compiler import compile_for_all_lengths

BLOCK = 128
"""Tokens of a block: the least that FlexAttention's default tiles divide."""

LEAST_BLOCKS = 11
"""Blocks of a layout at least, the last of them padding. torch compiles anew for one block alone,
and where the number of blocks, or of tokens, happens to be that of heads or of numbers in a head:
it takes them for the same. Few Models have 11 heads; above, such a chance costs one compilation.
"""

Modification = Callable[..., Tensor]
"""A function of (batch, head, query index, key index) or, with the score before these, of scores:
called with scalars, it is traced into the kernel.
"""


FlexFunction = Callable[..., Any]
"""What is called as `flex_attention` is."""

FlexKernel = Callable[
    [Tensor, Tensor, Tensor, BlockMask, Modification | None, float, Tensor | None], Tensor
]
"""What is called as `attend_blocks` is."""


class FlexPass:
    """The AttentionPass of a Packed layout by FlexAttention: a block mask of each window, made once
    by the first layer that has it.
    """

    def __init__(
        self,
        packed: Packed,
        device: torch.device | str,
        *,
        kernel: FlexKernel | None = None,
        block: int = BLOCK,
    ) -> None:
        """kernel: computes in the place of the compiled one. block: tokens of a block."""
        self.longest = int(packed.positions.max(initial=-1)) + 1
        self._tokens = len(packed.ids)
        self._padding = max(0, LEAST_BLOCKS * block - self._tokens)
        self._end, self._positions = _pad_layout(packed, self._padding)
        self._device, self._block, self._kernel = torch.device(device), block, kernel
        self._masks: dict[int | None, BlockMask] = {}
        self._caps: dict[float, Modification] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind
    ) -> Tensor:
        """See AttentionPass."""
        q, k, v = (self._lay_out_heads(x) for x in (query, key, value))
        mask, cap = self._find_mask(kind.window), self._find_cap(kind.softcap)
        kernel = self._kernel or compile_attention()
        out = kernel(q, k, v, mask, cap, kind.scaling, kind.sinks)
        return out[0, :, : self._tokens].transpose(0, 1)

    def _lay_out_heads(self, x: Tensor) -> Tensor:
        """[tokens, heads, dim] -> [1, heads, padded tokens, dim]."""
        if self._padding:
            x = pad(x, (0, 0, 0, 0, 0, self._padding))
        return x.transpose(0, 1).unsqueeze(0)

    def _find_mask(self, window: int | None) -> BlockMask:
        mask = self._masks.get(window)
        if mask is None:
            mask = make_block_mask(self._end, self._positions, window, self._device, self._block)
            self._masks[window] = mask
        return mask

    def _find_cap(self, softcap: float | None) -> Modification | None:
        if softcap is None:
            return None
        if softcap not in self._caps:
            # A tensor: torch would compile a number in, or fail at it where shapes are dynamic.
            limit = torch.tensor(softcap, dtype=torch.float32, device=self._device)
            self._caps[softcap] = cap_scores_at(limit)
        return self._caps[softcap]


def attend_blocks(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_mask: BlockMask,
    score_mod: Modification | None,
    scaling: float,
    sinks: Tensor | None,
    *,
    flex: FlexFunction = flex_attention,
) -> Tensor:
    """Attend under a block mask: query [1, heads, tokens, dim], keys [1, key heads, tokens, dim],
    values [1, key heads, tokens, any], sinks [heads] -> [1, heads, tokens, any].

    Scores are scaled, then modified, then masked. A sink s takes part in the softmax with a value
    of zero: of weights with normaliser Z it leaves Z / (Z + exp(s)) = sigmoid(log Z - s) (gpt-oss).
    """
    has_shared_keys = query.shape[1] != keys.shape[1]
    if sinks is None:
        return flex(query, keys, values, score_mod, block_mask, scaling, enable_gqa=has_shared_keys)
    out, more = flex(
        query,
        keys,
        values,
        score_mod,
        block_mask,
        scaling,
        enable_gqa=has_shared_keys,
        return_aux=AuxRequest(lse=True),
    )
    # Its base is e: torch's kernels compute in base 2 and convert what they return.
    kept_share = torch.sigmoid(more.lse - sinks.float()[None, :, None])
    return (out * kept_share.unsqueeze(-1)).to(out.dtype)


@cache
def compile_attention() -> FlexKernel:
    """Compile `attend_blocks`, once for all lengths: the one compiled function of the process.

    With fullgraph, what cannot be compiled is an error: uncompiled, FlexAttention would silently
    make all scores.
    """
    return compile_for_all_lengths(attend_blocks, fullgraph=True)


def make_block_mask(
    end: np.ndarray,
    positions: np.ndarray,
    window: int | None,
    device: torch.device,
    block: int = BLOCK,
) -> BlockMask:
    """Make the mask of a layout, end and positions int64 [tokens]: blocks of which every token sees
    every token need no look at single tokens, and blocks that see nothing are left out.
    """
    some, every = find_visible_blocks(end, positions, window, block)
    partial_counts, partial_blocks = _list_blocks(some & ~every, device)
    full_counts, full_blocks = _list_blocks(every, device)
    tokens = len(end)
    ends = _to_device(end, device)
    if window is None:
        visible = see_ancestors(ends)
    else:
        oldest = _to_device(positions - window + 1, device)
        visible = see_nearest_ancestors(ends, _to_device(positions, device), oldest)
    return BlockMask.from_kv_blocks(
        partial_counts,
        partial_blocks,
        full_counts,
        full_blocks,
        BLOCK_SIZE=block,
        mask_mod=visible,
        seq_lengths=(tokens, tokens),
    )


# torch compiles a function once, whatever tensors it closes over: lengths may differ. So what a
# layout has of its own is in tensors, a window too.


def see_ancestors(end: Tensor) -> Modification:
    """Make the mask of a tree: each token sees itself and its ancestors."""

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end[key])

    return visible


def see_nearest_ancestors(end: Tensor, positions: Tensor, oldest: Tensor) -> Modification:
    """Make the mask of a tree in a window. oldest: the least position that each query sees."""

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end[key]) & (positions[key] >= oldest[query])

    return visible


def cap_scores_at(limit: Tensor) -> Modification:
    """Make the modification that caps scaled scores: AttentionKind.softcap."""

    def cap(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return limit * torch.tanh(score / limit)

    return cap


def find_visible_blocks(
    end: np.ndarray, positions: np.ndarray, window: int | None, block: int
) -> tuple[np.ndarray, np.ndarray]:
    """Find which blocks of keys each block of queries sees, bool [blocks, blocks] twice: where
    perhaps some token sees one, and where surely every token sees every one.

    Without a window, `some` is exact. In one, a block that begins in a row and ends in the next
    counts with the least position of both.
    """
    first = np.arange(0, len(end), block)
    last = np.minimum(first + block, len(end)) - 1
    least_end, greatest_end = np.minimum.reduceat(end, first), np.maximum.reduceat(end, first)
    query_blocks, key_blocks = np.indices((len(first), len(first)))
    some = (key_blocks <= query_blocks) & (greatest_end > first[:, None])
    every = (key_blocks < query_blocks) & (least_end > last[:, None])
    if window is not None:
        nearest = np.minimum.reduceat(positions, first)
        farthest = np.maximum.reduceat(positions, first)
        some &= nearest[:, None] - farthest < window
        every &= farthest[:, None] - nearest < window
    return some, every


def _list_blocks(chosen: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """List the chosen blocks of each row, as BlockMask has them: bool [blocks, blocks] -> counts
    int32 [1, 1, blocks], indices int32 [1, 1, blocks, blocks], ascending, then arbitrary ones.
    """
    order = np.argsort(~chosen, axis=1, kind="stable")
    counts = chosen.sum(axis=1)
    return _to_device(counts, device)[None, None], _to_device(order, device)[None, None]


def _to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """int32: what BlockMask needs, and half of what the kernel would read of int64."""
    return torch.from_numpy(values.astype(np.int32)).to(device, non_blocking=True)


def _pad_layout(packed: Packed, padding: int) -> tuple[np.ndarray, np.ndarray]:
    """The ends and positions of all tokens, and of so many after them that see only themselves."""
    tokens = len(packed.ids)
    padded_ends = tokens + 1 + np.arange(padding)
    end = np.concatenate([packed.end, padded_ends])
    positions = np.concatenate([packed.positions, np.zeros(padding, dtype=np.int64)])
    return end, positions
