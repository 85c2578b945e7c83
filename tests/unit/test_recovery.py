"""The effects of a lost Worker: incarnations, moved blocks, lineage, attempts, weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.batch import Keys
from engine.coordinator.blocks import Blocks
from engine.coordinator.coordinator import Coordinator, Settings
from engine.coordinator.prompt_table import PromptTable
from engine.coordinator.prompts import FINISHED, RUNNING
from engine.coordinator.recovery import DEATHS, Recovery
from engine.plan import plan as plans
from engine.protocol import messages as m
from engine.protocol.staleness import NO_VERSION
from engine.run.simulated_workers.faults import FaultModel
from engine.run.simulated_workers.simulated_worker import SimulatedWorker
from tests.kit.plans import plan_of, planned_node, ref
from tests.kit.simulations import simulation
from tests.kit.turns import example_count


def worker_lost(worker: str, epoch: int = 0, error: str = "killed") -> m.WorkerLost:
    return m.WorkerLost(worker=worker, epoch=epoch, error=error)


def test_a_death_counts_once_and_opens_the_next_epoch() -> None:
    recovery = Recovery(["w"])
    assert recovery.note_lost(worker_lost("w"))
    assert not recovery.note_lost(worker_lost("w"))
    assert not recovery.there("w")
    assert not recovery.note_opened(m.WorkerOpened(worker="w", epoch=0))
    assert recovery.note_opened(m.WorkerOpened(worker="w", epoch=1))
    assert recovery.there("w")
    stale = m.From(worker="w", epoch=0, number=0, event=worker_lost("w"))
    assert list(recovery.in_order(stale)) == []


def test_deaths_without_anything_finished_are_hopeless_and_the_first_cause_is_told() -> None:
    recovery = Recovery(["w"])
    for epoch in range(DEATHS - 1):
        recovery.note_lost(worker_lost("w", epoch, f"death {epoch}"))
    assert not recovery.hopeless("w")
    recovery.note_finished("w")
    for epoch in range(DEATHS - 1, 2 * DEATHS - 1):
        assert not recovery.hopeless("w")
        recovery.note_lost(worker_lost("w", epoch, f"death {epoch}"))
    assert f"The first time: death {DEATHS - 1}" in recovery.hopeless("w")


def test_deaths_in_steps_far_apart_do_not_count_together() -> None:
    recovery = Recovery(["w", "v"])
    for epoch in range(2 * DEATHS):
        for worker in ("w", "v"):
            recovery.note_lost(worker_lost(worker, epoch))
        recovery.note_opened(m.WorkerOpened(worker="w", epoch=epoch + 1))
        recovery.step_ended()
        assert not recovery.hopeless("w")
        assert bool(recovery.hopeless("v")) is (epoch + 1 >= DEATHS)


def test_who_reads_a_block_that_moved_twice_finds_its_rows() -> None:
    blocks = Blocks()
    old = blocks.add(ref([0, 1, 2], block=1, worker="a"), 3)
    reading = blocks.reading("n", (), np.array([old, old]), np.array([2, 0], dtype=np.int32))
    assert blocks.lose("a") == {old}
    assert blocks.missing([old]) == {old}
    first, second = (blocks.add(ref([0], block=b, worker="b"), 1) for b in (5, 6))
    blocks.move(old, np.array([first, second, second]), np.array([0, 0, 1], dtype=np.int32))
    assert blocks.missing([old]) == set()
    gather = blocks.gather(reading)
    assert [gather.refs[b] for b in gather.block] == [("b", 6), ("b", 5)]
    assert gather.row.tolist() == [1, 0]
    assert blocks.lose("b") == {first, second}
    assert blocks.missing([old]) == {first, second}
    third = blocks.add(ref([0], block=9, worker="c"), 0)
    blocks.move(first, np.array([third]), np.array([3], dtype=np.int32))
    blocks.move(second, np.array([third, third]), np.array([4, 5], dtype=np.int32))
    gather = blocks.gather(reading)
    assert gather.refs == (("c", 9),)
    assert gather.row.tolist() == [5, 3]
    assert blocks.drain() == {}


def test_where_rows_moved_is_kept_for_as_long_as_what_they_were_is_needed() -> None:
    blocks = Blocks()
    old = blocks.add(ref([0], worker="a"), 1)
    blocks.lose("a")
    new = blocks.add(ref([0], block=7, worker="b"), 0)
    blocks.move(old, np.array([new]), np.array([0], dtype=np.int32))
    assert blocks.drain() == {}
    blocks.drop(np.array([old]))
    assert blocks.drain() == {"b": (7,)}, "and nothing of the lost one"
    assert len(blocks) == 0


def plan(max_lag: int = 0) -> plans.Plan:
    """Answers, which a score reads, and training on both; each node in a Worker of its own."""
    chunking = "ready" if max_lag else "cohort"
    policy = {"param": "model", "model": "policy"}
    generates = {
        "work": "decode",
        "models": (plans.ModelUse(access="read", trained=True, **policy),),
        "chunking": chunking,
    }
    trains = {
        "work": "train",
        "region": "step",
        "relation": "sink",
        "models": (plans.ModelUse(access="write", **policy),),
    }
    model = plans.PlannedModel(name="policy", base="b", writer="learn", readers=("rollout",))
    return plan_of(
        planned_node("prompts", work="source", relation="source", workers=("data",)),
        planned_node("rollout", "prompts", workers=("gen",), **generates),
        planned_node("score", "rollout", workers=("judge",), chunking=chunking),
        planned_node("learn", "rollout", "score", workers=("train",), **trains),
        sources=(plans.PlannedSource(name="prompts", batch=2, max_lag=max_lag),),
        models=(model,),
        recorder="data",
    )


class CoordinatorByHand:
    """A coordinator whose instructions are answered by hand."""

    def __init__(self, planned: plans.Plan) -> None:
        self.coordinator = Coordinator(planned, Settings(steps=9))
        self.blocks = 1
        self.said: list[m.Instruction] = self.coordinator.start()
        self.weights_come(self.blocks)
        self.hear(m.SourceOpened(node="prompts", rows=99))

    def offered(self, block: int) -> None:
        """The writer keeps the version that it was asked for."""
        (offer,) = self.new(m.Offer)
        assert (offer.writer, offer.worker, offer.version) == ("learn", "train", 0)
        self.hear(m.Offered(id=offer.id, worker="train", block=block, digest="d"))

    def loaded(self) -> None:
        """The reader has it, from the block in which it is kept."""
        (load,) = self.new(m.Load)
        assert (load.worker, load.source, load.digest) == ("gen", "train", "d")
        self.hear(m.Loaded(id=load.id, worker="gen"))

    def weights_come(self, block: int) -> None:
        self.offered(block)
        self.loaded()

    def hear(self, event: object) -> None:
        self.said += self.coordinator.handle(event, 0.0)  # type: ignore[arg-type]

    def new(self, kind: type) -> list:
        found = [i for i in self.said if isinstance(i, kind)]
        self.said = [i for i in self.said if not isinstance(i, kind)]
        return found

    def make(self, chunk: m.RunChunk, version: int = NO_VERSION, content: int = 0) -> None:
        """All rows of a chunk come, before it ends."""
        self.blocks += 1
        rows = ref(chunk.keys, self.blocks, version, chunk.worker, content)
        self.hear(m.Produced(id=chunk.id, node=chunk.node, ref=rows))

    def run(self, chunk: m.RunChunk, version: int = NO_VERSION, content: int = 0) -> None:
        self.make(chunk, version, content)
        self.hear(m.ChunkDone(id=chunk.id, node=chunk.node))

    def run_next(self, *names: str, **how: int) -> None:
        """The chunks of these nodes, each told once the one before has ended."""
        for name in names:
            version = 0 if name == "rollout" else NO_VERSION
            self.run(self.chunk(name), version, **how)

    def chunk(self, name: str) -> m.RunChunk:
        """The only one that was told; beside it there may be the next wave's prompts."""
        chunks = {chunk.node: chunk for chunk in self.new(m.RunChunk)}
        chunk = chunks.pop(name)
        assert set(chunks) <= {"prompts"}
        return chunk

    def train(self) -> m.TrainStep:
        (found,) = self.new(m.TrainStep)
        return found

    def die(self, worker: str) -> None:
        self.hear(worker_lost(worker))
        assert self.new(m.Respawn) == [m.Respawn(workers=(worker,))]

    def come_back(self, worker: str, epoch: int = 1) -> None:
        self.hear(m.WorkerOpened(worker=worker, epoch=epoch))

    def begin_again(self, worker: str) -> None:
        self.die(worker)
        self.come_back(worker)


