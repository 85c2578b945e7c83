"""From logits to tokens, by inverse transform of one uniform draw a row.

Owns: temperature, top-k, top-p and the log-probabilities that go on record. Does not own: the
draws (dataflow.randomness), nor when a row ends (decode.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dataflow.errors import KernelError

BLOCK = 1 << 23
"""Numbers of one block of rows: bounds the float64 sums where the vocabulary is large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen. temperature 0 is greedy; top_k 0 and top_p 1 leave the distribution whole."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0.0 or not 0.0 < self.top_p <= 1.0 or self.top_k < 0:
            raise KernelError(
                f"expected temperature >= 0, 0 < top_p <= 1 and top_k >= 0, found {self}. Fix: as it says."
            )


def sample(logits: Tensor, draws: Tensor, how: Sampling) -> tuple[Tensor, Tensor]:
    """One token a row, and its log-probability.

    logits [rows, vocabulary], draws float64 [rows] in [0, 1) -> tokens int64 [rows], log-probabilities float32 [rows].
    The log-probability is that of softmax(logits / temperature) over the whole vocabulary, before top-k and top-p cut
    it, as TRL and verl record it; for temperature 0 it is that at temperature 1. A row depends on its own logits and
    draw alone.
    """
    if logits.shape[0] * logits.shape[1] > BLOCK and logits.shape[0] > 1:
        size = max(1, BLOCK // logits.shape[1])
        parts = [sample(x, u, how) for x, u in zip(logits.split(size), draws.split(size), strict=True)]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
    scores = logits.float()
    if how.temperature not in (0.0, 1.0):
        scores = scores / how.temperature
    logprobs = torch.log_softmax(scores, -1)
    if how.temperature == 0.0:
        tokens = scores.argmax(-1)
    else:
        tokens = _inverse(_truncated(scores, logprobs.exp(), how), draws)
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def _inverse(weights: Tensor, draws: Tensor) -> Tensor:
    """The first token whose cumulated weight exceeds draw * total; so never one of weight 0."""
    sums = weights.cumsum(-1, dtype=torch.float64)
    total = sums[:, -1]
    # draw * total may round up to total, which no cumulated weight exceeds.
    target = torch.minimum(draws * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(sums, target.unsqueeze(1), right=True).squeeze(1)


def _truncated(scores: Tensor, weights: Tensor, how: Sampling) -> Tensor:
    """Weights with those outside of top-k set to 0, then those outside of top-p of the rest; ties at the edge stay.

    scores [rows, vocabulary]: say which token is better, also where two weights are rounded to the same number.
    top-p keeps the least set of most likely tokens whose share reaches it (Holtzman et al., arXiv 1904.09751).
    """
    if 0 < how.top_k < weights.shape[1]:
        least = scores.topk(how.top_k, -1).values[:, -1:]
        weights = weights.where(scores >= least, 0.0)
    if how.top_p < 1.0:
        best, order = scores.sort(-1, descending=True)
        ordered = weights.gather(-1, order)
        before = ordered.cumsum(-1, dtype=torch.float64) - ordered
        inside = before < how.top_p * ordered.sum(-1, keepdim=True, dtype=torch.float64)
        least = best.where(inside, torch.inf).amin(-1, keepdim=True)
        weights = weights.where(scores >= least, 0.0)
    return weights
