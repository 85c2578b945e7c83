"""The key-value cache of generation, and the passes that attend through it.

Owns: where the keys and values of live rows are stored, and attention for prompts (Common,
Prefill). Does not own: which rows are live (shared_step.py), passes over one new token per row
(decode_pass.py) and over several of a row's completion (again_pass.py), keys at fixed places
(static_keys.py), the call into the module (attention.py).

A row's keys are stored on three levels, each once for all rows that share it:

    prefix    what all prompts of a chunk begin with    [1]
    prompt    the rest of one prompt                    [groups]
    own       the row's completion                      [rows]

Shapes: K key heads, D head dim, L keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from operators.kernels.torch.attention_kind import AttentionKind, attend, attend_packed, causal


@dataclass(slots=True)
class Level:
    """Keys and values of one layer on one level: [holders, K, L, D]; holders and L can grow."""

    keys: Tensor
    values: Tensor

    def reserve(self, holders: int, length: int, most: int = 0) -> None:
        """Make room for `holders` holders, at least doubling what grows; later ones may be dropped.
        most: keys that a holder may have, beyond which nothing doubles; 0: any number.

        New room is zero: 0 times garbage may be NaN.
        """
        self.keys = _grow(self.keys, holders, length, most)
        self.values = _grow(self.values, holders, length, most)

    @property
    def numbers(self) -> int:
        """Numbers of one holder's key and value."""
        heads = self.keys.shape[1]
        return heads * (self.keys.shape[3] + self.values.shape[3])

    def move(self, source: Tensor, target: Tensor, holders: int) -> None:
        """Copy holders `source` over holders `target`; all indices are below `holders`."""
        self.reserve(holders, 0)
        for tensor in (self.keys, self.values):
            tensor[target] = tensor[source]

    def copy_out(self, holder: int, length: int) -> Level:
        """A holder's first keys in memory of their own: [K, length, D]."""
        return Level(self.keys[holder, :, :length].clone(), self.values[holder, :, :length].clone())

    def copy_in(self, holder: int, parked: Level) -> None:
        """Make these [K, length, D] a holder's first keys; there is room for them."""
        length = parked.keys.shape[1]
        self.keys[holder, :, :length] = parked.keys
        self.values[holder, :, :length] = parked.values


def _grow(tensor: Tensor, holders: int, length: int, most: int) -> Tensor:
    have, heads, long, dim = tensor.shape
    if holders <= have and length <= long:
        return tensor
    # Most rows end while others grow longer: longer room is made only for the remaining ones.
    wider = holders if holders <= have else max(holders, 2 * have)
    doubled = max(2 * long, 8)
    if most:
        doubled = min(doubled, most)
    longer = long if length <= long else max(length, doubled)
    larger = tensor.new_zeros(wider, heads, longer, dim)
    remaining = min(have, wider)
    larger[:remaining, :, :long] = tensor[:remaining]
    return larger


@dataclass(slots=True)
class Cache:
    """The levels of all layers. prefix: how many tokens all prompts share."""

    prefix: int = 0
    prefixes: dict[int, Level] = field(default_factory=dict)
    prompts: dict[int, Level] = field(default_factory=dict)
    own: dict[int, Level] = field(default_factory=dict)

    def shorten_prefix(self, prefix: int) -> None:
        """Let only so many tokens be shared: what others there were goes to each prompt."""
        for layer, level in self.prefixes.items():
            groups = len(self.prompts[layer].keys)
            tail_keys = level.keys[:, :, prefix:].expand(groups, -1, -1, -1)
            tail_values = level.values[:, :, prefix:].expand(groups, -1, -1, -1)
            prompts = self.prompts[layer]
            prompts.keys = torch.cat([tail_keys, prompts.keys], 2)
            prompts.values = torch.cat([tail_values, prompts.values], 2)
            level.keys = level.keys[:, :, :prefix].contiguous()
            level.values = level.values[:, :, :prefix].contiguous()
        if not prefix:
            self.prefixes.clear()
        self.prefix = prefix

    def level(self, levels: dict[int, Level], layer: int, keys: Tensor, values: Tensor) -> Level:
        """Find a layer's level, created at first use; keys and values [tokens, K, D] give its
        shape.
        """
        if layer not in levels:
            # A value may have another D than its key.
            no_keys = keys.new_zeros(0, keys.shape[1], 0, keys.shape[2])
            no_values = values.new_zeros(0, values.shape[1], 0, values.shape[2])
            levels[layer] = Level(no_keys, no_values)
        return levels[layer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """The pass over the common prefix, one row of tokens; stores its keys."""

    cache: Cache
    longest: int

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind
    ) -> Tensor:
        """See AttentionPass."""
        keys = key.transpose(0, 1).unsqueeze(0)
        values = value.transpose(0, 1).unsqueeze(0)
        # In the order in which every later step reads them.
        self.cache.prefixes[layer] = Level(keys.contiguous(), values.contiguous())
        return attend_packed(query[None], key[None], value[None], kind)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """The pass over the rests of some prompts, packed one after the other; stores their keys at
    groups first, first + 1, ...

    width: the longest rest. place: int64 [tokens], where each token goes in [groups, width]; None
    if all rests have the same length.
    """

    cache: Cache
    first: int
    groups: int
    width: int
    place: Tensor | None
    masks: dict[int | None, Tensor] = field(default_factory=dict)
    """By window, each made by the first layer that has it."""

    @property
    def longest(self) -> int:
        return self.cache.prefix + self.width

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind
    ) -> Tensor:
        """See AttentionPass. Rests are right-padded here and nowhere else."""
        q, k, v = (self._pad(x) for x in (query, key, value))
        level = self.cache.level(self.cache.prompts, layer, key, value)
        level.reserve(self.first + self.groups, self.width)
        groups = slice(self.first, self.first + self.groups)
        level.keys[groups, :, : self.width] = k.transpose(1, 2)
        level.values[groups, :, : self.width] = v.transpose(1, 2)
        if self.cache.prefix:
            out = self._attend_after_prefix(layer, q, k, v, kind)
        else:
            out = attend_packed(q, k, v, kind)
        flat = out.reshape(self.groups * self.width, *out.shape[2:])
        return flat if self.place is None else flat[self.place]

    def _pad(self, x: Tensor) -> Tensor:
        """[tokens, heads, D] -> [groups, width, heads, D]."""
        if self.place is None:
            return x.reshape(self.groups, self.width, *x.shape[1:])
        room = x.new_zeros(self.groups * self.width, *x.shape[1:])
        room[self.place] = x
        return room.view(self.groups, self.width, *x.shape[1:])

    def _attend_after_prefix(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind
    ) -> Tensor:
        prefix = self.cache.prefixes[layer]
        prefix_keys = prefix.keys.expand(self.groups, -1, -1, -1)
        prefix_values = prefix.values.expand(self.groups, -1, -1, -1)
        keys = torch.cat([prefix_keys, k.transpose(1, 2)], 2)
        values = torch.cat([prefix_values, v.transpose(1, 2)], 2)
        mask = self.masks.get(kind.window)
        if mask is None:
            causal_mask = causal(self.width, keys.shape[2], kind.window, keys.device)
            mask = causal_mask[None, None]
            self.masks[kind.window] = mask
        return attend(q.transpose(1, 2), keys, values, mask, kind).transpose(1, 2)
