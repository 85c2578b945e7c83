"""One simulated Worker process, from its start to its end.

    simulated                 takes                                   answers
    RunChunk                  the rows' times                         Produced..., Tombstoned..., ChunkDone
    TrainStep                 a time                                  Stepped; of a rank group Prepared,
                                                                      and after Go, Stepped
    Wake, Sleep               a time                                  Woken, Slept
    Offer, Load               a time                                  Offered, Loaded
    Evaluate, Record          a time                                  Evaluated, Recorded
    Release                   nothing                                 -
    Asked (by the loop)       a time, asleep or awake                 an answer to the loop

Owns: doing what it is told, one thing after another, and checking that it can be done. Does not
own: when it dies and what of its messages arrives (workers.py), nor how long things take and
what comes of a row (behaviour.py).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from dataflow.batch import Keys
from dataflow.errors import RunError
from engine.coordinator.ages import ages
from engine.coordinator.messages import (
    ChunkDone,
    Evaluate,
    Evaluated,
    Event,
    FetchFailed,
    Go,
    Load,
    Loaded,
    Offer,
    Offered,
    Prepared,
    Produced,
    Record,
    Recorded,
    Release,
    RunChunk,
    Sleep,
    Slept,
    Stepped,
    Tombstoned,
    ToWorker,
    TrainStep,
    Wake,
    Woken,
)
from engine.coordinator.ordered_inbox import OrderedInbox
from engine.coordinator.refs import NO_VERSION, Gather
from engine.coordinator.tables import codes
from engine.plan.plan import PlannedNode
from engine.simulate.asking import Asked
from engine.simulate.groups import Work

if TYPE_CHECKING:
    from engine.simulate.workers import Simulation

Done = Callable[[], None]
Task = Callable[[Done], None]
"""Begins something, and calls what it is given when that has ended."""

Rows = RunChunk | TrainStep | Evaluate | Record


@dataclass(frozen=True, slots=True)
class Waiting:
    """What is to be begun. chunk: a request passes it; asked: it is one."""

    task: Task
    chunk: bool = False
    asked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A chunk saw a trained Model: at its begin `first`, at its end `last`; `step` as the
    coordinator numbered it.
    """

    node: str
    region: str
    step: int
    first: int
    last: int


