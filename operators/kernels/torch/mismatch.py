"""The log-probs that the sampler recorded: how far the trainer's are from them, and their entropy.

Owns: policy/mismatch/mean, policy/mismatch/max and policy/mismatch_kl of a micro-batch,
policy/sampled_entropy of a Step. Does not own: when they are taken (train.py), their reduction over
micro-batches and ranks (reduce.py), what sizes mean (docs/agreement.md).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dataflow.loss import Now
from operators.kernels.torch.packing import Packed
from operators.kernels.torch.reduce import MetricSums
from operators.kernels.torch.steprows import TrainRows
from operators.kernels.torch.temperatures import expand_to_rows
from operators.kernels.torch.train_settings import RowSet


def add_sampled_entropy(row_set: RowSet, rows: TrainRows, sums: MetricSums) -> None:
    """Add policy/sampled_entropy: the mean over trained tokens of -log p, p as their sampler
    recorded it; of rows that the trained Model wrote.
    """
    if rows.sampler_logprobs is None:
        return
    by_row = expand_to_rows(row_set.written_by_model, rows.keys.sample)
    counts = (rows.mask > 0) & by_row[rows.completions.segments()]
    total = -float(rows.sampler_logprobs[counts].sum(dtype=np.float64))
    sums.add("policy/sampled_entropy", total, float(counts.sum()))


def find_recorded_alike(
    row_set: RowSet, rows: TrainRows, packed: Packed, device: torch.device
) -> Tensor | None:
    """[tokens]: 1 where the recorded log-probs have the temperature of training; None if none
    has.
    """
    samples = rows.keys.sample[packed.rows]
    alike = expand_to_rows(row_set.sampled_alike, samples)
    if not alike.any():
        return None
    return torch.from_numpy(alike[packed.row].astype(np.float32)).to(device)


def add_mismatch(now: Now, sums: MetricSums, recorded_alike: Tensor | None) -> None:
    """Add the metrics of a micro-batch, over its trained tokens whose recorded log-probs have the
    temperature of training. recorded_alike [tokens]: 1 for those, None if there are none. Adds
    nothing where either side has no log-probs.
    """
    if now.logprobs is None or now.sampler_logprobs is None or recorded_alike is None:
        return
    # float64: where the two agree, what differs is the last digits of float32.
    d = now.logprobs.detach().double() - now.sampler_logprobs
    add_differences(d, now.mask * recorded_alike > 0, sums)


def add_differences(d: Tensor, counts: Tensor, sums: MetricSums) -> None:
    """Add the metrics of differences of log-probs.

    d float64 [tokens]: log p of the trainer - log p of the sampler; counts bool [tokens].
    """
    # Filled, not picked: how many were picked would have to come from the device.
    d, tokens = d.masked_fill(~counts, 0.0), counts.sum()
    sums.add("policy/mismatch/mean", d.abs().sum(), tokens)
    sums.add("policy/mismatch_kl", k3(d).sum(), tokens)
    if len(d):
        sizes = d.abs().masked_fill(~counts, -torch.inf)
        sums.most("policy/mismatch/max", sizes.max())


def k3(d: Tensor) -> Tensor:
    """Compute exp(d) - 1 - d [tokens], of which the mean over tokens of the sampler is
    KL(sampler | trainer): the estimator k3 of http://joschu.net/blog/kl-approx.html.

    Its relative error is 4e-16 / |d| in float64: seven digits are right at |d| = 1e-8. Float32, and
    exp in the place of expm1, would make 0 of |d| = 1e-6.
    """
    return d.expm1() - d
