"""The next wave: its rows are made while a Step is trained, and count only once it is admitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.coordinator.coordinator import Coordinator, Settings
from engine.plan.plan import Plan, PlannedModel, PlannedSource
from engine.protocol import messages as m
from engine.run.simulated_workers.behaviour import Durations, Outcomes
from engine.run.simulated_workers.simulation import Simulation
from tests.kit.plans import learning_nodes, plan_of, ref


def synchronous() -> Plan:
    """Prompts in a Worker of their own, generation and training in another."""
    nodes = learning_nodes("data", "gpu", ("gpu",))
    source = PlannedSource(name="prompts", batch=4, max_lag=0)
    model = PlannedModel(
        name="policy", base="b", writer="learn", readers=("rollout",), aliases=("rollout",)
    )
    plan = plan_of(*nodes, sources=(source,), models=(model,))
    return replace(plan, recorder="data")


def simulated(plan: Plan, *, every: int = 99) -> Simulation:
    """A run of three Steps; every: Steps between checkpoints."""
    run = Simulation(
        plan,
        Settings(steps=3, checkpoint_every=every),
        rows={"prompts": 99},
        durations=Durations(row={"rollout": 1.0}, train=10.0, slots=1, tail=0.0),
        outcomes=Outcomes(),
    )
    run.run()
    return run


class FirstStepByHand:
    """A coordinator that is told by hand what two Workers say."""

    def __init__(self, plan: Plan) -> None:
        self.coordinator = Coordinator(plan, Settings(steps=3))
        self._blocks = 0
        self.told = self.coordinator.start()
        for load in self.last(m.Load):
            self.say(m.Loaded(id=load.id, worker=load.worker))
        self.say(m.SourceOpened(node="prompts", rows=99))

    def say(self, event: m.Event) -> list[m.Instruction]:
        """What is told because of it."""
        self.told = self.coordinator.handle(event, 0.0)
        return self.told

    def last(self, kind: type) -> list:
        """What of this kind was told last."""
        return [each for each in self.told if isinstance(each, kind)]

    def run_chunk(self, chunk: m.RunChunk) -> list[m.Instruction]:
        """Say that a chunk has made its rows."""
        self._blocks += 1
        made = ref(chunk.keys, self._blocks, version=self.coordinator.version, worker=chunk.worker)
        instructions = self.say(m.Produced(id=chunk.id, node=chunk.node, ref=made))
        return instructions + self.say(m.ChunkDone(id=chunk.id, node=chunk.node))

    def train(self) -> tuple[m.RunChunk, m.TrainStep]:
        """The source's second chunk and the first TrainStep: told once Step 1 has its rows."""
        (prompts,) = self.last(m.RunChunk)
        (rollout,) = _kind(self.run_chunk(prompts), m.RunChunk)
        instructions = self.run_chunk(rollout)
        (train,) = _kind(instructions, m.TrainStep)
        (ahead,) = _kind(instructions, m.RunChunk)
        for record in _kind(instructions, m.Record):
            self.say(m.Recorded(id=record.id))
        return ahead, train

    def end_step(self, train: m.TrainStep) -> list[m.Instruction]:
        """Say that the Step is trained."""
        return self.say(m.Stepped(id=train.id, node="learn", step=train.step, worker="gpu"))


def _kind(instructions: Sequence[m.Instruction], kind: type) -> list:
    return [each for each in instructions if isinstance(each, kind)]


def test_generation_begins_with_the_answer_that_ends_the_step() -> None:
    run = FirstStepByHand(synchronous())
    ahead, train = run.train()
    assert ahead.node == "prompts"
    assert not _kind(run.run_chunk(ahead), m.RunChunk), "its prompts are not admitted yet"
    instructions = run.end_step(train)
    names = [type(each).__name__ for each in instructions]
    assert names.index("Load") < names.index("RunChunk"), "a Worker loads first"
    (rollout,) = _kind(instructions, m.RunChunk)
    assert rollout.node == "rollout"
    assert rollout.keys.rows() == ahead.keys.rows()


def test_rows_that_come_late_are_as_any_others() -> None:
    run = FirstStepByHand(synchronous())
    ahead, train = run.train()
    assert not _kind(run.end_step(train), m.RunChunk), "the source was told of its wave before"
    (rollout,) = _kind(run.run_chunk(ahead), m.RunChunk)
    assert rollout.keys.rows() == ahead.keys.rows()


def test_rows_that_were_lost_are_made_again() -> None:
    run = FirstStepByHand(synchronous())
    ahead, train = run.train()
    run.run_chunk(ahead)
    instructions = run.say(m.WorkerLost(worker="data", epoch=0, error="it was killed"))
    assert _kind(instructions, m.Respawn)
    assert not _kind(instructions, m.RunChunk)
    (again,) = _kind(run.say(m.WorkerOpened(worker="data", epoch=1)), m.RunChunk)
    assert again.node == "prompts"
    assert again.again, "its metrics would count twice"
    assert again.keys.rows() == ahead.keys.rows()
    assert not _kind(run.end_step(train), m.RunChunk)
    (rollout,) = _kind(run.run_chunk(again), m.RunChunk)
    assert rollout.node == "rollout"


@pytest.mark.parametrize("has_come", [False, True])
def test_a_run_that_ends_here_has_not_begun_another_step(has_come: bool) -> None:
    run = FirstStepByHand(synchronous())
    ahead, train = run.train()
    if has_come:
        run.run_chunk(ahead)
    run.say(m.StopRequested(reason="enough"))
    instructions = run.end_step(train)
    (checkpoint,) = _kind(instructions, m.Checkpoint)
    (cut,) = checkpoint.sources.values()
    assert (cut.next, cut.admitted, cut.running) == (4, 4, ())
    instructions = run.say(m.Checkpointed(step=1))
    assert _kind(instructions, m.Finish)
    if not has_come:
        instructions += run.run_chunk(ahead)
    released = {
        (each.worker, block) for each in _kind(instructions, m.Release) for block in each.blocks
    }
    assert ("data", 3) in released, "nobody wants the rows that came too early"


def test_the_source_is_told_of_each_step_but_the_first_while_the_one_before_is_trained() -> None:
    trained, closed = 0, 0
    told: list[tuple[int, int]] = []
    for each in _said(simulated(synchronous())):
        match each:
            case m.TrainStep(step=step):
                trained = step
            case m.StepClosed(step=step):
                closed = step
            case m.RunChunk(node="prompts"):
                told.append((trained, closed))
    assert told == [(0, 0), (1, 0), (2, 1)], "no wave is made for a Step that never comes"


def test_checkpoints_are_as_if_nothing_had_been_made_early() -> None:
    run = simulated(synchronous(), every=1)
    cuts = [checkpoint.sources["prompts"] for checkpoint in _kind(_said(run), m.Checkpoint)]
    prompts = [(cut.next, cut.admitted, cut.running) for cut in cuts]
    assert prompts == [(4, 4, ()), (8, 8, ()), (12, 12, ())]
    assert not run.workers.outbox.blocks


def _said(run: Simulation) -> list[m.Instruction]:
    return [each for _, each in run.history.instructions]


def test_workers_go_on_before_a_step_is_closed() -> None:
    names: list[str] = []
    for each in _said(simulated(synchronous())):
        is_rollout = isinstance(each, m.RunChunk) and each.node == "rollout"
        if is_rollout or isinstance(each, m.StepClosed):
            names.append(type(each).__name__)
    beginning, end = ["StepClosed", "RunChunk"], ["StepClosed"]
    assert names == [*beginning, *["RunChunk", "StepClosed"] * 2, *end]
