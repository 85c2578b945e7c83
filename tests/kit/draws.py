"""Whether two kernels of generate draw alike: other tokens only where rounding explains them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dataflow.batch import Batch
from dataflow.randomness import uniform
from operators.kernels.text import to_ragged
from operators.kernels.torch.sampling import Sampling, cumulate_weights

NOISE = 1e-5
"""Edges are computed once more, from whole rows, which rounds differently than decoding them."""


def require_same_draws(
    rows: tuple[Batch, Batch],
    kernels: tuple[Any, Any],
    how: Sampling,
    *,
    share: float = 0.95,
    most: float = 1e-4,
) -> None:
    """At least this share of the rows has equal tokens. In any other row the first token that
    differs has a draw between the two kernels' cumulated weights of one token, which are at most
    `most` apart.
    """
    one, other = rows
    assert one.keys.rows() == other.keys.rows()
    ids = [batch.ragged("completion_ids") for batch in rows]
    odd = [row for row in range(len(one)) if ids[0][row].tolist() != ids[1][row].tolist()]
    assert len(odd) <= (1 - share) * len(one), f"other tokens in {len(odd)} of {len(one)} rows"
    seeds = kernels[0]._session.row_seeds(one.keys)
    for row in odd:
        pair = [answer[row].tolist() for answer in ids]
        at = next(i for i, (a, b) in enumerate(zip(*pair, strict=False)) if a != b)
        before = [*one.ragged("prompt_ids")[row].tolist(), *pair[0][:at]]
        first = min(answer[at] for answer in pair)
        low, high = sorted(float(edges(kernel, before, how)[first]) for kernel in kernels)
        draw = float(uniform(seeds[row : row + 1], at)[0])
        told = f"row {row}, token {at}: the draw is {draw}, the edges are {low} and {high}"
        assert low - NOISE <= draw <= high + NOISE, told
        assert high - low <= most, told


def edges(kernel: Any, before: list[int], how: Sampling) -> np.ndarray:
    """float64 [vocabulary]: the cumulated weights of the token after these, up to 1, by the
    kernel's own log-probs of every token there.
    """
    each = to_ragged([[*before, token] for token in range(kernel.vocabulary)])
    found = kernel.probe(each).reshape(kernel.vocabulary, len(before))[:, -1]
    scores = torch.from_numpy(found.astype(np.float32))[None] / how.temperature
    sums = cumulate_weights(scores, torch.log_softmax(scores, -1), how)[0]
    return (sums / sums[-1]).numpy()
