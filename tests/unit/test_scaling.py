"""The rule for more or fewer replicas, alone and in simulated runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.coordinator.core import Settings
from engine.coordinator.messages import StepClosed
from engine.coordinator.scaling import PATIENCE, BalanceRule
from engine.plan.plan import ModelUse, Plan, PlannedModel, PlannedSource
from engine.simulate.behaviour import Durations
from tests.kit.plans import plan_of, planned_node
from tests.kit.simulations import simulation

seconds = st.floats(0.1, 1000.0)
TRAINS: dict[str, Any] = {
    "work": "train",
    "region": "step",
    "relation": "sink",
    "workers": ("train",),
}


def counts_of(work: Callable[[int], float], training: float, steps: int, begin: int) -> list[int]:
    """Replicas after each Step. work: what one replica would need for a Step's rows."""
    rule, counts = BalanceRule(), [begin]
    for step in range(steps):
        there = counts[-1]
        counts.append(there + rule.after_step(there, work(step) / there, training))
    return counts


@given(work=seconds, training=seconds, begin=st.integers(1, 60))
@settings(max_examples=200, deadline=None)
def test_with_constant_times_it_comes_to_rest(work: float, training: float, begin: int) -> None:
    quick = max(work / training, 1.0)
    steps = int(quick) + PATIENCE * begin + 10
    training = max(training, work / 50)  # so that it does not take for ever
    counts = counts_of(lambda _: work, training, steps + 50, begin)
    assert len(set(counts[steps:])) == 1, counts
    last = counts[-1]
    assert last >= 1
    assert work / (last + 1) < training * (1 + 1e-9), (
        "one more would still not be faster than training"
    )
    moves = [b - a for a, b in pairwise(counts) if a != b]
    assert len(set(moves)) <= 1, "it went one way only"


@given(work=st.floats(5.0, 500.0), training=st.floats(10.0, 100.0))
@settings(max_examples=200, deadline=None)
def test_at_rest_the_difference_is_less_than_what_one_more_saves(
    work: float, training: float
) -> None:
    last = counts_of(lambda _: work, training, 200, 1)[-1]
    generating, saves = work / last, work / last - work / (last + 1)
    assert generating - training < saves * (1 + 1e-6)
    if last > 1:
        assert generating >= training * (1 - 1e-9), "it added only what helps"


def test_longer_answers_bring_replicas_and_shorter_ones_end_them() -> None:
    ramp = counts_of(lambda step: 100.0 * (1 + step / 5), 60.0, 40, 1)
    assert ramp == sorted(ramp)
    assert ramp[0] < ramp[10] < ramp[-1]
    down = counts_of(lambda step: max(900.0 - 20 * step, 60.0), 60.0, 120, ramp[-1])
    assert down[-1] < 4
    stays = [len(list(filter(lambda c, n=n: c == n, down))) for n in set(down[30:])]
    assert min(stays) >= PATIENCE


def test_one_odd_step_ends_no_replica() -> None:
    short = {3, 4, 7, 8, 11}
    counts = counts_of(lambda step: 50.0 if step in short else 300.0, 100.0, 15, 3)
    assert set(counts) == {3}


def elastic_plan(*, max_lag: int, most: int) -> Plan:
    """Generation on replicas that come and go, and training."""
    read, write = (
        ModelUse(param="model", model="policy", access=a, trained=True) for a in ("read", "write")
    )
    names = tuple(f"rollout-{i}" for i in range(most))
    how: dict[str, Any] = {"work": "decode", "models": (read,), "workers": names, "chunks": most}
    nodes = (
        planned_node("prompts", work="source", relation="source", workers=("data",)),
        planned_node("rollout", "prompts", **how),
        planned_node("learn", "rollout", models=(write,), **TRAINS),
    )
    source = PlannedSource(name="prompts", batch=12, max_lag=max_lag, cohort=12 * (max_lag > 0))
    model = PlannedModel(name="policy", base="b", writer="learn", readers=("rollout",))
    spare = {"spare": names[1:], "recorder": "data"}
    return plan_of(*nodes, sources=(source,), models=(model,), **spare)


def replicas_of(run: Any, steps: Iterable[int]) -> list[float]:
    """How many there were after each of these Steps."""
    closed = {i.step: i for _, i in run.history.instructions if isinstance(i, StepClosed)}
    return [closed[step].metrics["replicas/rollout"] for step in steps]


def scaled(plan: Plan, scaling: Any, *, row: float, train: float = 10.0, steps: int = 40) -> Any:
    """A run of 12 rows a Step, each of which takes a replica so many seconds."""
    quick = Durations(row={"rollout": row, "prompts": 0.0}, tail=0.0, train=train, slots=1)
    told = Settings(steps=steps, scaling=scaling)
    run = simulation(plan, settings=told, rows=12 * 99, durations=quick)
    assert run.run() is not None
    return run


@pytest.mark.parametrize("max_lag", [0, 1])
@pytest.mark.parametrize(("row", "wanted"), [(0.4, 1), (1.9, 2), (3.4, 4), (60.0, 6)])
def test_a_run_gets_as_many_as_training_keeps_up_with(
    max_lag: int, row: float, wanted: int
) -> None:
    """12 rows take one replica 4.8, 22.8, 40.8 and 720 seconds; training takes 10."""
    run = scaled(elastic_plan(max_lag=max_lag, most=6), "balance", row=row)
    assert replicas_of(run, range(20, 40)) == [wanted] * 20


def test_most_begins_all_at_once_and_fixed_none() -> None:
    plan = elastic_plan(max_lag=1, most=4)
    for scaling, wanted in (("most", 4.0), ("fixed", 1.0)):
        run = scaled(plan, scaling, row=60.0, steps=5)
        assert replicas_of(run, range(1, 6)) == [wanted] * 5
