"""FlexAttention as its documentation describes it: all scores, with gradients, on any device.

Owns: a reference that reads a block mask as torch's kernels do: blocks that are not listed are not
there, full ones are not asked for single tokens. Does not own: what is compared with it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from operators.kernels.torch.flex_pass import Modification, attend_blocks


def expand_blocks(counts: Tensor, indices: Tensor) -> Tensor:
    """bool [blocks, blocks]: the blocks that a BlockMask lists for each block of queries."""
    listed = torch.zeros(indices.shape[-2:], dtype=torch.bool)
    for row, count in enumerate(counts[0, 0].tolist()):
        listed[row, indices[0, 0, row, :count].long()] = True
    return listed


def listed_blocks(mask: BlockMask) -> tuple[Tensor, Tensor]:
    """The blocks that are partly and wholly visible, bool [blocks, blocks] twice."""
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    partial_blocks = expand_blocks(mask.kv_num_blocks, mask.kv_indices)
    return partial_blocks, expand_blocks(mask.full_kv_num_blocks, mask.full_kv_indices)


def by_token(blocks: Tensor, block: int, tokens: int) -> Tensor:
    """bool [tokens, tokens]: whether the block of each pair of tokens is listed."""
    return blocks.repeat_interleave(block, 0).repeat_interleave(block, 1)[:tokens, :tokens]


def visible_tokens(mask: BlockMask) -> Tensor:
    """bool [tokens, tokens]: what each query sees."""
    tokens, block = mask.seq_lengths[0], mask.BLOCK_SIZE[0]
    partial_blocks, full_blocks = listed_blocks(mask)
    zero, at = torch.tensor(0), torch.arange(tokens)
    modified = mask.mask_mod(zero, zero, at[:, None], at[None])
    partly = by_token(partial_blocks, block, tokens) & modified
    return partly | by_token(full_blocks, block, tokens)


def dense_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Modification | None,
    block_mask: BlockMask,
    scale: float,
    enable_gqa: bool = False,
    return_aux: AuxRequest | None = None,
) -> Any:
    """Called as `flex_attention`; log-sum-exps have the base e."""
    shared = query.shape[1] // key.shape[1]
    assert enable_gqa == (shared > 1)
    k, v = (x.repeat_interleave(shared, 1) for x in (key, value))
    scores = query @ k.transpose(2, 3) * scale
    if score_mod is not None:
        zero, at = torch.tensor(0), torch.arange(query.shape[2])
        scores = score_mod(scores, zero, zero, at[:, None], at[None])
    scores = scores.masked_fill(~visible_tokens(block_mask), -torch.inf)
    out = scores.softmax(-1) @ v
    if return_aux is None:
        return out
    return out, AuxOutput(lse=scores.logsumexp(-1))


dense_kernel = partial(attend_blocks, flex=dense_flex)
"""What FlexPass takes in the place of its compiled kernel."""
