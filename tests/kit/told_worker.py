"""A Worker that is told things between its events, and channels whose peers are slow or lost.

What stands between messages and the Worker is that of its process: the inbox, and who is told at
once (engine/run/worker_process). Here one thread does it all, so that a test says when.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from engine.channels.contract import PeerLost, Requests
from engine.channels.inproc import InprocChannel
from engine.protocol import messages as m
from engine.run.control.control import Request
from engine.run.worker.worker import Worker
from engine.run.worker_process.task_inbox import Inbox

SOON = 20.0
"""Seconds."""
Act = Callable[[], None]


class GatedChannel(InprocChannel):
    """Rows of other Workers than `here` come once they are let; those of lost ones never."""

    def __init__(self, here: str) -> None:
        super().__init__()
        self._here = here
        self.lost: set[str] = set()
        self.asked: list[int] = []
        """Blocks of others, as they were asked for."""
        self.began = threading.Semaphore(0)
        self.refused = threading.Semaphore(0)
        """Of fetches whose rows are lost."""
        self.may_answer = threading.Event()
        self.may_answer.set()

    def fetch(self, requests: Requests) -> list[pa.RecordBatch]:
        others = [request for request in requests if request.worker != self._here]
        if others:
            self.asked += [request.block for request in others]
            self.began.release()
            assert self.may_answer.wait(SOON)
        for request in others:
            if request.worker in self.lost:
                self.refused.release()
                raise PeerLost(request.worker, "its process is gone")
        return super().fetch(requests)


class ToldWorker:
    """An opened Worker and its inbox. events: all that it has said."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.events: list[m.Event] = []
        self._inbox = Inbox()
        self._count = 0
        self._passed = threading.Semaphore(0)
        self._while_waiting: list[Act] = []
        worker.runs.take_next = self._take_within
        worker.runs.ranks.hear(self._take_out, self._wait_for)

    def tell(self, instruction: m.ToWorker) -> None:
        """As its control thread does. Returns once weights that are fetched beside have come."""
        if not isinstance(instruction, m.Load):
            self.worker.runs.fetch_ahead(instruction)
            self._put(instruction)
        elif self.worker.delivery.fetch_beside(instruction, self._pass_on, self.events.append):
            assert self._passed.acquire(timeout=SOON)
        else:
            self._take_weights(instruction)

    def carry_out(self, acts: Sequence[tuple[int, Act]] = ()) -> list[m.Event]:
        """Carry out all that was told; returns the events. acts: each is done behind so many
        events, ascending, or where nothing else is left to do.
        """
        waiting = list(acts)
        first = len(self.events)
        while self._count or waiting:
            if not self._count:
                waiting.pop(0)[1]()
                continue
            instruction: Any = self._inbox.take()
            self._count -= 1
            for event in self.worker.execute(instruction):
                self.events.append(event)
                while waiting and waiting[0][0] <= len(self.events) - first:
                    waiting.pop(0)[1]()
        return self.events[first:]

    def tell_while_waiting(self, act: Act) -> None:
        """Do this once the Worker waits for something before a run."""
        self._while_waiting.append(act)

    def _take_out(self, instruction: m.ToWorker) -> None:
        self._count -= 1
        self._inbox.remove(instruction)

    def _wait_for(self, wanted: Callable[[m.ToWorker], bool]) -> m.ToWorker | None:
        self._while_waiting.pop(0)()
        instruction = self._inbox.wait_for(wanted)
        assert not isinstance(instruction, Request)
        self._count -= 1
        return instruction

    def _take_within(self, passes: Callable[[m.ToWorker], bool]) -> m.ToWorker | None:
        instruction = self._inbox.within(passes)
        assert not isinstance(instruction, Request)
        self._count -= instruction is not None
        return instruction

    def _pass_on(self, load: m.Load) -> None:
        self._take_weights(load)
        self._passed.release()

    def _take_weights(self, load: m.Load) -> None:
        if self._inbox.has_weights() or not self.worker.delivery.interrupt_with(load):
            self._put(load)

    def _put(self, instruction: m.ToWorker) -> None:
        self._count += 1
        self._inbox.put(instruction)
        self.worker.runs.announce(instruction)
