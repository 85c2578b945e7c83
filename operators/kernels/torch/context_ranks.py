"""Context ranks: the packed tokens of a micro-batch, divided over ranks that have the same rows.

Owns: which tokens a rank computes, the exchange of heads for tokens around attention, and the
numbers of all tokens from those of each rank. Does not own: attention (packed_pass.py), sums of
gradients (parallel.py), the layout of packed tokens (packing.py).

Of n ranks, rank k has every n-th packed token from token k on. So all have as many tokens, and as
many logits to within a few, wherever the prompts lie:

    packed tokens of 2 ranks    0 1 2 3 4 5 6 +    (+ is padding, which nothing attends to)
    rank 0                      0   2   4   6
    rank 1                        1   3   5   +

Embeddings, norms, MLPs and heads see a rank's own tokens alone. Around attention the ranks exchange
(DeepSpeed-Ulysses, arXiv:2309.14509, section 3): each gives away the other ranks' heads of its own
tokens, and gets its own heads of all tokens, in their packed order. So attention, over whole rows
or a tree of prefixes, is the one of a single rank, with heads / n each. Then they exchange back.

What the model says of each token is gathered: each rank has the loss of whole rows, to the bit that
of the others, and goes back through the numbers of its own tokens. So the sum of the ranks'
gradients is the gradient of the loss, with no further factor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dataflow.errors import KernelError
from dataflow.kernel import Session
from operators.kernels.torch.attention import AttentionPass
from operators.kernels.torch.attention_kind import AttentionKind
from operators.kernels.torch.model_numbers import ModelNumbers
from operators.kernels.torch.packed_pass import PackedPass
from operators.kernels.torch.packing import Packed
from operators.kernels.torch.temperatures import Temperature


class ContextRanks:
    """One rank's view of the ranks that divide the tokens of the same rows. group: of these ranks,
    in order, with the backend of their device.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.count = group.rank(), group.size()

    @staticmethod
    def of_replica(module: nn.Module, session: Session, node: str) -> ContextRanks:
        """The ranks of a replica, all of which divide tokens. Raises KernelError for a module of
        which they cannot, and without a process group.
        """
        if session.group is None:
            raise KernelError(
                f"{node}: expected a process group for its {session.world} ranks, found none. Fix:"
                " plan it with one rank."
            )
        require_heads(module, session.world, 1, node)
        return ContextRanks(session.group, next(module.parameters()).device)

    def divide(self, packed: Packed) -> TokenShare:
        """Take this rank's tokens of a layout. Every rank has to call, with the same layout."""
        count, rank = self.count, self.rank
        padding = -len(packed.ids) % count
        token_owners, row_owners = packed.source % count, packed.last % count
        tokens, rows = np.flatnonzero(token_owners == rank), np.flatnonzero(row_owners == rank)
        share = replace(
            packed,
            ids=np.pad(packed.ids, (0, padding))[rank::count],
            positions=np.pad(packed.positions, (0, padding))[rank::count],
            tokens=packed.tokens[tokens],
            row=packed.row[tokens],
            source=packed.source[tokens] // count,
            last=packed.last[rows] // count,
        )
        return TokenShare(
            packed=share,
            tokens=tokens,
            attention_pass=_ContextPass(packed, padding, self),
            joins=(_Join(token_owners, self), _Join(row_owners, self)),
        )