def test_a_chunk_under_way_is_run_again_with_the_same_keys_once_its_weights_are_there() -> None:
    by_hand = CoordinatorByHand(plan())
    by_hand.run_next("prompts")
    first = by_hand.chunk("rollout")
    by_hand.die("gen")
    assert by_hand.new(m.RunChunk) == []
    by_hand.come_back("gen")
    assert by_hand.new(m.RunChunk) == []
    by_hand.offered(77)
    assert [load.block for load in by_hand.said if isinstance(load, m.Load)] == [77]
    by_hand.new(m.Release)
    by_hand.loaded()
    again = by_hand.chunk("rollout")
    assert again.id != first.id
    assert again.keys.rows() == first.keys.rows()
    assert not again.again
    assert by_hand.new(m.Release) == [m.Release(worker="train", blocks=(77,))]


def test_a_lost_input_is_made_again_first_and_nothing_else_is() -> None:
    by_hand = CoordinatorByHand(plan())
    by_hand.run_next("prompts", "rollout")
    by_hand.chunk("score")
    by_hand.begin_again("data")
    assert by_hand.new(m.RunChunk) == []  # nobody asks for the prompts
    by_hand.begin_again("judge")
    by_hand.hear(m.FetchFailed(worker="judge", peer="gen", id=by_hand.chunk("score").id))
    assert by_hand.new(m.RunChunk) == []  # until the loss is told here, too
    by_hand.begin_again("gen")
    by_hand.weights_come(78)
    for name, version in (("prompts", NO_VERSION), ("rollout", 0)):
        chunk = by_hand.chunk(name)
        assert chunk.again
        by_hand.run(chunk, version)
    again = by_hand.chunk("score")
    assert not again.again, "the first of these has not ended"
    assert again.inputs["rollout"][0].refs == (("gen", by_hand.blocks),)
    by_hand.run(again)
    assert by_hand.train().keys.rows() == [(0, 0, 0), (1, 0, 0)]


