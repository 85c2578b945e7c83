"""The pass over one new token for each live row, with keys on three levels.

Owns: attention of these tokens. Does not own: where keys are stored (cache.py), which rows are live
and which of them are read together (shared_step.py).

A level's keys are scored against all rows that share them in one matrix product, and one softmax is
taken over the three levels. Shapes: R rows, G groups, K key heads, r query heads per key head, D
head dim, L keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from operators.kernels.torch.attention_kind import AttentionKind
from operators.kernels.torch.cache import Cache, Level
from operators.kernels.torch.step_threads import use_threads

SHORT = 8
"""Up to this many own keys, products are written out elementwise: batched products of such small
matrices take up to twice as long on CPU (256 rows, 2 key heads of 32, 6 keys: 327 us for scores and
values, against 158). Only in float32: in another type each written-out product would be rounded.
"""

THREAD_READS = 1 << 20
"""Numbers of keys or values that justify one thread in a product with own ones. Each is read for
one multiplication, which takes far longer than that.
"""

PART_READS = 1 << 19
"""Numbers of keys and values that a further part must spare each layer: its operations take as long
as reading these (CPU, float32: about 0.1 ms).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPart:
    """Rows begin .. end - 1 of the live ones, which have at most `longest` own keys, with the new
    ones. bias [rows, 1, 1, longest]: 0 or -inf; None if every key counts.
    """

    begin: int
    end: int
    longest: int
    bias: Tensor | None = None

    @property
    def slots(self) -> slice:
        """As an index."""
        return slice(self.begin, self.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """The pass over one new token for each live row; the rows are at own[0 .. rows - 1].

    members: the most rows in any live group. width: the longest prompt rest. place: int64 [rows],
    where each row goes in [groups, members]; None if it is there already. last: int64 [rows], the
    index of the new token among the row's own. parts: all rows, in order; most: own tokens that a
    row may have. prompt_bias [groups, 1, 1, width] is 0 or -inf; None if every key counts. rest:
    int64 [rows], on the host: the length of each row's prompt rest. threads: at most so many.
    """

    cache: Cache
    rows: int
    groups: int
    members: int
    width: int
    place: Tensor | None
    last: Tensor
    parts: Sequence[OwnPart]
    most: int
    prompt_bias: Tensor | None
    rest: np.ndarray
    threads: int
    biases: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """What each window hides from each part, by its first slot: made by the first layer that has
    it."""
    written_at: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Where the new keys go in a level of so many heads and keys, its first axes as one."""

    @property
    def longest(self) -> int:
        return self.cache.prefix + self.width + self._longest_own

    @property
    def _longest_own(self) -> int:
        return max(part.longest for part in self.parts)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind
    ) -> Tensor:
        """See AttentionPass."""
        cache, heads, dim = self.cache, key.shape[1], query.shape[2]
        own_level = self._write(layer, key, value)
        q = (query * kind.scaling).view(self.rows, heads, -1, dim)
        prompt = cache.prompts[layer]
        # Own keys first: own, prompt, prefix is the order of scores, biases and weights below.
        shared_scores = [self._prompt_scores(prompt, q, kind)]
        if cache.prefix:
            prefix_scores = self._prefix_scores(cache.prefixes[layer], q)
            shared_scores.append(kind.cap_scores(prefix_scores))
        outs: list[Tensor] = []
        shared_weights: list[Sequence[Tensor]] = []
        for part in self.parts:
            its_scores = [scores[part.slots] for scores in shared_scores]
            own_scores = self._own_scores(own_level, part, q[part.slots], kind)
            weights = self._weigh(part, [own_scores, *its_scores], kind)
            outs.append(self._own_values(own_level, part, weights[0]))
            shared_weights.append(weights[1:])
        by_level = zip(*shared_weights, strict=True)
        prompt_weights, *prefix_weights = (_join(by_part) for by_part in by_level)
        out = _join(outs)
        out += self._prompt_values(prompt, prompt_weights)
        if cache.prefix:
            out += self._prefix_values(cache.prefixes[layer], prefix_weights[0])
        return out.reshape(self.rows, query.shape[1], -1)

    def _weigh(
        self, part: OwnPart, level_scores: Sequence[Tensor], kind: AttentionKind
    ) -> Sequence[Tensor]:
        """The weights of the keys of each level."""
        scores = torch.cat(tuple(level_scores), -1)
        if kind.window is not None:
            scores = scores + self._window_bias(kind.window, part, scores)
        weights = kind.weights(scores).to(scores.dtype)
        return weights.split([level.shape[-1] for level in level_scores], -1)

    def _window_bias(self, window: int, part: OwnPart, scores: Tensor) -> Tensor:
        """[slots, 1, 1, keys], as the scores are ordered: 0, or -inf for keys before the window."""
        bias = self.biases.get((window, part.begin))
        if bias is not None:
            return bias
        device, prefix = scores.device, self.cache.prefix
        own_begin = torch.from_numpy(self.rest[part.slots]).to(device) + prefix
        position = own_begin + self.last[part.slots]  # of the new token
        begins = (own_begin, own_begin.new_tensor(prefix), own_begin.new_tensor(0))
        lengths = (part.longest, self.width, prefix)
        levels: list[Tensor] = []
        for begin, length in zip(begins, lengths, strict=True):
            distance = (position - begin)[:, None] - torch.arange(length, device=device)
            levels.append(distance >= window)
        hidden = torch.cat(levels, 1)[:, None, None]
        bias = scores.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        self.biases[window, part.begin] = bias
        return bias

    def _write(self, layer: int, new_keys: Tensor, new_values: Tensor) -> Level:
        """Store the new tokens' keys and values behind each row's own."""
        level = self.cache.level(self.cache.own, layer, new_keys, new_values)
        level.reserve(self.rows, self._longest_own, self.most)
        if len(self.parts) == 1 and self.parts[0].bias is None:  # all rows are equally long
            level.keys[: self.rows, :, self._longest_own - 1] = new_keys
            level.values[: self.rows, :, self._longest_own - 1] = new_values
            return level
        places = self._places(level)
        for tensor, new in ((level.keys, new_keys), (level.values, new_values)):
            tensor.view(-1, tensor.shape[3]).index_copy_(0, places, new.flatten(0, 1))
        return level

    def _places(self, level: Level) -> Tensor:
        """int64 [R * K]: where the new keys are among all of the level."""
        _, heads, room, _ = level.keys.shape
        places = self.written_at.get((heads, room))
        if places is None:
            of_head = torch.arange(self.rows * heads, device=self.last.device).view(-1, heads)
            places = (of_head * room + self.last[:, None]).view(-1)
            self.written_at[heads, room] = places
        return places

    # Own level: [slots, K, r, D] with [slots, K, L, D].

    def _own_scores(self, level: Level, part: OwnPart, q: Tensor, kind: AttentionKind) -> Tensor:
        keys = level.keys[part.slots, :, : part.longest]
        if part.longest <= SHORT and q.dtype == torch.float32:
            scores = (q.unsqueeze(3) * keys.unsqueeze(2)).sum(-1)
        else:
            with self._threads_for(keys):
                scores = q @ keys.transpose(2, 3)
        scores = kind.cap_scores(scores)
        if part.bias is None:
            return scores
        return scores.add_(part.bias)

    def _own_values(self, level: Level, part: OwnPart, weights: Tensor) -> Tensor:
        values = level.values[part.slots, :, : part.longest]
        if part.longest <= SHORT and weights.dtype == torch.float32:
            return (weights.unsqueeze(-1) * values.unsqueeze(2)).sum(3)
        with self._threads_for(values):
            return weights @ values

    def _threads_for(self, numbers: Tensor) -> AbstractContextManager[Any]:
        """Threads for one product with these keys or values, as many as it is worth."""
        worthwhile = min(self.threads, numbers.numel() // THREAD_READS)
        return use_threads(worthwhile) if worthwhile > 1 else nullcontext()

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
        return x if self.place is None else x.index_select(0, self.place)

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


def _join(parts: Sequence[Tensor]) -> Tensor:
    """What all parts have, as one."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))