def require_heads(module: nn.Module, context: int, tensor: int, node: str) -> None:
    """Raise KernelError for a module whose heads so many context ranks cannot share equally.
    tensor: ranks over which the heads are divided before.
    """
    config: Any = module.config
    heads = int(config.num_attention_heads) // tensor
    if heads % context:
        nearest = max(count for count in range(1, context) if heads % count == 0)
        of_rank = f"{heads} attention heads{' of each tensor rank' * (tensor > 1)}"
        raise KernelError(
            f"{node}: expected heads divisible by its {context} context ranks, found {of_rank}."
            f" Fix: context={nearest}."
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenShare:
    """The tokens of a layout that one rank computes.

    packed: these tokens, as heads read them; source, last, tokens and row are of those that are
    predicted here. tokens: which of the layout's predicted tokens these are; None for all.
    attention_pass: of these tokens; None for the layout's own. joins: of numbers of tokens, and of
    rows.
    """

    packed: Packed
    tokens: np.ndarray | None = None
    attention_pass: AttentionPass | None = None
    joins: tuple[_Join, _Join] | None = None

    @staticmethod
    def of(packed: Packed, ranks: ContextRanks | None) -> TokenShare:
        """This rank's tokens; all of them without context ranks."""
        return TokenShare(packed=packed) if ranks is None else ranks.divide(packed)

    def take_temperature(self, temperature: Temperature) -> Temperature:
        """That of the tokens predicted here."""
        if self.tokens is None or not isinstance(temperature, np.ndarray):
            return temperature
        return temperature[self.tokens]

    def take_ids(self, ids: Tensor | None) -> Tensor | None:
        """Further ids [tokens, any] in the places of the tokens predicted here."""
        if self.tokens is None or ids is None:
            return ids
        return ids[torch.from_numpy(self.tokens).to(ids.device)]

    def join_tokens(self, numbers: Tensor) -> Tensor:
        """[tokens predicted here, ...] -> [tokens, ...], on every rank."""
        return numbers if self.joins is None else self.joins[0].join(numbers)

    def join_rows(self, numbers: Tensor) -> Tensor:
        """[rows whose last token is here, ...] -> [rows, ...], on every rank."""
        return numbers if self.joins is None else self.joins[1].join(numbers)

    def join(self, numbers: ModelNumbers) -> ModelNumbers:
        """Gather the numbers of all tokens and rows. Every rank has to call."""
        scores = None if numbers.scores is None else self.join_rows(numbers.scores)
        return numbers._replace(scores=None).each(self.join_tokens)._replace(scores=scores)


class _Join:
    """Puts numbers together of which each rank has its own. owners int64 [numbers]: whose each is;
    a rank has its own in their order.
    """

    def __init__(self, owners: np.ndarray, ranks: ContextRanks) -> None:
        self.ranks = ranks
        self.counts: list[int] = np.bincount(owners, minlength=ranks.count).tolist()
        self.order = torch.from_numpy(np.argsort(owners, kind="stable")).to(ranks.device)
        """The places of all numbers, the first rank's first."""

    def join(self, numbers: Tensor) -> Tensor:
        """[a rank's, ...] -> [all, ...]; backwards, each rank goes on with its own."""
        if not len(self.order):
            return numbers
        return _Gathered.apply(numbers, self)  # type: ignore[return-value]

    @property
    def own_places(self) -> Tensor:
        """The places of this rank's numbers."""
        return self.order.split(self.counts)[self.ranks.rank]


class _Gathered(torch.autograd.Function):
    """All ranks' numbers. All have the same loss, so each takes the gradient of its own alone."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, join: _Join) -> Tensor:
        ctx.join = join
        # all_gather takes equal lengths.
        padded = numbers.new_zeros(max(join.counts), *numbers.shape[1:])
        padded[: len(numbers)] = numbers
        by_rank = [torch.empty_like(padded) for _ in join.counts]
        dist.all_gather(by_rank, padded, group=join.ranks.group)
        pieces = [piece[:count] for piece, count in zip(by_rank, join.counts, strict=True)]
        whole = numbers.new_empty(len(join.order), *numbers.shape[1:])
        whole[join.order] = torch.cat(pieces)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][ctx.join.own_places], None


class _ContextPass:
    """The AttentionPass of one rank's tokens: that of all tokens, with this rank's heads."""

    def __init__(self, packed: Packed, padding: int, ranks: ContextRanks) -> None:
        self._whole = PackedPass(packed, ranks.device)
        self._tokens, self._padding, self._ranks = len(packed.ids), padding, ranks

    @property
    def longest(self) -> int:
        """See AttentionPass."""
        return self._whole.longest

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind
    ) -> Tensor:
        """See AttentionPass; of the tokens of this rank."""
        ranks = self._ranks
        # Each rank needs as many heads of keys as any other.
        repeats = math.lcm(key.shape[1], ranks.count) // key.shape[1]
        read = [key, value]
        if repeats > 1:
            read = [each.repeat_interleave(repeats, dim=1) for each in read]
        if kind.sinks is not None:
            kind = replace(kind, sinks=kind.sinks.view(ranks.count, -1)[ranks.rank])
        of_heads: Any = _HeadsForTokens.apply(ranks.group, query, *read)
        q, k, v = (x[: self._tokens] for x in of_heads)
        output = self._whole.attend(layer, q, k, v, kind)
        padded = nn.functional.pad(output, (0, 0, 0, 0, 0, self._padding))
        return _TokensForHeads.apply(ranks.group, padded)  # type: ignore[return-value]


class _HeadsForTokens(torch.autograd.Function):
    """[own tokens, heads, dim] -> [all tokens, own heads, dim], of several in one message."""

    @staticmethod
    def forward(ctx: Any, group: Any, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(_gather_tokens(parts, group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *_gather_heads(grads, ctx.group))


class _TokensForHeads(torch.autograd.Function):
    """[all tokens, own heads, dim] -> [own tokens, heads, dim]."""

    @staticmethod
    def forward(ctx: Any, group: Any, part: Tensor) -> Tensor:
        ctx.group = group
        return _gather_heads([part], group)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, _gather_tokens(grads, ctx.group)[0]


def _gather_tokens(parts: Sequence[Tensor], group: Any) -> list[Tensor]:
    """[own tokens, heads, dim] -> [all tokens, own heads, dim]."""
    size = group.size()
    by_reader = [part.unflatten(1, (size, -1)).transpose(0, 1) for part in parts]
    # Token i of rank k is token i * ranks + k.
    return [received.transpose(0, 1).flatten(0, 1) for received in _exchange(by_reader, group)]


def _gather_heads(parts: Sequence[Tensor], group: Any) -> list[Tensor]:
    """[all tokens, own heads, dim] -> [own tokens, heads, dim]."""
    size = group.size()
    by_reader = [part.unflatten(0, (-1, size)).transpose(0, 1) for part in parts]
    return [received.transpose(0, 1).flatten(1, 2) for received in _exchange(by_reader, group)]


def _exchange(parts: Sequence[Tensor], group: Any) -> list[Tensor]:
    """Send entry k of each tensor [ranks, ...] to rank k. Returns what the ranks sent, in order."""
    message = torch.cat([part.flatten(1) for part in parts], dim=1)
    received = torch.empty_like(message)
    dist.all_to_all_single(received, message, group=group)
    pieces = received.split([part[0].numel() for part in parts], dim=1)
    return [piece.unflatten(1, part.shape[1:]) for piece, part in zip(pieces, parts, strict=True)]
