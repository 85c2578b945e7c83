"""Which versions count as lag, and a run that is busy without reaching a Step."""

from __future__ import annotations

import re

import numpy as np
import pytest

from dataflow.batch import Batch, Keys
from dataflow.check import check
from dataflow.schema import Completion
from engine.channels.inproc import InprocChannel
from engine.coordinator.admission import Admission
from engine.coordinator.blocks import Blocks
from engine.coordinator.coordinator import Settings
from engine.coordinator.prompt_table import PromptTable
from engine.coordinator.prompts import RUNNING
from engine.plan.plan import ModelUse, Plan, PlannedModel, PlannedNode
from engine.plan.planned_source import PlannedSource
from engine.plan.planner import make_plan
from engine.protocol.messages import Finish
from engine.protocol.refs import SourceCut
from engine.protocol.staleness import NO_VERSION, ages
from engine.run.simulated_workers import chunks
from engine.run.simulated_workers.behaviour import Durations
from engine.run.simulated_workers.simulation import Simulation
from engine.run.worker.worker import Worker
from tests import right_graphs
from tests.kit.plans import DATA, plan_of, planned_node, ref
from tests.kit.simulations import simulation

BATCH = 3


def reads(name: str, above: str, model: str, *, trained: bool) -> PlannedNode:
    use = ModelUse(param="policy", model=model, access="read", trained=trained)
    where = {"workers": (name,), "chunking": "ready"}
    return planned_node(name, above, work="decode", models=(use,), **where)


def judged(policy: str, *, max_lag: int) -> Plan:
    """A policy whose answers a frozen judge and a follower, which moves every third Step, read."""
    written = ModelUse(param="model", model="policy", access="write", trained=True)
    learn = {"work": "train", "scope": "batch", "region": "step", "relation": "sink"}
    nodes = (
        planned_node("prompts", work="source", relation="source", chunking="ready"),
        reads("rollout", "prompts", "policy", trained=True),
        reads("judge", "rollout", "judge", trained=False),
        reads("slow", "rollout", "average", trained=True),
        planned_node("learn", "rollout", "judge", "slow", models=(written,), **learn),
    )
    models = (
        PlannedModel(name="policy", base="b", writer="learn", readers=("rollout",)),
        PlannedModel(name="judge", base="b", readers=("judge",)),
        PlannedModel(name="average", base="b", readers=("slow",), follows="policy", every=3),
    )
    admitted = {"batch": BATCH, "max_lag": max_lag, "intake": policy, "cohort": 1}
    sources = (PlannedSource(name="prompts", **admitted),)
    return plan_of(*nodes, sources=sources, models=models)


def simulated(plan: Plan, *, patience: float, until: float = 1e9) -> Simulation:
    durations = Durations(load=0.1, train=0.5, slots=BATCH, slow=0.1, slower=30.0)
    settings = Settings(steps=12, patience=patience)
    run = simulation(plan, settings=settings, rows=99, durations=durations)
    run.run(until=lambda: run.now > until)
    return run


@pytest.mark.parametrize("policy", ["exact", "drop"])
@pytest.mark.parametrize("max_lag", [0, 1])
def test_a_judge_and_a_slow_follower_make_nothing_older(policy: str, max_lag: int) -> None:
    run = simulated(judged(policy, max_lag=max_lag), patience=1e-9)
    assert run.finish == Finish(reason="all steps are done")
    metrics = [getattr(told, "metrics", None) for _, told in run.history.instructions]
    lags = [each["policy/lag/max"] for each in metrics if each]
    assert len(lags) == 12
    assert max(lags) <= max_lag


def test_a_row_is_as_old_as_what_is_trained_whoever_reads_it_after() -> None:
    plan, recorded = judged("exact", max_lag=1), np.array([4, NO_VERSION, 0], dtype=np.int32)
    assert ages(plan, "rollout", recorded).tolist() == [4, NO_VERSION, 0]
    assert ages(plan, "judge", recorded).tolist() == [NO_VERSION] * 3
    assert ages(plan, "slow", recorded).tolist() == [6, NO_VERSION, 2]
    assert ages(plan, "prompts", recorded).tolist() == [NO_VERSION] * 3


def test_a_worker_counts_no_version_of_a_model_that_nobody_trains() -> None:
    plan = make_plan(check(right_graphs.language_model_judge(), lambda data, split: DATA), seed=0)
    worker = Worker("main", plan, channel=InprocChannel())
    token = np.ones((2, 1), dtype=np.int32)
    columns = {"completion_ids": list(token), "version": list(3 * token)}
    rows = Batch.make(Keys.of([0, 1]), columns, Completion)
    assert worker.rows.keep("rollout", rows).version.tolist() == [3, 3]
    assert worker.rows.keep("verdict", rows).version.tolist() == [NO_VERSION] * 2


def stale(plan: Plan, node: str, oldest: np.ndarray) -> np.ndarray:
    """Rows that are of version 0 for ever, as a defect might say of them."""
    return np.zeros(len(oldest), dtype=np.int32) if node == "judge" else ages(plan, node, oldest)


def test_a_run_that_gives_all_up_ends_and_says_who_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "ages", stale)
    run = simulated(judged("drop", max_lag=1), patience=300.0, until=20_000.0)
    assert run.finish is not None, "it goes on for ever"
    assert run.coordinator.version == 2  # of which version 0 is more than one behind
    told = (
        r"no Step was completed for 3\d\d s, though prompts are admitted: learn: intake='drop' gave"
        r" up \d\d prompts of 'prompts' since step 2 as older than max_lag=1: judge made rows of"
        r" version 0\. Fix: intake='exact', or a greater max_lag\."
    )
    assert re.fullmatch(told, run.finish.error)
    assert not run.workers.outbox.blocks


@pytest.mark.long
def test_patience_0_is_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "ages", stale)
    assert simulated(judged("drop", max_lag=1), patience=0.0, until=5_000.0).finish is None


def test_a_first_step_that_takes_longer_than_the_watchdog_is_no_livelock() -> None:
    durations = Durations(row={"rollout": 5_000.0}, tail=0.0)
    settings = Settings(steps=3, patience=300.0)
    run = simulation(judged("drop", max_lag=1), settings=settings, rows=99, durations=durations)
    assert run.run() == Finish(reason="all steps are done")
    assert run.now > 5_000.0


def test_what_a_checkpoint_brings_back_too_old_is_not_given_up_in_vain() -> None:
    """Under `drop`, finished rows may be given up at once; the new ones may take their time."""
    plan, blocks = judged("drop", max_lag=1), Blocks()
    stream = [n for n in plan.nodes if n.region == "stream"]
    lane = PromptTable("prompts", stream, ["rollout", "judge", "slow"], blocks)
    admission = Admission(plan.sources[0], lane, steps=None)
    admission.rows = 9
    stored = {node.name: ref([0, 1], version=2) for node in stream}
    admission.restore(SourceCut(next=2, finished=((0, 0, 0), (1, 0, 0)), admitted=2), stored, 5)
    admission.take(5)
    assert (lane.prompts.outstanding, admission.vain.prompts) == (0, 0)
    admission.admit(5)
    for name in stored:
        slots = lane.prompts.slots(RUNNING)
        keys = Keys(
            lane.prompts.position[slots], np.zeros(6, np.int32), lane.prompts.attempt[slots]
        )
        lane.add_rows(name, ref(keys, version=2))
    lane.pump()
    admission.take(5)
    assert (admission.vain.prompts, admission.vain.version, admission.vain.oldest) == (6, 5, 2)