class SimulatedWorker:
    """A Worker of this epoch. told: how many instructions were sent to it; said: how many events it
    has sent.
    """

    def __init__(self, world: Simulation, name: str, epoch: int) -> None:
        self.name = name
        self.epoch = epoch
        self.fence: OrderedInbox[ToWorker | Asked] = OrderedInbox(epoch)
        self.told = self.said = 0
        self.opened = self.gone = False
        self._world = world
        self._plan = world.plan
        self._timing = world.timing
        self._times = world.times
        self._stopped_until = 0.0
        self._put_off: deque[Done] = deque()
        """What would have happened while it stood still, in order."""
        self._queue: deque[Waiting] = deque()
        self._first: deque[Task] = deque()
        self._busy = False
        self._loaded_at = 0.0
        self._loads: dict[str, list[tuple[float, int]]] = {}
        """Node -> (time, version) of everything published that was loaded."""

    # --- life -------------------------------------------------------------------------------------

    def die(self) -> None:
        """Whatever it was doing comes to nothing, and what it kept is gone."""
        self.gone = True
        self._world.outbox.lose(self.name)
        self._world.groups.forget(self.name)
        self._world.devices.sleep(self.name)

    def stop(self, seconds: float) -> None:
        """It does nothing for a time, then goes on as if nothing had been; the longest time counts."""
        self._stopped_until = max(self._stopped_until, self._world.clock.now + seconds)

    @property
    def stopped(self) -> bool:
        """Whether it does not answer at present."""
        return self._stopped_until > self._world.clock.now

    def after(self, seconds: float, action: Done) -> None:
        """Let something happen here so many seconds from now, if the process is still there."""
        self._world.clock.after(seconds, partial(self._act, action))

    def _act(self, action: Done) -> None:
        """Now, or where it stands still as soon as it goes on: behind all that was to be before."""
        if self.gone:
            return
        if not self._put_off and not self.stopped:
            action()
            return
        if not self._put_off:
            self._world.clock.after(self._stopped_until - self._world.clock.now, self._go_on)
        self._put_off.append(action)

    def _go_on(self) -> None:
        if self.stopped:
            self._world.clock.after(self._stopped_until - self._world.clock.now, self._go_on)
            return
        while self._put_off and not self.gone:
            self._put_off.popleft()()

    def _hear(self, event: Event) -> None:
        self._world.sent(self, event)

    def _vary(self, seconds: float) -> float:
        return seconds * self._times.lognormvariate(0.0, self._timing.tail)

    # --- instructions -----------------------------------------------------------------------------

    def obey(self, instruction: ToWorker | Asked) -> None:
        """Take an instruction up, or a request."""
        match instruction:
            case Asked():
                self._pass(partial(self._save, instruction, instruction.nodes))
            case RunChunk():
                self._enqueue(
                    partial(self._fetch, instruction, partial(self._run_chunk, instruction)),
                    chunk=True,
                )
            case TrainStep() if instruction.mine is not None:
                self._world.devices.check(self.name)
                self._world.groups.told(instruction)
                self._enqueue(
                    partial(self._fetch, instruction, partial(self._prepare, instruction))
                )
            case Go():
                message = self._world.groups.begin(instruction)
                self._enqueue(partial(self._train, message), first=True)
            case TrainStep():
                self._enqueue(partial(self._fetch, instruction, partial(self._train, instruction)))
            case Evaluate():
                self._enqueue(
                    partial(self._fetch, instruction, partial(self._evaluate, instruction))
                )
            case Offer():
                self._enqueue(partial(self._offer, instruction))
            case Load():
                self._load(instruction)
            case Record():
                self._enqueue(partial(self._fetch, instruction, partial(self._record, instruction)))
            case Wake():
                self._world.devices.wake(self.name)
                self.after(
                    self._vary(self._timing.load), lambda: self._hear(Woken(worker=self.name))
                )
            case Sleep():
                self._sleep()
            case Release():
                self._world.outbox.release(self.name, instruction.blocks)

    def _enqueue(self, task: Task, *, first: bool = False, chunk: bool = False) -> None:
        """first: behind what else is to be first, and before all others."""
        self._world.devices.check(self.name)
        if first:
            self._first.append(task)
        else:
            self._queue.append(Waiting(task, chunk=chunk))
        self._next()

    def _pass(self, task: Task) -> None:
        """A request: before the chunks that wait, behind all else."""
        place = len(self._queue)
        while place and self._queue[place - 1].chunk:
            place -= 1
        self._queue.insert(place, Waiting(task, asked=True))
        self._next()

    def _next(self) -> None:
        """Begin what is first in the queue, when idle."""
        if not self._busy and (self._first or self._queue):
            self._busy = True
            task = self._first.popleft() if self._first else self._queue.popleft().task
            self.after(0.0, partial(task, self._idle))

    def _idle(self) -> None:
        self._busy = False
        self._next()

    # --- rows from others -------------------------------------------------------------------------

    def _check(self, message: Rows) -> None:
        """Raises RunError where the rows that it is to read are gone though nobody died, or are
        others, or where it has some to read that it is to be given.
        """
        if isinstance(message, TrainStep) and message.giver not in ("", self.name):
            if any(message.inputs.values()):
                raise RunError(
                    f"{message.node}: {self.name} is to fetch what {message.giver} gives it"
                )
            return
        if isinstance(message, Record):
            for recorded in self._plan.recorded:
                self._world.outbox.check(message.keys[recorded.name], message.inputs, (recorded,))
            return
        mine = message.mine if isinstance(message, TrainStep) else None
        keys = message.keys if mine is None else message.keys.take(mine)
        self._world.outbox.check(keys, message.inputs, self._world.nodes[message.node].inputs)

    def _fetch(self, message: Rows, then: Task, done: Done) -> None:
        """Fetch what a message names and go on; Unfetched where a Worker that kept some of it is
        gone meanwhile.
        """

        def end() -> None:
            peer = self._world.outbox.absent(gathers(message.inputs))
            if not peer:
                then(done)
                return
            self._hear(FetchFailed(id=message.id, worker=self.name, peer=peer))
            done()

        self._check(message)
        self.after(self._world.fetching(), end)

    # --- chunks -----------------------------------------------------------------------------------

    def _run_chunk(self, chunk: RunChunk, done: Done) -> None:
        """Produce the rows of a chunk in batches as they get ready, some of them failing; then end
        it.
        """
        node, begun, outcomes = (
            self._world.nodes[chunk.node],
            self._world.clock.now,
            self._world.outcomes,
        )
        keys = (
            chunk.keys.expand(node.rows // node.inner) if node.relation == "expand" else chunk.keys
        )
        starts, ends = self._times_of(node, len(keys))
        failed = outcomes.failed(node.name, keys) | _without_any(node, chunk)
        wanted = ~failed & outcomes.kept(node.name, keys) if node.relation == "subset" else ~failed
        for rows in self._batches(ends):
            when = max(ends[rows].tolist(), default=0.0)
            self.after(
                when, partial(self._yield, chunk, keys, rows, wanted, failed, begun + starts)
            )

        def end() -> None:
            self._check(chunk)
            self._seen(chunk, node, begun)
            self._hear(ChunkDone(id=chunk.id, node=chunk.node))
            done()

        self.after(max(ends.tolist(), default=0.0), end)

    def _yield(
        self,
        chunk: RunChunk,
        keys: Keys,
        rows: np.ndarray,
        wanted: np.ndarray,
        failed: np.ndarray,
        starts: np.ndarray,
    ) -> None:
        good = rows[wanted[rows]]
        version = self._ages(
            chunk.node,
            np.array([self._version(chunk.node, float(starts[r])) for r in good], np.int32),
        )
        ref = self._world.outbox.keep(self.name, chunk.node, keys.take(good), version)
        self._hear(Produced(id=chunk.id, node=chunk.node, ref=ref))
        for key in keys.take(rows[failed[rows]]).rows():
            self._hear(
                Tombstoned(id=chunk.id, node=chunk.node, key=key, error="the outcome says so")
            )

    def _times_of(self, node: PlannedNode, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Seconds from the chunk's begin at which each row begins and ends, given the node's slots."""
        free = [0.0] * (self._timing.slots if node.traits.generates else 1)
        starts, ends = np.zeros(rows), np.zeros(rows)
        for row in range(rows):
            starts[row] = heapq.heappop(free)
            ends[row] = starts[row] + self._timing.of_row(node.name, self._times)
            heapq.heappush(free, float(ends[row]))
        return starts, ends

    def _batches(self, ends: np.ndarray) -> Iterator[np.ndarray]:
        """The rows in the order in which they end, cut at random; now and then an empty batch comes
        first.
        """
        order = np.argsort(ends, kind="stable")
        parts = self._times.choice((1, 1, 2, len(order)))
        cuts = sorted(
            {0, len(order), *(self._times.randint(0, len(order)) for _ in range(parts - 1))}
        )
        if self._times.random() < 0.1:
            yield order[:0]
        for first, last in pairwise(cuts):
            rows = order[first:last]
            yield rows[self._times.sample(range(len(rows)), len(rows))]

    def _version(self, node: str, start: float) -> int:
        """The version that a row which began then is made with; NO_VERSION without a published
        Model.
        """
        return max(
            (version for when, version in self._loads.get(node, ()) if when <= start),
            default=NO_VERSION,
        )

    def _ages(self, node: str, versions: np.ndarray) -> np.ndarray:
        """What the rows count as. A decode node records version 0 until its Model's first other
        one.
        """
        recorded = np.maximum(versions, 0) if self._world.nodes[node].traits.generates else versions
        return ages(self._plan, node, recorded)

    def _seen(self, chunk: RunChunk, node: PlannedNode, begun: float) -> None:
        first, last = (
            self._version(chunk.node, begun),
            self._version(chunk.node, self._world.clock.now),
        )
        if first != NO_VERSION:
            read = Read(node=node.name, region=node.region, step=chunk.step, first=first, last=last)
            self._world.history.reads.append(read)

    # --- Steps, evaluations, samples --------------------------------------------------------------

    def _train(self, message: TrainStep, done: Done) -> None:
        def end() -> None:
            self._check(message)
            outbox, groups = self._world.outbox, self._world.groups
            versions = {g.producer: outbox.versions(g) for g in gathers(message.inputs)}
            whole = (message, versions) if message.mine is None else groups.ended(message, versions)
            if whole is not None:
                self._world.history.trained.append(whole)
            self._hear(
                Stepped(id=message.id, node=message.node, step=message.step, worker=self.name)
            )
            done()

        self._with_all(("train", message.node, message.id), self._timing.train, end)

    def _prepare(self, message: TrainStep, done: Done) -> None:
        """A rank has its rows, and may begin when the others have theirs."""

        def end() -> None:
            self._world.groups.prepared(message)
            self._hear(Prepared(id=message.id, node=message.node, worker=self.name))
            done()

        self.after(self._vary(self._timing.load), end)

    def _evaluate(self, message: Evaluate, done: Done) -> None:
        def end() -> None:
            self._check(message)
            self._hear(Evaluated(id=message.id, node=message.node, version=message.version))
            done()

        self.after(self._vary(self._timing.store), end)

    def _record(self, message: Record, done: Done) -> None:
        def end() -> None:
            self._check(message)
            self._world.history.samples[message.step] = message.keys
            self._hear(Recorded(id=message.id, step=message.step))
            done()

        self.after(self._vary(self._timing.store), end)

    def _save(self, asked: Asked, left: tuple[str, ...], done: Done) -> None:
        """One node after another, each with all of its ranks; then the answer."""
        if left:
            save = partial(self._save, asked, left[1:], done)
            self._with_all(("save", left[0], asked.number), self._timing.store, save)
            return
        well = not self._world.outbox.absent(list(asked.rows))
        self.after(0.0, lambda: self._world.asking.answered(asked.number, self.name, well=well))
        done()

    # --- weights and devices ----------------------------------------------------------------------

    def _offer(self, message: Offer, done: Done) -> None:
        def end() -> None:
            block = self._world.outbox.offer(self.name, message.model, message.version)
            self._hear(
                Offered(
                    id=message.id,
                    model=message.model,
                    version=message.version,
                    worker=self.name,
                    block=block,
                    digest="",
                )
            )
            done()

        self._with_all(("offer", message.writer, message.id), self._timing.load, end)

    def _with_all(self, what: Work, seconds: float, end: Done) -> None:
        """Something that takes a time; where the node has ranks, from when all of them have come to
        it.
        """
        begin = partial(self.after, self._vary(seconds), end)
        if self._world.nodes[what[1]].ranks > 1:
            self._world.groups.meet(what, self.name, begin)
        else:
            begin()

    def _load(self, message: Load) -> None:
        """Weights overtake the chunks that wait; in a reader that can be interrupted also the one
        that runs.
        """
        self._world.devices.check(self.name)
        seconds, now = self._vary(self._timing.load), self._world.clock.now
        if self._timing.loads == "interrupt":
            self._loaded_at = max(now + seconds, self._loaded_at)  # one after another
            self.after(self._loaded_at - now, partial(self._loaded, message, _nothing))
        else:
            self._enqueue(
                lambda done: self.after(seconds, partial(self._loaded, message, done)), first=True
            )

    def _loaded(self, message: Load, done: Done) -> None:
        if message.source:
            model = message.leader or message.model
            self._world.outbox.check_offer(message.source, message.block, model, message.version)
        if not message.leader or self._world.nodes[message.reader].traits.generates:
            self._loads.setdefault(message.reader, []).append(
                (self._world.clock.now, message.version)
            )
        self._hear(
            Loaded(
                id=message.id,
                node=message.reader,
                model=message.model,
                version=message.version,
                worker=self.name,
            )
        )
        done()

    def _sleep(self) -> None:
        """Give the devices back. Raises RunError for a Worker with something under way that it
        cannot let go.
        """

        def end(done: Done) -> None:
            self._world.devices.sleep(self.name)
            done()
            self._hear(Slept(worker=self.name))

        self._world.groups.give_up(self.name)
        if self._first or not all(each.asked for each in self._queue):
            raise RunError(f"worker {self.name} was sent to sleep with work to do")
        self._enqueue(lambda done: self.after(self._vary(self._timing.load), partial(end, done)))


def _without_any(node: PlannedNode, chunk: RunChunk) -> np.ndarray:
    """Boolean [rows], or False: the rows of which no descendant is left, where they are made of
    these.
    """
    for i in node.inputs:
        if i.fan_in:
            owners = chunk.inputs[i.name][0].keys
            assert owners is not None
            return ~np.isin(
                codes(chunk.keys.position, chunk.keys.sample), codes(owners.position, owners.sample)
            )
    return np.zeros(1, dtype=bool)


def gathers(inputs: Mapping[str, tuple[Gather, ...]]) -> list[Gather]:
    """All of them."""
    return [gather for many in inputs.values() for gather in many]


def _nothing() -> None:
    pass
