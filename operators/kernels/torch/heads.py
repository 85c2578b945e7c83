"""Heads: a model's numbers at the packed tokens of some rows.

Owns: log-probs, entropy, values and scores from one forward over a prefix tree, computed only
where something is predicted. Does not own: the tree (packing.py), the losses.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from operators.kernels.tensors import index
from operators.kernels.torch.attention import forward, hidden
from operators.kernels.torch.packing import Packed
from operators.kernels.torch.shared_attention import TreePass

CHUNK = 1 << 26
"""The most logits held at once, with or without gradient: 256 MB in float32."""

_SHAPERS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Settings that change logits after the head; such logits come from the module's own forward."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predictions:
    """For the written tokens, float32 [tokens]. entropy: of the distribution of each."""

    logprobs: Tensor
    entropy: Tensor | None


def predictions(
    module: nn.Module,
    packed: Packed,
    written: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
) -> Predictions:
    """Log-probs (and entropy) of the completion tokens; `written` int64 [tokens] are their ids.

    Logits are computed once for each distinct prefix; if they exceed CHUNK, in chunks that the
    backward pass computes again.
    """
    keep, which = np.unique(packed.source, return_inverse=True)
    config: Any = module.config
    device = written.device
    if len(keep) * config.vocab_size <= CHUNK or any(
        getattr(config, name, None) for name in _SHAPERS
    ):
        logits = forward(module, *_fed(packed, device), index(keep, device))
        return _read(logits, index(which, device), written, temperature, entropy)
    return _chunked(
        module,
        packed,
        keep,
        which,
        written,
        temperature,
        entropy,
        max(1, CHUNK // config.vocab_size),
    )


def _fed(packed: Packed, device: torch.device) -> tuple[Tensor, Tensor, TreePass]:
    return index(packed.ids, device), index(packed.positions, device), TreePass(packed, device)


def _read(
    logits: Tensor, which: Tensor, written: Tensor, temperature: float, entropy: bool
) -> Predictions:
    """logits [kept, vocabulary]; token i reads row which[i]."""
    scaled = logits.float() / temperature if temperature != 1.0 else logits.float()
    total = scaled.logsumexp(dim=-1)
    logprobs = scaled[which, written] - total[which]
    if not entropy:
        return Predictions(logprobs=logprobs, entropy=None)
    expected = (scaled.softmax(dim=-1) * scaled).sum(dim=-1)
    return Predictions(logprobs=logprobs, entropy=(total - expected)[which])


def _chunked(
    module: nn.Module,
    packed: Packed,
    keep: np.ndarray,
    which: np.ndarray,
    written: Tensor,
    temperature: float,
    entropy: bool,
    rows: int,
) -> Predictions:
    """Like `_read`, with `rows` rows of logits at a time."""
    states = hidden(module, *_fed(packed, written.device)).index_select(
        0, index(keep, written.device)
    )
    head: Any = module.get_output_embeddings()  # type: ignore[operator]

    def part(state: Tensor, of: Tensor, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        read = _read(head(state), of, ids, temperature, entropy)
        return read.logprobs, read.entropy

    order = np.argsort(which, kind="stable")
    cuts = np.searchsorted(which[order], np.arange(0, len(keep) + rows, rows))
    parts = []
    for chunk, (low, high) in enumerate(pairwise(cuts)):
        chosen = order[low:high]
        of = index(which[chosen] - chunk * rows, written.device)
        ids = written[index(chosen, written.device)]
        parts.append(
            checkpoint(
                part, states[chunk * rows : (chunk + 1) * rows], of, ids, use_reentrant=False
            )
        )
    back = index(np.argsort(order), written.device)
    joined = [None if xs[0] is None else torch.cat(xs)[back] for xs in zip(*parts, strict=True)]
    assert joined[0] is not None
    return Predictions(logprobs=joined[0], entropy=joined[1])


def values(module: nn.Module, packed: Packed, device: torch.device) -> Tensor:
    """float32 [tokens]: the scalar head before each completion token is written."""
    return _scalar(module, packed, packed.source, device)


def scores(module: nn.Module, packed: Packed, device: torch.device) -> Tensor:
    """float32 [rows]: the scalar head at the last fed token of each row."""
    return _scalar(module, packed, packed.last, device)


def _scalar(module: nn.Module, packed: Packed, where: np.ndarray, device: torch.device) -> Tensor:
    states = hidden(module, *_fed(packed, device)).index_select(0, index(where, device))
    head: Any = module.score
    return head(states).float().squeeze(-1)
