"""DeviceTurns: at most one Worker per device is awake, and nothing waits forever."""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.batch import Keys
from engine.coordinator import messages as m
from engine.coordinator.device_turns import DeviceTurns
from engine.coordinator.outstanding import Outstanding
from engine.coordinator.recovery import Recovery
from engine.plan.plan import Layout, Plan
from tests.kit.plans import plan_of, planned_node

GROUPS = (("a", "b", "c"), ("d", "e"))
WORKERS = ("a", "b", "c", "d", "e", "free")


class TurnsByHand(DeviceTurns):
    """DeviceTurns, with what the coordinator has done before it asks them."""

    def __init__(self, plan: Plan) -> None:
        self.outstanding = Outstanding()
        self.recovery = Recovery(name for names in plan.turns for name in (*names, "free"))
        super().__init__(plan, self.outstanding)

    def told(self, instructions: Iterable[m.Instruction]) -> list[m.Instruction]:
        instructions, workers = list(instructions), dict[int, list[str]]()
        for each in instructions:
            if isinstance(each, m.Task):
                self.outstanding.ask(each)
                workers.setdefault(each.id, []).append(each.worker)
                self.outstanding.ask_all(each, workers[each.id])
        return super().told(instructions)

    def heard(self, event: m.Event) -> list[m.Instruction]:
        asked = self.outstanding.heard(event)
        if isinstance(event, m.WorkerLost):
            if not self.recovery.lost(event):
                return []
            self.outstanding.lost(event.worker)
        elif isinstance(event, m.FetchFailed) and asked is not None:
            self.outstanding.give_up(asked)
        return super().heard(event)


def turns_of(*groups: tuple[str, ...]) -> TurnsByHand:
    return TurnsByHand(plan_of(turns=groups or GROUPS))


def chunk(number: int, worker: str) -> m.RunChunk:
    return m.RunChunk(id=number, node=f"on_{worker}", worker=worker, step=0, keys=Keys.of([number]))


def step(task: int, node: str, worker: str) -> m.TrainStep:
    return m.TrainStep(id=task, node=node, worker=worker, step=1, keys=Keys.of([]), inputs={})


def anything(draw: random.Random, number: int, worker: str) -> m.Instruction:
    """An instruction of a kind that has to be answered; `number` is in it."""
    node, none, load = f"on_{worker}", Keys.of([]), {"model": f"m{number}", "writer": "w"}
    kinds = (
        chunk(number, worker),
        step(number, f"{node}_{number}", worker),
        m.Evaluate(id=number, node=node, worker=worker, version=number, keys=none, inputs={}),
        m.Record(id=number, step=number, keys={}, inputs={}, worker=worker),
        m.Offer(id=number, model="m", writer=node, worker=worker, version=number),
        m.Load(id=number, reader=node, version=number, worker=worker, **load),
    )
    return draw.choice(kinds)


def answer(told: m.Instruction) -> m.Event:
    match told:
        case m.RunChunk():
            return m.ChunkDone(id=told.id, node=told.node)
        case m.TrainStep():
            return m.Stepped(id=told.id, node=told.node, step=told.step, worker=told.worker)
        case m.Evaluate():
            return m.Evaluated(id=told.id, node=told.node, version=told.version)
        case m.Record():
            return m.Recorded(id=told.id)
        case m.Offer():
            return m.Offered(id=told.id, worker=told.worker, block=0, digest="")
        case m.Load():
            return m.Loaded(id=told.id, worker=told.worker)
        case m.Wake():
            return m.Woken(worker=told.worker)
        case m.Sleep():
            return m.Slept(worker=told.worker)
    raise AssertionError(told)


