"""Runs of two generations: rewards go up by key, whatever is deselected or dropped."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial

import pytest

from dataflow.errors import KernelError
from tests.kit import turn_graphs
from tests.kit.runs import column, metrics, samples
from tests.kit.tiny_runs import TinyRuns

pytestmark = pytest.mark.timeout(240)
FAIL = "turns, some fail"


@pytest.fixture(autouse=True)
def nothing_is_seen_yet() -> None:
    turn_graphs.SEEN.clear()


def means_of(below: int) -> dict[tuple[int, int, int], float]:
    """What mean_over made, compared with the plain mean of the rows; `below`: of each row."""
    means = {
        key: float(mean)
        for keys, values in turn_graphs.SEEN["above"]
        for key, mean in zip(keys.rows(), values, strict=True)
    }
    given: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for keys, values in turn_graphs.SEEN["below"]:
        for (position, sample, attempt), value in zip(keys.rows(), values, strict=True):
            given[position, sample // below, attempt].append(float(value))
    assert means
    for key, mean in means.items():
        assert mean == pytest.approx(sum(given[key]) / len(given[key]), rel=1e-6), key
    return means


GRAPHS = {
    "ReMax, n=3 and 2 others": (partial(turn_graphs.remax, n=3, greedy=2), 2, 1),
    "turns, n=1": (partial(turn_graphs.turns, n=1, second=1), 1, 1),
    "turns, n=2, of 4 some selected": (partial(turn_graphs.turns, second=4, selects=True), 4, 2),
    FAIL: (partial(turn_graphs.turns, drops=True), 2, 2),
    "below the cut": (turn_graphs.sure_turns, 3, 2),
}
FAST = "turns, n=2, of 4 some selected"


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == FAST else [pytest.mark.long]) for n in GRAPHS]
)
def test_a_row_gets_the_mean_of_its_own(tiny: TinyRuns, name: str) -> None:
    make, below, width = GRAPHS[name]
    result = tiny.run(make, 2)
    means = means_of(below)
    assert {sample for _, sample, _ in means} == set(range(width))
    assert len(set(means.values())) > 2, "the rows differ, so that wrong ones would show"
    assert result.step == 2
    assert (metrics(result)[-1]["data/dropped"] > 0) == (name == FAIL)


def test_an_ancestors_rows_are_read_by_key(tiny: TinyRuns) -> None:
    tiny.run(turn_graphs.linked_turns, 2)
    (keys, values), *_ = turn_graphs.SEEN["linked"]
    assert len(set(values.tolist())) >= 2
    assert len(keys) < 4 * 2 * 2, "some were selected away"


@pytest.mark.long
def test_an_evaluation_goes_up_too(tiny: TinyRuns) -> None:
    result = tiny.run(turn_graphs.evaluated_turns, 2)
    rounds = list(zip(turn_graphs.SEEN["below"], turn_graphs.SEEN["above"], strict=True))
    assert len(rounds) == 2, "before Step 1, and at Step 2"
    for below, above in rounds:
        turn_graphs.SEEN.update(below=[below], above=[above])
        means = means_of(3)
        assert len(means) == 6
    wanted = pytest.approx(sum(means.values()) / 6, rel=1e-6)
    assert metrics(result)[-1]["eval/reward"] == wanted


@pytest.mark.long
def test_turn_1_is_kept_by_the_reward_of_turn_2(tiny: TinyRuns) -> None:
    result = tiny.run(turn_graphs.best_turns, 2)
    assert metrics(result)[-1]["data/rows"] == 8
    assert samples(result).num_rows == 16


@pytest.mark.long
def test_a_row_without_any_left_is_a_tombstone_and_its_prompt_is_dropped(tiny: TinyRuns) -> None:
    """One answer of turn 2 each, of which a selection leaves two in three."""
    result = tiny.run(turn_graphs.turns(tiny.folder, n=1, second=1, selects=True), 2)
    assert sum(column(result, "data/dropped")) > 0
    assert column(result, "data/rows") == [4, 4], "another prompt took the place of a dropped one"
    means_of(1)


FITS = (
    r"row \(position, sample, attempt\) \({}, 0, 0\): expected one value for every completion"
    r" token, found \d in '{}' and \d in '{}'"
)


MADE = "one_token_less: " + FITS.format(1, r"rollout\.completion_ids", "advantage")
JOINED = "train_policy: " + FITS.format(
    0, r"rows\.completion_ids", r"clipped_policy_loss\.reference\.logprobs"
)


@pytest.mark.long
@pytest.mark.parametrize("at_once,told", [(True, MADE), (False, JOINED)], ids=["made", "joined"])
def test_tokens_that_do_not_fit_are_named(tiny: TinyRuns, at_once: bool, told: str) -> None:
    with pytest.raises(KernelError, match=told):
        tiny.run(turn_graphs.misaligned(tiny.folder, at_once=at_once), 1)


@pytest.mark.parametrize(
    "refill", [True, pytest.param(False, marks=[pytest.mark.long, pytest.mark.repeats])]
)
def test_prompts_that_a_selection_keeps_are_answered_by_whole_groups(
    tiny: TinyRuns, refill: bool
) -> None:
    result = tiny.run(partial(turn_graphs.prompts_chosen, refill=refill), 2)
    rows = samples(result).to_pylist()
    assert set(Counter((row["step"], row["position"]) for row in rows).values()) == {3}
    assert {row["prompt"][0] for row in rows} <= set("abc")
    counts = column(result, "data/rows")
    assert all(count == 12 for count in counts) if refill else min(counts) < 12


def test_a_run_that_learns_nothing_says_so_after_ten_steps(
    tiny: TinyRuns, caplog: pytest.LogCaptureFixture
) -> None:
    result = tiny.run(turn_graphs.own_baseline, 10)
    assert column(result, "optim/grad_norm") == [0.0] * 10
    (told,) = (line for line in caplog.messages if "[nothing_learnt]" in line)
    assert "'policy' learnt nothing in the last 10 Steps (up to step 10): its gradient" in told
