"""The project's sampling law inside vLLM, by its public extension point for logits processors.

Owns: each row's token, its log-prob and the mass kept, as torch/sampling.py has them. Does not own:
when a row runs (vLLM's scheduler).

The request is greedy to vLLM. This processor draws the token (from the row's own random stream, at
the token's place), writes the token's log-prob where its logit was and -inf everywhere else: so the
token is the greatest, and with logprobs_mode="processed_logits" the number that comes back is the
log-prob. If the sampler truncates, the mass comes back at another token, see `as_logit`. No random
generator of vLLM's is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.sample.logits_processor.interface import (
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
)

from dataflow.randomness import uniform
from operators.kernels.torch.sampling import DrawnTokens, Sampling, sample

_SCALE = 2.0**100
_ZERO = -(2.0**126)


def extra_args(seed: int, how: Sampling) -> dict[str, Any]:
    """What a request tells this processor: the row's random stream, and how tokens are chosen."""
    return {"seed": seed, "how": (how.temperature, how.top_p, how.top_k)}


def as_logit(mass: Tensor) -> Tensor:
    """A log mass (float32, at most 0) as a logit below any log-prob, exactly: a power of two scales
    without rounding.
    """
    return torch.where(mass == 0.0, _ZERO, mass * _SCALE)


def from_logit(logit: np.ndarray) -> np.ndarray:
    """The log mass, float32."""
    zero = logit == np.float32(_ZERO)
    return np.where(zero, np.float32(0.0), logit / np.float32(_SCALE)).astype(np.float32)


@dataclass(slots=True)
class _Row:
    seed: int
    how: tuple[float, float, int]
    written: list[int]
    """The tokens that the row has, which vLLM extends."""


class Keyed(LogitsProcessor):
    """Draws the tokens of all requests that have `extra_args`; leaves other requests alone."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        """No: it decides which token is the greatest."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the rows through vLLM's batch: removed first, then added, then moved."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, _, written in batch_update.added:
            self._rows.pop(index, None)
            given = params.extra_args or {}
            if "seed" in given:
                self._rows[index] = _Row(given["seed"], given["how"], written)
        for a, b, way in batch_update.moved:
            self._move(a, b, swap=way == MoveDirectionality.SWAP)

    def _move(self, a: int, b: int, *, swap: bool) -> None:
        here, there = self._rows.pop(a, None), self._rows.pop(b, None)
        if here is not None:
            self._rows[b] = here
        if swap and there is not None:
            self._rows[a] = there

    def apply(self, logits: Tensor) -> Tensor:
        """logits float32 [requests, vocabulary], changed in place."""
        of: dict[tuple[float, float, int], list[int]] = {}
        for index in sorted(self._rows):
            of.setdefault(self._rows[index].how, []).append(index)
        for how, indices in of.items():
            self._draw(logits, indices, Sampling(temperature=how[0], top_p=how[1], top_k=how[2]))
        return logits

    def _draw(self, logits: Tensor, indices: list[int], how: Sampling) -> None:
        rows = [self._rows[index] for index in indices]
        seeds = np.array([row.seed for row in rows], np.uint64)
        places = np.array([len(row.written) for row in rows], np.int64)
        draws = torch.from_numpy(uniform(seeds, places)).to(logits.device)
        where = torch.tensor(indices, device=logits.device)
        whole = len(indices) == logits.shape[0]
        drawn = sample(logits if whole else logits[where], draws, how)
        if whole:
            logits.fill_(-torch.inf)
        else:
            logits[where] = -torch.inf
        _put(logits, where, drawn)


def _put(logits: Tensor, where: Tensor, drawn: DrawnTokens) -> None:
    if drawn.mass is not None:
        beside = torch.where(drawn.tokens == 0, 1, 0)
        logits[where, beside] = as_logit(drawn.mass)
    logits[where, drawn.tokens] = drawn.logprobs
