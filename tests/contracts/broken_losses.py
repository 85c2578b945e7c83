"""Losses that break one promise each.

Owns: the mutants of test_operators_contract.py. Each is a mistake that is easily made.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dataflow import Advantage, Now, Reward, Tensors, Terms, loss


def _trained(now: Now, numbers: Tensor | None) -> Tensor:
    """These numbers of tokens, 0 where a token has mask 0."""
    assert numbers is not None
    return numbers.masked_fill(now.mask == 0, 0.0)


def _said(now: Now) -> Tensor:
    return _trained(now, now.logprobs)


def _ahead(now: Now) -> Tensor:
    return _said(now) - _trained(now, now.sampler_logprobs)


def _weighed(now: Now, advantage: Tensors[Advantage]) -> Tensor:
    return -_trained(now, advantage["advantage"]) * _said(now)


@loss()
def honest(now: Now, advantage: Tensors[Advantage]) -> Terms:
    gain = _trained(now, advantage["advantage"])
    return Terms(_weighed(now, advantage), {"policy/gain": (gain.sum(), now.mask.sum())})


@loss()
def takes_the_mean(now: Now, advantage: Tensors[Advantage]) -> Terms:
    return Terms(honest.fn(now, advantage).loss.mean())


@loss()
def root(now: Now) -> Terms:
    return Terms(_said(now).sqrt())


@loss()
def noisy(now: Now) -> Terms:
    return Terms(_said(now) * torch.rand(len(now.mask)))


@loss()
def centred_over_the_call(now: Now) -> Terms:
    said = _said(now)
    return Terms((said - said.sum() / now.mask.sum().clamp(min=1.0)).square())


@loss()
def centred_over_the_group(now: Now) -> Terms:
    said = _said(now)
    total, count = (now.group_sum(now.row_sum(x)) for x in (said, torch.ones_like(said)))
    return Terms((said - (total / count.clamp(min=1.0))[now.group]).square())


@loss(scope="sequence")
def off_by_one_row(now: Now, advantage: Tensors[Advantage]) -> Terms:
    return Terms(now.row_sum(_weighed(now, advantage)).roll(1))


@loss()
def metric_of_means(now: Now) -> Terms:
    said = _said(now)
    mean = said.detach().sum() / now.mask.sum().clamp(min=1.0)
    return Terms(-said, {"policy/said": (mean, 1.0)})


@loss(scope="group")
def against_the_first(now: Now) -> Terms:
    row = now.row_sum(_said(now))
    first = torch.stack([row[now.row_group == g][0] for g in range(now.groups)])
    return Terms(now.group_sum((row - first[now.row_group] - 1.0).square()))


@loss(scope="group")
def counts_from_the_front(now: Now, score: Tensors[Reward]) -> Terms:
    sizes = torch.bincount(now.row_group).tolist()
    parts = (now.row_sum(_said(now)) * score["reward"]).split(sizes)
    return Terms(torch.stack([part.sum().square() for part in parts]))


@loss(scope="sequence")
def running_sums(now: Now, advantage: Tensors[Advantage]) -> Terms:
    weighed = _weighed(now, advantage)
    total = torch.cat([torch.zeros(1), weighed.double().cumsum(0)])
    ends = torch.bincount(now.row, minlength=now.rows).cumsum(0)
    starts = torch.cat([torch.zeros(1, dtype=ends.dtype), ends[:-1]])
    summed = total[ends] - total[starts]
    return Terms(summed.square().to(weighed.dtype))


@loss(scope="sequence")
def sums_all_tokens(now: Now) -> Terms:
    assert now.logprobs is not None
    return Terms(torch.zeros(now.rows).to(now.logprobs).index_add(0, now.row, now.logprobs))


@loss(scope="sequence")
def zero_times_nan(now: Now, advantage: Tensors[Advantage]) -> Terms:
    return Terms(now.row_sum(-advantage["advantage"] * _said(now)))


@loss(scope="sequence")
def mean_over_all_tokens(now: Now, advantage: Tensors[Advantage]) -> Terms:
    lengths = torch.bincount(now.row, minlength=now.rows).clamp(min=1)
    return Terms(now.row_sum(_weighed(now, advantage)) / lengths)


@loss()
def around_a_million(now: Now) -> Terms:
    return Terms(_said(now) + 1e6 + 0.01 - 1e6)


@loss()
def doubled_behind(now: Now) -> Terms:
    said = _said(now) * 1.0
    if said.requires_grad:
        said.register_hook(lambda gradient: 2.0 * gradient)
    return Terms(-said)


@loss()
def absolute(now: Now) -> Terms:
    return Terms(_ahead(now).abs())


@loss()
def squared_ratio(now: Now) -> Terms:
    return Terms(_ahead(now).exp().square())


BROKEN = {
    "shape": takes_the_mean,
    "finite": root,
    "deterministic": noisy,
    "data_parallel": centred_over_the_call,
    "micro_batches": centred_over_the_group,
    "packing": off_by_one_row,
    "metrics": metric_of_means,
    "row_order": against_the_first,
    "relabelling": counts_from_the_front,
    "isolation": running_sums,
    "masked_gradient": sums_all_tokens,
    "masked": zero_times_nan,
    "holes": mean_over_all_tokens,
    "float32": around_a_million,
    "gradient": doubled_behind,
    "kinks": absolute,
    "extremes": squared_ratio,
}
