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

    def gather(self, x: Tensor) -> Tensor:
        """Each block's keys or values: [tokens, key heads, D] -> [b, key heads, k, D]."""
        _, key_heads, dim = x.shape
        by_block = x.index_select(0, self.keys).view(len(self.mask), -1, key_heads, dim)
        return by_block.transpose(1, 2)

    def bias(self, rest: int, dtype: torch.dtype) -> Tensor:
        """0 or -inf [b, 1, rest * q, k]: made once, as each layer keeps its mask until backward."""
        bias = self.biases.get((rest, dtype))
        if bias is None:
            zeros = torch.zeros(self.mask.shape, dtype=dtype, device=self.mask.device)
            bias = zeros.masked_fill_(~self.mask, -torch.inf)
            bias = bias.repeat(1, rest, 1).unsqueeze(1)
            self.biases[rest, dtype] = bias
        return bias


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
        sets = _group_alike(packed, self.block, self.count, window)
        self._buckets = [self._make_bucket(packed, blocks, device) for blocks in sets]
        self._order: Tensor | None = None  # one bucket has the tokens in their order
        if len(self._buckets) > 1:
            self._order = self._find_order().to(device)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, kind: AttentionKind) -> Tensor:
        """query [tokens, heads, dim] -> [tokens, heads, dim of value]."""
        tokens, heads, dim = query.shape
        padded = self.count * self.block
        q = pad(query, (0, 0, 0, 0, 0, padded - tokens))
        q = q.view(self.count, self.block, heads, dim)
        outs = [self._attend(bucket, q, keys, values, kind) for bucket in self._buckets]
        wide = values.shape[2]
        if self._order is None:
            return outs[0].reshape(padded, heads, wide)[:tokens]
        joined = torch.cat([out.reshape(-1, heads, wide) for out in outs])
        return joined.index_select(0, self._order)

    def _attend(
        self, bucket: _Bucket, query: Tensor, keys: Tensor, values: Tensor, kind: AttentionKind
    ) -> Tensor:
        """Attend in a bucket: query [all blocks, q, heads, dim] -> [b, q, heads, dim of value]."""
        q = query if bucket.blocks is None else query.index_select(0, bucket.blocks)
        k, v = bucket.gather(keys), bucket.gather(values)
        if kind.plain:
            return _attend_plainly(q, k, v, bucket, kind.scaling)
        mask = bucket.mask.unsqueeze(1)
        return attend(q.transpose(1, 2), k, v, mask, kind).transpose(1, 2)

    def _make_bucket(
        self, packed: Packed, blocks: np.ndarray, device: torch.device | str
    ) -> _Bucket:
        keys, mask = _find_keys(packed, blocks, self.block, self.window)
        block_index: Tensor | None = None
        if len(blocks) < self.count:
            block_index = torch.from_numpy(blocks).to(device)
        return _Bucket(
            block_index,
            torch.from_numpy(keys.ravel()).to(device),
            torch.from_numpy(mask).to(device),
        )

    def _find_order(self) -> Tensor:
        """Find where each token's result is in the concatenated buckets."""
        blocks = torch.cat([bucket.blocks for bucket in self._buckets if bucket.blocks is not None])
        within = torch.arange(self.block, device=blocks.device)
        places = blocks[:, None] * self.block + within
        return torch.argsort(places.ravel())[: self.tokens]


def _attend_plainly(q: Tensor, k: Tensor, v: Tensor, bucket: _Bucket, scaling: float) -> Tensor:
    """q [b, q, heads, dim], k and v [b, key heads, k, dim] -> [b, q, heads, dim of value].

    The query heads of one key head are laid out one after another as more queries: keys are never
    repeated.
    """
    count, length, heads, dim = q.shape
    key_heads = k.shape[1]
    rest = heads // key_heads
    q = q.view(count, length, key_heads, rest, dim)
    q = q.permute(0, 2, 3, 1, 4).reshape(count, key_heads, rest * length, dim)
    bias = bucket.bias(rest, q.dtype)
    out = scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scaling)
    out = out.view(count, key_heads, rest, length, -1)
    return out.permute(0, 3, 1, 2, 4).reshape(count, length, heads, -1)


def _block_length(longest: int, tokens: int) -> int:
    """A quarter of the longest path: a block's ancestors are at most a few times its tokens."""
    length = _round_up(max(SHORTEST_BLOCK, longest // 4))
    return max(1, min(tokens, length))


def _round_up(count: int) -> int:
    """Round up to a multiple of 8: GPU kernels copy masks of other widths."""
    return -(-count // 8) * 8


def _group_alike(packed: Packed, block: int, count: int, window: int | None) -> list[np.ndarray]:
    """Group blocks whose numbers of ancestors differ by at most ALIKE, a block or a third."""
    first = np.arange(count) * block
    depth = packed.positions[first] - _find_begins(packed, first, block, window)
    order = np.argsort(depth, kind="stable")
    sets: list[list[int]] = []
    deepest = -1
    for b in order.tolist():
        if depth[b] > deepest:
            sets.append([])
            deepest = max(depth[b] * 4 // 3, depth[b] + max(ALIKE, block))
        sets[-1].append(b)
    # Ascending: a bucket of all blocks is taken to have them in their order.
    return [np.sort(np.array(blocks, dtype=np.int64)) for blocks in sets]


def _find_begins(packed: Packed, first: np.ndarray, block: int, window: int | None) -> np.ndarray:
    """int64 [b]: the depth of the first ancestor that any token of each block sees: a block may
    begin deep in one row and go on with another, near the root.
    """
    if window is None:
        return np.zeros_like(first)
    last_token = len(packed.ids) - 1
    tokens = np.minimum(first[:, None] + np.arange(block), last_token)
    least_depth = packed.positions[tokens].min(axis=1)
    begins = np.maximum(least_depth - window + 1, 0)
    return np.minimum(begins, packed.positions[first])


def _find_keys(
    packed: Packed, blocks: np.ndarray, block: int, window: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """int64 [b, k]: each block's keys, its first token's ancestors and then its own tokens; bool
    [b, q, k]: which of them each query sees.
    """
    total = len(packed.ids)
    first = blocks * block
    depth = packed.positions[first]
    begin = _find_begins(packed, first, block, window)
    queries = first[:, None] + np.arange(block)
    own = np.minimum(queries, total - 1)
    width = _round_up(int((depth - begin).max(initial=0)))
    steps = begin[:, None] + np.arange(width)
    is_ancestor = steps < depth[:, None]  # the others are padding, as blocks differ in depth
    reach = np.minimum(steps, packed.path.shape[1] - 1)
    path_rows = packed.owner[first][:, None]
    above = np.where(is_ancestor, packed.path[path_rows, reach], 0)
    # j is visible to i where j <= i < end[j] (packing.py); ancestors come before all queries.
    ends_above, ends_own = packed.end[above], packed.end[own]
    i, j = queries[:, :, None], queries[:, None, :]
    sees_above = is_ancestor[:, None, :] & (i < ends_above[:, None, :])
    sees_own = (j <= i) & (i < ends_own[:, None, :])
    keys = np.concatenate([above, own], axis=1)
    mask = np.concatenate([sees_above, sees_own], axis=2)
    if window is not None:
        query_positions, key_positions = packed.positions[own], packed.positions[keys]
        mask &= query_positions[:, :, None] - key_positions[:, None, :] < window
    # Queries beyond the last token are padding: they see key 0 so that no softmax is empty.
    mask[queries >= total, 0] = True
    return keys, mask
