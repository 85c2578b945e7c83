"""A switch to another layout, as the coordinator says it: what it measures, and waits for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.coordinator.coordinator import Settings
from engine.coordinator.parts import make_parts
from engine.coordinator.relayout_policy import LayoutSwitch, RelayoutPolicy
from engine.plan.layout_table import LayoutBucket, LayoutTable, RunLayout
from engine.plan.plan import Plan, PlannedModel
from engine.plan.planned_source import PlannedSource
from engine.protocol import messages as m
from engine.run.simulated_workers.behaviour import Durations
from engine.run.simulated_workers.simulation import Simulation
from tests.kit.plans import learning_nodes, plan_of, ref
from tests.kit.simulations import simulation

TABLE = LayoutTable(
    layouts=(RunLayout(), RunLayout(text="other")), buckets=(LayoutBucket(start=0, best=0),)
)


class AfterStep(RelayoutPolicy):
    """Switches after one Step. noted: live tokens of each."""

    def __init__(self, step: int) -> None:
        super().__init__(TABLE)
        self._at = step
        self.noted: list[float] = []

    def note_step(self, step: int, live_tokens: float) -> None:
        self.noted.append(live_tokens)

    def choose(self, steps_left: int | None) -> LayoutSwitch | None:
        if len(self.noted) != self._at:
            return None
        return LayoutSwitch(layout=1, reason=f"{steps_left} are left")


def plan(max_lag: int = 0) -> Plan:
    source = PlannedSource(name="prompts", batch=3, max_lag=max_lag)
    model = PlannedModel(name="policy", base="b", writer="learn", readers=("rollout",))
    nodes = learning_nodes("data", "gen", ("train",))
    return plan_of(*nodes, sources=(source,), models=(model,), recorder="data")


def run_of(policy: RelayoutPolicy, *, steps: int = 5, max_lag: int = 0) -> Simulation:
    durations = Durations(row={"rollout": 2.0}, train=1.0, store=1.0, slots=1)
    settings = Settings(steps=steps, relayout=policy)
    return simulation(plan(max_lag), settings=settings, durations=durations)


def checkpoints(run: Simulation) -> list[m.Checkpoint]:
    return [message for _, message in run.history.instructions if isinstance(message, m.Checkpoint)]


def test_a_checkpoint_comes_before_the_switch_and_nothing_after_it() -> None:
    run = run_of(AfterStep(2))
    run.run()
    assert run.relayout == m.Relayout(step=2, before=0, layout=1, reason="3 are left")
    assert [(each.step, each.timed) for each in checkpoints(run)] == [(2, True)]
    assert run.finish is None
    assert not run.workers.outbox.blocks


def test_live_tokens_are_the_rows_of_a_step_times_their_mean_length() -> None:
    """Of what was generated alone, whatever was made twice; each Step is measured anew."""
    policy = AfterStep(9)
    planned = plan()
    parts = make_parts(planned, Settings(steps=5, relayout=policy))
    for length in (3, 5):
        rows = ref([0, 1])
        parts.relayouts.note_rows("rollout", replace(rows, lengths=np.full(2, length)))
        parts.relayouts.note_rows("prompts", replace(rows, lengths=np.full(2, 1000)))
    metrics = parts.relayouts.end_step(1)
    assert metrics["relayout/live_tokens"] == 3 * 4.0
    assert metrics["relayout/layout"] == metrics["relayout/switches"] == 0.0
    policy.note_cost(7.0)
    assert parts.relayouts.end_step(2)["relayout/seconds"] == 7.0
    assert "relayout/seconds" not in parts.relayouts.end_step(3)
    assert policy.noted == [12.0, 0.0, 0.0]


def test_with_a_lag_what_runs_is_finished_and_nothing_more_is_admitted() -> None:
    run = run_of(AfterStep(2), max_lag=1)
    run.run()
    assert run.relayout is not None
    (checkpoint,) = checkpoints(run)
    cut = checkpoint.sources["prompts"]
    assert cut.running == ()
    assert cut.finished, "what was under way waits to be trained"
    assert len(checkpoint.rows["rollout"][0]) == len(cut.finished)


def test_the_last_step_is_followed_by_no_switch() -> None:
    run = run_of(AfterStep(3), steps=3)
    run.run()
    assert run.relayout is None
    assert run.finish == m.Finish(reason="all steps are done")


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("max_lag", [0, 1])
def test_who_stops_the_run_meanwhile_ends_it(max_lag: int, at_once: bool) -> None:
    run = run_of(AfterStep(2), max_lag=max_lag)
    asked: list[m.StopRequested] = []

    def stop() -> m.StopRequested | None:
        closed = [
            message for _, message in run.history.instructions if isinstance(message, m.StepClosed)
        ]
        if asked or closed[-1:] == [] or closed[-1].step < 2:
            return None
        asked.append(m.StopRequested(reason="enough", at_once=at_once))
        return asked[0]

    run.run(stop=stop)
    assert run.relayout is None
    assert run.finish == m.Finish(reason="enough")
    assert [each.step for each in checkpoints(run)] == [2]