@dataclass
class DeviceWorld:
    """Workers that do one thing after another, and refuse what a sleeping one cannot do."""

    filter: TurnsByHand
    awake: set[str] = field(default_factory=lambda: {"free"})
    queues: dict[str, deque[m.Instruction]] = field(
        default_factory=lambda: {w: deque() for w in WORKERS}
    )
    deaths: Counter[str] = field(default_factory=Counter)
    begun: dict[str, list[m.Instruction]] = field(default_factory=lambda: {w: [] for w in WORKERS})

    def take(self, instructions: list[m.Instruction]) -> None:
        for each in instructions:
            assert isinstance(each, m.ToWorker)
            mates = next((group for group in GROUPS if each.worker in group), (each.worker,))
            if isinstance(each, m.Wake):
                assert not self.awake & set(mates), "two are awake"
                self.awake.add(each.worker)
            elif not isinstance(each, m.Release | m.Go):
                assert each.worker in self.awake, "told something in its sleep"
            if isinstance(each, m.Sleep):
                assert not self.queues[each.worker], "sent to sleep with work to do"
            if not isinstance(each, m.Release | m.Go):
                self.queues[each.worker].append(each)

    def step(self, worker: str) -> None:
        """Let a Worker finish the first task in its queue."""
        told = self.queues[worker].popleft()
        if isinstance(told, m.Sleep):
            self.awake.discard(worker)
        if not isinstance(told, m.Wake | m.Sleep):
            self.begun[worker].append(told)
        self.take(self.filter.heard(answer(told)))

    def lose(self, worker: str) -> None:
        self.queues[worker].clear()
        if worker != "free":
            self.awake.discard(worker)
        self.take(self.filter.heard(death(worker, epoch=self.deaths[worker])))
        self.deaths[worker] += 1

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
    world, wanted = DeviceWorld(turns_of()), {w: [] for w in WORKERS}
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


def of_ranks() -> TurnsByHand:
    nodes = [
        planned_node(name, work="train", workers=workers, layout=Layout(data=len(workers)))
        for name, workers in RANKS.items()
    ]
    return TurnsByHand(plan_of(*nodes, turns=GROUPS))


@dataclass
class InLockStep(DeviceWorld):
    """Workers whose ranks begin an assignment or an offer only when all of them have come to it."""

    there: dict[int, set[str]] = field(default_factory=dict)

    def step(self, worker: str) -> None:
        told = self.queues[worker][0]
        if not isinstance(told, m.TrainStep | m.Offer):
            return super().step(worker)
        node = told.node if isinstance(told, m.TrainStep) else told.writer
        there = self.there.setdefault(told.id, set())
        if worker not in there and isinstance(told, m.TrainStep):
            self.take(self.filter.heard(m.Prepared(id=told.id, node=node, worker=worker)))
        there.add(worker)
        if there >= set(RANKS[node]):
            super().step(worker)

    def drain(self, draw: random.Random) -> None:
        """All Workers begin their first tasks, again and again, until nothing moves."""
        before: object = None
        while before != (
            now := [[*map(list, self.queues.values())], *map(len, self.there.values())]
        ):
            before = now
            for worker in draw.sample(WORKERS, len(WORKERS)):
                if self.queues[worker]:
                    self.step(worker)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_rank_groups_over_several_turns_never_wait_for_each_other(seed: int) -> None:
    draw = random.Random(seed)
    world, wanted = InLockStep(of_ranks()), {w: [] for w in WORKERS}
    for number in range(40):
        node = draw.choice(list(RANKS))
        kind = draw.choice(("chunk", "chunk", "train", "offer"))
        told: list[m.Instruction] = [chunk(100 + number, draw.choice(WORKERS))]
        idle = all(
            each in world.begun[w]
            for w in RANKS[node]
            for each in wanted[w]
            if isinstance(each, m.TrainStep)
        )
        if kind == "train" and idle:
            told = [step(number, node, w) for w in RANKS[node]]
        elif kind == "offer":
            offer = {"id": number, "model": "m", "writer": node, "version": 0}
            told = [m.Offer(**offer, worker=w) for w in RANKS[node]]
        for each in told:
            wanted[each.worker].append(each)
        world.take(world.filter.told(told))
        world.some(draw)
    world.drain(draw)
    assert world.begun == wanted
    assert world.filter.waiting() == []


def chunks_at_waking(turns: TurnsByHand, worker: str) -> list[int]:
    """Which chunks a Worker is told that has woken."""
    return [told.id for told in turns.heard(m.Woken(worker=worker)) if isinstance(told, m.RunChunk)]


