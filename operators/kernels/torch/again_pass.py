"""The pass over several tokens of rows' completions: what they were given, or all that they have.

Owns: attention of these tokens. Does not own: where keys are stored (cache.py), which rows are fed
together (prompt_feeding.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from operators.kernels.torch.attention_kind import AttentionKind, attend
from operators.kernels.torch.cache import Cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """The pass over tokens of some rows' completions, packed one after the other: of each row from
    a place on, whose own keys before that are at own[first .. first + rows - 1] already. Stores
    theirs behind them.

    live: all live rows, whose keys stay. width: the most tokens of a row. prompt: the longest
    prompt rest; longest_own: the most own keys of a row, with the new ones; most: own tokens that a
    row may have. group: int64 [rows], the group of each row's prompt; own_begin: int64 [rows], the
    position of its first own token; begin: int64 [rows], the index of its first new token among
    the own. holder, index: int64 [tokens], where each token's keys go in the own level; place:
    int64 [tokens], where the token goes in [rows, width]. mask: bool [rows, 1, width, prefix +
    prompt + longest_own], without any window.
    """

    cache: Cache
    live: int
    first: int
    rows: int
    width: int
    prompt: int
    longest_own: int
    most: int
    group: Tensor
    own_begin: Tensor
    begin: Tensor
    holder: Tensor
    index: Tensor
    place: Tensor
    mask: Tensor

    @property
    def longest(self) -> int:
        return self.mask.shape[-1]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind
    ) -> Tensor:
        """See AttentionPass. Queries are right-padded; what a row has behind its keys is hidden."""
        q = self._pad(query)
        level = self.cache.level(self.cache.own, layer, key, value)
        level.reserve(self.live, self.longest_own, self.most)
        level.keys[self.holder, :, self.index] = key
        level.values[self.holder, :, self.index] = value
        rows = slice(self.first, self.first + self.rows)
        prompt = self.cache.prompts[layer]
        own_keys = level.keys[rows, :, : self.longest_own]
        own_values = level.values[rows, :, : self.longest_own]
        keys = [prompt.keys[self.group, :, : self.prompt], own_keys]
        values = [prompt.values[self.group, :, : self.prompt], own_values]
        if self.cache.prefix:
            prefix = self.cache.prefixes[layer]
            keys.insert(0, prefix.keys.expand(self.rows, -1, -1, -1))
            values.insert(0, prefix.values.expand(self.rows, -1, -1, -1))
        mask = self._mask_in(kind.window)
        out = attend(q, torch.cat(keys, 2), torch.cat(values, 2), mask, kind)
        heads, dim = out.shape[1::2]
        flat = out.transpose(1, 2).reshape(self.rows * self.width, heads, dim)
        return flat[self.place]

    def _mask_in(self, window: int | None) -> Tensor:
        """The mask with what a window hides: by the positions of queries and keys."""
        if window is None:
            return self.mask
        device = self.mask.device
        own_positions = self.own_begin[:, None] + torch.arange(self.longest_own, device=device)
        prompt_positions = torch.arange(self.cache.prefix + self.prompt, device=device)
        positions = torch.cat([prompt_positions.expand(self.rows, -1), own_positions], 1)
        query_begin = self.own_begin + self.begin
        query_positions = query_begin[:, None] + torch.arange(self.width, device=device)
        distance = query_positions[:, None, :, None] - positions[:, None, None, :]
        return self.mask & (distance < window)

    def _pad(self, x: Tensor) -> Tensor:
        """[tokens, heads, D] -> [rows, heads, width, D]."""
        room = x.new_zeros(self.rows * self.width, *x.shape[1:])
        room[self.place] = x
        return room.view(self.rows, self.width, *x.shape[1:]).transpose(1, 2)
