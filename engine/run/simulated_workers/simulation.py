"""One run of a plan in simulated time: the real coordinator and loop, simulated Workers.

Owns: putting them together, and finishing what was under way when the run ended. Does not own:
whether the outcome makes sense (the tests).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import get_args

from dataflow.errors import RunError
from engine.coordinator.coordinator import Coordinator, Settings
from engine.plan.plan import Plan
from engine.protocol import messages as m
from engine.protocol.events import EventHeard, EventStream, InstructionTold, Subscriber
from engine.run.loop.loop import Loop
from engine.run.simulated_workers.behaviour import Durations, Outcomes
from engine.run.simulated_workers.faults import FaultModel
from engine.run.simulated_workers.history import History
from engine.run.simulated_workers.kernel_times import KernelTimes, RandomTimes
from engine.run.simulated_workers.store import MemoryStore, SimulatedCheckpoint
from engine.run.simulated_workers.workers import SimulatedWorkers


class _Killed(Exception):
    """Ends a run as a kill would, between two events."""


class Simulation:
    """A run from its beginning, or from a checkpoint. rows: of each source in one pass. watchers:
    who is told of what happens. together: the coordinator is so slow that up to so many messages
    wait, and takes them together; 1: each is heard alone, when it comes. kernels: how long these
    take, in the place of `durations`.
    """

    def __init__(
        self,
        plan: Plan,
        settings: Settings,
        *,
        rows: Mapping[str, int],
        durations: Durations,
        outcomes: Outcomes,
        faults: FaultModel | None = None,
        latest: SimulatedCheckpoint | None = None,
        watchers: Sequence[Subscriber] = (),
        together: int = 1,
        kernels: KernelTimes | None = None,
    ) -> None:
        self.coordinator = Coordinator(plan, settings)
        closed, disk = 0, None
        if latest is not None:
            closed, disk = latest.message.step, latest.rows
        self.history = history = History(closed=closed)
        self.store = MemoryStore(plan, latest)
        self.faulty, self.outcomes = faults is not None, outcomes
        self._watchers, self._together = watchers, together
        self.workers = SimulatedWorkers(
            plan,
            history,
            rows=rows,
            kernels=kernels or RandomTimes(durations),
            outcomes=outcomes,
            faults=faults,
            disk=disk,
            together=together,
            slow=durations.seed,
        )
        self.finish: m.Finish | None = None
        self.relayout: m.Relayout | None = None
        """With which layout the run has to go on from its last checkpoint, likewise."""
        self.went_back = False
        """Whether the run has to go on from its last checkpoint, as another simulation."""

    @property
    def now(self) -> float:
        """Simulated seconds since the run began."""
        return self.workers.clock.now

    def run(
        self,
        *,
        until: Callable[[], bool] = lambda: False,
        stop: Callable[[], m.StopRequested | None] = lambda: None,
    ) -> m.Finish | None:
        """Run to the end, until every Worker is idle. None: it goes back to a checkpoint, or
        `until` held at an event, as if killed. stop: as the loop's. Raises RunError if stuck.
        """

        def kill(event: EventHeard) -> None:
            if until():
                raise _Killed

        stream = EventStream(self.history, self.workers, *self._watchers)
        stream.on(kill, *get_args(m.Event))
        loop = Loop(
            self.coordinator,
            self.workers,
            self.store,
            stream,
            stop,
            clock=lambda: self.now,
            together=self._together,
        )
        try:
            end = loop.run()
            self.went_back = isinstance(end, m.Rollback)
            if isinstance(end, m.Relayout):
                self.relayout = end
                self._settle(loop.untold)
        except _Killed:
            return None
        except RunError:
            if not (isinstance(self.history.end, m.Finish) and self.history.end.error):
                raise
        if isinstance(self.history.end, m.Finish):
            self.finish = self.history.end
            self._settle(loop.untold)
        return self.finish

    def _settle(self, untold: Sequence[m.Instruction]) -> None:
        """Finish what is under way: every block is released. An open Step's samples are dropped."""
        self._tell(untold)
        while (message := self.workers.next()) is not None:
            for event in self.coordinator.in_order(message):
                self.history.take(EventHeard(at=self.now, event=event))
                self._tell(self.coordinator.handle(event, self.now))
        for step in [step for step in self.history.samples if step > self.history.closed]:
            del self.history.samples[step]

    def _tell(self, instructions: Sequence[m.Instruction]) -> None:
        for instruction in instructions:
            assert isinstance(instruction, m.ToWorker), f"after the end: {instruction}"
            self.history.take(InstructionTold(at=self.now, instruction=instruction))
            self.workers.tell(instruction)
