"""The key-value cache of generation, and the passes that attend through it.

Owns: where the keys and values of live rows are stored, and attention for prompts (Prefill), for
one new token per row (Decode), and for several of a row's completion (Again). Does not own: which
rows are live (shared_step.py), keys at fixed places (static_keys.py), the call into the module
(attention.py).

A row's keys are stored on three levels, each once for all rows that share it:

    prefix    what all prompts of a chunk begin with    [1]
    prompt    the rest of one prompt                    [groups]
    own       the row's completion                      [rows]

Decode scores a level's keys against all rows that share them in one matrix product, and takes
one softmax over the three levels. Shapes: R rows, G groups, K key heads, r query heads per key
head, D head dim, L keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from operators.kernels.torch.attention_kind import AttentionKind, attend, attend_packed, causal

SHORT = 8
"""Up to this many own keys, products are written out elementwise: batched products of such small
matrices take up to twice as long on CPU (256 rows, 2 key heads of 32, 6 keys: 327 us for scores and
values, against 158). Only in float32: in another type each written-out product would be rounded.
"""


@dataclass(slots=True)
class Level:
    """Keys and values of one layer on one level: [holders, K, L, D]; holders and L can grow."""

    keys: Tensor
    values: Tensor

    def reserve(self, holders: int, length: int) -> None:
        """Make room for `holders` holders, at least doubling what grows; later ones may be dropped.

        New room is zero: 0 times garbage may be NaN.
        """
        self.keys = _grow(self.keys, holders, length)
        self.values = _grow(self.values, holders, length)

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


def _grow(tensor: Tensor, holders: int, length: int) -> Tensor:
    have, heads, long, dim = tensor.shape
    if holders <= have and length <= long:
        return tensor
    # Most rows end while others grow longer: longer room is made only for the remaining ones.
    wider = holders if holders <= have else max(holders, 2 * have)
    longer = long if length <= long else max(length, 2 * long, 8)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """The pass over tokens of some rows' completions, packed one after the other: of each row from
    a place on, whose own keys before that are at own[first .. first + rows - 1] already. Stores
    theirs behind them.

    live: all live rows, whose keys stay. width: the most tokens of a row. prompt: the longest
    prompt rest; longest_own: the most own keys of a row, with the new ones. group: int64 [rows],
    the group of each row's prompt; own_begin: int64 [rows], the position of its first own token;
    begin: int64 [rows], the index of its first new token among the own. holder, index: int64
    [tokens], where each token's keys go in the own level; place: int64 [tokens], where the token
    goes in [rows, width]. mask: bool [rows, 1, width, prefix + prompt + longest_own], without any
    window.
    """

    cache: Cache
    live: int
    first: int
    rows: int
    width: int
    prompt: int
    longest_own: int
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
        level.reserve(self.live, self.longest_own)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """The pass over one new token for each live row; the rows are at own[0 .. rows - 1].

    members: the most rows in any live group. width: the longest prompt rest. place: int64 [rows],
    where each row goes in [groups, members]; None if it is there already. last: int64 [rows], the
    index of the new token among the row's own; longest_own: the greatest of them plus 1. own_bias
    [rows, 1, 1, longest_own] and prompt_bias [groups, 1, 1, width] are 0 or -inf; None if every key
    counts. rest: int64 [rows], on the host: the length of each row's prompt rest.
    """

    cache: Cache
    rows: int
    groups: int
    members: int
    width: int
    longest_own: int
    place: Tensor | None
    last: Tensor
    own_bias: Tensor | None
    prompt_bias: Tensor | None
    rest: np.ndarray
    biases: dict[int, Tensor] = field(default_factory=dict)
    """What each window hides: made by the first layer that has it."""

    @property
    def longest(self) -> int:
        return self.cache.prefix + self.width + self.longest_own

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind
    ) -> Tensor:
        """See AttentionPass."""
        cache, heads, dim = self.cache, key.shape[1], query.shape[2]
        own_level = self._write(layer, key, value)
        q = (query * kind.scaling).view(self.rows, heads, -1, dim)
        prompt = cache.prompts[layer]
        # Own keys first: own, prompt, prefix is the order of scores, biases and weights below.
        level_scores = [self._own_scores(own_level, q, kind), self._prompt_scores(prompt, q, kind)]
        if cache.prefix:
            prefix_scores = self._prefix_scores(cache.prefixes[layer], q)
            level_scores.append(kind.cap_scores(prefix_scores))
        scores = torch.cat(level_scores, -1)
        if kind.window is not None:
            scores = scores + self._window_bias(kind.window, scores)
        weights = kind.weights(scores).to(query.dtype)
        own_weights, prompt_weights, *prefix_weights = weights.split(
            [level.shape[-1] for level in level_scores], -1
        )
        out = self._own_values(own_level, own_weights)
        out = out + self._prompt_values(prompt, prompt_weights)
        if cache.prefix:
            out += self._prefix_values(cache.prefixes[layer], prefix_weights[0])
        return out.reshape(self.rows, query.shape[1], -1)

    def _window_bias(self, window: int, scores: Tensor) -> Tensor:
        """[rows, 1, 1, keys], as the scores are ordered: 0, or -inf for keys before the window."""
        bias = self.biases.get(window)
        if bias is not None:
            return bias
        device, prefix = scores.device, self.cache.prefix
        own_begin = torch.from_numpy(self.rest).to(device) + prefix
        position = own_begin + self.last  # [rows]: of the new token
        begins = (own_begin, own_begin.new_tensor(prefix), own_begin.new_tensor(0))
        lengths = (self.longest_own, self.width, prefix)
        levels: list[Tensor] = []
        for begin, length in zip(begins, lengths, strict=True):
            distance = (position - begin)[:, None] - torch.arange(length, device=device)
            levels.append(distance >= window)
        hidden = torch.cat(levels, 1)[:, None, None]
        bias = scores.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        self.biases[window] = bias
        return bias

    def _write(self, layer: int, new_keys: Tensor, new_values: Tensor) -> Level:
        """Store the new tokens' keys and values behind each row's own."""
        level = self.cache.level(self.cache.own, layer, new_keys, new_values)
        level.reserve(self.rows, self.longest_own)
        if self.own_bias is None:  # all rows are equally long
            level.keys[: self.rows, :, self.longest_own - 1] = new_keys
            level.values[: self.rows, :, self.longest_own - 1] = new_values
        else:
            rows = torch.arange(self.rows, device=new_keys.device)
            level.keys[rows, :, self.last] = new_keys
            level.values[rows, :, self.last] = new_values
        return level

    # Own level: [R, K, r, D] with [R, K, L, D].

    def _own_scores(self, level: Level, q: Tensor, kind: AttentionKind) -> Tensor:
        keys = level.keys[: self.rows, :, : self.longest_own]
        if self.longest_own <= SHORT and q.dtype == torch.float32:
            scores = (q.unsqueeze(3) * keys.unsqueeze(2)).sum(-1)
        else:
            scores = q @ keys.transpose(2, 3)
        scores = kind.cap_scores(scores)
        if self.own_bias is None:
            return scores
        return scores + self.own_bias

    def _own_values(self, level: Level, weights: Tensor) -> Tensor:
        values = level.values[: self.rows, :, : self.longest_own]
        if self.longest_own <= SHORT and weights.dtype == torch.float32:
            return (weights.unsqueeze(-1) * values.unsqueeze(2)).sum(3)
        return weights @ values

    # Prompt level: the rows of a group side by side, [G, K, members * r, D] with [G, K, L, D].

    def _prompt_scores(self, prompt: Level, q: Tensor, kind: AttentionKind) -> Tensor:
        keys = prompt.keys[: self.groups, :, : self.width]
        scores = self._by_group(q) @ keys.transpose(2, 3)
        scores = kind.cap_scores(scores)
        if self.prompt_bias is not None:
            scores = scores + self.prompt_bias
        return self._by_row(scores)

    def _prompt_values(self, prompt: Level, weights: Tensor) -> Tensor:
        values = prompt.values[: self.groups, :, : self.width]
        return self._by_row(self._by_group(weights) @ values)

    def _by_group(self, x: Tensor) -> Tensor:
        """[R, K, r, X] -> [G, K, members * r, X]."""
        _, heads, shared, last = x.shape
        if self.place is not None:
            room = x.new_zeros(self.groups * self.members, heads, shared, last)
            room[self.place] = x
            x = room
        x = x.view(self.groups, self.members, heads, shared, last).transpose(1, 2)
        return x.reshape(self.groups, heads, self.members * shared, last)

    def _by_row(self, x: Tensor) -> Tensor:
        """The inverse of _by_group."""
        groups, heads, _, last = x.shape
        x = x.view(groups, heads, self.members, -1, last).transpose(1, 2)
        x = x.reshape(groups * self.members, heads, -1, last)
        return x if self.place is None else x[self.place]

    # Prefix level: all rows side by side, [K, R * r, D] with [K, L, D].

    def _prefix_scores(self, prefix: Level, q: Tensor) -> Tensor:
        keys = prefix.keys[0].transpose(1, 2)
        return self._split_rows(self._join_rows(q) @ keys)

    def _prefix_values(self, prefix: Level, weights: Tensor) -> Tensor:
        return self._split_rows(self._join_rows(weights) @ prefix.values[0])

    def _join_rows(self, x: Tensor) -> Tensor:
        """[R, K, r, X] -> [K, R * r, X]."""
        _, heads, _, last = x.shape
        return x.transpose(0, 1).reshape(heads, -1, last)

    def _split_rows(self, x: Tensor) -> Tensor:
        """The inverse of _join_rows."""
        heads, _, last = x.shape
        return x.view(heads, self.rows, -1, last).transpose(0, 1)
