"""Runs whose groups have rows of several generations, and of the data."""

from __future__ import annotations

from collections import Counter
from functools import partial

import numpy as np
import pytest

from tests.kit import concat_graphs
from tests.kit.processes import KillWorkers
from tests.kit.runs import column, require_same_runs, samples
from tests.kit.tiny_runs import TinyRuns

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(autouse=True)
def nothing_is_seen_yet() -> None:
    concat_graphs.SEEN.clear()


@pytest.mark.long
def test_of_the_whole_is_computed_what_is_computed_of_the_parts(tiny: TinyRuns) -> None:
    """Rewards, and log-probs at two temperatures: the first Step's weights are those of both."""
    result = tiny.run(concat_graphs.compared_apart, 2)
    for kind, most in (("rewards", 0.0), ("logprobs", 1e-5)):  # other rows share their batches
        for one, other in concat_graphs.SEEN[kind]:
            np.testing.assert_allclose(one, other, rtol=0.0, atol=most)
            assert len(one) >= 20
            assert len(set(one.tolist())) > 2
    assert column(result, "data/rows") == [4 * 5] * 2
    assert max(abs(x) for x in column(result, "policy/mismatch_kl")) < 1e-6


@pytest.mark.long
def test_two_generations_train_as_one_of_the_same_rows(tiny: TinyRuns) -> None:
    one = tiny.run(partial(concat_graphs.greedy_twice, parts=False), 2, name="one")
    both = tiny.run(partial(concat_graphs.greedy_twice, parts=True), 2, name="both")
    assert samples(both)["completion"].to_pylist() == samples(one)["completion"].to_pylist()
    for name in ("loss/policy_gradient_loss", "optim/grad_norm", "reward/mean", "train/tokens"):
        assert column(both, name) == pytest.approx(column(one, name), rel=1e-6, abs=1e-9), name
        assert any(column(one, name)), name


def test_gold_answers_are_the_last_of_each_group(tiny: TinyRuns) -> None:
    result = tiny.run(concat_graphs.shown_gold, 1)
    rows = samples(result).to_pylist()
    sampled, gold = ([row for row in rows if row["sample"] == n] for n in (0, 2))
    assert len(gold) == 4
    for row, other in zip(gold, sampled, strict=True):
        assert row["completion"] == row["prompt"][0]
        assert row["completion_mask"] == [1] * len(row["completion_ids"])
        assert (row["position"], row["prompt_ids"]) == (other["position"], other["prompt_ids"])
    seen = Counter(key[1] for key, _ in concat_graphs.SEEN["rows"])
    assert seen == {0: 4, 1: 4, 2: 4}


@pytest.mark.long
def test_groups_that_lost_rows_of_one_part_are_the_same_with_every_node_apart_and_one_killed(
    tiny: TinyRuns,
) -> None:
    graph = partial(concat_graphs.joint, selects=True)
    death = KillWorkers({1: "cool", 2: "answers"})
    alone = tiny.run(graph, name="alone")
    assert column(alone, "data/rows") == [4 * 4] * 3
    numbers = set(samples(alone)["sample"].to_pylist())
    assert {0, 1, 5} <= numbers <= set(range(6)), "of the second generation the better one"
    apart = tiny.run(graph, name="apart", workers="apart", on_step=[death])
    require_same_runs(apart, alone)
