"""What a simulated Worker does for train nodes: Steps, parts of Steps, and the ends of these.

    simulated     takes             answers
    TrainStep     a time            Stepped; of several ranks Prepared, and after Go, Stepped
    TrainPart     a time            PartTrained; likewise where ranks have a part of the weights
    FinishStep    a time            Stepped; of several ranks Prepared, and after Go, Stepped
    all of them   a time            Short, where memory runs out

Owns: which part a node sums next. Does not own: fetching rows (simulated_worker.py), times
(kernel_times.py), ranks that wait for each other (groups.py), what all of them had of a Step
(parts.py).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Protocol

from engine.protocol import messages as m
from engine.run.simulated_workers.groups import Assigned, Together, Work
from engine.run.simulated_workers.parts import SummedParts
from engine.run.simulated_workers.shorts import Shortage
from engine.run.simulated_workers.task_queue import Done
from engine.run.simulated_workers.world import RunningWorker, SharedWorld


class TrainingWorker(RunningWorker, Protocol):
    """A Worker, as its train nodes see it."""

    def meet(self, what: Work, begin: Done) -> None:
        """Begin once all ranks of a node have come to this."""
        ...

    def note_compute(self, seconds: float, rows: int = 0, tokens: int = 0) -> None:
        """Note that what it does now keeps its device busy for so long."""
        ...


class TrainRuns:
    """Of one Worker. check: of the rows of a message."""

    def __init__(
        self, worker: TrainingWorker, world: SharedWorld, check: Callable[[Assigned], None]
    ) -> None:
        self._worker, self._world, self._check = worker, world, check
        self.parts = SummedParts()

    def is_prepared_first(self, message: Together) -> bool:
        """Whether ranks do this together, after Go."""
        node = self._world.nodes[message.node]
        if node.ranks == 1:
            return False
        return node.layout.in_step or not isinstance(message, m.TrainPart)

    def prepare(self, message: Together, done: Done) -> None:
        """Prepare a rank: it has its rows, and may begin when the others have theirs."""

        def end() -> None:
            self._world.groups.note_prepared(message)
            self._worker.say(m.Prepared(id=message.id, node=message.node, worker=self._worker.name))
            done()

        self._worker.after(self._world.kernels.prepare(message), end)

    def answer_part(self, message: m.TrainPart, place: int, done: Done) -> None:
        """Answer a part that is summed already, or whose turn has not come."""
        if place < 0:
            self._say_trained(message)
        else:
            peer = self.parts.lost_peer(message.node)
            self._worker.say(m.FetchFailed(id=message.id, worker=self._worker.name, peer=peer))
        done()

    def train(self, message: Together, done: Done) -> None:
        """Do the updates of a Step, the gradients of a part, or the update that ends parts."""
        worker, world = self._worker, self._world
        node = world.nodes[message.node]
        short = None if isinstance(message, m.FinishStep) else world.shorts.find(message)
        if isinstance(message, m.TrainStep):
            world.shorts.require_rest(message)

        def begin() -> None:
            world.cores.begin(worker.name, node)
            world.cores.compute(worker, seconds, end)

        def end() -> None:
            world.cores.end(worker.name, node)
            if short is None or isinstance(message, m.FinishStep):
                self._end(message)
                done()
            else:
                self._end_short(message, short, done)

        if isinstance(message, m.FinishStep):
            seconds, rows = world.kernels.finish(message), 0
        else:
            seconds, rows = world.kernels.train(message), len(message.keys)
        worker.note_compute(seconds, rows)
        if self.is_prepared_first(message):
            worker.meet(("train", message.node, message.id), begin)
        else:
            begin()

    def _end_short(self, message: Assigned, short: Shortage, done: Done) -> None:
        """Memory ran out. Where state is lost, the other ranks wait in a collective, for good."""
        is_first = message.worker == self._world.nodes[message.node].workers[0]
        if not short.is_lost or is_first:
            self._worker.say(self._world.shorts.say(message, short))
        if not short.is_lost:
            done()

    def _end(self, message: Together) -> None:
        if isinstance(message, m.FinishStep):
            self.parts.finish(message)
            is_first = message.worker == self._world.nodes[message.node].workers[0]
            if self._world.proving and is_first:
                self._world.history.note_trained(*self._world.trained_parts.take(message))
        else:
            self._check(message)
            if self._world.proving:
                self._note_trained(message)
        if isinstance(message, m.TrainStep):
            self._world.shorts.note_done(message)
        if isinstance(message, m.TrainPart):
            self.parts.add(message)
            self._say_trained(message)
            return
        stepped = m.Stepped(
            id=message.id, node=message.node, step=message.step, worker=self._worker.name
        )
        self._worker.say(stepped)

    def _say_trained(self, message: m.TrainPart) -> None:
        trained = m.PartTrained(
            id=message.id, node=message.node, step=message.step, worker=self._worker.name
        )
        self._worker.say(trained)

    def _note_trained(self, message: Assigned) -> None:
        outbox, groups = self._world.outbox, self._world.groups
        gathers = chain.from_iterable(message.inputs.values())
        versions = {gather.producer: outbox.versions(gather) for gather in gathers}
        if message.mine is not None:
            whole = groups.take_updates(message, versions)
            if whole is None:
                return
            message, versions = whole
        if isinstance(message, m.TrainPart):
            self._world.trained_parts.add(message, versions)
        else:
            self._world.history.note_trained(message, versions)
