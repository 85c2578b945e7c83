"""From logits to tokens on a device, without a word to the host in between.

Owns: uniform draws computed where the logits are, the choice of tokens from parts of the
vocabulary, and the one buffer in which a step's numbers go to the host. Does not own: temperature,
top-k and top-p (sampling.py), the definition of a draw (dataflow/randomness.py).

Nothing here reads a number of a tensor on the host, so a CUDA graph can hold it: what sampling.py
raises is a flag of each row here. The tokens are those of `sampling.sample` for the same logits and
draws, but for draws that lie within the rounding of a float64 sum of each other's tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from dataflow.errors import KernelError
from operators.kernels.torch.decode_step import StepTokens
from operators.kernels.torch.sampling import (
    UNSOUND,
    DrawnTokens,
    Sampling,
    find_unsound,
    truncate_weights,
)

PART = 1024
"""Tokens whose weights are added up at once. A running sum over a whole vocabulary is one block of
a GPU a row, and writes twice the bytes of the weights; sums of parts are read once.
"""

BLOCK = 1 << 26
"""Numbers in one block of rows: bounds what sampling holds, of which there are three at once."""

NUMBERS = 4
"""int32 numbers of one row in the packed buffer: token, log-prob, mass, whether it is unsound."""

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


def draw_uniform(seeds: Tensor, indices: Tensor) -> Tensor:
    """Draw what `dataflow.randomness.uniform` draws, to the bit: float64 [rows] in [0, 1).

    seeds: the bits of the uint64 seeds, as int64 [rows]; indices int64 [rows]. int64 products wrap
    as uint64 ones do; shifts of negative numbers are made logical.
    """
    bits = seeds + _GOLDEN * (indices + 1)
    bits = (bits ^ _shift(bits, 30)) * _FIRST
    bits = (bits ^ _shift(bits, 27)) * _SECOND
    bits = bits ^ _shift(bits, 31)
    return _shift(bits, 11).double() * 2.0**-53  # a float64 holds 53 bits


def _shift(bits: Tensor, count: int) -> Tensor:
    """Shift right as an unsigned number is."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def draw_packed(logits: Tensor, draws: Tensor, how: Sampling, packed: Tensor) -> Tensor:
    """Draw one token per row into `packed`, int32 [NUMBERS, rows], and return the tokens, int64
    [rows]. logits [rows, vocabulary], draws float64 [rows].
    """
    size = max(1, BLOCK // logits.shape[1])
    begin, all_tokens = 0, []
    for block_logits, block_draws in zip(logits.split(size), draws.split(size), strict=True):
        drawn, unsound = _draw_tokens(block_logits, block_draws, how)
        block = packed[:, begin : begin + len(block_draws)]
        block[0].copy_(drawn.tokens)
        block[1].copy_(drawn.logprobs.view(torch.int32))
        if drawn.mass is not None:
            block[2].copy_(drawn.mass.view(torch.int32))
        block[3].copy_(unsound)
        all_tokens.append(drawn.tokens)
        begin += len(block_draws)
    return torch.cat(all_tokens)


def unpack_rows(packed: np.ndarray, rows: np.ndarray, *, truncates: bool) -> StepTokens:
    """Read int32 [NUMBERS, rows] that `draw_packed` wrote for these rows. Raises KernelError for a
    row whose logits were no numbers.
    """
    tokens, logprob_bits, mass_bits, unsound = packed
    if unsound.any():
        raise KernelError(UNSOUND)
    mass = mass_bits.view(np.float32) if truncates else None
    return StepTokens(rows=rows, tokens=tokens, logprobs=logprob_bits.view(np.float32), mass=mass)


def _draw_tokens(logits: Tensor, draws: Tensor, how: Sampling) -> tuple[DrawnTokens, Tensor]:
    """`sampling.sample`, and which rows are unsound instead of an error: bool [rows]."""
    scores = logits.float()
    if how.temperature not in (0.0, 1.0):
        scores = scores / how.temperature
    logprobs = torch.log_softmax(scores, -1)
    mass = None
    if how.temperature == 0.0:
        tokens = scores.argmax(-1)
    else:
        weights = truncate_weights(scores, logprobs.exp(), how)
        tokens, total = _invert_parts(weights, draws)
        if how.truncates:
            mass = total.clamp(max=1.0).log().float()
    # A row of NaN finds a token behind the last: an index that would end the device's context.
    tokens = tokens.clamp(0, logits.shape[1] - 1)
    drawn_logprobs = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    drawn = DrawnTokens(tokens=tokens, logprobs=drawn_logprobs, mass=mass)
    return drawn, find_unsound(logprobs)


def _invert_parts(weights: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Find each row's first token whose cumulative weight exceeds draw * total, never one of weight
    0; and the totals, float64 [rows]. weights float32 [rows, vocabulary].

    First the part of the vocabulary, then the token in it.
    """
    vocabulary = weights.shape[1]
    whole = vocabulary // PART * PART
    sums = weights[:, :whole].unflatten(1, (-1, PART)).sum(-1, dtype=torch.float64)
    rest = weights[:, whole:].sum(-1, keepdim=True, dtype=torch.float64)
    sums = torch.cat([sums, rest], 1).cumsum(1)
    total = sums[:, -1:]
    target = torch.minimum(draws.unsqueeze(1) * total, _below(total))
    part = torch.searchsorted(sums, target, right=True)
    # A row of NaN finds a part behind the last.
    part = part.clamp(max=sums.shape[1] - 1)
    before = pad(sums, (1, 0)).gather(1, part)
    places = part * PART + torch.arange(PART, device=weights.device)
    part_weights = weights.gather(1, places.clamp(max=vocabulary - 1))
    part_weights = part_weights.masked_fill(places >= vocabulary, 0.0)
    within = part_weights.cumsum(1, dtype=torch.float64)
    # The part's own sum may round to less than the difference of the running sums.
    target = torch.minimum(target - before, _below(within[:, -1:]))
    token = torch.searchsorted(within, target, right=True)
    return (part * PART + token).squeeze(1), total.squeeze(1)


def _below(total: Tensor) -> Tensor:
    """The largest number less than each total, which every draw's target is at most."""
    return torch.nextafter(total, torch.zeros_like(total))
