"""The effects of a lost Worker: incarnations, moved blocks, lineage, attempts, weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.batch import Keys
from engine.coordinator import messages
from engine.coordinator.blocks import Blocks
from engine.coordinator.core import Coordinator, Settings
from engine.coordinator.prompt_table import PromptTable
from engine.coordinator.prompts import FINISHED, RUNNING
from engine.coordinator.recovery import DEATHS, Recovery
from engine.coordinator.refs import Ref
from engine.plan import plan as plans
from engine.plan.lag import NO_VERSION
from engine.simulate.faults import FaultModel
from engine.simulate.simulated_worker import SimulatedWorker
from tests.kit.simulations import simulation


def worker_lost(worker: str, epoch: int = 0, error: str = "killed") -> messages.WorkerLost:
    return messages.WorkerLost(worker=worker, epoch=epoch, error=error)


def test_a_death_counts_once_and_opens_the_next_epoch() -> None:
    recovery = Recovery(["w"])
    assert recovery.lost(worker_lost("w"))
    assert not recovery.lost(worker_lost("w"))
    assert not recovery.there("w")
    assert not recovery.opened(messages.WorkerOpened(worker="w", epoch=0))
    assert recovery.opened(messages.WorkerOpened(worker="w", epoch=1))
    assert recovery.there("w")
    stale = messages.From(worker="w", epoch=0, number=0, event=worker_lost("w"))
    assert list(recovery.in_order(stale)) == []


def test_deaths_without_anything_finished_are_hopeless_and_the_first_cause_is_told() -> None:
    recovery = Recovery(["w"])
    for epoch in range(DEATHS - 1):
        recovery.lost(worker_lost("w", epoch, f"death {epoch}"))
    assert not recovery.hopeless("w")
    recovery.finished("w")
    for epoch in range(DEATHS - 1, 2 * DEATHS - 1):
        assert not recovery.hopeless("w")
        recovery.lost(worker_lost("w", epoch, f"death {epoch}"))
    assert f"The first time: death {DEATHS - 1}" in recovery.hopeless("w")


def ref(
    keys: Keys, block: int = 1, version: int = NO_VERSION, worker: str = "w", content: int = 0
) -> Ref:
    rows = len(keys)
    return Ref(
        worker=worker,
        block=block,
        keys=keys,
        lengths=np.ones(rows, dtype=np.int64),
        version=np.full(rows, version, dtype=np.int32),
        digest=np.full(rows, content, dtype=np.uint64),
    )


def test_who_reads_a_block_that_moved_twice_finds_its_rows() -> None:
    blocks = Blocks()
    old = blocks.add(ref(Keys.of([0, 1, 2]), block=1, worker="a"), 3)
    reading = blocks.reading("n", (), np.array([old, old]), np.array([2, 0], dtype=np.int32))
    assert blocks.lose("a") == {old}
    assert blocks.missing([old]) == {old}
    first, second = (blocks.add(ref(Keys.of([0]), block=b, worker="b"), 1) for b in (5, 6))
    blocks.move(old, np.array([first, second, second]), np.array([0, 0, 1], dtype=np.int32))
    assert blocks.missing([old]) == set()
    gather = blocks.gather(reading)
    assert [gather.refs[b] for b in gather.block] == [("b", 6), ("b", 5)]
    assert gather.row.tolist() == [1, 0]
    assert blocks.lose("b") == {first, second}
    assert blocks.missing([old]) == {first, second}
    third = blocks.add(ref(Keys.of([0]), block=9, worker="c"), 0)
    blocks.move(first, np.array([third]), np.array([3], dtype=np.int32))
    blocks.move(second, np.array([third, third]), np.array([4, 5], dtype=np.int32))
    gather = blocks.gather(reading)
    assert gather.refs == (("c", 9),)
    assert gather.row.tolist() == [5, 3]
    assert blocks.drain() == {}


def test_where_rows_moved_is_kept_for_as_long_as_what_they_were_is_needed() -> None:
    blocks = Blocks()
    old = blocks.add(ref(Keys.of([0]), worker="a"), 1)
    blocks.lose("a")
    new = blocks.add(ref(Keys.of([0]), block=7, worker="b"), 0)
    blocks.move(old, np.array([new]), np.array([0], dtype=np.int32))
    assert blocks.drain() == {}
    blocks.drop(np.array([old]))
    assert blocks.drain() == {"b": (7,)}
    assert len(blocks) == 0


def test_lost_blocks_are_not_released() -> None:
    blocks = Blocks()
    old = blocks.add(ref(Keys.of([0]), worker="a"), 1)
    blocks.lose("a")
    blocks.drop(np.array([old]))
    assert blocks.drain() == {}
    assert len(blocks) == 0


POLICY = plans.ModelUse(param="model", model="policy", access="read", trained=True)


def node(
    name: str, *gates: str, worker: str, relation: str = "same", work: str = "host", **more: object
) -> plans.PlannedNode:
    inputs = tuple(
        plans.PlannedInput(name=g, gate=g, fetches=(plans.Fetch(producer=g, columns=("x",)),))
        for g in gates
    )
    fields = {
        "operator": name,
        "scope": "row",
        "region": "stream",
        "source": "prompts",
        "workers": (worker,),
    } | more
    return plans.PlannedNode(name=name, work=work, relation=relation, inputs=inputs, **fields)


def plan(max_lag: int = 0) -> plans.Plan:
    chunking = "ready" if max_lag else "cohort"
    learn = plans.ModelUse(param="model", model="policy", access="write")
    sources = (plans.PlannedSource(name="prompts", batch=2, max_lag=max_lag),)
    models = (POLICY,)
    nodes = (
        node("prompts", worker="data", relation="source", work="source"),
        node("rollout", "prompts", worker="gen", work="decode", models=models, chunking=chunking),
        node("score", "rollout", worker="judge", chunking=chunking),
        node(
            "learn",
            "rollout",
            "score",
            worker="train",
            relation="sink",
            work="train",
            region="step",
            models=(learn,),
        ),
    )
    return plans.Plan(
        graph="g",
        digest="",
        seed=0,
        nodes=plans.with_lags(nodes, sources),
        sources=sources,
        models=(plans.PlannedModel(name="policy", base="b", writer="learn", readers=("rollout",)),),
        recorder="data",
    )


class CoordinatorByHand:
    """A coordinator whose instructions are answered by hand."""

    def __init__(self, planned: plans.Plan) -> None:
        self.coordinator = Coordinator(planned, Settings(steps=9))
        self.blocks = 0
        self.said: list[messages.Instruction] = self.coordinator.start()
        self.opened()

    def opened(self) -> None:
        self.offered(self.block())
        self.loaded()
        self.hear(messages.SourceOpened(node="prompts", rows=99))

    def offered(self, block: int) -> None:
        """The writer keeps the version that it was asked for."""
        (offer,) = self.new(messages.Offer)
        assert (offer.writer, offer.worker, offer.version) == ("learn", "train", 0)
        self.hear(messages.Offered(id=offer.id, worker="train", block=block, digest="d"))

    def loaded(self) -> None:
        """The reader has it, from the block in which it is kept."""
        (load,) = self.new(messages.Load)
        assert (load.worker, load.source, load.digest) == ("gen", "train", "d")
        self.hear(messages.Loaded(id=load.id, worker="gen"))

    def block(self) -> int:
        self.blocks += 1
        return self.blocks

    def hear(self, event: object) -> None:
        self.said += self.coordinator.handle(event, 0.0)  # type: ignore[arg-type]

    def new(self, kind: type) -> list:
        found = [i for i in self.said if isinstance(i, kind)]
        self.said = [i for i in self.said if not isinstance(i, kind)]
        return found

    def run(self, chunk: messages.RunChunk, version: int = NO_VERSION, content: int = 0) -> None:
        remade_ref = ref(chunk.keys, self.block(), version, chunk.worker, content)
        self.hear(messages.Produced(id=chunk.id, node=chunk.node, ref=remade_ref))
        self.hear(messages.ChunkDone(id=chunk.id, node=chunk.node))

    def chunk(self, name: str) -> messages.RunChunk:
        (found,) = self.new(messages.RunChunk)
        assert found.node == name
        return found

    def die(self, worker: str, epoch: int = 0) -> None:
        self.hear(worker_lost(worker, epoch))
        assert self.new(messages.Respawn) == [messages.Respawn(workers=(worker,))]

    def come_back(self, worker: str, epoch: int = 1) -> None:
        self.hear(messages.WorkerOpened(worker=worker, epoch=epoch))


def test_a_chunk_under_way_is_run_again_with_the_same_keys_once_its_weights_are_there() -> None:
    by_hand = CoordinatorByHand(plan())
    by_hand.run(by_hand.chunk("prompts"))
    first = by_hand.chunk("rollout")
    by_hand.die("gen")
    assert by_hand.new(messages.RunChunk) == []
    by_hand.come_back("gen")
    assert by_hand.new(messages.RunChunk) == []
    by_hand.offered(77)
    assert [load.block for load in by_hand.said if isinstance(load, messages.Load)] == [77]
    by_hand.new(messages.Release)
    by_hand.loaded()
    again = by_hand.chunk("rollout")
    assert again.id != first.id
    assert again.keys.rows() == first.keys.rows()
    assert not again.again
    assert by_hand.new(messages.Release) == [messages.Release(worker="train", blocks=(77,))]


def test_a_lost_input_is_made_again_first_and_nothing_else_is() -> None:
    by_hand = CoordinatorByHand(plan())
    by_hand.run(by_hand.chunk("prompts"))
    by_hand.run(by_hand.chunk("rollout"), version=0)
    by_hand.chunk("score")
    by_hand.die("data")
    by_hand.come_back("data")
    assert by_hand.new(messages.RunChunk) == []  # nobody asks for the prompts
    by_hand.die("judge")
    by_hand.come_back("judge")
    score = by_hand.chunk("score")
    by_hand.hear(messages.FetchFailed(worker="judge", peer="gen", id=score.id))
    assert by_hand.new(messages.RunChunk) == []  # until the loss is told here, too
    by_hand.die("gen")
    by_hand.come_back("gen")
    by_hand.offered(78)
    by_hand.loaded()
    remade = [by_hand.chunk("prompts")]
    by_hand.run(remade[0])
    remade.append(by_hand.chunk("rollout"))
    by_hand.run(remade[1], version=0)
    assert [chunk.again for chunk in remade] == [True, True]
    again = by_hand.chunk("score")
    assert not again.again, "the first of these has not ended"
    assert again.inputs["rollout"][0].refs == (("gen", by_hand.blocks),)
    by_hand.run(again)
    (train,) = by_hand.new(messages.TrainStep)
    assert train.keys.rows() == [(0, 0, 0), (1, 0, 0)]


@pytest.mark.parametrize("max_lag", [0, 1])
def test_a_synchronous_step_begins_when_its_chunks_have_ended(max_lag: int) -> None:
    """All rows have come, and the Worker dies before it says what it measured of them."""
    by_hand = CoordinatorByHand(plan(max_lag))
    by_hand.run(by_hand.chunk("prompts"))
    rollout = by_hand.chunk("rollout")
    by_hand.hear(
        messages.Produced(
            id=rollout.id, node="rollout", ref=ref(rollout.keys, by_hand.block(), 0, "gen")
        )
    )
    by_hand.run(by_hand.chunk("score"))
    assert len(by_hand.new(messages.TrainStep)) == max_lag
    if max_lag:
        return
    assert "rollout: chunks under way at gen: 1" in by_hand.coordinator.waiting()
    by_hand.die("gen")
    by_hand.come_back("gen")
    by_hand.offered(78)
    by_hand.loaded()
    assert by_hand.new(messages.TrainStep) == []
    again = by_hand.chunk("rollout")
    assert (again.keys.rows(), again.again) == (rollout.keys.rows(), False)
    by_hand.run(again, version=0)
    (train,) = by_hand.new(messages.TrainStep)
    assert train.inputs["rollout"][0].refs == (("gen", by_hand.blocks),)


def test_rows_that_are_others_when_made_again_fail_the_run_and_name_the_kernel() -> None:
    by_hand = CoordinatorByHand(plan())
    by_hand.run(by_hand.chunk("prompts"), content=5)
    rollout = by_hand.chunk("rollout")
    by_hand.die("data")
    by_hand.come_back("data")
    by_hand.hear(messages.FetchFailed(worker="gen", peer="data", id=rollout.id))
    by_hand.run(by_hand.chunk("prompts"), content=6)
    (finish,) = by_hand.new(messages.Finish)
    assert "prompts: its chunk was run again" in finish.error
    assert "row (0, 0, 0) is another" in finish.error
    assert "not deterministic" in finish.error


def test_a_train_node_that_could_not_fetch_is_told_once_more() -> None:
    by_hand = CoordinatorByHand(plan())
    by_hand.run(by_hand.chunk("prompts"))
    by_hand.run(by_hand.chunk("rollout"), version=0)
    by_hand.run(by_hand.chunk("score"))
    (train,) = by_hand.new(messages.TrainStep)
    by_hand.die("judge")
    by_hand.hear(messages.FetchFailed(worker="train", peer="judge", id=train.id))
    by_hand.come_back("judge")
    by_hand.run(by_hand.chunk("score"))
    (again,) = by_hand.new(messages.TrainStep)
    assert again.id > train.id
    assert again.keys.rows() == train.keys.rows()


def test_a_worker_with_state_takes_the_run_back() -> None:
    by_hand = CoordinatorByHand(plan())
    by_hand.hear(worker_lost("train", error="out of memory"))
    assert by_hand.new(messages.Rollback) == [
        messages.Rollback(worker="train", error="out of memory")
    ]
    by_hand.said.clear()
    by_hand.run(
        messages.RunChunk(id=99, node="prompts", worker="data", step=0, keys=Keys.of([0, 1]))
    )
    assert by_hand.said == []


def test_what_the_weights_have_moved_on_from_takes_the_run_back() -> None:
    """Rows of a rollout that a second train node needs, after the first has trained."""
    base = plan()
    second = replace(base.node("learn"), name="other", workers=("train2",), models=())
    by_hand = CoordinatorByHand(replace(base, nodes=(*base.nodes, second)))
    by_hand.run(by_hand.chunk("prompts"))
    by_hand.run(by_hand.chunk("rollout"), version=0)
    by_hand.run(by_hand.chunk("score"))
    (train,) = by_hand.new(messages.TrainStep)
    by_hand.die("gen")
    by_hand.come_back("gen")
    assert by_hand.new(messages.Rollback) == []
    assert by_hand.new(messages.Offer) == []  # the writer may be training already

    by_hand.hear(messages.Stepped(id=train.id, node=train.node, step=1, worker="train"))
    assert [g.worker for g in by_hand.new(messages.Rollback)] == ["gen"]


def test_with_lag_prompts_of_lost_rollouts_begin_again_and_others_do_not() -> None:
    by_hand = CoordinatorByHand(plan(max_lag=1))
    by_hand.run(by_hand.chunk("prompts"))
    by_hand.run(by_hand.chunk("rollout"), version=0)
    score = by_hand.chunk("score")
    by_hand.die("judge")  # of what it was doing nothing is left; the rollouts are
    by_hand.come_back("judge")
    again = by_hand.chunk("score")
    assert again.keys.rows() == score.keys.rows()
    by_hand.die("gen")
    by_hand.come_back("gen")
    by_hand.offered(78)
    assert by_hand.new(messages.RunChunk) == []  # admission waits for the reader
    by_hand.loaded()
    assert by_hand.chunk("prompts").keys.rows() == [(p, 0, 1) for p in range(4)]


def test_with_lag_rows_that_need_no_model_are_made_again_alone() -> None:
    base = plan(max_lag=1)
    by_hand = PromptTable("prompts", base.nodes[:3], ["rollout", "score"], Blocks())
    by_hand.admit([0, 1], [0, 0], 0)
    keys = Keys.of([0, 1])
    for number, name in enumerate(("prompts", "rollout", "score")):
        by_hand.produced(
            name,
            ref(keys, block=number, version=0 if name == "rollout" else NO_VERSION, worker=name),
        )
        by_hand.pump()
    assert by_hand.prompts.count[FINISHED] == 2
    slots, ready = by_hand.lose(by_hand.blocks.lose("score"), trained={"rollout"})
    assert (len(slots), ready) == (0, [])
    assert by_hand.prompts.count[RUNNING] == 2
    (chunk,) = by_hand.pump()
    assert (chunk.node.name, chunk.keys.rows()) == ("score", keys.rows())
    slots, ready = by_hand.lose(by_hand.blocks.lose("prompts"), trained={"rollout"})
    assert [r.keys.rows() for r in ready] == [keys.rows()]
    slots, _ = by_hand.lose(by_hand.blocks.lose("rollout"), trained={"rollout"})
    assert by_hand.again(slots) == [(0, 1), (1, 1)]


@pytest.mark.parametrize("max_lag", [0, 1])
def test_a_worker_that_dies_again_and_again_fails_the_run(max_lag: int) -> None:
    by_hand = CoordinatorByHand(plan(max_lag))
    for epoch in range(DEATHS):
        by_hand.new(messages.Respawn)
        by_hand.hear(worker_lost("data", epoch, f"segmentation fault {epoch}"))
        by_hand.come_back("data", epoch + 1)
    assert by_hand.new(messages.Respawn) == []
    (finish,) = by_hand.new(messages.Finish)
    assert "worker data died 3 times" in finish.error
    assert "segmentation fault 0" in finish.error


@settings(max_examples=100, deadline=None)
@given(
    times=st.lists(st.floats(0.0, 50.0), max_size=8),
    stops=st.lists(st.tuples(st.floats(0.0, 40.0), st.floats(0.1, 30.0)), min_size=1, max_size=3),
)
def test_a_worker_that_stood_still_does_everything_in_the_order_that_it_would_have(
    times: list[float], stops: list[tuple[float, float]]
) -> None:
    world = simulation(plan(1), settings=Settings(steps=1), rows=1).workers
    by_hand, done = SimulatedWorker(world, "rollout", 0), list[tuple[float, int]]()
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
        assert run.run() == messages.Finish(reason="all steps are done")
        assert run.workers.deaths > 0
        return [f"{when:.6f} {type(event).__name__}" for when, event in run.history.events]

    assert story() == story()
