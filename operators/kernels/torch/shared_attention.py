"""Attention over a prefix tree: each token sees its ancestors and itself, nothing else.

Owns: the attention pass of training and of forward passes, as batched scaled dot-product
attention. Does not own: the tree (packing.py), how a pass reaches the model (attention.py).

The packed tokens are cut into blocks of equal length, regardless of rows. In depth-first order the
ancestors of any token in a block are either in the block or ancestors of its first token, so a
block's keys are those ancestors and the block itself. Only keys are ever padded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from operators.kernels.torch.attention_kind import AttentionKind, attend
from operators.kernels.torch.packing import Packed

SHORTEST_BLOCK = 40
"""Queries per block. On CPU (prompts of 50, answers of 5 to 40): 32 to 64 are equal, 96 slower."""

ALIKE = 64
"""Blocks whose ancestors differ by at most this share a bucket: a call costs more than padding."""


@dataclass(frozen=True, slots=True, eq=False)
class _Bucket:
    """Blocks of similar key counts. blocks int64 [b] (None: all), keys [b * k], mask [b, q, k]."""

    blocks: Tensor | None
    keys: Tensor
    mask: Tensor
    biases: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)

    def bias(self, rest: int, dtype: torch.dtype) -> Tensor:
        """0 or -inf [b, 1, rest * q, k]: made once, as each layer keeps its mask until backward."""
        known = self.biases.get((rest, dtype))
        if known is None:
            zeros = torch.zeros(self.mask.shape, dtype=dtype, device=self.mask.device)
            known = zeros.masked_fill_(~self.mask, -torch.inf).repeat(1, rest, 1).unsqueeze(1)
            self.biases[rest, dtype] = known
        return known


class TreePass:
    """The AttentionPass of a Packed layout, built once per micro-batch for all layers: the blocks
    of each window once, by the first layer that has it.
    """

    def __init__(
        self, packed: Packed, device: torch.device | str = "cpu", block: int | None = None
    ) -> None:
        self.longest = int(packed.positions.max(initial=-1)) + 1
        self._packed, self._device, self._block = packed, device, block
        self._blocks: dict[int | None, _Blocks] = {None: _Blocks(packed, device, block, None)}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind
    ) -> Tensor:
        """See AttentionPass."""
        blocks = self._blocks.get(kind.window)
        if blocks is None:
            blocks = _Blocks(self._packed, self._device, self._block, kind.window)
            self._blocks[kind.window] = blocks
        return blocks.attend(query, key, value, kind)


class _Blocks:
    """The blocks of a layout under one window."""

    def __init__(
        self, packed: Packed, device: torch.device | str, block: int | None, window: int | None
    ) -> None:
        self.tokens = len(packed.ids)
        longest = int(packed.positions.max(initial=-1)) + 1
        reach = longest if window is None else min(longest, window)
        self.block = block or _block_length(reach, self.tokens)
        self.count = -(-self.tokens // self.block)
        self.window = window
        self._buckets = [
            self._bucket(packed, blocks, device)
            for blocks in _alike(packed, self.block, self.count, window)
        ]
        self._order = self._inverse().to(device) if len(self._buckets) > 1 else None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind) -> Tensor:
        """query [tokens, heads, dim] -> [tokens, heads, dim of value]."""
        tokens, heads, dim = query.shape
        blocks = self.count * self.block
        q = pad(query, (0, 0, 0, 0, 0, blocks - tokens)).view(self.count, self.block, heads, dim)
        outs = [self._attend(bucket, q, key, value, kind) for bucket in self._buckets]
        wide = value.shape[2]
        if self._order is None:
            return outs[0].reshape(blocks, heads, wide)[:tokens]
        return torch.cat([out.reshape(-1, heads, wide) for out in outs]).index_select(
            0, self._order
        )

    def _attend(
        self, bucket: _Bucket, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind
    ) -> Tensor:
        """One bucket: query [all blocks, q, heads, dim] -> [b, q, heads, dim of value]."""
        q = query if bucket.blocks is None else query.index_select(0, bucket.blocks)
        count, shared = q.shape[0], key.shape[1]
        k, v = (
            x.index_select(0, bucket.keys).view(count, -1, shared, x.shape[2]).transpose(1, 2)
            for x in (key, value)
        )
        if kind.plain:
            return _plain(q, k, v, bucket, kind.scaling)
        return attend(q.transpose(1, 2), k, v, bucket.mask.unsqueeze(1), kind).transpose(1, 2)

    def _bucket(self, packed: Packed, blocks: np.ndarray, device: torch.device | str) -> _Bucket:
        keys, mask = _keys(packed, blocks, self.block, self.window)
        every = len(blocks) == self.count
        return _Bucket(
            None if every else torch.from_numpy(blocks).to(device),
            torch.from_numpy(keys.ravel()).to(device),
            torch.from_numpy(mask).to(device),
        )

    def _inverse(self) -> Tensor:
        """Where each token's result is in the concatenated buckets."""
        blocks = torch.cat([bucket.blocks for bucket in self._buckets if bucket.blocks is not None])
        places = blocks[:, None] * self.block + torch.arange(self.block, device=blocks.device)
        return torch.argsort(places.ravel())[: self.tokens]


