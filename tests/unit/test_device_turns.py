"""DeviceTurns: of the Workers on the same devices one at most is awake, and nothing waits for ever."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.batch import Keys
from engine.coordinator.device_turns import DeviceTurns
from engine.coordinator.messages import (
    ChunkDone,
    Evaluate,
    Evaluated,
    Event,
    FetchFailed,
    Go,
    Instruction,
    Load,
    Loaded,
    Offer,
    Offered,
    Prepared,
    Record,
    Recorded,
    Release,
    Respawn,
    RunChunk,
    Sleep,
    Slept,
    Stepped,
    ToWorker,
    TrainStep,
    Wake,
    Woken,
    WorkerLost,
)
from engine.plan.plan import Layout, Plan, PlannedNode

GROUPS = (("a", "b", "c"), ("d", "e"))
WORKERS = ("a", "b", "c", "d", "e", "free")


def turns(*groups: tuple[str, ...]) -> DeviceTurns:
    return DeviceTurns(
        Plan(graph="g", digest="", seed=0, nodes=(), sources=(), turns=groups or GROUPS)
    )


def chunk(number: int, worker: str) -> RunChunk:
    return RunChunk(id=number, node=f"on_{worker}", worker=worker, step=0, keys=Keys.of([number]))


def anything(draw: random.Random, number: int, worker: str) -> Instruction:
    """An instruction of a kind that has to be answered; `number` is in it."""
    node, none = f"on_{worker}", Keys.of([])
    return draw.choice(
        (
            chunk(number, worker),
            TrainStep(
                id=number,
                node=f"{node}_{number}",
                worker=worker,
                step=0,
                keys=none,
                inputs={},
            ),
            Evaluate(id=number, node=node, worker=worker, version=number, keys=none, inputs={}),
            Record(id=number, step=number, keys={}, inputs={}, worker=worker),
            Offer(id=number, model="m", writer=node, worker=worker, version=number),
            Load(id=number, model="m", writer="w", reader=node, version=number, worker=worker),
        )
    )


def answer(told: Instruction) -> Event:
    match told:
        case RunChunk():
            return ChunkDone(id=told.id, node=told.node)
        case TrainStep():
            return Stepped(id=told.id, node=told.node, step=0, worker=told.worker)
        case Evaluate():
            return Evaluated(id=told.id, node=told.node, version=told.version)
        case Record():
            return Recorded(id=told.id, step=told.step)
        case Offer():
            where = {"worker": told.worker, "block": 0, "digest": ""}
            return Offered(id=told.id, model=told.model, version=told.version, **where)
        case Load():
            what = {"node": told.reader, "model": told.model, "version": told.version}
            return Loaded(id=told.id, worker=told.worker, **what)
        case Wake():
            return Woken(worker=told.worker)
        case Sleep():
            return Slept(worker=told.worker)
    raise AssertionError(told)


@dataclass
class World:
    """Workers that do one thing after another, and refuse what a sleeping one cannot do."""

    filter: DeviceTurns
    awake: set[str] = field(default_factory=lambda: {"free"})
    queues: dict[str, deque[Instruction]] = field(
        default_factory=lambda: {w: deque() for w in WORKERS}
    )
    epochs: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WORKERS, -1))
    begun: dict[str, list[Instruction]] = field(default_factory=lambda: {w: [] for w in WORKERS})

    def take(self, instructions: list[Instruction]) -> None:
        for each in instructions:
            assert isinstance(each, ToWorker)
            mates = next((group for group in GROUPS if each.worker in group), (each.worker,))
            if isinstance(each, Wake):
                assert not self.awake & set(mates), "two are awake"
                self.awake.add(each.worker)
            elif not isinstance(each, Release | Go):
                assert each.worker in self.awake, "told something in its sleep"
            if isinstance(each, Sleep):
                assert not self.queues[each.worker], "sent to sleep with work to do"
            if not isinstance(each, Release | Go):
                self.queues[each.worker].append(each)

    def step(self, worker: str) -> None:
        """Let a Worker end what is first in its queue."""
        told = self.queues[worker].popleft()
        if isinstance(told, Sleep):
            self.awake.discard(worker)
        if not isinstance(told, Wake | Sleep):
            self.begun[worker].append(told)
        self.take(self.filter.heard(answer(told)))

    def lose(self, worker: str) -> None:
        self.queues[worker].clear()
        if worker != "free":
            self.awake.discard(worker)
        self.epochs[worker] += 1
        self.take(
            self.filter.heard(WorkerLost(worker=worker, epoch=self.epochs[worker], error="killed"))
        )

    def some(self, draw: random.Random) -> None:
        """Let some Workers come to what is first in their queues."""
        for _ in range(draw.choice((0, 0, 1, 3))):
            if busy := [w for w, queue in self.queues.items() if queue]:
                self.step(draw.choice(busy))

    def drain(self, draw: random.Random) -> None:
        while busy := [w for w, queue in self.queues.items() if queue]:
            self.step(draw.choice(busy))


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 32), losses=st.booleans())
def test_random_arrivals_never_two_awake_nothing_starves_nothing_overtakes(
    seed: int, losses: bool
) -> None:
    draw = random.Random(seed)
    world, wanted = World(turns()), {w: [] for w in WORKERS}
    for number in range(60):
        worker = draw.choice(WORKERS)
        told = anything(draw, number, worker)
        wanted[worker].append(told)
        world.take(world.filter.told([told]))
        if losses and draw.random() < 0.05:
            lost = draw.choice(WORKERS)
            world.lose(lost)
            wanted[lost] = list(world.begun[lost])
        world.some(draw)
    world.drain(draw)
    assert world.begun == wanted
    assert world.filter.waiting() == []


RANKS = {"one": ("a", "d"), "two": ("b", "e"), "three": ("e", "c")}
"""Rank groups over both groups."""


def of_ranks() -> DeviceTurns:
    made = [
        PlannedNode(
            name=name,
            operator="train",
            work="train",
            scope="batch",
            region="step",
            relation="reduce",
            workers=workers,
            layout=Layout(data=len(workers)),
        )
        for name, workers in RANKS.items()
    ]
    return DeviceTurns(
        Plan(graph="g", digest="", seed=0, nodes=tuple(made), sources=(), turns=GROUPS)
    )


@dataclass
class InLockStep(World):
    """Workers whose ranks begin an assignment or an offer only when all of them have come to it."""

    there: dict[int, set[str]] = field(default_factory=dict)

    def step(self, worker: str) -> None:
        told = self.queues[worker][0]
        if not isinstance(told, TrainStep | Offer):
            return super().step(worker)
        node = told.node if isinstance(told, TrainStep) else told.writer
        there = self.there.setdefault(told.id, set())
        if worker not in there and isinstance(told, TrainStep):
            self.take(self.filter.heard(Prepared(id=told.id, node=node, worker=worker)))
        there.add(worker)
        if there >= set(RANKS[node]):
            super().step(worker)

    def drain(self, draw: random.Random) -> None:
        """Everybody comes to what is first in its queue, again and again, until nothing moves."""
        before: object = None
        while before != (
            now := (
                [list(q) for q in self.queues.values()],
                {k: set(v) for k, v in self.there.items()},
            )
        ):
            before = now
            for worker in draw.sample(WORKERS, len(WORKERS)):
                if self.queues[worker]:
                    self.step(worker)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_rank_groups_over_several_leases_never_wait_for_each_other(seed: int) -> None:
    draw = random.Random(seed)
    world, wanted, none = InLockStep(of_ranks()), {w: [] for w in WORKERS}, Keys.of([])
    for number in range(40):
        node = draw.choice(list(RANKS))
        kind = draw.choice(("chunk", "chunk", "train", "offer"))
        told: list[Instruction] = [chunk(100 + number, draw.choice(WORKERS))]
        idle = all(
            each in world.begun[w]
            for w in RANKS[node]
            for each in wanted[w]
            if isinstance(each, TrainStep)
        )
        if kind == "train" and idle:
            told = [
                TrainStep(id=number, node=node, worker=w, step=1, keys=none, inputs={})
                for w in RANKS[node]
            ]
        elif kind == "offer":
            told = [
                Offer(id=number, model="m", writer=node, worker=w, version=0) for w in RANKS[node]
            ]
        for each in told:
            wanted[each.worker].append(each)
        world.take(world.filter.told(told))
        world.some(draw)
    world.drain(draw)
    assert world.begun == wanted
    assert world.filter.waiting() == []


def test_a_turn_passes_to_who_waits_longest() -> None:
    world = World(turns())
    for number, worker in enumerate("acba"):
        world.take(world.filter.told([chunk(number, worker)]))
    assert world.filter.waiting() == [
        "worker a: is waking",
        "worker c: waits for the devices that a has",
        "worker b: waits for the devices that a has",
    ]
    order = []
    while busy := [w for w, queue in world.queues.items() if queue]:
        order += [w for w in busy if isinstance(world.queues[w][0], Wake)]
        world.step(busy[0])
    assert order == ["a", "c", "b"]
    assert world.awake == {"b", "free"}  # nobody else waits: it keeps the devices


def test_what_comes_while_another_waits_waits_behind_its_turn() -> None:
    it = turns(("a", "b"))
    assert it.told([chunk(0, "a")]) == [Wake(worker="a")]
    first = it.heard(Woken(worker="a"))
    assert [each.id for each in first if isinstance(each, RunChunk)] == [0]
    assert it.told([chunk(1, "b"), chunk(2, "a")]) == []
    assert it.heard(ChunkDone(id=0, node="on_a")) == [Sleep(worker="a")]
    assert it.heard(Slept(worker="a")) == [Wake(worker="b")]
    assert [each.id for each in it.heard(Woken(worker="b")) if isinstance(each, RunChunk)] == [1]
    assert it.heard(ChunkDone(id=1, node="on_b")) == [Sleep(worker="b")]


def test_release_and_go_pass_a_sleeping_worker() -> None:
    it = turns(("a", "b"))
    passing = [Release(worker="a", blocks=(1,)), Go(node="n", worker="b", id=0)]
    assert it.told(passing) == passing


def steps(task: int, *workers: str) -> list[TrainStep]:
    """What the ranks of one node are told."""
    none = Keys.of([])
    return [
        TrainStep(id=task, node="learn", worker=w, step=1, keys=none, inputs={}) for w in workers
    ]


def prepared(worker: str, task: int) -> Prepared:
    return Prepared(node="learn", worker=worker, id=task)


def unfetched(worker: str, task: int) -> FetchFailed:
    return FetchFailed(worker=worker, peer="gone", id=task)


@pytest.mark.parametrize("last", ["prepared", "unfetched"])
def test_ranks_that_wait_for_rows_that_are_gone_give_their_devices_up(last: str) -> None:
    it = turns(("a", "gen"), ("b", "other"))
    told = steps(7, "a", "b")
    assert it.told(told) == [Wake(worker="a"), Wake(worker="b")]
    assert it.heard(Woken(worker="a")) == told[:1]
    assert it.heard(Woken(worker="b")) == told[1:]
    assert it.told([chunk(1, "gen")]) == []
    events = [prepared("a", 7), unfetched("b", 7)]
    assert it.heard(events.pop(last == "prepared")) == []
    assert it.heard(events.pop()) == [Sleep(worker="a")]


@pytest.mark.parametrize("last", [prepared, unfetched])
def test_a_rank_that_slept_while_another_could_not_fetch_answers_and_passes_its_devices_on(
    last: Callable[[str, int], Event],
) -> None:
    it = turns(("a", "gen"), ("b", "other"))
    told = steps(7, "a", "b")
    assert it.told([chunk(1, "gen"), *told]) == [Wake(worker="gen"), Wake(worker="b")]
    assert it.heard(Woken(worker="b")) == told[1:]
    assert it.heard(unfetched("b", 7)) == []
    assert it.heard(Woken(worker="gen")) != []
    assert it.heard(ChunkDone(id=1, node="on_gen")) == [Sleep(worker="gen")]
    assert it.heard(Slept(worker="gen")) == [Wake(worker="a")]
    assert it.heard(Woken(worker="a")) == told[:1]
    assert it.told([chunk(2, "gen")]) == []
    assert it.heard(last("a", 7)) == [Sleep(worker="a")]


def test_what_a_rank_says_late_of_a_dropped_assignment_ends_no_later_one() -> None:
    it = turns(("a", "gen"), ("b", "other"))
    first, second = steps(7, "a", "b"), steps(8, "a", "b")
    it.told(first)
    assert [*it.heard(Woken(worker="a")), *it.heard(Woken(worker="b"))] == first
    assert it.heard(unfetched("b", 7)) == []
    assert it.told(second) == second
    assert it.heard(prepared("b", 8)) == []
    assert it.told([chunk(1, "other"), chunk(2, "gen")]) == []
    assert it.heard(unfetched("a", 7)) == []
    assert it.heard(prepared("a", 8)) == []
    assert it.heard(Stepped(id=8, node="learn", step=1, worker="a")) == [Sleep(worker="a")]
    assert it.heard(Stepped(id=8, node="learn", step=1, worker="b")) == [Sleep(worker="b")]


@pytest.mark.parametrize("kind", [RunChunk, Record, Evaluate, Load])
def test_what_could_not_be_begun_has_ended(kind: type) -> None:
    it, draw = turns(("a", "b")), random.Random(0)
    told = next(
        each for each in iter(lambda: anything(draw, 3, "a"), None) if isinstance(each, kind)
    )
    it.told([told])
    assert it.heard(Woken(worker="a")) == [told]
    it.told([chunk(9, "b")])
    gone = FetchFailed(id=3, worker="a", peer="c")
    assert it.heard(gone) == [Sleep(worker="a")]


@pytest.mark.parametrize("kind", [Load, Offer])
def test_of_versions_that_are_asked_for_one_after_another_each_is_answered(kind: type) -> None:
    it, draw = turns(("a", "b")), random.Random(0)
    some = (anything(draw, number, "a") for number in itertools.count())
    asked = list(itertools.islice((each for each in some if isinstance(each, kind)), 2))
    it.told(asked)
    assert it.heard(Woken(worker="a")) == asked
    it.told([chunk(999, "b")])
    assert it.heard(answer(asked[0])) == []
    assert it.heard(answer(asked[1])) == [Sleep(worker="a")]


@pytest.mark.parametrize("state", ["waking", "held", "sleeping"])
def test_a_lost_worker_frees_its_devices_and_is_told_anew_only_by_the_core(state: str) -> None:
    it = turns(("a", "b"))
    it.told([chunk(0, "a"), chunk(1, "b")])
    if state != "waking":
        it.heard(Woken(worker="a"))
    if state == "sleeping":
        assert it.heard(ChunkDone(id=0, node="on_a")) == [Sleep(worker="a")]
    assert it.heard(WorkerLost(worker="a", epoch=0, error="killed")) == [Wake(worker="b")]
    assert [each.id for each in it.heard(Woken(worker="b")) if isinstance(each, RunChunk)] == [1]
    assert it.waiting() == []


def test_a_death_that_is_told_twice_is_one() -> None:
    it, death = turns(("a", "b")), WorkerLost(worker="a", epoch=0, error="killed")
    it.told([chunk(0, "a")])
    it.heard(Woken(worker="a"))
    assert it.heard(death) == []
    assert it.told([chunk(1, "a"), chunk(2, "b")]) == [Wake(worker="a")]
    assert it.heard(death) == []
    assert [each.id for each in it.heard(Woken(worker="a")) if isinstance(each, RunChunk)] == [1]


def test_a_worker_that_is_killed_is_reset_like_a_lost_one() -> None:
    it = turns(("a", "b"))
    it.told([chunk(0, "a"), chunk(1, "b")])
    it.heard(Woken(worker="a"))
    assert it.told([Respawn(workers=("a",))]) == [Respawn(workers=("a",)), Wake(worker="b")]


def test_without_leases_everything_passes() -> None:
    it = DeviceTurns(Plan(graph="g", digest="", seed=0, nodes=(), sources=()))
    told = [chunk(0, "a"), chunk(1, "b")]
    assert it.told(told) == told
    assert it.heard(ChunkDone(id=0, node="on_a")) == []
