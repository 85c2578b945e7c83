"""Attention over a prefix tree: each token sees its ancestors and itself, nothing else.

Owns: the attention pass of training and of forward passes, as batched scaled dot-product
attention. Does not own: the tree (packing.py), how a pass reaches the model (attention.py).

The packed tokens are cut into blocks of equal length. In depth-first order the ancestors of any
token in a block are either in the block or ancestors of its first token, so a block's keys are
those ancestors and the block itself. Where rows are short, they are cut regardless of rows, and
only keys are padded. Where they are long, blocks begin where a row leaves the others: one that
went on with the next row would compute all keys of the one for the tokens of the other.
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

LONG_BRANCH = 1.5
"""Blocks that a row adds to the tree, in the mean, from which blocks begin with them: of fewer,
what is padded to whole blocks costs as much as it saves.
"""


@dataclass(frozen=True, slots=True, eq=False)
class BlockCut:
    """Blocks of queries. first, size int64 [blocks]: their first tokens, and how many each has of
    its `length`; the others belong to the next block, and are computed in vain. by_branch: whether
    blocks begin where rows leave the others.
    """

    first: np.ndarray
    size: np.ndarray
    length: int
    by_branch: bool = False

    def tokens(self, blocks: np.ndarray, total: int) -> np.ndarray:
        """int64 [b, length]: the tokens of some blocks; the last of all in the place of none."""
        within = np.arange(self.length)
        tokens = self.first[blocks, None] + within
        return np.minimum(tokens, total - 1)


@dataclass(frozen=True, slots=True, eq=False)
class _Bucket:
    """Blocks of similar key counts. mask [b, q, k]."""

    mask: Tensor
    biases: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)

    @property
    def queries(self) -> int:
        """Queries of all its blocks."""
        return self.mask.shape[0] * self.mask.shape[1]

    @property
    def keys(self) -> int:
        """Keys of all its blocks."""
        return self.mask.shape[0] * self.mask.shape[2]

    def by_block(self, gathered: Tensor) -> Tensor:
        """Its blocks' keys or values: [b * k, key heads, D] -> [b, key heads, k, D]."""
        return gathered.unflatten(0, (len(self.mask), -1)).transpose(1, 2)

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
        cut = cut_evenly(self.tokens, block or _block_length(reach, self.tokens))
        if block is None:
            cut = cut_long_branches(packed, cut)
        self.block, self.count = cut.length, len(cut.first)
        self.window = window
        sets = _group_alike(packed, cut, window)
        key_sets: list[np.ndarray] = []
        self._buckets: list[_Bucket] = []
        for blocks in sets:
            keys, mask = _find_keys(packed, cut, blocks, window)
            key_sets.append(keys.ravel())
            mask_tensor = torch.from_numpy(mask).to(device)
            self._buckets.append(_Bucket(mask_tensor))
        # Gathered for all buckets at once: the way back of each gather fills all tokens with zeros.
        all_keys = np.concatenate(key_sets)
        self._keys = torch.from_numpy(all_keys).to(device)
        # Tokens where blocks begin with rows, else blocks; None: one bucket has all in order.
        self._by_branch = cut.by_branch
        self._queries: Tensor | None = None
        self._order: Tensor | None = None
        if cut.by_branch or len(sets) > 1:
            queries = np.concatenate(sets)
            if cut.by_branch:
                queries = cut.tokens(queries, self.tokens)
            self._queries = torch.from_numpy(queries.ravel()).to(device)
            order = _find_order(cut, sets)
            self._order = torch.from_numpy(order).to(device)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, kind: AttentionKind) -> Tensor:
        """query [tokens, heads, dim] -> [tokens, heads, dim of value]."""
        all_queries = self._order_queries(query)
        key_counts = [bucket.keys for bucket in self._buckets]
        parts = zip(
            self._buckets,
            all_queries.split([bucket.queries for bucket in self._buckets]),
            keys.index_select(0, self._keys).split(key_counts),
            values.index_select(0, self._keys).split(key_counts),
            strict=True,
        )
        outs = [self._attend(*part, kind) for part in parts]
        if self._order is None:
            return outs[0][: self.tokens]
        return torch.cat(outs).index_select(0, self._order)

    def _order_queries(self, query: Tensor) -> Tensor:
        """Lay queries out by bucket: [tokens, heads, dim] -> [blocks * q, heads, dim]."""
        if self._by_branch and self._queries is not None:
            return query.index_select(0, self._queries)
        padded = pad(query, (0, 0, 0, 0, 0, self.count * self.block - self.tokens))
        if self._queries is None:
            return padded
        by_block = padded.unflatten(0, (self.count, self.block))
        return by_block.index_select(0, self._queries).flatten(0, 1)

    def _attend(
        self, bucket: _Bucket, query: Tensor, keys: Tensor, values: Tensor, kind: AttentionKind
    ) -> Tensor:
        """Attend in a bucket: [b * q, heads, dim] -> [b * q, heads, dim of value]."""
        q = query.unflatten(0, (-1, self.block))
        k, v = bucket.by_block(keys), bucket.by_block(values)
        if kind.plain:
            out = _attend_plainly(q, k, v, bucket, kind.scaling)
        else:
            out = attend(q.transpose(1, 2), k, v, bucket.mask.unsqueeze(1), kind).transpose(1, 2)
        return out.flatten(0, 1)


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