@pytest.mark.parametrize("max_lag", [0, 1])
def test_a_synchronous_step_begins_when_its_chunks_have_ended(max_lag: int) -> None:
    """All rows have come, and the Worker dies before it says what it measured of them."""
    by_hand = CoordinatorByHand(plan(max_lag))
    by_hand.run_next("prompts")
    rollout = by_hand.chunk("rollout")
    by_hand.make(rollout, version=0)
    by_hand.run_next("score")
    assert len(by_hand.new(m.TrainStep)) == max_lag
    if max_lag:
        return
    assert "rollout: chunks under way at gen: 1" in by_hand.coordinator.waiting()
    by_hand.begin_again("gen")
    by_hand.weights_come(78)
    assert by_hand.new(m.TrainStep) == []
    again = by_hand.chunk("rollout")
    assert (again.keys.rows(), again.again) == (rollout.keys.rows(), False)
    by_hand.run(again, version=0)
    assert by_hand.train().inputs["rollout"][0].refs == (("gen", by_hand.blocks),)


def test_rows_that_are_others_when_made_again_fail_the_run_and_name_the_kernel() -> None:
    by_hand = CoordinatorByHand(plan())
    by_hand.run_next("prompts", content=5)
    rollout = by_hand.chunk("rollout")
    by_hand.begin_again("data")
    by_hand.hear(m.FetchFailed(worker="gen", peer="data", id=rollout.id))
    by_hand.run_next("prompts", content=6)
    (finish,) = by_hand.new(m.Finish)
    assert "prompts: its chunk was run again" in finish.error
    assert "row (0, 0, 0) is another" in finish.error
    assert "not deterministic" in finish.error


def test_a_row_that_came_and_is_lost_alone_as_it_is_made_again_leads_to_a_checkpoint() -> None:
    """Others have read it; and what made it fail, an environment, promises nothing."""
    by_hand = CoordinatorByHand(plan())
    by_hand.run_next("prompts")
    rollout = by_hand.chunk("rollout")
    by_hand.begin_again("data")
    by_hand.hear(m.FetchFailed(worker="gen", peer="data", id=rollout.id))
    again = by_hand.chunk("prompts")
    rest = replace(again, keys=again.keys.take(np.array([1])))
    by_hand.make(rest)
    lost = {"node": "prompts", "key": (0, 0, 0), "error": "timed out"}
    by_hand.hear(m.Tombstoned(id=again.id, row_only=True, **lost))
    by_hand.hear(m.ChunkDone(id=again.id, node="prompts"))
    assert by_hand.new(m.Finish) == []
    (rollback,) = by_hand.new(m.Rollback)
    assert "row (0, 0, 0) did not come" in rollback.error


def test_a_train_node_that_could_not_fetch_is_told_once_more() -> None:
    by_hand = CoordinatorByHand(plan())
    by_hand.run_next("prompts", "rollout", "score")
    train = by_hand.train()
    by_hand.die("judge")
    by_hand.hear(m.FetchFailed(worker="train", peer="judge", id=train.id))
    by_hand.come_back("judge")
    by_hand.run_next("score")
    again = by_hand.train()
    assert again.id > train.id
    assert again.keys.rows() == train.keys.rows()


def test_a_worker_with_state_takes_the_run_back() -> None:
    by_hand = CoordinatorByHand(plan())
    by_hand.hear(worker_lost("train", error="out of memory"))
    assert by_hand.new(m.Rollback) == [m.Rollback(worker="train", error="out of memory")]
    by_hand.said.clear()
    by_hand.run(m.RunChunk(id=99, node="prompts", worker="data", step=0, keys=Keys.of([0, 1])))
    assert by_hand.said == []


