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


def make_keyed_params(
    seed: int, how: Sampling, *, place: int = 0, max_tokens: int, stop_token_ids: list[int]
) -> SamplingParams:
    """Make the params of a request whose tokens are drawn here: greedy to vLLM. seed: the row's
    random stream. place: of the request's first token in the row's completion.
    """
    return SamplingParams(
        temperature=0.0,
        detokenize=False,
        ignore_eos=True,
        skip_clone=True,
        extra_args={
            "seed": seed,
            "place": place,
            "how": (how.temperature, how.top_p, how.top_k),
        },
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
        logprobs=2 if how.truncates else 0,
    )


def make_vllm_params(
    seed: int, how: Sampling, *, place: int = 0, max_tokens: int, stop_token_ids: list[int]
) -> SamplingParams:
    """Make the params of a request whose tokens vLLM draws, with this seed (of which it takes 63
    bits), or with another for each later place at which a row goes on: vLLM begins its draws anew
    with each request.
    """
    if how.truncates:
        raise KernelError(f"expected no top-k or top-p with sampler='vllm', found {how}.")
    return SamplingParams(
        temperature=how.temperature,
        detokenize=False,
        ignore_eos=True,
        skip_clone=True,
        extra_args={"how": (how.temperature, how.top_p, how.top_k)},
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
        seed=_seed_at(seed, place) & LARGEST,
        logprobs=0,
    )


def _seed_at(seed: int, place: int) -> int:
    """The row's own seed at its first place."""
    if place == 0:
        return seed
    return int(uniform(np.array([seed], np.uint64), place)[0] * 2.0**53)


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
    place: int
    """Of the request's first token in the row's completion."""
    how: tuple[float, float, int]
    written: list[int]
    """The tokens that the request has written, which vLLM extends."""


class Keyed(LogitsProcessor):
    """Draws the tokens of requests by `make_keyed_params`, normalises those by `make_vllm_params`,
    leaves others alone.
    """

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
            extra_args = params.extra_args or {}
            if "how" in extra_args:
                self._rows[index] = _Row(
                    seed=extra_args.get("seed"),
                    place=extra_args.get("place", 0),
                    how=extra_args["how"],
                    written=written,
                )
        for source, target, direction in batch_update.moved:
            self._move(source, target, swap=direction == MoveDirectionality.SWAP)

    def _move(self, source: int, target: int, *, swap: bool) -> None:
        source_row = self._rows.pop(source, None)
        target_row = self._rows.pop(target, None)
        if source_row is not None:
            self._rows[target] = source_row
        if swap and target_row is not None:
            self._rows[source] = target_row

    def apply(self, logits: Tensor) -> Tensor:
        """Draw or normalise each row. logits float32 [requests, vocabulary], changed in place."""
        # Rows that are sampled alike go together, in one call.
        indices_by_sampling: dict[tuple[bool, tuple[float, float, int]], list[int]] = {}
        for index in sorted(self._rows):
            row = self._rows[index]
            sampling = (row.seed is None, row.how)
            indices_by_sampling.setdefault(sampling, []).append(index)
        for (by_vllm, (temperature, top_p, top_k)), indices in indices_by_sampling.items():
            how = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
            if by_vllm:
                _normalise(logits, indices, how)
            else:
                self._draw(logits, indices, how)
        return logits

    def _draw(self, logits: Tensor, indices: list[int], how: Sampling) -> None:
        rows = [self._rows[index] for index in indices]
        seeds = np.array([row.seed for row in rows], np.uint64)
        places = np.array([row.place + len(row.written) for row in rows], np.int64)
        draws = torch.from_numpy(uniform(seeds, places)).to(logits.device)
        where = torch.tensor(indices, device=logits.device)
        if len(indices) == logits.shape[0]:  # all rows: they need not be copied
            drawn = sample(logits, draws, how)
            logits.fill_(-torch.inf)
        else:
            drawn = sample(logits[where], draws, how)
            logits[where] = -torch.inf
        _put(logits, where, drawn)


def _normalise(logits: Tensor, indices: list[int], how: Sampling) -> None:
    """Normalise these rows, so that they are log-probs once vLLM has divided them by the
    temperature.
    """
    where = torch.tensor(indices, device=logits.device)
    temperature = how.temperature or 1.0
    logprobs = torch.log_softmax(logits[where].float() / temperature, -1)
    require_numbers(logprobs)
    logits[where] = logprobs * temperature


def _put(logits: Tensor, where: Tensor, drawn: DrawnTokens) -> None:
    """Write each row's log-prob at its token, and the mass, if there is one, at token 0 or, where
    that is the row's own, at token 1.
    """
    if drawn.mass is not None:
        beside = torch.where(drawn.tokens == 0, 1, 0)
        logits[where, beside] = as_logit(drawn.mass)
    logits[where, drawn.tokens] = drawn.logprobs
