"""The rule for more or fewer replicas, alone and in simulated runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.coordinator.coordinator import Settings
from engine.coordinator.replica_scaling import PATIENCE, BalanceRule
from engine.plan.plan import ModelUse, Plan, PlannedModel
from engine.plan.planned_source import PlannedSource
from engine.protocol.messages import StepClosed
from engine.run.simulated_workers.behaviour import Durations
from tests.kit.plans import plan_of, planned_node
from tests.kit.simulations import simulation
from tests.kit.turns import example_count

seconds = st.floats(0.1, 1000.0)


def counts_of(work: Callable[[int], float], training: float, steps: int, begin: int) -> list[int]:
    """Replicas after each Step. work: what one replica would need for a Step's rows."""
    rule, counts = BalanceRule(), [begin]
    for step in range(steps):
        there = counts[-1]
        counts.append(there + rule.after_step(there, work(step) / there, training))
    return counts


@given(work=seconds, training=seconds, begin=st.integers(1, 60))
@settings(max_examples=example_count(200), deadline=None)
def test_with_constant_times_it_comes_to_rest(work: float, training: float, begin: int) -> None:
    steps = int(max(work / training, 1.0)) + PATIENCE * begin + 10
    training = max(training, work / 50)  # so that it does not take for ever
    counts = counts_of(lambda _: work, training, steps + 50, begin)
    assert len(set(counts[steps:])) == 1, counts
    last = counts[-1]
    assert last >= 1
    assert work / (last + 1) < training * (1 + 1e-9), "one more would not be faster than training"
    assert last <= begin or work / last >= training * (1 - 1e-9), "it added only what helps"
    assert counts == sorted(counts, reverse=counts[0] > last), "it went one way only"


def test_longer_answers_bring_replicas_and_shorter_ones_end_them() -> None:
    ramp = counts_of(lambda step: 100.0 * (1 + step / 5), 60.0, 40, 1)
    assert ramp == sorted(ramp)
    assert ramp[0] < ramp[10] < ramp[-1]
    down = counts_of(lambda step: max(900.0 - 20 * step, 60.0), 60.0, 120, ramp[-1])
    assert down[-1] < 4
    assert min(Counter(down[30:]).values()) >= PATIENCE


def test_one_odd_step_ends_no_replica() -> None:
    short = {3, 4, 7, 8, 11}
    assert set(counts_of(lambda step: 50.0 if step in short else 300.0, 100.0, 15, 3)) == {3}


def elastic_plan(*, max_lag: int, most: int) -> Plan:
    """Generation on replicas that come and go, and training."""
    names = tuple(f"rollout-{i}" for i in range(most))
    use = {"param": "model", "model": "policy", "trained": True}
    generates = {
        "work": "decode",
        "models": (ModelUse(access="read", **use),),
        "workers": names,
        "chunks": most,
    }
    trains = {
        "work": "train",
        "region": "step",
        "relation": "sink",
        "models": (ModelUse(access="write", **use),),
        "workers": ("train",),
    }
    cohort = 12 if max_lag else 0
    return plan_of(
        planned_node("prompts", work="source", relation="source", workers=("data",)),
        planned_node("rollout", "prompts", **generates),
        planned_node("learn", "rollout", **trains),
        sources=(PlannedSource(name="prompts", batch=12, max_lag=max_lag, cohort=cohort),),
        models=(PlannedModel(name="policy", base="b", writer="learn", readers=("rollout",)),),
        spare=names[1:],
        recorder="data",
    )


def scaled(scaling: Any, *, row: float, steps: int, most: int, max_lag: int = 1) -> list[float]:
    """How many replicas there were after each Step of 12 rows, each of which takes one so many
    seconds.
    """
    durations = Durations(row={"rollout": row, "prompts": 0.0}, tail=0.0, train=10.0, slots=1)
    run = simulation(
        elastic_plan(max_lag=max_lag, most=most),
        settings=Settings(steps=steps, scaling=scaling),
        rows=12 * 99,
        durations=durations,
    )
    assert run.run() is not None
    closed = {i.step: i for _, i in run.history.instructions if isinstance(i, StepClosed)}
    return [closed[step].metrics["replicas/rollout"] for step in range(1, steps)]


@pytest.mark.long
@pytest.mark.parametrize("max_lag", [0, 1])
@pytest.mark.parametrize(("row", "expected"), [(0.4, 1), (1.9, 2), (3.4, 4), (60.0, 6)])
def test_a_run_gets_as_many_as_training_keeps_up_with(
    max_lag: int, row: float, expected: int
) -> None:
    """12 rows take one replica 4.8, 22.8, 40.8 and 720 seconds; training takes 10."""
    assert set(scaled("balance", row=row, steps=25, most=6, max_lag=max_lag)[15:]) == {expected}


@pytest.mark.parametrize(("scaling", "wanted"), [("most", 4), ("fixed", 1)])
def test_most_begins_all_at_once_and_fixed_none(scaling: str, wanted: int) -> None:
    assert set(scaled(scaling, row=60.0, steps=6, most=4)) == {wanted}