def cut_evenly(tokens: int, length: int) -> BlockCut:
    """Cut tokens into blocks of this length, the last of which may have fewer."""
    first = np.arange(0, tokens, length)
    return BlockCut(first, np.minimum(tokens - first, length), length)


def cut_long_branches(packed: Packed, even: BlockCut) -> BlockCut:
    """Cut what each row adds to the tree by itself, in blocks about as long as those of `even`;
    `even` where rows add too little.
    """
    is_first = np.diff(packed.owner, prepend=-1) != 0
    starts = np.flatnonzero(is_first)
    sizes = np.diff(starts, append=len(packed.ids))
    if len(packed.ids) < LONG_BRANCH * even.length * len(starts):
        return even
    shortest, longest = even.length * 3 // 4, even.length * 5 // 4
    lengths = np.arange(max(8, shortest // 8 * 8), longest + 1, 8)
    padded: list[int] = []
    for length in lengths:
        counts = -(-sizes // length)
        padded.append(int(counts.sum() * length))
    best = np.argmin(padded)
    length = int(lengths[best])
    counts = -(-sizes // length)
    blocks_before = np.cumsum(counts) - counts
    all_blocks = np.arange(counts.sum())
    within = all_blocks - np.repeat(blocks_before, counts)
    first = np.repeat(starts, counts) + within * length
    end = np.repeat(starts + sizes, counts)
    size = np.minimum(end - first, length)
    return BlockCut(first, size, length, by_branch=True)


def _find_order(cut: BlockCut, sets: list[np.ndarray]) -> np.ndarray:
    """Find where each token's result is in the concatenated buckets."""
    blocks = np.concatenate(sets)
    within = np.arange(cut.length)
    is_real = within < cut.size[blocks, None]
    tokens = cut.first[blocks, None] + within
    order = np.empty(int(cut.size.sum()), dtype=np.int64)
    order[tokens[is_real]] = np.flatnonzero(is_real)
    return order


def _group_alike(packed: Packed, cut: BlockCut, window: int | None) -> list[np.ndarray]:
    """Group blocks whose numbers of ancestors differ by at most ALIKE; where blocks are cut
    regardless of rows, by at most a block or a third, too.
    """
    block = cut.length
    depth = packed.positions[cut.first] - _find_begins(packed, cut.first, block, window)
    order = np.argsort(depth, kind="stable")
    sets: list[list[int]] = []
    deepest = -1
    for b in order.tolist():
        if depth[b] > deepest:
            sets.append([])
            deepest = depth[b] + ALIKE
            if not cut.by_branch:
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
    packed: Packed, cut: BlockCut, blocks: np.ndarray, window: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """int64 [b, k]: each block's keys, its first token's ancestors and then its own tokens; bool
    [b, q, k]: which of them each query sees.
    """
    total, block = len(packed.ids), cut.length
    first = cut.first[blocks]
    depth = packed.positions[first]
    begin = _find_begins(packed, first, block, window)
    queries = first[:, None] + np.arange(block)
    standing = np.minimum(queries, total - 1)
    width = _round_up(int((depth - begin).max(initial=0)))
    steps = begin[:, None] + np.arange(width)
    is_ancestor = steps < depth[:, None]  # the others are padding, as blocks differ in depth
    reach = np.minimum(steps, packed.path.shape[1] - 1)
    path_rows = packed.owner[first][:, None]
    above = np.where(is_ancestor, packed.path[path_rows, reach], 0)
    # j is visible to i where j <= i < end[j] (packing.py); ancestors come before all queries.
    ends_above, ends_own = packed.end[above], packed.end[standing]
    i, j = queries[:, :, None], queries[:, None, :]
    sees_above = is_ancestor[:, None, :] & (i < ends_above[:, None, :])
    sees_own = (j <= i) & (i < ends_own[:, None, :])
    keys = np.concatenate([above, standing], axis=1)
    mask = np.concatenate([sees_above, sees_own], axis=2)
    if window is not None:
        query_positions, key_positions = packed.positions[standing], packed.positions[keys]
        mask &= query_positions[:, :, None] - key_positions[:, None, :] < window
    # Queries beyond the last token are padding: they see key 0 so that no softmax is empty.
    mask[queries >= total, 0] = True
    return keys, mask
