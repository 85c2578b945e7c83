"""Whole runs of two generations: rewards go up by key, whatever is selected away, is dropped, or
dies on the way.
"""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from turn_graphs import (
    SEEN,
    best_turns,
    evaluated_turns,
    linked_turns,
    misaligned,
    remax,
    sure_turns,
    turns,
)

from dataflow.errors import KernelError
from engine.api import Result, resume, run
from engine.observe.samples import read_samples
from tests.kit.processes import children, workers
from tests.kit.runs import metrics, timeless, weights

Options = Callable[..., Any]
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Every process of a run has ended and was waited for when the call returns."""
    before = set(children())
    SEEN.clear()
    yield
    assert set(children()) <= before


def numbers(result: Result) -> list[dict[str, Any]]:
    """What depends neither on the clock nor on places."""
    rows = timeless(metrics(result.folder))
    return [
        {k: v for k, v in r.items() if not k.startswith(("worker/", "edge/", "coordinator/"))}
        for r in rows
    ]


def same(one: Result, other: Result) -> None:
    """Metrics, weights and samples of two runs, to the bit."""
    assert numbers(other) == numbers(one)
    assert weights(other) == weights(one)
    assert read_samples(other.folder / "samples").equals(read_samples(one.folder / "samples"))


def means_of(below: int) -> dict[tuple[int, int, int], float]:
    """What mean_over made, after comparing it with the plain mean of the rows with these keys;
    `below`: of each row.
    """
    made = {
        k: float(v)
        for keys, values in SEEN["above"]
        for k, v in zip(keys.rows(), values, strict=True)
    }
    given: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for keys, values in SEEN["below"]:
        for (position, sample, attempt), value in zip(keys.rows(), values, strict=True):
            given[position, sample // below, attempt].append(float(value))
    assert made
    for key, mean in made.items():
        assert mean == pytest.approx(sum(given[key]) / len(given[key]), rel=1e-6), key
    return made


GRAPHS = {
    "ReMax, n=1": (lambda folder: remax(folder, n=1), 1, 1),
    "ReMax, n=3 and 2 others": (lambda folder: remax(folder, n=3, greedy=2), 2, 1),
    "turns, n=1": (lambda folder: turns(folder, n=1, second=1), 1, 1),
    "turns, n=2, of 4 some selected": (lambda folder: turns(folder, second=4, selects=True), 4, 2),
    "turns, some fail": (lambda folder: turns(folder, drops=True), 2, 2),
    "below the cut": (sure_turns, 3, 2),
}


FAST = ("ReMax, n=1", "turns, n=2, of 4 some selected")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FAST else [pytest.mark.long]) for n in GRAPHS]
)
def test_a_row_gets_the_mean_of_its_own(tiny: Path, options: Options, name: str) -> None:
    make, below, width = GRAPHS[name]
    result = run(make(tiny), options(2))
    made = means_of(below)
    assert {sample for _, sample, _ in made} == set(range(width))
    assert len(set(made.values())) > 2, "the rows differ, so that wrong ones would show"
    assert result.step == 2
    assert (metrics(result.folder)[-1]["data/dropped"] > 0) == (name == "turns, some fail")


@pytest.mark.parametrize("n,second", [(2, 2), pytest.param(1, 1, marks=pytest.mark.long)])
def test_an_ancestors_rows_are_read_by_key(
    tiny: Path, options: Options, n: int, second: int
) -> None:
    run(linked_turns(tiny, n=n, second=second), options(2))
    (keys, values), *_ = SEEN["linked"]
    assert len(set(values.tolist())) >= 2
    assert len(keys) < 4 * n * second, "some were selected away"


@pytest.mark.long
def test_an_evaluation_goes_up_too(tiny: Path, options: Options) -> None:
    result = run(evaluated_turns(tiny), options(2))
    rounds = [
        dict(zip(("below", "above"), pair, strict=True))
        for pair in zip(SEEN["below"], SEEN["above"], strict=True)
    ]
    assert len(rounds) == 2, "before Step 1, and at Step 2"
    for each in rounds:
        SEEN.update({name: [chunk] for name, chunk in each.items()})
        made = means_of(3)
        assert len(made) == 6
    assert metrics(result.folder)[-1]["eval/reward"] == pytest.approx(
        sum(made.values()) / 6, rel=1e-6
    )


@pytest.mark.long
def test_turn_1_is_kept_by_the_reward_of_turn_2(tiny: Path, options: Options) -> None:
    result = run(best_turns(tiny), options(2))
    assert metrics(result.folder)[-1]["data/rows"] == 8
    shown = read_samples(result.folder / "samples")
    assert shown.num_rows == 16


def test_a_row_without_any_left_is_a_tombstone_and_its_prompt_is_dropped(
    tiny: Path, options: Options
) -> None:
    """One answer of turn 2 each, of which a selection leaves two in three."""
    result = run(turns(tiny, n=1, second=1, selects=True), options(2))
    rows = metrics(result.folder)
    assert sum(row["data/dropped"] for row in rows) > 0
    assert all(row["data/rows"] == 4 for row in rows), (
        "another prompt took the place of one that was dropped"
    )
    means_of(1)


@pytest.mark.parametrize("made,told", [
    (True, r"one_token_less: row \(position, sample, attempt\) \(1, 0, 0\): expected one value for every completion "
           r"token, found \d in 'rollout\.completion_ids' and \d in 'advantage'"),
    (False, r"train_policy: row \(position, sample, attempt\) \(0, 0, 0\): expected one value for every completion "
            r"token, found \d in 'rows\.completion_ids' and \d in 'clipped_policy_loss\.reference\.logprobs'"),
])  # fmt: skip
def test_tokens_that_do_not_fit_are_named(
    tiny: Path, options: Options, made: bool, told: str
) -> None:
    with pytest.raises(KernelError, match=told):
        run(misaligned(tiny, made=made), options(1))


# several processes, replicas, lag, and death


def killing(name: str, step: int) -> Callable[[Any], None]:
    """Kills a Worker when it is told of this Step, once."""
    left = {step}

    def told(row: Any) -> None:
        if row["step"] in left:
            left.discard(row["step"])
            os.kill(workers()[name], signal.SIGKILL)

    return told


@pytest.mark.long
def test_replicas_of_which_one_is_killed_give_the_bits_of_one_process(
    tiny: Path, options: Options
) -> None:
    graph, chunks = turns(tiny, second=4, selects=True), {"mean_over": 2}
    alone = run(graph, options(3, name="alone", chunks=chunks))
    killed = killing("mean_over-0", 1)
    several = run(
        graph, options(3, name="several", replicas=chunks, chunks=chunks), on_step=[killed]
    )
    same(alone, several)


@pytest.mark.long
def test_with_lag_and_a_generator_that_is_killed_no_row_is_lost(
    tiny: Path, options: Options
) -> None:
    result = run(
        turns(tiny, max_lag=1, drops=True),
        options(6, workers="auto", checkpoint_every=3),
        on_step=[killing("rollout", 2)],
    )
    rows = metrics(result.folder)
    assert result.step == 6
    assert 0 < rows[-1]["data/dropped"] <= 6
    assert max(row["policy/lag/max"] for row in rows) <= 1
    shown = read_samples(result.folder / "samples")
    keys = list(zip(shown["position"].to_pylist(), shown["sample"].to_pylist(), strict=True))
    assert len(keys) == len(set(keys)) == 6 * 4 * 2


@pytest.mark.long
def test_resumed_it_gives_the_bits_of_a_whole_run(tiny: Path, options: Options) -> None:
    whole = run(turns(tiny, n=1, second=2), options(4, name="whole", checkpoint_every=2))
    part = run(turns(tiny, n=1, second=2), options(2, name="part", checkpoint_every=2))
    same(whole, resume(part.folder, steps=4))
