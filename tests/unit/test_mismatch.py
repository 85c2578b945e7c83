"""Sampler against trainer: what the train kernel reports of it, to the smallest differences."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from dataflow.batch import Batch
from engine.keep.metrics.step_metrics import StepMetrics, json_line
from engine.plan.metric_labels import Label
from operators.kernels.torch.mismatch import add_differences
from operators.kernels.torch.reduce import MetricSums
from tests.kit.rows import padded_logprobs, plain, random_rows, with_tokens
from tests.kit.training import PG, opened, with_advantage

MEAN, MOST, KL = "policy/mismatch/mean", "policy/mismatch/max", "policy/mismatch_kl"


def added(*batches: Sequence[float], masked: bool = False) -> MetricSums:
    """Micro-batches of these differences, each with one more that does not count."""
    sums = MetricSums()
    for batch in batches:
        d = torch.tensor([*batch, 50.0], dtype=torch.float64)
        counts = torch.arange(len(d)) < (0 if masked else len(batch))
        add_differences(d, counts, sums)
    return sums


def own(base: str, rows: Batch) -> np.ndarray:
    """float32 [tokens]: the model's log-probs by transformers."""
    with torch.no_grad():
        return torch.cat(padded_logprobs(plain(base), rows)).numpy()


def test_a_difference_of_a_millionth_is_not_rounded_to_nothing() -> None:
    metrics = added([1e-6]).means()
    assert metrics[KL] == pytest.approx(5e-13, rel=1e-6, abs=0.0)
    assert metrics[MEAN] == metrics[MOST] == 1e-6
    step = StepMetrics()
    for name, value in metrics.items():
        step.add(name, value)
    assert json.loads(json_line(1, step.row(1), set())) == {"step": 1, **metrics}


def test_small_terms_beside_a_large_one_are_all_in_the_sum() -> None:
    """A float32 sum of 1 and of a thousand times 1e-8 is 1."""
    batches = [[1.0], *[[1e-8]] * 1000]
    assert added(*batches).means()[MEAN] * 1001 == pytest.approx(1.00001, rel=1e-12)


def test_tokens_are_counted_to_the_last_one() -> None:
    sums = MetricSums()
    for number in (2.0**24, 1.0, 1.0):
        sums.count("train/tokens", number)
    assert sums.means() == {"train/tokens": 2**24 + 2}


def test_the_greatest_of_two_micro_batches_is_neither_their_sum_nor_their_mean() -> None:
    metrics = added([0.25, -3.0], [0.5, 1.0]).means()
    assert metrics[MOST] == 3.0
    assert metrics[MEAN] == 4.75 / 4
    assert metrics[KL] == pytest.approx(sum(math.expm1(d) - d for d in (0.25, -3, 0.5, 1)) / 4)


@pytest.mark.parametrize("differences", [[1.0], []])
def test_tokens_that_do_not_count_have_no_mismatch(differences: list[float]) -> None:
    assert added(differences, masked=True).means() == {}


def test_the_greatest_is_that_of_all_ranks() -> None:
    metrics = added([0.5, 0.25]).means(dict, lambda mine: {n: max(x, 2.0) for n, x in mine.items()})
    assert metrics[MOST] == 2.0


def test_the_greatest_of_a_second_policy_is_that_of_all_workers() -> None:
    step = StepMetrics()
    for value in (0.5, 2.0, 1.0):
        step.add(Label(model="second", every=True).on(MOST), value)
    assert step.row(1) == {"step": 1, "policy/second/mismatch/max": 2.0}


def test_the_kernel_reports_it_whatever_the_micro_batches(base: str) -> None:
    rows = random_rows(4, 3)
    d = own(base, rows).astype(np.float64) - rows.ragged("sampler_logprobs").values
    d = d[rows.ragged("completion_mask").values > 0]
    for tokens in (24, 16384):
        metrics = opened(base, PG, tokens=tokens).step(with_advantage(rows))
        assert (metrics["train/micro_batches"] > 2) is (tokens == 24)
        assert metrics[MEAN] == pytest.approx(np.abs(d).mean(), rel=1e-5)
        assert metrics[MOST] == pytest.approx(np.abs(d).max(), rel=1e-5)
        assert metrics[KL] == pytest.approx((np.expm1(d) - d).mean(), rel=1e-5)


def test_rows_of_another_temperature_and_masked_tokens_are_left_out(base: str) -> None:
    rows = random_rows(3, 2)
    found = own(base, rows)
    segments = rows.ragged("completion_ids").segments()
    masked = rows.ragged("completion_mask").values == 0
    other = (rows.keys.sample == 1)[segments]
    assert masked.any()
    assert (other & ~masked).any()
    rows = with_tokens(rows, sampler_logprobs=found - np.where(masked | other, 9.0, 0.0))
    temperatures = {"temperature": (1.0, 1.0), "sampler_temperature": (1.0, 0.7)}
    metrics = opened(base, PG, **temperatures).step(with_advantage(rows))
    assert 0.0 < metrics[MOST] < 1e-4
    assert metrics[MEAN] < 1e-5
    assert opened(base, PG).step(with_advantage(rows))[MOST] == pytest.approx(9.0, rel=1e-4)


def test_an_update_that_is_skipped_is_not_the_first(base: str) -> None:
    """Of two minibatches one has no trained token; which of them is drawn first differs."""
    rows = random_rows(2, 2)
    first = rows.keys.position == rows.keys.position.min()
    kept = first[rows.ragged("completion_ids").segments()]
    rows = with_tokens(rows, completion_mask=kept.astype(np.uint8))
    kernel = opened(base, PG, minibatches=2, lr=1e-30)
    for step in range(1, 7):
        metrics = kernel.step(with_advantage(rows, step))
        assert metrics["optim/skipped"] == 1.0
        assert {MEAN, MOST, KL} <= metrics.keys()
