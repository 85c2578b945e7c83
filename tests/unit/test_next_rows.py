"""The next Step's rows: chosen early, fetched ahead, and those that are then trained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.kernel import Layout
from dataflow.loss_terms import ROWS
from engine.coordinator.admission import Admission
from engine.coordinator.coordinator import Settings
from engine.coordinator.intake import choose_exact, is_in_time
from engine.coordinator.parts import CoordinatorParts, make_parts
from engine.coordinator.prompts import FINISHED
from engine.plan.plan import Plan, PlannedModel, PlannedSource
from engine.protocol import messages as m
from engine.protocol.refs import Gather
from engine.run.simulated_workers.behaviour import Durations, Outcomes
from engine.run.simulated_workers.simulation import Simulation
from tests.kit.plans import learning_nodes, plan_of, ref


def lagging(max_lag: int = 1, ranks: tuple[str, ...] = ("t0",), intake: Any = "exact") -> Plan:
    """Generation in a Worker of its own, training in others."""
    nodes = learning_nodes("gen", "gen", ranks)
    trained = replace(nodes[-1], layout=Layout(data=len(ranks)))
    source = PlannedSource(name="prompts", batch=4, max_lag=max_lag, intake=intake)
    model = PlannedModel(name="policy", base="b", writer="learn", readers=("rollout",))
    plan = plan_of(*nodes[:-1], trained, sources=(source,), models=(model,))
    return replace(plan, recorder="gen")


def simulated(plan: Plan, train: float = 10.0, steps: int = 6) -> Simulation:
    """A run whose training takes so many seconds, and generation about 4."""
    durations = Durations(row={"rollout": 1.0}, train=train, slots=1, tail=0.0)
    run = Simulation(
        plan, Settings(steps=steps), rows={"prompts": 99}, durations=durations, outcomes=Outcomes()
    )
    run.run()
    return run


def gather_of(message: m.FetchAhead | m.TrainStep) -> Gather:
    """The rows of its only input."""
    ((gather,),) = message.inputs.values()
    return gather


def told(run: Simulation, kind: type) -> list:
    return [each for _, each in run.history.instructions if isinstance(each, kind)]


@pytest.mark.parametrize("intake", ["exact", "admission", "drop"])
@pytest.mark.parametrize("ranks", [("t0",), ("t0", "t1")])
def test_what_is_fetched_ahead_is_what_is_trained(intake: str, ranks: tuple[str, ...]) -> None:
    run = simulated(lagging(ranks=ranks, intake=intake))
    ahead = {(each.worker, each.step): each for each in told(run, m.FetchAhead)}
    trained = {(each.worker, each.step): each for each in told(run, m.TrainStep)}
    later = {place for place in trained if place[1] > 1}
    assert ahead.keys() == later, "every Step but the first is fetched ahead, by every rank"
    for place, message in ahead.items():
        assert message.keys[ROWS].rows() == trained[place].keys.rows()
        gather, wanted = gather_of(message), gather_of(trained[place])
        assert gather.refs == wanted.refs
        assert np.array_equal(gather.row, wanted.row)


def test_it_is_told_while_the_step_before_is_trained() -> None:
    instructions = [each for _, each in simulated(lagging()).history.instructions]
    for message in [each for each in instructions if isinstance(each, m.FetchAhead)]:
        before = instructions[: instructions.index(message)]
        assert [each.step for each in before if isinstance(each, m.TrainStep)][-1] == (
            message.step - 1
        )


def test_nothing_is_fetched_ahead_at_lag_0_or_within_one_worker() -> None:
    assert not told(simulated(lagging(max_lag=0)), m.FetchAhead)
    assert not told(simulated(lagging(ranks=("gen",))), m.FetchAhead)


def test_blocks_of_the_next_step_stay_until_it_is_over() -> None:
    run = simulated(lagging())
    open_blocks: dict[int, set] = {}
    for _, instruction in run.history.instructions:
        match instruction:
            case m.FetchAhead(step=step):
                open_blocks[step] = set(gather_of(instruction).refs)
            case m.StepClosed(step=step):
                open_blocks.pop(step, None)
            case m.Release(worker=worker, blocks=blocks):
                released = {(worker, block) for block in blocks}
                assert released.isdisjoint(set().union(*open_blocks.values()))
    assert not run.workers.outbox.blocks


AGES = st.lists(st.integers(0, 5), max_size=12).map(lambda ages: np.array(ages, np.int32))


@given(begun=AGES, running=AGES, batch=st.integers(1, 4), max_lag=st.integers(1, 3))
def test_a_choice_is_in_time_by_the_rule_that_it_was_made_by(
    begun: np.ndarray, running: np.ndarray, batch: int, max_lag: int
) -> None:
    chosen = choose_exact(
        begun, running, batch=batch, max_lag=max_lag, version=5, last=len(begun) < batch
    )
    if len(chosen):
        left = np.concatenate([np.delete(begun, chosen), running])
        assert is_in_time(left, batch=batch, max_lag=max_lag, version=5)


def made(parts: CoordinatorParts, admission: Admission) -> None:
    """Have all prompts that are admitted made and answered, each chunk a block."""
    waiting, block = admission.admit(0), 0
    while waiting:
        chunk = waiting.pop()
        block += 1
        parts.sources.take_rows(chunk, ref(chunk.keys, block, version=0, worker="gen"))
        assert parts.sources.close_chunk(chunk) is None
        waiting += admission.table.pump()


def test_rows_that_are_given_up_stay_while_someone_may_fetch_them() -> None:
    parts = make_parts(lagging(), Settings(steps=6))
    admission = parts.sources.admissions["prompts"]
    admission.rows = 99
    made(parts, admission)
    parts.blocks.drain()
    (message,) = parts.next_rows.tell(0, lambda worker: True)
    assert not list(parts.next_rows.tell(0, lambda worker: True)), "it is said once"
    admission.begin_again(admission.table.prompts.slots(FINISHED))
    fetched = {block for _, block in gather_of(message).refs}
    assert fetched.isdisjoint(parts.blocks.drain().get("gen", ()))
    parts.next_rows.end_step(1)
    assert fetched <= set(parts.blocks.drain()["gen"])


def test_nobody_fetches_ahead_from_a_worker_that_is_gone() -> None:
    parts = make_parts(lagging(), Settings(steps=6))
    admission = parts.sources.admissions["prompts"]
    admission.rows = 99
    made(parts, admission)
    parts.blocks.lose("gen")
    assert not list(parts.next_rows.tell(0, lambda worker: True))


def test_an_early_choice_falls_once_a_prompt_of_it_begins_again() -> None:
    parts = make_parts(lagging(), Settings(steps=6))
    admission = parts.sources.admissions["prompts"]
    admission.rows = 99
    made(parts, admission)
    early = admission.choose_early(0)
    assert np.array_equal(admission.take(0), early), "it stands, however often this is asked"
    admission.begin_again(early[:1])
    again = admission.take(0)
    assert early[0] not in again
    assert len(again) == 4