def _plain(q: Tensor, k: Tensor, v: Tensor, bucket: _Bucket, scaling: float) -> Tensor:
    """q [b, q, heads, dim], k and v [b, key heads, k, dim] -> [b, q, heads, dim of value].

    The query heads of one key head are laid out one after another as more queries: keys are never
    repeated.
    """
    count, length, heads, dim = q.shape
    shared = k.shape[1]
    rest = heads // shared
    q = (
        q.view(count, length, shared, rest, dim)
        .permute(0, 2, 3, 1, 4)
        .reshape(count, shared, rest * length, dim)
    )
    out = scaled_dot_product_attention(q, k, v, attn_mask=bucket.bias(rest, q.dtype), scale=scaling)
    return (
        out.view(count, shared, rest, length, -1)
        .permute(0, 3, 1, 2, 4)
        .reshape(count, length, heads, -1)
    )


def _block_length(longest: int, tokens: int) -> int:
    """A quarter of the longest path: a block's ancestors are at most a few times its tokens."""
    return max(1, min(tokens, _even(max(SHORTEST_BLOCK, longest // 4))))


def _even(count: int) -> int:
    """Rounded up to a multiple of 8: GPU kernels copy masks of other widths."""
    return -(-count // 8) * 8


def _alike(packed: Packed, block: int, count: int, window: int | None) -> list[np.ndarray]:
    """Sets of blocks whose numbers of ancestors differ by at most ALIKE, a block or a third."""
    first = np.arange(count) * block
    depth = packed.positions[first] - _begins(packed, first, block, window)
    order = np.argsort(depth, kind="stable")
    sets: list[list[int]] = []
    for b in order.tolist():
        if not sets or depth[b] > max(
            depth[sets[-1][0]] * 4 // 3, depth[sets[-1][0]] + max(ALIKE, block)
        ):
            sets.append([])
        sets[-1].append(b)
    return [np.sort(np.array(s, dtype=np.int64)) for s in sets]


def _begins(packed: Packed, first: np.ndarray, block: int, window: int | None) -> np.ndarray:
    """int64 [b]: the depth of the first ancestor that any token of each block sees: a block may
    begin deep in one row and go on with another, near the root.
    """
    if window is None:
        return np.zeros_like(first)
    tokens = np.minimum(first[:, None] + np.arange(block), len(packed.ids) - 1)
    begins = np.maximum(packed.positions[tokens].min(axis=1) - window + 1, 0)
    return np.minimum(begins, packed.positions[first])


def _keys(
    packed: Packed, blocks: np.ndarray, block: int, window: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """int64 [b, k]: each block's keys; bool [b, q, k]: which of them each query sees."""
    total = len(packed.ids)
    first = blocks * block
    depth = packed.positions[first]
    begin = _begins(packed, first, block, window)
    queries = first[:, None] + np.arange(block)
    own = np.minimum(queries, total - 1)
    steps = begin[:, None] + np.arange(_even(int((depth - begin).max(initial=0))))
    known = steps < depth[:, None]
    reach = np.minimum(steps, packed.path.shape[1] - 1)
    above = np.where(known, packed.path[packed.owner[first][:, None], reach], 0)
    sees_above = known[:, None, :] & (queries[:, :, None] < packed.end[above][:, None, :])
    sees_own = (queries[:, None, :] <= queries[:, :, None]) & (
        queries[:, :, None] < packed.end[own][:, None, :]
    )
    keys = np.concatenate([above, own], axis=1)
    mask = np.concatenate([sees_above, sees_own], axis=2)
    if window is not None:
        at = packed.positions
        mask &= at[own][:, :, None] - at[keys][:, None, :] < window
    # Queries beyond the last token are padding: they see key 0 so that no softmax is empty.
    mask[queries >= total, 0] = True
    return keys, mask
