"""The project's sampling law inside vLLM, by its public extension point for logits processors.

Owns: each row's token, its log-prob and the mass kept, as torch/sampling.py has them. Does not own:
when a row runs (vLLM's scheduler).

The request is greedy to vLLM. This processor draws the token (from the row's own random stream, at
the token's place), writes the token's log-prob where its logit was and -inf everywhere else: so the
token is the greatest, and with logprobs_mode="processed_logits" the number that comes back is the
log-prob. If the sampler truncates, the mass comes back at another token, see `as_logit`. No random
generator of vLLM's is used.

A request with vLLM's own sampler (sampler="vllm") is drawn by vLLM. This processor only subtracts
the row's normaliser, which changes no draw: the number that comes back is the log-prob then too, so
that rows of both kinds may share an engine and a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor.interface import (
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
)

from dataflow.errors import KernelError
from dataflow.limits import LARGEST
from dataflow.randomness import uniform
from operators.kernels.torch.sampling import DrawnTokens, Sampling, require_numbers, sample

_SCALE = 2.0**100
_ZERO = -(2.0**126)


def keyed(seed: int, how: Sampling, **limits: Any) -> SamplingParams:
    """A request whose tokens are drawn here: greedy to vLLM. seed: the row's random stream."""
    told = {"seed": seed, "how": (how.temperature, how.top_p, how.top_k)}
    return _asked(0.0, limits, told, logprobs=2 if how.truncates else 0)


def own(seed: int, how: Sampling, **limits: Any) -> SamplingParams:
    """A request whose tokens vLLM draws, with this seed (of which it takes 63 bits)."""
    if how.truncates:
        raise KernelError(f"expected no top-k or top-p with sampler='vllm', found {how}.")
    told = {"how": (how.temperature, how.top_p, how.top_k)}
    return _asked(how.temperature, limits, told, seed=seed & LARGEST, logprobs=0)


def _asked(
    temperature: float, limits: dict[str, Any], told: dict[str, Any], **more: Any
) -> SamplingParams:
    return SamplingParams(
        temperature=temperature,
        detokenize=False,
        ignore_eos=True,
        skip_clone=True,
        extra_args=told,
        **limits,
        **more,
    )


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
    seed: int | None
    """None: vLLM draws."""
    how: tuple[float, float, int]
    written: list[int]
    """The tokens that the row has, which vLLM extends."""


class Keyed(LogitsProcessor):
    """Draws the tokens of `keyed` requests, normalises those of `own`, leaves others alone."""

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
            if "how" in given:
                self._rows[index] = _Row(given.get("seed"), given["how"], written)
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
        of: dict[tuple[bool, tuple[float, float, int]], list[int]] = {}
        for index in sorted(self._rows):
            row = self._rows[index]
            of.setdefault((row.seed is None, row.how), []).append(index)
        for (by_vllm, (temperature, top_p, top_k)), indices in of.items():
            how = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
            (_normalise if by_vllm else self._draw)(logits, indices, how)
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


def _normalise(logits: Tensor, indices: list[int], how: Sampling) -> None:
    """So that these rows are log-probs once vLLM has divided them by the temperature."""
    where, by = torch.tensor(indices, device=logits.device), how.temperature or 1.0
    logprobs = torch.log_softmax(logits[where].float() / by, -1)
    require_numbers(logprobs)
    logits[where] = logprobs * by


def _put(logits: Tensor, where: Tensor, drawn: DrawnTokens) -> None:
    if drawn.mass is not None:
        beside = torch.where(drawn.tokens == 0, 1, 0)
        logits[where, beside] = as_logit(drawn.mass)
    logits[where, drawn.tokens] = drawn.logprobs