def death(worker: str, epoch: int = 0) -> m.WorkerLost:
    return m.WorkerLost(worker=worker, epoch=epoch, error="killed")


def test_a_turn_passes_to_who_waits_longest() -> None:
    world = DeviceWorld(turns_of())
    for number, worker in enumerate("acba"):
        world.take(world.filter.told([chunk(number, worker)]))
    assert world.filter.waiting() == [
        "worker a: is waking",
        "worker c: waits for the devices that a has",
        "worker b: waits for the devices that a has",
    ]
    order = []
    while busy := [w for w, queue in world.queues.items() if queue]:
        order += [w for w in busy if isinstance(world.queues[w][0], m.Wake)]
        world.step(busy[0])
    assert order == ["a", "c", "b"]
    assert world.awake == {"b", "free"}  # nobody else waits: it keeps the devices


def test_what_comes_while_another_waits_waits_behind_its_turn() -> None:
    turns = turns_of(("a", "b"))
    assert turns.told([chunk(0, "a")]) == [m.Wake(worker="a")]
    assert chunks_at_waking(turns, "a") == [0]
    assert turns.told([chunk(1, "b"), chunk(2, "a")]) == []
    assert turns.heard(m.ChunkDone(id=0, node="on_a")) == [m.Sleep(worker="a")]
    assert turns.heard(m.Slept(worker="a")) == [m.Wake(worker="b")]
    assert chunks_at_waking(turns, "b") == [1]
    assert turns.heard(m.ChunkDone(id=1, node="on_b")) == [m.Sleep(worker="b")]


def test_release_and_go_pass_a_sleeping_worker() -> None:
    turns = turns_of(("a", "b"))
    passing = [m.Release(worker="a", blocks=(1,)), m.Go(node="n", worker="b", id=0)]
    assert turns.told(passing) == passing


def steps(task: int, *workers: str) -> list[m.TrainStep]:
    """What the ranks of one node are told."""
    return [step(task, "learn", worker) for worker in workers]


def prepared(worker: str, task: int) -> m.Prepared:
    return m.Prepared(node="learn", worker=worker, id=task)


def unfetched(worker: str, task: int) -> m.FetchFailed:
    return m.FetchFailed(worker=worker, peer="gone", id=task)


@pytest.mark.parametrize("last", ["prepared", "unfetched"])
def test_ranks_that_wait_for_rows_that_are_gone_give_their_devices_up(last: str) -> None:
    turns = turns_of(("a", "gen"), ("b", "other"))
    told = steps(7, "a", "b")
    assert turns.told(told) == [m.Wake(worker="a"), m.Wake(worker="b")]
    assert turns.heard(m.Woken(worker="a")) == told[:1]
    assert turns.heard(m.Woken(worker="b")) == told[1:]
    assert turns.told([chunk(1, "gen")]) == []
    events = [prepared("a", 7), unfetched("b", 7)]
    assert turns.heard(events.pop(last == "prepared")) == []
    assert turns.heard(events.pop()) == [m.Sleep(worker="a")]


@pytest.mark.parametrize("last", [prepared, unfetched])
def test_a_rank_that_slept_while_another_could_not_fetch_answers_and_passes_its_devices_on(
    last: Callable[[str, int], m.Event],
) -> None:
    turns = turns_of(("a", "gen"), ("b", "other"))
    told = steps(7, "a", "b")
    assert turns.told([chunk(1, "gen"), *told]) == [m.Wake(worker="gen"), m.Wake(worker="b")]
    assert turns.heard(m.Woken(worker="b")) == told[1:]
    assert turns.heard(unfetched("b", 7)) == []
    assert turns.heard(m.Woken(worker="gen")) != []
    assert turns.heard(m.ChunkDone(id=1, node="on_gen")) == [m.Sleep(worker="gen")]
    assert turns.heard(m.Slept(worker="gen")) == [m.Wake(worker="a")]
    assert turns.heard(m.Woken(worker="a")) == told[:1]
    assert turns.told([chunk(2, "gen")]) == []
    assert turns.heard(last("a", 7)) == [m.Sleep(worker="a")]


