"""Rows with tokens in their middle that the model did not write, from the sampler to the weights.

A log-prob of 0 there, or any other, leads to the same bits: no loss, weight, divergence, entropy,
value or advantage reads it, and no metric does.
"""

from __future__ import annotations

import math
from functools import partial

import pytest

from tests.kit.masked_middles import masked_grpo, masked_ppo
from tests.kit.runs import metrics, require_same_numbers
from tests.kit.tiny_runs import TinyRuns

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("make", [masked_grpo, masked_ppo], ids=["GRPO", "PPO"])
def test_what_a_row_was_answered_has_no_part_in_training(tiny: TinyRuns, make: object) -> None:
    plain = tiny.run(partial(make, filler=0.0), 2, name="plain")
    other = tiny.run(partial(make, filler=-4.0), 2, name="other")
    require_same_numbers(other, plain)
    for row in metrics(plain):
        assert all(math.isfinite(number) for number in row.values() if isinstance(number, float))
        assert row["policy/mismatch/max"] < 1e-3, "written tokens agree with their sampler"


@pytest.mark.long
def test_only_written_tokens_count_as_trained(tiny: TinyRuns) -> None:
    result = tiny.run(masked_grpo, 1)
    row = metrics(result)[0]
    assert row["train/tokens"] < row["completion/tokens"]
