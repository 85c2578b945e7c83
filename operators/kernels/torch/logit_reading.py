"""What is read of logits: log-probs, entropy, further tokens, at some temperature.

Owns: these numbers, of whole logits and of those of which each tensor rank has some columns. Does
not own: which tokens are predicted, and how many logits are held at once (heads.py), what ranks
exchange (vocabulary_part.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from operators.kernels.tensors import widen
from operators.kernels.torch.vocabulary_part import VocabularyPart


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predictions:
    """What a model predicts of the written tokens.

    logprobs float32 [tokens]. entropy [tokens]: of the distribution of each. at_ids [tokens, ids]:
    log-probs of the ids asked for. top_ids int64, top_logprobs [tokens, k]: the most likely tokens,
    best first.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    at_ids: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitReading:
    """What is computed of each token besides its log-prob, and at which temperature: of all, or of
    each row of logits. part: the columns of the logits that are here; None: all.
    """

    temperature: float | Tensor
    entropy: bool
    top_k: int
    part: VocabularyPart | None = None

    def of_rows(self, rows: slice) -> LogitReading:
        """The reading of some rows of logits."""
        if not isinstance(self.temperature, Tensor):
            return self
        return replace(self, temperature=self.temperature[rows])

    def scale(self, logits: Tensor) -> Tensor:
        """Divide logits by the temperature, as float32."""
        if isinstance(self.temperature, Tensor):
            return widen(logits) / self.temperature[:, None]
        if self.temperature == 1.0:
            return widen(logits)
        return widen(logits) / self.temperature


def read_logits(
    logits: Tensor, which: Tensor, written: Tensor, ids: Tensor | None, reading: LogitReading
) -> Predictions:
    """Read logits [kept, vocabulary], or this rank's columns; token i reads row which[i]."""
    scaled = reading.scale(logits)
    if reading.part is not None:
        return _read_part(scaled, which, written, ids, reading, reading.part)
    total = scaled.logsumexp(dim=-1)
    predicted = Predictions(logprobs=scaled[which, written] - total[which])
    if reading.entropy:
        expected = (scaled.softmax(dim=-1) * scaled).sum(dim=-1)
        predicted = replace(predicted, entropy=(total - expected)[which])
    if ids is not None:
        at_ids = scaled[which[:, None], ids] - total[which, None]
        predicted = replace(predicted, at_ids=at_ids)
    if reading.top_k:
        best, tokens = scaled.topk(reading.top_k, dim=-1)
        top_logprobs = (best - total[:, None])[which]
        predicted = replace(predicted, top_ids=tokens[which], top_logprobs=top_logprobs)
    return predicted


def _read_part(
    scaled: Tensor,
    which: Tensor,
    written: Tensor,
    ids: Tensor | None,
    reading: LogitReading,
    part: VocabularyPart,
) -> Predictions:
    """Read logits [kept, size] of which other ranks have the other columns; the numbers are the
    same on all.

    One maximum and one sum over ranks: of what the exponentials add up to, of their products with
    the logits, and of the logits that are read, each of which one rank has (Megatron-LM,
    arXiv:1909.08053, section 3).
    """
    most = part.greatest(scaled.amax(dim=-1))
    below = scaled - most[:, None]
    weights = below.exp()
    partial = [weights.sum(dim=-1)]
    if reading.entropy:
        partial.append((weights * below).sum(dim=-1))
    top_ids = part.top_ids(scaled, reading.top_k)[which] if reading.top_k else None
    columns = [written[:, None]]
    columns += [each for each in (ids, top_ids) if each is not None]
    read_ids = torch.cat(columns, dim=1)
    picked = part.pick(below, which[:, None].expand_as(read_ids), read_ids)
    summed = part.sum(torch.cat([*partial, picked.flatten()]))
    total, *expected = summed[: len(partial) * len(most)].view(len(partial), len(most))
    logprobs = summed[len(partial) * len(most) :].view_as(picked) - total.log()[which, None]
    of_written, at_ids, top_logprobs = logprobs.split(
        [1, *(0 if each is None else each.shape[1] for each in (ids, top_ids))], dim=1
    )
    return Predictions(
        logprobs=of_written[:, 0],
        entropy=(total.log() - expected[0] / total)[which] if reading.entropy else None,
        at_ids=None if ids is None else at_ids,
        top_ids=top_ids,
        top_logprobs=None if top_ids is None else top_logprobs,
    )
