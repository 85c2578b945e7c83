"""The tables of the vocabulary, of which each tensor rank has some of the rows.

Owns: how a language model's embedding and head are split in place, the lookup in a part, and what
ranks exchange about logits of which each has its columns. Does not own: which numbers are read of
logits (logit_reading.py), matrices of the layers (slices.py).

    embedding   each rank looks up the tokens that it has; the sum over ranks is whole on each
    head        whole hidden states, this rank's columns of the logits

(Megatron-LM, arXiv:1909.08053, section 3.) Both or none are split: they may be one tensor. They
stay whole where the vocabulary is not divisible by the ranks, where one of the two is no plain
layer, and without a head over the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from operators.kernels.torch.split_linear import COLUMNS, split_linear

_FIRST = 0


@dataclass(frozen=True, slots=True, eq=False)
class VocabularyPart:
    """One rank's tokens: first .. first + size - 1. group: of the ranks that have the others."""

    group: Any
    first: int
    size: int

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Find ids in this part: the place of each, int64, 0 where it is elsewhere; and whether it
        is here, bool.
        """
        places = ids - self.first
        is_here = (places >= 0) & (places < self.size)
        return places.masked_fill(~is_here, 0), is_here

    def pick(self, logits: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
        """Pick logits [rows, size] of tokens, at `rows` and `ids` of one shape; 0 for those that
        another rank has.
        """
        places, is_here = self.find(ids)
        return logits[rows, places].masked_fill(~is_here, 0.0)

    def sum(self, numbers: Tensor) -> Tensor:
        """Add up over ranks. What follows is the same on all of them, and so is its gradient, which
        is that of each rank's numbers.
        """
        return _Sum.apply(numbers, self.group)  # type: ignore[return-value]

    @torch.no_grad()
    def greatest(self, numbers: Tensor) -> Tensor:
        """Find the maxima over ranks, without a gradient."""
        numbers = numbers.detach().clone()
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group)
        return numbers

    @torch.no_grad()
    def top_ids(self, logits: Tensor, count: int) -> Tensor:
        """Find the most likely tokens of the whole vocabulary, best first: int64 [rows, count], the
        same on all ranks. logits [rows, size].
        """
        best, places = logits.detach().topk(min(count, self.size), dim=-1)
        candidates = self._gather(best)
        ids = self._gather(places + self.first)
        return ids.gather(1, candidates.topk(count, dim=-1).indices)

    def _gather(self, columns: Tensor) -> Tensor:
        """[rows, some] of each rank -> [rows, all], on all of them."""
        parts = [torch.empty_like(columns) for _ in range(self.group.size())]
        dist.all_gather(parts, columns.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)

    def gather_first(self, logits: Tensor) -> Tensor:
        """Gather logits [rows, size] on the first rank: [rows, vocabulary] there. The others give
        theirs, and keep them.
        """
        logits = logits.contiguous()
        if self.group.rank() != _FIRST:
            dist.gather(logits, group=self.group, group_dst=_FIRST)
            return logits
        parts = [torch.empty_like(logits) for _ in range(self.group.size())]
        dist.gather(logits, parts, group=self.group, group_dst=_FIRST)
        return torch.cat(parts, dim=-1)


class _Sum(torch.autograd.Function):
    """The sum over ranks; its backward is the identity."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, group: Any) -> Tensor:
        total = numbers.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _SplitEmbedding(nn.Embedding):
    """A lookup in a table of which each rank has some rows."""

    part: VocabularyPart

    def forward(self, input: Tensor) -> Tensor:
        """int64 [...] -> [..., hidden], whole on each rank."""
        weight = self.weight
        assert isinstance(weight, DTensor)
        places, is_here = self.part.find(input)
        rows = nn.functional.embedding(places, weight.to_local(), self._find_padding())
        return self.part.sum(rows.masked_fill(~is_here[..., None], 0.0))

    def _find_padding(self) -> int | None:
        """The place of the padding token, which gets no gradient; None if another rank has it."""
        if self.padding_idx is None:
            return None
        place = self.padding_idx - self.part.first
        return place if 0 <= place < self.part.size else None


def split_vocabulary(module: nn.Module, mesh: DeviceMesh) -> VocabularyPart | None:
    """Split a causal model's embedding and head in place, over the ranks of a mesh, which have the
    same weights before. Returns this rank's part; None where both stay whole.
    """
    tables = _find_tables(module, mesh.size())
    if tables is None:
        return None
    embedding, head = tables
    size = embedding.num_embeddings // mesh.size()
    group = mesh.get_group()
    part = VocabularyPart(group, first=group.rank() * size, size=size)
    is_tied = embedding.weight is head.weight
    split_linear(head, mesh, COLUMNS)
    weight: Any = head.weight
    if not is_tied:
        rows = distribute_tensor(embedding.weight.detach(), mesh, [Shard(0)], src_data_rank=None)
        weight = nn.Parameter(rows, requires_grad=embedding.weight.requires_grad)
    embedding.register_parameter("weight", weight)
    embedding.__class__ = _SplitEmbedding
    embedding.part = head.part = part  # type: ignore[assignment]
    return part


def find_vocabulary_part(module: nn.Module) -> VocabularyPart | None:
    """This rank's part of a module's vocabulary; None where its head is whole, or has none."""
    return getattr(_find_head(module), "part", None)


def _find_head(module: nn.Module) -> nn.Module | None:
    find = getattr(module, "get_output_embeddings", None)
    return None if find is None else find()


def _find_tables(module: nn.Module, ranks: int) -> tuple[nn.Embedding, nn.Linear] | None:
    """Find embedding and head of a causal model if they can be split over so many ranks."""
    model: Any = module
    embedding, head = model.get_input_embeddings(), _find_head(module)
    # Layers of other classes may scale what they look up, or add to it.
    if type(embedding) is not nn.Embedding or type(head) is not nn.Linear:
        return None
    vocabulary = embedding.num_embeddings
    is_plain = embedding.max_norm is None and not embedding.scale_grad_by_freq
    if not is_plain or head.out_features != vocabulary or vocabulary % ranks:
        return None
    return embedding, head
