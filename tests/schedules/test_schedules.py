"""Random schedules of each kind: every promise of the coordinator holds, at any timing, any death.

A few seeds of each kind; `python -m tests.schedules.many` runs others, and replays one that failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from engine.coordinator.coordinator import Coordinator, Settings
from engine.plan.passes.shape import set_lags
from engine.plan.plan import ModelUse, PlannedModel
from engine.plan.planned_source import PlannedSource
from engine.protocol import messages as m
from engine.run.simulated_workers.behaviour import Outcomes
from tests.kit.plans import plan_of, planned_node
from tests.schedules.kinds import KINDS, slow_case
from tests.schedules.many import replay
from tests.schedules.plans import ScheduleCase
from tests.schedules.proof import Proof
from tests.schedules.weather import begun, ended, prove

SEEDS = {"undisturbed": 80, "deaths": 80}
"""How many of a kind, if not 20: these two take half as long as the others."""
AT_ONCE = 10
ONCE_FAILED = (
    *(1255, 2051, 3263, 8187, 8550, 8605, 14360, 15399),
    *(28085, 32171, 33441, 35189, 36616, 38862, 67521, 73180),
)
"""Seeds with deaths, beyond the others, by which `python -m tests.schedules.many` found faults."""


def marks(kind: str, first: int) -> list[Any]:
    """`make test` has the first seeds of each kind that is not of two ("slow deaths")."""
    if first:
        return [pytest.mark.long, pytest.mark.repeats]
    return [pytest.mark.long] if " " in kind else []


CASES: list[Any] = [
    pytest.param(kind, range(first, first + AT_ONCE), marks=marks(kind, first))
    for kind in KINDS
    for first in range(0, SEEDS.get(kind, 20), AT_ONCE)
]


@pytest.mark.parametrize(("kind", "seeds"), [*CASES, ("deaths", ONCE_FAILED)], ids=str)
def test_every_promise_holds(kind: str, seeds: Sequence[int]) -> None:
    for seed in seeds:
        try:
            KINDS[kind](seed)
        except BaseException:
            print(f"to see it again: {replay(kind, seed)}")
            raise


@pytest.mark.long
def test_slow_schedules_have_groups_and_losses_beside_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the kinds with a slow coordinator would say nothing."""
    sizes: list[int] = []
    beside = 0
    last: Sequence[m.Event] = ()
    handle = Coordinator.handle_together

    def noted(self: Coordinator, events: Sequence[m.Event], now: float) -> list[m.Instruction]:
        nonlocal beside, last
        sizes.append(len(events))
        beside += isinstance(events[0], m.WorkerLost) and len(last) > 1
        last = events
        return handle(self, events, now)

    monkeypatch.setattr(Coordinator, "handle_together", noted)
    for seed in range(20):
        prove(slow_case(seed))
    assert sum(size > 1 for size in sizes) > 1000
    assert max(sizes) > 30
    assert beside > 5


def overtaken(policy: str, max_lag: int, seed: int) -> float:
    """The greatest lag reported where slow rows are overtaken; nothing is lost under any policy."""
    read, write = (
        ModelUse(param="model", model="policy", access=a, trained=True) for a in ("read", "write")
    )
    names = tuple(f"w{i}" for i in range(12))
    decode = {"work": "decode", "models": (read,), "workers": names}
    nodes = (
        planned_node("prompts", work="source", relation="source", chunking="ready"),
        planned_node("rollout", "prompts", chunking="ready", **decode),
        planned_node(
            "learn", "rollout", work="train", region="step", relation="sink", models=(write,)
        ),
    )
    source = PlannedSource(name="prompts", batch=3, max_lag=max_lag, intake=policy, cohort=1)
    model = PlannedModel(name="policy", base="b", writer="learn", readers=("rollout",))
    plan = plan_of(*set_lags(nodes, (source,)), sources=(source,), models=(model,))
    how = {"settings": Settings(steps=15), "rows": {"prompts": 99}, "outcomes": Outcomes()}
    case = ScheduleCase(seed=seed, plan=plan, **how)
    run = ended(begun(case, seed))
    proof = Proof(case, run)
    proof.all()
    return max(c.metrics["policy/lag/max"] for c in proof.steps.values() if c.metrics)


@pytest.mark.long
@pytest.mark.parametrize("max_lag", [1, 3])
def test_exact_and_drop_bound_what_admission_alone_does_not(max_lag: int) -> None:
    greatest = {
        policy: max(overtaken(policy, max_lag, seed) for seed in range(8))
        for policy in ("exact", "drop", "admission")
    }
    assert greatest["admission"] > max_lag
    assert greatest["exact"] == greatest["drop"] == max_lag
