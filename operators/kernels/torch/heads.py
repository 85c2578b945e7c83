"""Heads: a model's numbers at the packed tokens of some rows.

Owns: log-probs, entropy, values and scores from one forward over a prefix tree, computed only
where something is predicted. Does not own: the tree (packing.py), the losses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from operators.kernels.tensors import index
from operators.kernels.torch.attention import forward, hidden
from operators.kernels.torch.packing import Packed
from operators.kernels.torch.scalar import scalar_head
from operators.kernels.torch.shared_attention import TreePass
from operators.kernels.torch.temperatures import Temperature

CHUNK = 1 << 26
"""The most logits held at once, with or without gradient: 256 MB in float32."""

_SHAPERS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Settings that change logits after the head; such logits come from the module's own forward."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predictions:
    """For the written tokens, float32 [tokens]. entropy: of the distribution of each. at
    [tokens, ids]: log-probs of the ids asked for. top_ids int64, top_logprobs [tokens, k]: the most
    likely tokens, best first.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    at: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None


def predictions(
    module: nn.Module,
    packed: Packed,
    written: Tensor,
    *,
    temperature: Temperature = 1.0,
    entropy: bool = False,
    ids: Tensor | None = None,
    top_k: int = 0,
) -> Predictions:
    """Log-probs (and entropy) of the completion tokens; `written` int64 [tokens] are their ids.
    ids int64 [tokens, any]: further tokens in their places. top_k: how many of the most likely.

    Logits are computed once for each distinct prefix and temperature; if they exceed CHUNK, in
    chunks that the backward pass computes again.
    """
    keep, which, scale = _distinct(packed.source, temperature)
    config: Any = module.config
    device = written.device
    asked = _Asked(temperature=_on(scale, device), entropy=entropy, top_k=top_k)
    if len(keep) * config.vocab_size <= CHUNK or any(
        getattr(config, name, None) for name in _SHAPERS
    ):
        logits = forward(module, *_fed(packed, device), index(keep, device))
        return _read(logits, index(which, device), written, ids, asked)
    rows = max(1, CHUNK // config.vocab_size)
    return _chunked(module, packed, keep, which, written, ids, asked, rows)


def _fed(packed: Packed, device: torch.device) -> tuple[Tensor, Tensor, TreePass]:
    return index(packed.ids, device), index(packed.positions, device), TreePass(packed, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What is computed of each token besides its log-prob, and at which temperature: of all, or of
    each row of logits.
    """

    temperature: float | Tensor
    entropy: bool
    top_k: int

    def rows(self, some: slice) -> _Asked:
        """Of some rows of logits."""
        at = self.temperature
        return replace(self, temperature=at[some]) if isinstance(at, Tensor) else self

    def scaled(self, logits: Tensor) -> Tensor:
        """float32, divided by the temperature."""
        at = self.temperature
        if isinstance(at, Tensor):
            return logits.float() / at[:, None]
        return logits.float() / at if at != 1.0 else logits.float()


def _distinct(
    source: np.ndarray, temperature: Temperature
) -> tuple[np.ndarray, np.ndarray, Temperature]:
    """The fed tokens whose logits are read, once for each temperature at which they are; for each
    predicted token the index of its own; and the temperature of each that is read, or of all.
    """
    if isinstance(temperature, float):
        keep, which = np.unique(source, return_inverse=True)
        return keep, which, temperature
    scales, scale = np.unique(temperature, return_inverse=True)
    pairs, which = np.unique(source * len(scales) + scale, return_inverse=True)
    return pairs // len(scales), which, scales[pairs % len(scales)]


def _on(temperature: Temperature, device: torch.device) -> float | Tensor:
    if isinstance(temperature, float):
        return temperature
    return torch.from_numpy(temperature).to(device)


def _read(
    logits: Tensor, which: Tensor, written: Tensor, ids: Tensor | None, asked: _Asked
) -> Predictions:
    """logits [kept, vocabulary]; token i reads row which[i]."""
    scaled = asked.scaled(logits)
    total = scaled.logsumexp(dim=-1)
    found = Predictions(logprobs=scaled[which, written] - total[which])
    if asked.entropy:
        expected = (scaled.softmax(dim=-1) * scaled).sum(dim=-1)
        found = replace(found, entropy=(total - expected)[which])
    if ids is not None:
        found = replace(found, at=scaled[which[:, None], ids] - total[which, None])
    if asked.top_k:
        best, tokens = scaled.topk(asked.top_k, dim=-1)
        found = replace(found, top_ids=tokens[which], top_logprobs=(best - total[:, None])[which])
    return found


def _chunked(
    module: nn.Module,
    packed: Packed,
    keep: np.ndarray,
    which: np.ndarray,
    written: Tensor,
    ids: Tensor | None,
    asked: _Asked,
    rows: int,
) -> Predictions:
    """Like `_read`, with `rows` rows of logits at a time."""
    device = written.device
    states = hidden(module, *_fed(packed, device)).index_select(0, index(keep, device))
    head: Any = module.get_output_embeddings()  # type: ignore[operator]

    def part(
        state: Tensor, of: Tensor, own: Tensor, others: Tensor | None, asked: _Asked
    ) -> list[Tensor | None]:
        read = _read(head(state), of, own, others, asked)
        return [read.logprobs, read.entropy, read.at, read.top_ids, read.top_logprobs]

    order = np.argsort(which, kind="stable")
    cuts = np.searchsorted(which[order], np.arange(0, len(keep) + rows, rows))
    parts = []
    for chunk, (low, high) in enumerate(pairwise(cuts)):
        chosen = index(order[low:high], device)
        of = index(which[order[low:high]] - chunk * rows, device)
        some = slice(chunk * rows, (chunk + 1) * rows)
        others, own = None if ids is None else ids[chosen], written[chosen]
        given = (states[some], of, own, others, asked.rows(some))
        parts.append(checkpoint(part, *given, use_reentrant=False))
    back = index(np.argsort(order), device)
    logprobs, spread, at, top_ids, top_logprobs = (
        None if xs[0] is None else torch.cat(xs)[back] for xs in zip(*parts, strict=True)
    )
    assert logprobs is not None
    return Predictions(
        logprobs=logprobs, entropy=spread, at=at, top_ids=top_ids, top_logprobs=top_logprobs
    )


def values(module: nn.Module, packed: Packed, device: torch.device) -> Tensor:
    """float32 [tokens]: the scalar head before each completion token is written."""
    return _scalar(module, packed, packed.source, device)


def scores(module: nn.Module, packed: Packed, device: torch.device) -> Tensor:
    """float32 [rows]: the scalar head at the last fed token of each row."""
    return _scalar(module, packed, packed.last, device)


def values_and_scores(
    module: nn.Module, packed: Packed, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Both, of one forward."""
    both = _scalar(module, packed, np.concatenate([packed.source, packed.last]), device)
    return both[: len(packed.source)], both[len(packed.source) :]


def _scalar(module: nn.Module, packed: Packed, where: np.ndarray, device: torch.device) -> Tensor:
    states = hidden(module, *_fed(packed, device)).index_select(0, index(where, device))
    return scalar_head(module)(states).float().squeeze(-1)
