"""How far the trainer's log-probs are from those that the sampler recorded.

Owns: policy/mismatch/mean, policy/mismatch/max and policy/mismatch_kl of a micro-batch. Does not
own: when they are taken (train.py), their reduction over micro-batches and ranks (reduce.py), what
sizes mean (docs/agreement.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dataflow.loss import Now
from operators.kernels.torch.reduce import MetricSums


def mismatch(now: Now, sums: MetricSums, recorded_so: Tensor | None) -> None:
    """Add the metrics of a micro-batch, over its trained tokens whose recorded log-probs have the
    temperature of training. recorded_so [tokens]: 1 for those, None if there are none. Nothing
    where either side has no log-probs.
    """
    if now.logprobs is None or now.sampler_logprobs is None or recorded_so is None:
        return
    # float64: where the two agree, what differs is the last digits of float32.
    d = now.logprobs.detach().double() - now.sampler_logprobs
    add_differences(d, now.mask * recorded_so > 0, sums)


def add_differences(d: Tensor, counts: Tensor, sums: MetricSums) -> None:
    """d float64 [tokens]: log p of the trainer - log p of the sampler; counts bool [tokens]."""
    # Filled, not picked: how many were picked would have to come from the device.
    d, many = d.masked_fill(~counts, 0.0), counts.sum()
    sums.add("policy/mismatch/mean", d.abs().sum(), many)
    sums.add("policy/mismatch_kl", k3(d).sum(), many)
    if len(d):
        sums.most("policy/mismatch/max", d.abs().masked_fill(~counts, -torch.inf).max())


def k3(d: Tensor) -> Tensor:
    """[tokens]: exp(d) - 1 - d, of which the mean over tokens of the sampler is
    KL(sampler | trainer): the estimator k3 of http://joschu.net/blog/kl-approx.html.

    Its relative error is 4e-16 / |d| in float64: seven digits are right at |d| = 1e-8. Float32, and
    exp in the place of expm1, would make 0 of |d| = 1e-6.
    """
    return d.expm1() - d
