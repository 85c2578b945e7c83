"""Keys and values at fixed places, each row's whole context by itself, and the passes through them.

Owns: the tensors, and attention for one new token per row (StaticDecode) and for several of a row's
completion (StaticAgain). Does not own: which row is in which slot
(static_step.py), prompts' own passes (cache.py), graphs (captured_steps.py).

A layer has one tensor [slots, length, K, D] of keys, one of values: slot s holds its row's token at
position p in place p. A prompt is copied to each of its rows, so a step's products have no shape or
index that depends on which rows share one. A step computes the first rows and the first keys of
them, in a few sizes; what it must not see is hidden by a bias that the device makes from the rows'
positions. K key heads, r query heads per key head, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from operators.kernels.torch.attention_kind import AttentionKind, attend
from operators.kernels.torch.cache import Cache, Level
from operators.kernels.torch.flash_decode import KeyLengths, attend_by_length, suits_flash


class StaticKeys:
    """The keys and values of all layers. slots, length: of each tensor. A Level is [slots, length,
    K, D] here: in the order in which flash_decode.py reads.
    """

    def __init__(self) -> None:
        self.slots, self.length = 0, 0
        self.levels: dict[int, Level] = {}

    def reserve(self, slots: int, length: int) -> bool:
        """Make room for so many slots and tokens, one layer after another. Returns whether the
        tensors are other ones now: what computes with the former must be made anew.
        """
        if slots <= self.slots and length <= self.length:
            return False
        self.slots, self.length = max(slots, self.slots), max(length, self.length)
        for level in self.levels.values():
            level.keys = self._enlarge(level.keys)
            level.values = self._enlarge(level.values)
        return True

    def _enlarge(self, tensor: Tensor) -> Tensor:
        slots, length, heads, dim = tensor.shape
        # Zeros: 0 times garbage may be NaN.
        larger = tensor.new_zeros(self.slots, self.length, heads, dim)
        larger[:slots, :length] = tensor
        return larger

    def store_prompts(self, cache: Cache, groups: Tensor, slots: Tensor) -> None:
        """Copy prompts' keys from the groups of a cache, int64 [rows], to these slots, int64
        [rows].
        """
        prefix = cache.prefix
        for layer, prompts in cache.prompts.items():
            level = self._find_level(layer, prompts)
            # A cache has room for more tokens than the prompts have; here may be less.
            width = min(prompts.keys.shape[2], self.length - prefix)
            rest = slice(prefix, prefix + width)
            level.keys[slots, rest] = prompts.keys[groups, :, :width].transpose(1, 2)
            level.values[slots, rest] = prompts.values[groups, :, :width].transpose(1, 2)
            if prefix:
                shared = cache.prefixes[layer]
                level.keys[slots, :prefix] = shared.keys.transpose(1, 2)
                level.values[slots, :prefix] = shared.values.transpose(1, 2)

    def _find_level(self, layer: int, like: Level) -> Level:
        """A layer's tensors, made at first use with the heads and dims of another level."""
        level = self.levels.get(layer)
        if level is None:
            _, heads, _, dim = like.keys.shape
            value_dim = like.values.shape[3]
            level = Level(
                like.keys.new_zeros(self.slots, self.length, heads, dim),
                like.values.new_zeros(self.slots, self.length, heads, value_dim),
            )
            self.levels[layer] = level
        return level

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first `length` keys of slots `source` to slots `target`, int64 [moved]."""
        for level in self.levels.values():
            for tensor in (level.keys, level.values):
                tensor[target, :length] = tensor[source, :length]

    def copy_out(self, slot: int, length: int) -> dict[int, Level]:
        """A slot's first keys in memory of their own: of each layer [length, K, D]."""
        parked: dict[int, Level] = {}
        for layer, level in self.levels.items():
            keys, values = level.keys[slot, :length], level.values[slot, :length]
            parked[layer] = Level(keys.clone(), values.clone())
        return parked

    def copy_in(self, slot: int, parked: dict[int, Level]) -> None:
        """Make these [length, K, D] a slot's first keys; there is room for them."""
        for layer, its in parked.items():
            length, level = len(its.keys), self.levels[layer]
            level.keys[slot, :length] = its.keys
            level.values[slot, :length] = its.values


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticDecode:
    """The pass over one new token for each of the first `rows` slots, over their first `longest`
    keys. slots int64 [rows]: 0, 1, ...; positions int64 [rows]: of the new tokens. A slot without a
    live row computes at position 0, for nobody. lengths: for a kernel that reads only as many keys
    as each row has, where there is one (flash_decode.py).

    Nothing here waits for the device or has a shape that depends on its numbers.
    """

    keys: StaticKeys
    rows: int
    longest: int
    slots: Tensor
    positions: Tensor
    lengths: KeyLengths | None = None
    biases: dict[int | None, Tensor] = field(default_factory=dict)
    """What each window hides: made by the first layer that has it."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind
    ) -> Tensor:
        """See AttentionPass."""
        level = self.keys.levels[layer]
        level.keys[self.slots, self.positions] = key
        level.values[self.slots, self.positions] = value
        if self.lengths is not None and suits_flash(level, kind):
            return attend_by_length(query, level, self.lengths, kind.scaling)
        keys = level.keys[: self.rows, : self.longest].transpose(1, 2)
        values = level.values[: self.rows, : self.longest].transpose(1, 2)
        # The query heads of one key head as queries of one row: keys are not repeated.
        q = query.reshape(self.rows, key.shape[1], -1, query.shape[2])
        bias = self._find_bias(kind.window, q.dtype)
        if kind.plain:
            out = scaled_dot_product_attention(q, keys, values, attn_mask=bias, scale=kind.scaling)
        else:
            scores = kind.cap_scores((q @ keys.transpose(2, 3)) * kind.scaling)
            out = kind.weights(scores + bias).to(q.dtype) @ values
        return out.reshape(self.rows, query.shape[1], -1)

    def _find_bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[rows, 1, 1, longest]: 0 for the keys that each new token sees, else -inf."""
        bias = self.biases.get(window)
        if bias is None:
            places = torch.arange(self.longest, device=self.positions.device)
            hidden = _find_hidden(places, self.positions.unsqueeze(1), window)
            zeros = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            bias = zeros.masked_fill_(hidden, -torch.inf)[:, None, None]
            self.biases[window] = bias
        return bias


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticAgain:
    """The pass over tokens of some rows' completions, packed one after the other: of each row from
    a place on, whose keys before that are in its slot already. Stores theirs behind them.

    slots int64 [rows]: of the rows; positions int64 [rows, width]: of each row's tokens from its
    first fed one on; longest: the most keys of a row. token_slots, token_positions int64
    [tokens]; place int64 [tokens]: where each token goes in [rows, width].
    """

    keys: StaticKeys
    slots: Tensor
    positions: Tensor
    longest: int
    token_slots: Tensor
    token_positions: Tensor
    place: Tensor
    masks: dict[int | None, Tensor] = field(default_factory=dict)
    """By window, each made by the first layer that has it."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind
    ) -> Tensor:
        """See AttentionPass. Queries are right-padded."""
        level = self.keys.levels[layer]
        level.keys[self.token_slots, self.token_positions] = key
        level.values[self.token_slots, self.token_positions] = value
        rows, width = self.positions.shape
        padded = query.new_zeros(rows * width, *query.shape[1:])
        padded[self.place] = query
        q = padded.view(rows, width, *query.shape[1:]).transpose(1, 2)
        keys = level.keys[self.slots, : self.longest].transpose(1, 2)
        values = level.values[self.slots, : self.longest].transpose(1, 2)
        out = attend(q, keys, values, self._find_mask(kind.window), kind)
        flat = out.transpose(1, 2).reshape(rows * width, query.shape[1], -1)
        return flat[self.place]

    def _find_mask(self, window: int | None) -> Tensor:
        """bool [rows, 1, width, longest]: which keys each token sees."""
        mask = self.masks.get(window)
        if mask is None:
            places = torch.arange(self.longest, device=self.positions.device)
            mask = ~_find_hidden(places, self.positions.unsqueeze(2), window).unsqueeze(1)
            self.masks[window] = mask
        return mask


def _find_hidden(places: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """Which key places a token at each position does not see: bool [..., places]."""
    hidden = places > positions
    if window is not None:
        hidden = hidden | (places <= positions - window)
    return hidden
