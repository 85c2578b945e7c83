"""DeviceTurns: at most one Worker per device is awake, and nothing waits forever."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.batch import Keys
from engine.coordinator.device_turns import DeviceTurns
from engine.coordinator.recovery import Recovery
from engine.coordinator.task_ledger import Outstanding
from engine.plan.plan import Layout, Plan
from engine.protocol import messages as m
from tests.kit.plans import plan_of, planned_node
from tests.kit.turns import example_count

GROUPS = (("a", "b", "c"), ("d", "e"))
WORKERS = ("a", "b", "c", "d", "e", "free")


class TurnsByHand(DeviceTurns):
    """DeviceTurns, with what the coordinator has done before it asks them."""

    def __init__(self, plan: Plan) -> None:
        self.outstanding = Outstanding()
        self.recovery = Recovery(name for names in plan.turns for name in (*names, "free"))
        super().__init__(plan, self.outstanding)

    def let_through(self, instructions: Iterable[m.Instruction]) -> list[m.Instruction]:
        instructions, workers = list(instructions), dict[int, list[str]]()
        for each in instructions:
            if isinstance(each, m.Task):
                self.outstanding.ask(each)
                workers.setdefault(each.id, []).append(each.worker)
                self.outstanding.ask_all(each, workers[each.id])
        return super().let_through(instructions)

    def go_on_after(self, event: m.Event) -> list[m.Instruction]:
        asked = self.outstanding.note_answer(event)
        if isinstance(event, m.WorkerLost):
            if not self.recovery.note_lost(event):
                return []
            self.outstanding.forget_worker(event.worker)
        elif isinstance(event, m.FetchFailed) and asked is not None:
            self.outstanding.give_up(asked)
        return super().go_on_after(event)


def turns_of(*groups: tuple[str, ...]) -> TurnsByHand:
    return TurnsByHand(plan_of(turns=groups or GROUPS))


def chunk(number: int, worker: str) -> m.RunChunk:
    return m.RunChunk(id=number, node=f"on_{worker}", worker=worker, step=0, keys=Keys.of([number]))


def step(task: int, node: str, worker: str) -> m.TrainStep:
    return m.TrainStep(id=task, node=node, worker=worker, step=1, keys=Keys.of([]), inputs={})


def asked(number: int, worker: str) -> dict[type, m.Instruction]:
    """An instruction of each kind that has to be answered; `number` is in it."""
    node, of, none = f"on_{worker}", {"id": number, "worker": worker}, Keys.of([])
    return {
        m.RunChunk: chunk(number, worker),
        m.TrainStep: step(number, f"{node}_{number}", worker),
        m.Evaluate: m.Evaluate(node=node, version=number, keys=none, inputs={}, **of),
        m.Record: m.Record(step=number, keys={}, inputs={}, **of),
        m.Offer: m.Offer(model="m", writer=node, version=number, **of),
        m.Load: m.Load(model=f"m{number}", writer="w", reader=node, version=number, **of),
    }


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


class DeviceWorld:
    """Workers that do one thing after another, and refuse what a sleeping one cannot do."""

    def __init__(self, turns: TurnsByHand) -> None:
        self.filter, self.awake, self.deaths = turns, {"free"}, Counter[str]()
        self.queues = {w: deque[m.Instruction]() for w in WORKERS}
        self.begun = {w: list[m.Instruction]() for w in WORKERS}
        self.there = defaultdict[int, set[str]](set)
        """Of what ranks do together, by its number: those that have come to it."""

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
        self.take(self.filter.go_on_after(answer(told)))

    def lose(self, worker: str) -> None:
        self.queues[worker].clear()
        if worker != "free":
            self.awake.discard(worker)
        self.take(self.filter.go_on_after(death(worker, epoch=self.deaths[worker])))
        self.deaths[worker] += 1

    def some(self, draw: random.Random) -> None:
        """Let some Workers come to what is first in their queues."""
        for _ in range(draw.choice((0, 0, 1, 3))):
            if busy := [w for w, queue in self.queues.items() if queue]:
                self.step(draw.choice(busy))

    def drain(self, draw: random.Random) -> None:
        while busy := [w for w, queue in self.queues.items() if queue]:
            self.step(draw.choice(busy))


@settings(max_examples=example_count(150))
@given(seed=st.integers(0, 1 << 32), losses=st.booleans())
def test_random_arrivals_never_two_awake_nothing_starves_nothing_overtakes(
    seed: int, losses: bool
) -> None:
    draw = random.Random(seed)
    world, wanted = DeviceWorld(turns_of()), {w: [] for w in WORKERS}
    for number in range(60):
        worker = draw.choice(WORKERS)
        told = draw.choice(list(asked(number, worker).values()))
        wanted[worker].append(told)
        world.take(world.filter.let_through([told]))
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


class InLockStep(DeviceWorld):
    """Workers whose ranks begin an assignment or an offer only when all of them have come to it."""

    def step(self, worker: str) -> None:
        told = self.queues[worker][0]
        if not isinstance(told, m.TrainStep | m.Offer):
            return super().step(worker)
        node = told.node if isinstance(told, m.TrainStep) else told.writer
        there = self.there[told.id]
        if worker not in there and isinstance(told, m.TrainStep):
            self.take(self.filter.go_on_after(m.Prepared(id=told.id, node=node, worker=worker)))
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


@settings(max_examples=example_count(150))
@given(seed=st.integers(0, 1 << 32))
def test_rank_groups_over_several_turns_never_wait_for_each_other(seed: int) -> None:
    draw = random.Random(seed)
    nodes = [
        planned_node(name, work="train", workers=workers, layout=Layout(data=2))
        for name, workers in RANKS.items()
    ]
    turns = TurnsByHand(plan_of(*nodes, turns=GROUPS))
    world, expected = InLockStep(turns), {w: [] for w in WORKERS}
    for number in range(40):
        node = draw.choice(list(RANKS))
        kind = draw.choice(("chunk", "chunk", "train", "offer"))
        instructions = [chunk(100 + number, draw.choice(WORKERS))]
        idle = all(
            each in world.begun[w]
            for w in RANKS[node]
            for each in expected[w]
            if isinstance(each, m.TrainStep)
        )
        if kind == "train" and idle:
            instructions = [step(number, node, w) for w in RANKS[node]]
        elif kind == "offer":
            offer = {"id": number, "model": "m", "writer": node, "version": 0}
            instructions = [m.Offer(**offer, worker=w) for w in RANKS[node]]
        for each in instructions:
            expected[each.worker].append(each)
        world.take(world.filter.let_through(instructions))
        world.some(draw)
    world.drain(draw)
    assert world.begun == expected
    assert world.filter.waiting() == []


def death(worker: str, epoch: int = 0) -> m.WorkerLost:
    return m.WorkerLost(worker=worker, epoch=epoch, error="killed")


def test_a_turn_passes_to_who_waits_longest() -> None:
    world = DeviceWorld(turns_of())
    for number, worker in enumerate("acba"):
        world.take(world.filter.let_through([chunk(number, worker)]))
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


# --- one event after another ----------------------------------------------------------------------


def wake(worker: str) -> m.Wake:
    return m.Wake(worker=worker)


def woken(worker: str) -> m.Woken:
    return m.Woken(worker=worker)


def sleep(worker: str) -> m.Sleep:
    return m.Sleep(worker=worker)


def slept(worker: str) -> m.Slept:
    return m.Slept(worker=worker)


def steps(task: int, *workers: str) -> list[m.TrainStep]:
    """What the ranks of one node are told."""
    return [step(task, "learn", worker) for worker in workers]


def prepared(worker: str, task: int) -> m.Prepared:
    return m.Prepared(node="learn", worker=worker, id=task)


def unfetched(worker: str, task: int) -> m.FetchFailed:
    return m.FetchFailed(worker=worker, peer="gone", id=task)


Line = tuple[list[Any] | m.Event, list[Any]]
"""What the core says, as a list, or an event; and what goes out."""


def require(turns: TurnsByHand, *script: Line) -> None:
    """All of it, in order."""
    for number, (said, out) in enumerate(script):
        found = turns.let_through(said) if isinstance(said, list) else turns.go_on_after(said)
        assert found == out, f"line {number}"


@pytest.mark.parametrize(
    ("turns", "told"),
    [
        (turns_of(("a", "b")), m.Release(worker="a", blocks=(1,))),
        (turns_of(("a", "b")), m.Go(node="n", worker="b", id=0)),
        (TurnsByHand(plan_of()), chunk(0, "a")),
    ],
    ids=["release", "go", "devices of its own"],
)
def test_what_waits_for_no_devices_passes(turns: TurnsByHand, told: m.Instruction) -> None:
    require(turns, ([told], [told]))


def test_what_comes_while_another_waits_waits_behind_its_turn() -> None:
    first, other, later = chunk(0, "a"), chunk(1, "b"), chunk(2, "a")
    require(
        turns_of(("a", "b")),
        ([first], [wake("a")]),
        (woken("a"), [first]),
        ([other, later], []),
        (answer(first), [sleep("a")]),
        (slept("a"), [wake("b")]),
        (woken("b"), [other]),
        (answer(other), [sleep("b")]),
    )


RANKS_OF_TWO = (("a", "gen"), ("b", "other"))


@pytest.mark.parametrize(
    "last_two",
    [(prepared("a", 7), unfetched("b", 7)), (unfetched("b", 7), prepared("a", 7))],
)
def test_ranks_that_wait_for_rows_that_are_gone_give_their_devices_up(
    last_two: tuple[m.Event, m.Event],
) -> None:
    told, (first, last) = steps(7, "a", "b"), last_two
    require(
        turns_of(*RANKS_OF_TWO),
        (told, [wake("a"), wake("b")]),
        (woken("a"), told[:1]),
        (woken("b"), told[1:]),
        ([chunk(1, "gen")], []),
        (first, []),
        (last, [sleep("a")]),
    )


@pytest.mark.parametrize("last", [prepared("a", 7), unfetched("a", 7)])
def test_a_rank_that_slept_while_another_could_not_fetch_answers_and_passes_its_devices_on(
    last: m.Event,
) -> None:
    told, before = steps(7, "a", "b"), chunk(1, "gen")
    require(
        turns_of(*RANKS_OF_TWO),
        ([before, *told], [wake("gen"), wake("b")]),
        (woken("b"), told[1:]),
        (unfetched("b", 7), []),
        (woken("gen"), [before]),
        (answer(before), [sleep("gen")]),
        (slept("gen"), [wake("a")]),
        (woken("a"), told[:1]),
        ([chunk(2, "gen")], []),
        (last, [sleep("a")]),
    )


def test_what_a_rank_says_late_of_a_dropped_assignment_ends_no_later_one() -> None:
    first, second = steps(7, "a", "b"), steps(8, "a", "b")
    require(
        turns_of(*RANKS_OF_TWO),
        (first, [wake("a"), wake("b")]),
        (woken("a"), first[:1]),
        (woken("b"), first[1:]),
        (unfetched("b", 7), []),
        (second, second),
        (prepared("b", 8), []),
        ([chunk(1, "other"), chunk(2, "gen")], []),
        (unfetched("a", 7), []),
        (prepared("a", 8), []),
        (answer(second[0]), [sleep("a")]),
        (answer(second[1]), [sleep("b")]),
    )


@pytest.mark.parametrize("kind", [m.RunChunk, m.Record, m.Evaluate, m.Load])
def test_what_could_not_be_begun_has_ended(kind: type) -> None:
    told = asked(3, "a")[kind]
    require(
        turns_of(("a", "b")),
        ([told, chunk(9, "b")], [wake("a")]),
        (woken("a"), [told]),
        (unfetched("a", 3), [sleep("a")]),
    )


KILL = m.Respawn(workers=("a",))


@pytest.mark.parametrize(
    ("end", "out"), [(death("a"), [wake("b")]), ([KILL], [KILL, wake("b")])], ids=["lost", "killed"]
)
@pytest.mark.parametrize("state", ["waking", "held", "sleeping"])
def test_a_worker_that_is_gone_frees_its_devices_and_is_told_anew_only_by_the_core(
    state: str, end: Any, out: list[Any]
) -> None:
    first, other = chunk(0, "a"), chunk(1, "b")
    before = {
        "waking": [],
        "held": [(woken("a"), [first])],
        "sleeping": [(woken("a"), [first]), (answer(first), [sleep("a")])],
    }
    turns = turns_of(("a", "b"))
    begin = ([first, other], [wake("a")])
    require(turns, begin, *before[state], (end, out), (woken("b"), [other]))
    assert turns.waiting() == []