def test_what_the_weights_have_moved_on_from_takes_the_run_back() -> None:
    """Rows of a rollout that a second train node needs, after the first has trained."""
    base = plan()
    second = replace(base.node("learn"), name="other", workers=("train2",), models=())
    by_hand = CoordinatorByHand(replace(base, nodes=(*base.nodes, second)))
    by_hand.run_next("prompts", "rollout", "score")
    train = by_hand.train()
    by_hand.begin_again("gen")
    assert by_hand.new(m.Rollback) == []
    assert by_hand.new(m.Offer) == []  # the writer may be training already

    by_hand.hear(m.Stepped(id=train.id, node=train.node, step=1, worker="train"))
    assert [g.worker for g in by_hand.new(m.Rollback)] == ["gen"]


def test_with_lag_prompts_of_lost_rollouts_begin_again_and_others_do_not() -> None:
    by_hand = CoordinatorByHand(plan(max_lag=1))
    by_hand.run_next("prompts", "rollout")
    score = by_hand.chunk("score")
    by_hand.begin_again("judge")  # of what it was doing nothing is left; the rollouts are
    assert by_hand.chunk("score").keys.rows() == score.keys.rows()
    by_hand.begin_again("gen")
    by_hand.offered(78)
    assert by_hand.new(m.RunChunk) == []  # admission waits for the reader
    by_hand.loaded()
    assert by_hand.chunk("prompts").keys.rows() == [(p, 0, 1) for p in range(4)]


def test_with_lag_rows_that_need_no_model_are_made_again_alone() -> None:
    table = PromptTable("prompts", plan(max_lag=1).nodes[:3], ["rollout", "score"], Blocks())
    table.admit([0, 1], [0, 0], 0)
    keys = Keys.of([0, 1])
    versions = {"prompts": NO_VERSION, "rollout": 0, "score": NO_VERSION}
    for number, (name, version) in enumerate(versions.items()):
        table.add_rows(name, ref(keys, number, version, worker=name))
        table.pump()
    assert table.prompts.count[FINISHED] == 2

    def lose(worker: str) -> tuple[Any, Any]:
        return table.lose(table.blocks.lose(worker), trained={"rollout"})

    slots, ready = lose("score")
    assert (len(slots), ready) == (0, [])
    assert table.prompts.count[RUNNING] == 2
    (chunk,) = table.pump()
    assert (chunk.node.name, chunk.keys.rows()) == ("score", keys.rows())
    _, ready = lose("prompts")
    assert [r.keys.rows() for r in ready] == [keys.rows()]
    slots, _ = lose("rollout")
    assert table.again(slots) == [(0, 1), (1, 1)]


def test_a_worker_that_dies_again_and_again_fails_the_run() -> None:
    by_hand = CoordinatorByHand(plan())
    for epoch in range(DEATHS):
        by_hand.new(m.Respawn)
        by_hand.hear(worker_lost("data", epoch, f"segmentation fault {epoch}"))
        by_hand.come_back("data", epoch + 1)
    assert by_hand.new(m.Respawn) == []
    (finish,) = by_hand.new(m.Finish)
    assert "worker data died 3 times" in finish.error
    assert "segmentation fault 0" in finish.error


@settings(max_examples=example_count(100), deadline=None)
@given(
    times=st.lists(st.floats(0.0, 50.0), max_size=8),
    stops=st.lists(st.tuples(st.floats(0.0, 40.0), st.floats(0.1, 30.0)), min_size=1, max_size=3),
)
def test_a_worker_that_stood_still_does_everything_in_the_order_that_it_would_have(
    times: list[float], stops: list[tuple[float, float]]
) -> None:
    world = simulation(plan(1), settings=Settings(steps=1), rows=1).workers
    by_hand, done = SimulatedWorker(world, "rollout", 0), []
    for when, seconds in stops:
        world.clock.after(when, partial(by_hand.stop, seconds))
    for number, when in enumerate(times):
        by_hand.after(when, partial(lambda n: done.append((world.clock.now, n)), number))
    while world.clock.step():
        pass
    assert [n for _, n in done] == sorted(range(len(times)), key=times.__getitem__)
    still = [(when, when + seconds) for when, seconds in stops]
    assert not [(at, s) for at, _ in done for s in still if s[0] < at < s[1]]


def test_a_run_with_faults_repeats_exactly() -> None:
    def story() -> list[str]:
        faults = FaultModel(seed=3, deaths=4, rate=0.3, stateful=0.0)
        run = simulation(plan(1), settings=Settings(steps=4), faults=faults)
        assert run.run() == m.Finish(reason="all steps are done")
        assert run.workers.deaths > 0
        return [f"{when:.6f} {type(event).__name__}" for when, event in run.history.events]

    assert story() == story()
