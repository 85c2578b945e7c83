"""Rows that are lost alone: their groups go on, and each failure counts once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.batch import Batch, Keys
from dataflow.kernel import Assignment, KernelNode, Layout
from dataflow.schema import Reward
from engine.coordinator.blocks import Blocks
from engine.coordinator.chunk import NodeChunk
from engine.coordinator.coordinator import Settings
from engine.coordinator.lost_rows import LostRows
from engine.coordinator.prompt_table import PromptTable
from engine.coordinator.prompts import DROPPED, FINISHED, REJECTED
from engine.plan.plan import ModelUse, Plan, PlannedNode
from engine.plan.planned_source import PlannedSource
from engine.protocol import messages as m
from engine.run.simulated_workers.behaviour import Durations, Outcomes
from engine.run.simulated_workers.simulation import Simulation
from engine.run.worker.kernel_session import NodeSession
from operators.kernels.host import HostEvaluate
from tests.kit.kernels import FakeSession
from tests.kit.plans import plan_of, planned_node, ref
from tests.kit.simulations import simulation
from tests.kit.turns import example_count
from tests.schedules.kinds import lossy_case
from tests.schedules.weather import begun


def node(name: str, *gates: str, rows: int = 2, **fields: object) -> PlannedNode:
    return planned_node(name, *gates, **{"rows": rows, "inner": rows} | fields)


PROMPTS = node("prompts", relation="source", rows=1, work="source")
ROLLOUT = node("rollout", "prompts", relation="expand", inner=1, work="decode")
SCORE = node("score", "rollout")
BASELINE = node("baseline", "score", scope="group")
TRAIN = node("learn", "baseline", relation="sink", work="train", region="step")
SOURCE = PlannedSource(name="prompts", batch=2)
PLAN = plan_of(PROMPTS, ROLLOUT, SCORE, BASELINE, TRAIN, sources=(SOURCE,))


def lane(*more: PlannedNode, count: int = 1) -> PromptTable:
    """Prompts that are admitted and read, and the nodes above the cut."""
    nodes = (PROMPTS, ROLLOUT, *more)
    table = PromptTable("prompts", nodes, [nodes[-1].name], Blocks(weigh=True))
    table.admit(range(count), [0] * count, 0)
    feed(table, "prompts", Keys.of(range(count)))
    return table


def feed(table: PromptTable, name: str, keys: Keys) -> list[Keys]:
    """Rows come; returns the keys of what is then ready."""
    table.add_rows(name, ref(keys))
    return [chunk.keys for chunk in table.pump()]


def positions(table: PromptTable, status: int) -> list[int]:
    return table.prompts.position[table.prompts.slots(status)].tolist()


# --- one prompt's rows ----------------------------------------------------------------------------


def test_a_group_goes_on_without_the_row() -> None:
    table = lane(SCORE, BASELINE)
    assert table.lose_row("rollout", (0, 1, 0), failed=True) == "row"
    (ready,) = feed(table, "rollout", Keys.of([0], [0]))
    assert ready.rows() == [(0, 0, 0)]
    (ready,) = feed(table, "score", Keys.of([0], [0]))
    assert ready.rows() == [(0, 0, 0)]
    feed(table, "baseline", Keys.of([0], [0]))
    assert positions(table, FINISHED) == [0]
    assert table.take_emptied() == []


def test_a_prompt_knows_nothing_of_the_one_that_had_its_slot() -> None:
    lost_rows = LostRows(2, 4)
    lost_rows.add(0, 1, failed=True)
    lost_rows.add(1, 1, failed=True)
    lost_rows.clear(np.array([0]))
    assert lost_rows.any_of(np.array([0, 1])).tolist() == [False, True]
    assert [lost_rows.failed_share(slot) for slot in (0, 1)] == [0.0, 0.25]


def test_a_group_scope_waits_until_the_row_is_lost() -> None:
    table = lane(node("diverse", "rollout", scope="group"))
    assert feed(table, "rollout", Keys.of([0], [0])) == []
    table.lose_row("rollout", (0, 1, 0), failed=True)
    (ready,) = table.pump()
    assert ready.keys.rows() == [(0, 0, 0)]


def test_a_chunk_that_ends_without_a_lost_row_lacks_none() -> None:
    table = lane()
    table.lose_row("rollout", (0, 1, 0), failed=True)
    assert table.close_chunk(NodeChunk(ROLLOUT, Keys.of([0]), {})) == (0, 0, 0)
    feed(table, "rollout", Keys.of([0], [0]))
    assert table.close_chunk(NodeChunk(ROLLOUT, Keys.of([0]), {})) is None


def test_a_row_is_lost_once_and_never_after_it_came() -> None:
    table = lane(SCORE)
    assert table.lose_row("rollout", (0, 1, 0), failed=True) == "row"
    assert table.lose_row("rollout", (0, 1, 0), failed=True) == ""
    assert table.lose_row("rollout", (0, 0, 1), failed=True) == "", "of another attempt"
    assert table.lose_row("rollout", (9, 0, 0), failed=True) == "", "of a retired prompt"
    feed(table, "rollout", Keys.of([0, 0], [0, 1]))
    assert table.lose_row("rollout", (0, 0, 0), failed=True) == ""
    assert len(table.blocks.drain().get("w", ())) == 0
    feed(table, "score", Keys.of([0], [0]))
    assert table.stored_rows("rollout").keys.rows() == [(0, 0, 0)], "what came late is let go"


def test_a_chunk_that_is_given_up_makes_what_is_neither_there_nor_lost() -> None:
    table = lane(count=2)
    table.lose_row("rollout", (0, 0, 0), failed=True)
    feed(table, "rollout", Keys.of([0], [1]))
    table.unissue(NodeChunk(ROLLOUT, Keys.of([0, 1]), {}))
    (again,) = table.pump()
    assert again.keys.rows() == [(1, 0, 0)]


def test_a_row_that_had_come_and_fails_as_it_is_made_again_takes_its_group_with_it() -> None:
    table = lane(SCORE)
    feed(table, "rollout", Keys.of([0, 0], [0, 1]))
    every_block = frozenset(range(10))
    table.lose(every_block, trained=frozenset())
    assert table.lose_row("rollout", (0, 1, 0), failed=True) == "group"


@pytest.mark.parametrize("failed", [True, False])
def test_a_group_of_which_no_row_is_left_is_dropped(failed: bool) -> None:
    table = lane(SCORE, count=2)
    feed(table, "rollout", Keys.of([0, 0, 1, 1], [0, 1, 0, 1]))
    for sample in (0, 1):
        table.lose_row("score", (0, sample, 0), failed=failed)
    feed(table, "score", Keys.of([1, 1], [0, 1]))
    assert (positions(table, DROPPED), positions(table, FINISHED)) == ([0], [1])
    (group,) = table.take_emptied()
    assert (group.failed, group.share) == (failed, float(failed))


def test_a_select_takes_the_last_rows_beside_a_lost_one() -> None:
    """A prompt that nothing of is left is no failure; of a select that refills, it is rejected."""
    table = lane(node("keep", "rollout", relation="subset", refill=True))
    table.lose_row("rollout", (0, 0, 0), failed=True)
    (ready,) = feed(table, "rollout", Keys.of([0], [1]))
    assert table.close_chunk(NodeChunk(table.nodes[-1], ready, {})) is None
    table.pump()
    assert positions(table, REJECTED) == [0]
    assert table.take_emptied() == []


def test_lost_rows_are_absent_after_a_checkpoint() -> None:
    table = lane(SCORE)
    table.lose_row("rollout", (0, 1, 0), failed=True)
    feed(table, "rollout", Keys.of([0], [0]))
    feed(table, "score", Keys.of([0], [0]))
    cut = table.prompts.cut_state([])
    stored = {n.name: table.stored_rows(n.name).keys for n in table.nodes}
    other = PromptTable("prompts", table.nodes, ["score"], Blocks(weigh=True))
    other.restore(
        cut, {name: ref(keys, block=i) for i, (name, keys) in enumerate(stored.items())}, 3
    )
    for name, keys in stored.items():
        assert other.stored_rows(name).keys.rows() == keys.rows()
    assert positions(other, FINISHED) == [0]


# --- whole runs -----------------------------------------------------------------------------------


def ended(plan: Plan, outcomes: Outcomes, rows: int = 50, **fields: object) -> Simulation:
    run = simulation(plan, settings=Settings(**{"steps": 4} | fields), outcomes=outcomes, rows=rows)
    run.run()
    return run


def lost_in(run: Simulation) -> list[tuple[int, int, int]]:
    events = [event for _, event in run.history.events]
    return [e.key for e in events if isinstance(e, m.Tombstoned) and e.row_only]


def closed(run: Simulation) -> list[m.StepClosed]:
    instructions = [instruction for _, instruction in run.history.instructions]
    return [each for each in instructions if isinstance(each, m.StepClosed) and each.metrics]


def test_steps_have_their_prompts_and_the_metric_counts_rows() -> None:
    run = ended(PLAN, Outcomes(lose={"score": 0.3}))
    assert run.finish is not None
    assert not run.finish.error
    last = closed(run)[-1].metrics
    lost = lost_in(run)
    assert 0 < last["data/lost_rows"] == len(set(lost)) == len(lost)
    assert last["data/prompts"] == 2
    trained = [t for _, t in run.history.instructions if isinstance(t, m.TrainStep)]
    assert {len({p for p, _, _ in t.keys.rows()}) for t in trained} == {2}
    assert not set(lost) & {key for t in trained for key in t.keys.rows()}


def test_rows_count_as_shares_of_a_prompt_against_the_error_budget() -> None:
    run = ended(PLAN, Outcomes(lose={"score": 1.0}))
    assert run.finish is not None
    assert "10.5 of 12 admitted prompts were dropped (a row lost alone is" in run.finish.error
    assert "the first: score row (" in run.finish.error


def test_half_of_the_rows_are_less_than_half_of_the_budget_of_prompts() -> None:
    few = ended(PLAN, Outcomes(lose={"score": 0.5}), steps=8, error_budget=1.0)
    assert few.finish is not None
    assert not few.finish.error
    admission = few.coordinator.sources.admissions["prompts"]
    assert admission.failed_prompts == pytest.approx(_recount(few))
    assert admission.failed_prompts <= admission.admitted


def _recount(run: Simulation) -> float:
    """A row is half of its prompt."""
    return len(set(lost_in(run))) / 2


@settings(max_examples=example_count(15), deadline=None)
@given(seed=st.integers(0, 10_000))
def test_each_lost_row_is_told_once_whatever_dies(seed: int) -> None:
    case = lossy_case(seed)
    run = begun(case, 0)
    run.run()
    metrics = [each.metrics["data/lost_rows"] for each in closed(run)]
    assert metrics == sorted(metrics)
    stream = {n.name for n in case.plan.nodes if n.region == "stream"}
    tombstones = [e for _, e in run.history.events if isinstance(e, m.Tombstoned) and e.row_only]
    distinct = {(e.node, e.key) for e in tombstones if e.node in stream}
    assert sum(a.lost_rows for a in run.coordinator.sources.admissions.values()) <= len(distinct)


def test_the_schedules_of_lost_rows_lose_some_and_empty_some_groups() -> None:
    """Else the kinds "lossy" would say nothing."""
    lost = emptied = 0
    for seed in range(12):
        run = begun(lossy_case(seed), 0)
        run.run()
        lost += len(lost_in(run))
        emptied += sum(a.dropped for a in run.coordinator.sources.admissions.values())
    assert lost > 50
    assert emptied > 5


# --- evaluations ----------------------------------------------------------------------------------

POLICY = ModelUse(param="model", model="policy", access="read", trained=True)
QUESTIONS = {"source": "questions", "region": "evaluation"}
EXAM = (
    node("questions", relation="source", rows=1, work="source", **QUESTIONS),
    node("answer", "questions", relation="expand", inner=1, work="decode", **QUESTIONS),
    node("exam", "answer", relation="sink", work="evaluate", models=(POLICY,), **QUESTIONS),
)


def evaluated(lose: float, fail: float = 0.0) -> tuple[str, list[m.Evaluate]]:
    outcomes = Outcomes(lose={"answer": lose}, fail={"answer": fail})
    plan = replace(PLAN, nodes=(*PLAN.nodes, *EXAM))
    rows = {"prompts": 50, "questions": 20}
    run = Simulation(plan, Settings(steps=1), rows=rows, durations=Durations(), outcomes=outcomes)
    finish = run.run()
    evaluations = [each for _, each in run.history.instructions if isinstance(each, m.Evaluate)]
    return finish.error, evaluations


def test_an_evaluation_leaves_lost_rows_out_and_says_how_many() -> None:
    error, evaluations = evaluated(0.4)
    assert not error
    assert evaluations
    for task in evaluations:
        assert 0 < task.lost_rows < 40
        assert len(task.keys) == 40 - task.lost_rows


def test_an_evaluation_of_which_no_row_is_left_ends_the_run() -> None:
    error, _ = evaluated(1.0)
    assert "exam: every prompt of questions was given up; the first: answer row (" in error


def test_a_group_that_fails_in_an_evaluation_ends_the_run_as_ever() -> None:
    error, _ = evaluated(0.0, fail=0.2)
    assert "failed where no group can be dropped" in error


def test_the_metric_of_an_evaluation() -> None:
    kernel = HostEvaluate()
    kernel.open(KernelNode(name="evaluate", operator="evaluate"), Layout(), FakeSession())
    keys = Keys.of([0])
    rows = Batch.make(keys, {"reward": np.ones(1, np.float32)}, Reward)
    assignment = Assignment(sequence=0, step=3, keys=keys, inputs={"score": rows}, lost_rows=2)
    assert kernel.step(assignment)["eval/lost_rows"] == 2.0
    assert "eval/lost_rows" not in kernel.step(replace(assignment, lost_rows=0))


# --- the step region and the session --------------------------------------------------------------


def test_below_the_cut_a_lost_row_ends_the_run() -> None:
    below = node("again", "baseline", region="step")
    learn = node("learn", "again", relation="sink", work="train", region="step")
    plan = plan_of(PROMPTS, ROLLOUT, SCORE, BASELINE, below, learn, sources=(SOURCE,))
    run = ended(plan, Outcomes(lose={"again": 1.0}))
    assert run.finish is not None
    assert "failed where no group can be dropped" in run.finish.error


def test_a_session_says_which_rows_are_lost_alone() -> None:
    session = NodeSession("rollout", 0, {}, {})
    session.tombstone((0, 1, 0), "timed out", row_only=True)
    session.tombstone((2, 0, 0), "too long", failed=False)
    first, second = session.tombstones()
    assert (first.row_only, first.failed) == (True, True)
    assert (second.row_only, second.failed) == (False, False)
    assert session.tombstones() == []