def test_what_a_rank_says_late_of_a_dropped_assignment_ends_no_later_one() -> None:
    turns = turns_of(("a", "gen"), ("b", "other"))
    first, second = steps(7, "a", "b"), steps(8, "a", "b")
    turns.told(first)
    assert [*turns.heard(m.Woken(worker="a")), *turns.heard(m.Woken(worker="b"))] == first
    assert turns.heard(unfetched("b", 7)) == []
    assert turns.told(second) == second
    assert turns.heard(prepared("b", 8)) == []
    assert turns.told([chunk(1, "other"), chunk(2, "gen")]) == []
    assert turns.heard(unfetched("a", 7)) == []
    assert turns.heard(prepared("a", 8)) == []
    assert turns.heard(m.Stepped(id=8, node="learn", step=1, worker="a")) == [m.Sleep(worker="a")]
    assert turns.heard(m.Stepped(id=8, node="learn", step=1, worker="b")) == [m.Sleep(worker="b")]


@pytest.mark.parametrize("kind", [m.RunChunk, m.Record, m.Evaluate, m.Load])
def test_what_could_not_be_begun_has_ended(kind: type) -> None:
    turns, draw = turns_of(("a", "b")), random.Random(0)
    endless = iter(lambda: anything(draw, 3, "a"), None)
    told = next(each for each in endless if isinstance(each, kind))
    turns.told([told])
    assert turns.heard(m.Woken(worker="a")) == [told]
    turns.told([chunk(9, "b")])
    gone = m.FetchFailed(id=3, worker="a", peer="c")
    assert turns.heard(gone) == [m.Sleep(worker="a")]


@pytest.mark.parametrize("kind", [m.Load, m.Offer])
def test_of_versions_that_are_asked_for_one_after_another_each_is_answered(kind: type) -> None:
    turns, draw = turns_of(("a", "b")), random.Random(0)
    some = (anything(draw, number, "a") for number in itertools.count())
    asked = list(itertools.islice((each for each in some if isinstance(each, kind)), 2))
    turns.told(asked)
    assert turns.heard(m.Woken(worker="a")) == asked
    turns.told([chunk(999, "b")])
    assert turns.heard(answer(asked[0])) == []
    assert turns.heard(answer(asked[1])) == [m.Sleep(worker="a")]


@pytest.mark.parametrize("state", ["waking", "held", "sleeping"])
def test_a_lost_worker_frees_its_devices_and_is_told_anew_only_by_the_core(state: str) -> None:
    turns = turns_of(("a", "b"))
    turns.told([chunk(0, "a"), chunk(1, "b")])
    if state != "waking":
        turns.heard(m.Woken(worker="a"))
    if state == "sleeping":
        assert turns.heard(m.ChunkDone(id=0, node="on_a")) == [m.Sleep(worker="a")]
    assert turns.heard(death("a")) == [m.Wake(worker="b")]
    assert chunks_at_waking(turns, "b") == [1]
    assert turns.waiting() == []


def test_a_death_that_is_told_twice_is_one() -> None:
    turns = turns_of(("a", "b"))
    turns.told([chunk(0, "a")])
    turns.heard(m.Woken(worker="a"))
    assert turns.heard(death("a")) == []
    assert turns.told([chunk(1, "a"), chunk(2, "b")]) == [m.Wake(worker="a")]
    assert turns.heard(death("a")) == []
    assert chunks_at_waking(turns, "a") == [1]


def test_a_worker_that_is_killed_is_reset_like_a_lost_one() -> None:
    turns = turns_of(("a", "b"))
    turns.told([chunk(0, "a"), chunk(1, "b")])
    turns.heard(m.Woken(worker="a"))
    assert turns.told([m.Respawn(workers=("a",))]) == [
        m.Respawn(workers=("a",)),
        m.Wake(worker="b"),
    ]


def test_without_turns_everything_passes() -> None:
    turns = TurnsByHand(plan_of())
    told = [chunk(0, "a"), chunk(1, "b")]
    assert turns.told(told) == told
    assert turns.heard(m.ChunkDone(id=0, node="on_a")) == []
