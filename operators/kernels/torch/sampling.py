"""From logits to tokens, by inverse transform of one uniform draw per row.

Owns: temperature, top-k, top-p and the recorded log-probabilities. Does not own: the draws
(dataflow.randomness), when a row ends (decoding.py), what the recorded numbers mean (Rollout in
dataflow/schema.py), the same without waiting for a device (device_sampling.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dataflow.errors import KernelError
from operators.generate import truncates

BLOCK = 1 << 23
"""Numbers in one block of rows: bounds the float64 sums for large vocabularies."""


UNSOUND = (
    "expected finite logits, found NaN or infinity: the weights have diverged, or never had"
    " numbers. Fix: a lower learning rate from an earlier checkpoint on, or another base."
)
"""The error of rows without numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen: temperature 0 is greedy; top_k 0 and top_p 1 truncate nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0.0 or not 0.0 < self.top_p <= 1.0 or self.top_k < 0:
            raise KernelError(
                f"expected temperature >= 0, 0 < top_p <= 1 and top_k >= 0, found {self}. Fix: as"
                " it says."
            )

    @property
    def truncates(self) -> bool:
        """Whether it draws from a part of the distribution, whose mass is then recorded."""
        return truncates(self.temperature, self.top_p, self.top_k)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawnTokens:
    """Each row's token int64 and log-probability float32; if the sampler truncates, mass float32:
    the log of the probability that top-k and top-p kept.
    """

    tokens: Tensor
    logprobs: Tensor
    mass: Tensor | None = None


def sample(logits: Tensor, draws: Tensor, how: Sampling) -> DrawnTokens:
    """Draw one token per row; logits [rows, vocabulary], draws float64 [rows] in [0, 1).

    The log-probability is that of softmax(logits / temperature) over the whole vocabulary, before
    top-k and top-p; for temperature 0 it is that at temperature 1. Minus the mass it is that of the
    distribution drawn from, which TRL and verl record. A row depends only on its own logits and
    draw. Raises KernelError for logits that are no numbers.
    """
    rows, vocabulary = logits.shape
    if rows * vocabulary > BLOCK and rows > 1:
        return _sample_in_blocks(logits, draws, how)
    scores = logits.float()
    if how.temperature not in (0.0, 1.0):
        scores = scores / how.temperature
    logprobs = torch.log_softmax(scores, -1)
    require_numbers(logprobs)
    mass = None
    if how.temperature == 0.0:
        tokens = scores.argmax(-1)
    else:
        sums = cumulate_weights(scores, logprobs, how)
        tokens = _invert(sums, draws)
        if how.truncates:  # the whole is 1 to float32 precision, like the logprobs
            mass = sums[:, -1].clamp(max=1.0).log().float()
    drawn_logprobs = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return DrawnTokens(tokens=tokens, logprobs=drawn_logprobs, mass=mass)


def require_numbers(logprobs: Tensor) -> None:
    """Raise KernelError for a row [vocabulary] whose logits had NaN or infinity: each of its
    log-probs is NaN then.
    """
    if bool(find_unsound(logprobs).any()):
        raise KernelError(UNSOUND)


def find_unsound(logprobs: Tensor) -> Tensor:
    """Find rows [rows, vocabulary] whose logits had NaN or infinity: bool [rows]."""
    return logprobs[:, 0].isnan()


def cumulate_weights(scores: Tensor, logprobs: Tensor, how: Sampling) -> Tensor:
    """Add up each token's weight and those of the tokens before it: float64 [rows, vocabulary].

    A draw times the last of a row is looked up in them. scores: logits / temperature, of which
    logprobs are the log_softmax; both float32 [rows, vocabulary].
    """
    # float64: a float32 sum over a vocabulary would lose the weights of unlikely tokens.
    return truncate_weights(scores, logprobs.exp(), how).cumsum(-1, dtype=torch.float64)


def _sample_in_blocks(logits: Tensor, draws: Tensor, how: Sampling) -> DrawnTokens:
    """`sample` on blocks of rows."""
    size = max(1, BLOCK // logits.shape[1])
    blocks = zip(logits.split(size), draws.split(size), strict=True)
    parts = [sample(block_logits, block_draws, how) for block_logits, block_draws in blocks]
    masses = [part.mass for part in parts if part.mass is not None]
    return DrawnTokens(
        tokens=torch.cat([part.tokens for part in parts]),
        logprobs=torch.cat([part.logprobs for part in parts]),
        mass=torch.cat(masses) if masses else None,
    )


def _invert(sums: Tensor, draws: Tensor) -> Tensor:
    """Find the first token whose cumulative weight exceeds draw * total; so never one of weight
    0.
    """
    total = sums[:, -1]
    # draw * total may round up to total, which no cumulative weight exceeds.
    below_total = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(draws * total, below_total)
    return torch.searchsorted(sums, target.unsqueeze(1), right=True).squeeze(1)


def truncate_weights(scores: Tensor, weights: Tensor, how: Sampling) -> Tensor:
    """Set the weights outside the top-k to 0, then those outside the top-p of the rest; ties at the
    edge stay.

    scores [rows, vocabulary]: rank the tokens, even where two weights round to the same number.
    top-p keeps the smallest set of most likely tokens whose share reaches it (Holtzman et al.,
    arXiv 1904.09751). Filled, not chosen by `where`: that copies its number to the device, which no
    CUDA graph can hold.
    """
    if 0 < how.top_k < weights.shape[1]:
        least = scores.topk(how.top_k, -1).values[:, -1:]
        weights = weights.masked_fill(~(scores >= least), 0.0)
    if how.top_p < 1.0:
        best, order = scores.sort(-1, descending=True)
        ordered = weights.gather(-1, order)
        before = ordered.cumsum(-1, dtype=torch.float64) - ordered
        total = ordered.sum(-1, keepdim=True, dtype=torch.float64)
        inside = before < how.top_p * total
        least = best.masked_fill(~inside, torch.inf).amin(-1, keepdim=True)
        weights = weights.masked_fill(~(scores >= least), 0.0)
    return weights
