"""The Supervisor: the Workers of a run as processes of this host, for the loop's thread.

    waits for                                       unblocked by
    an event, a reply, an end (`next`, `ask`, ...)  the I/O thread (worker_io.py), a time limit
    the first words of others (many start)          the I/O thread

Owns: starting the processes, sending to them, closing. Does not own: which Worker runs what (plan),
what follows from a loss (the coordinator), the other end (engine/run/worker_process).

The loop's thread starts every process: the kernel kills a child when the thread that started it
ends, so no Worker outlives the run.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dataflow.kernel import PRINTED
from dataflow.shipping import pickle_by_value
from engine.channels.descriptors import make_room_for_children
from engine.keep.record.place import RecordPlace
from engine.keep.run_folder import RunFolder
from engine.plan.cluster import Cluster, detect
from engine.plan.options import RunOptions
from engine.plan.plan import Plan
from engine.protocol import messages as m
from engine.protocol.reports import Doing, Report, SpanOf
from engine.protocol.workers import Ask, WorkerGone
from engine.run.control import control
from engine.run.launch.child import ChildProcess, read_stacks, wait_until_over
from engine.run.launch.heartbeat import STACK_WAIT
from engine.run.launch.peers import connect_peers
from engine.run.launch.ranks import (
    Meeting,
    far_seat,
    find_spanning,
    groups_by_worker,
    open_meetings,
)
from engine.run.launch.starter import Starter
from engine.run.launch.worker_io import WorkerIO

_printed = logging.getLogger(PRINTED)
GRACE = 3.0
"""Seconds to close kernels in."""
_AT_ONCE = 4
"""Processes that start at the same time, for each core."""
_LEAST_AT_ONCE = 16
"""So many on any host."""
CONTROL_BYTES = "coordinator/bytes"
"""The metric: bytes that the process of the run sent and received on control sockets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostShare:
    """One host's share of a run. workers: with their networks. absent: those of them that begin as
    they are respawned, with the epoch of that. on_change: from any thread.
    """

    workers: Mapping[str, control.Network | None]
    absent: Mapping[str, int] = field(default_factory=dict)
    cluster: Cluster
    on_change: Callable[[], None]


class Supervisor:
    """One process for each Worker of a plan. See `engine.protocol.workers.Workers`."""

    def __init__(
        self, plan: Plan, folder: RunFolder, options: RunOptions, share: HostShare | None = None
    ) -> None:
        """folder: for logs and samples. share: None where all Workers are on this host."""
        self._plan = plan
        if share is None:
            workers, cluster = dict.fromkeys(plan.workers), plan.cluster or detect()
            absent = dict.fromkeys(plan.spare, 0)
            share = HostShare(
                workers=workers, absent=absent, cluster=cluster, on_change=lambda: None
            )
        self._share = share
        self._folder = folder
        self._options = options
        self._starter = Starter(plan, share.workers, folder)
        self._groups = groups_by_worker(plan)
        self._far = find_spanning(self._groups, share.workers)
        self._peers: dict[str, control.PeerAddress] = {}
        self._requests = 0
        self._moved = 0
        self._retiring: dict[ChildProcess, float] = {}
        """When each of these is killed."""
        networks = ((w, share.workers[w]) for w in self._far)
        leases = {worker: network.lease for worker, network in networks if network}
        self._io = WorkerIO(self._groups, options.heartbeat, share.on_change, leases)

    def open(self) -> Iterator[m.Event | m.From]:
        """Start all at once; yields their events once all are open."""
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self.begin()
            opened = self.wait_until_open(None)
            undo.pop_all()
        yield from opened or ()

    def begin(self) -> None:
        """Start all at once, without waiting for any."""
        make_room_for_children(len(self._share.workers))
        self._io.start()
        here = (w for w in self._share.workers if w not in self._share.absent)
        self._start(dict.fromkeys(here, 0))

    def respawn(self, workers: Sequence[str]) -> None:
        """Kill what is left of them, wait for its end, start the next incarnations."""
        old = self._mark_replaced(workers)
        self._io.end(old)
        epochs = {name: self._share.absent[name] for name in workers if name in self._share.absent}
        epochs |= {child.name: child.epoch + 1 for child in old}
        self._start({name: epochs[name] for name in workers})

    def retire(self, workers: Sequence[str]) -> None:
        """Ask them to end, as recorded rows are flushed then; `next` kills those that do not."""
        end = time.monotonic() + GRACE
        for child in self._mark_replaced(workers):
            self._io.send(child, control.Quit())
            self._retiring[child] = end

    def _mark_replaced(self, workers: Sequence[str]) -> list[ChildProcess]:
        """Report their end no more. Returns the incarnations, none of one that was never there."""
        old = [self._io.children[name] for name in workers if name in self._io.children]
        with self._io.changed:
            for child in old:
                child.replaced = True
        return old

    def _kill_retiring(self) -> None:
        now = time.monotonic()
        for child, end in [*self._retiring.items()]:
            if child.over.is_set():
                del self._retiring[child]
            elif now >= end:
                child.kill()

    def close(self, grace: float = GRACE) -> None:
        """Ask all to end, kill those that do not within these seconds, reap. Closing twice does
        nothing.
        """
        left = self._io.closing()
        if left is None:
            return
        for child in left:
            self._io.send(child, control.Quit())
        wait_until_over(left, grace)
        self._io.end(left)
        self._io.close()
        self._starter.close()

    def _start(self, epochs: Mapping[str, int]) -> None:
        """Start these Workers and send them the plan, without waiting for any to be open."""
        near = {w: group for w, group in self._groups.items() if w not in self._far}
        meetings = open_meetings(list(epochs), near)
        plan = pickle_by_value(self._plan, "the plan of a run with several workers")
        try:
            self._starter.prepare(epochs)
            for name in sorted(epochs, key=self._starter.is_forked):  # templates import meanwhile
                self._let_others_start()
                child = self._starter.start(name, epochs[name], self._raise_failure)
                # Open is the first frame that the Worker reads; only then is it watched.
                self._send_open(child, plan, meetings.get(name))
                self._io.watch(child)
        finally:
            for meeting in meetings.values():
                meeting.close()

    def _let_others_start(self) -> None:
        """Wait while many have not spoken yet: hundreds at once would hinder one another until none
        speaks in time.
        """
        at_once = max(_LEAST_AT_ONCE, _AT_ONCE * self._share.cluster.cores)
        children = self._io.children

        def has_room() -> bool:
            starting = sum(not (child.spoke or child.gone) for child in children.values())
            return starting < at_once

        with self._io.changed:
            self._io.wait_for(has_room)

    def _raise_failure(self) -> None:
        with self._io.changed:
            self._io.raise_failure()

    def _send_open(self, child: ChildProcess, plan: bytes, meeting: Meeting | None) -> None:
        opened = control.Open(
            worker=child.name,
            epoch=child.epoch,
            plan=plan,
            outbox=self._share.cluster.memory // 2 // len(self._share.workers),
            inproc=self._options.inproc,
            samples=self._folder.samples if child.name == self._plan.recorder else None,
            samples_every=self._options.samples_every,
            seat=self._seat(child.name, meeting),
            network=self._share.workers[child.name],
            spill=self._folder.path,
            record=RecordPlace.of(self._plan, self._folder.path, self._options),
            folder=self._folder.path,
            verify=self._options.verify,
        )
        child.send(opened, () if meeting is None else (meeting.descriptor(),))
        if self._peers:
            entries = tuple(self._peers.values())
            child.send(control.PeerAddresses(entries=entries))

    def _seat(self, worker: str, meeting: Meeting | None) -> control.Seat | None:
        if group := self._far.get(worker):
            return far_seat(worker, group)
        return None if meeting is None else meeting.seat(worker)

    def wait_until_open(self, timeout: float | None = 0.0) -> list[m.Event | m.From] | None:
        """Return the events of all Workers once all are open; None if they are not in time. Raises
        as `open`.
        """

        def find_loss() -> m.WorkerLost | None:
            return next((e for e in self._io.events if isinstance(e, m.WorkerLost)), None)

        with self._io.changed:
            children = self._io.children.values()
            self._io.wait_for(lambda: find_loss() or all(c.opened for c in children), timeout)
            if (gone := find_loss()) is not None:
                raise WorkerGone(gone.worker, gone.error)
            if not all(c.opened for c in children):
                return None
            opened = list(self._io.events)
            self._io.events.clear()
            return opened

    def tell(self, instruction: m.ToWorker) -> None:
        """Send an instruction, unless its Worker is lost, of which the coordinator will hear."""
        child = self._io.children[instruction.worker]
        with self._io.changed:
            if child.gone:
                return
            if not isinstance(instruction, m.Release | m.FetchAhead):
                child.to_end += 1
                child.under_way.append(_describe_instruction(instruction))
        self._connect(child, instruction)
        self._io.send(child, control.Command(instruction=instruction))

    def ask(self, requests: Mapping[str, Ask]) -> dict[str, Any]:
        """All of them at once; wait for all replies."""
        return self.replies(self.request(requests))

    def request(self, requests: Mapping[str, Ask]) -> dict[str, int]:
        """All of them at once, without waiting. Returns their numbers."""
        numbers: dict[str, int] = {}
        for name, request in requests.items():
            self._requests += 1
            numbers[name] = self._requests
            child = self._io.children[name]
            self._connect(child, request)
            self._io.send(child, control.Request(number=self._requests, request=request))
        return numbers

    def has_replied(self, numbers: Mapping[str, int]) -> bool:
        """Whether `replies` would not wait. Raises what a kernel raised."""
        children = self._io.children
        with self._io.changed:
            self._io.raise_failure()
            replies = self._io.replies
            return all(n in replies or children[w].over.is_set() for w, n in numbers.items())

    def replies(self, numbers: Mapping[str, int]) -> dict[str, Any]:
        """Wait for the replies to requests. Raises WorkerGone, and what a kernel raised."""
        return {name: self._reply(name, number) for name, number in numbers.items()}

    def _reply(self, worker: str, number: int) -> Any:
        over = self._io.children[worker].over
        with self._io.changed:
            self._io.wait_for(lambda: number in self._io.replies or over.is_set())
            reply = self._io.replies.pop(number, None)
        if reply is None:
            raise WorkerGone(worker, "it was lost while something was asked of it")
        if reply.lost:
            problem = f"it was lost while {worker} was asked for rows that it keeps"
            raise WorkerGone(reply.lost, problem)
        return reply.ref

    def forget(self) -> None:
        """See Workers."""
        for child in self._io.children.values():
            self._io.send(child, control.Forget())

    def meet(self, entries: Sequence[control.PeerAddress]) -> None:
        """Tell every Worker, and those that start later, where these Workers answer now."""
        self._peers |= {entry.worker: entry for entry in entries}
        for entry in entries:
            if entry.gone and entry.worker not in self._share.workers:
                self._io.note_gone(entry.worker, entry.epoch)
        where = control.PeerAddresses(entries=tuple(entries))
        for child in self._io.children.values():
            self._io.send(child, where)

    def _connect(self, child: ChildProcess, message: m.ToWorker | Ask) -> None:
        connect_peers(child, message, self._io.children, self._plan.worlds, self._io.send)

    def next(self, timeout: float | None = None) -> m.Event | m.From | None:
        """The next event; None if none came in time, or none will. Raises what a kernel raised."""
        return self._take_event(lambda: self._io.events or not self._io.busy, timeout)

    def next_while_idle(self, timeout: float) -> m.Event | m.From | None:
        """See Workers."""
        return self._take_event(lambda: self._io.events, timeout)

    def _take_event(
        self, holds: Callable[[], Any], timeout: float | None
    ) -> m.Event | m.From | None:
        self._kill_retiring()
        with self._io.changed:
            self._io.wait_for(holds, timeout)
            event = self._io.events.popleft() if self._io.events else None
            printed, self._io.printed = self._io.printed, []
        for line in printed:  # not under the lock: a screen may block
            _printed.warning("%s", line)
        return event

    @property
    def busy(self) -> bool:
        """Whether a Worker is starting, has something to end, or is lost and not yet reported."""
        with self._io.changed:
            return self._io.busy

    def reports(self) -> list[Report]:
        """Metrics since the last call, with the bytes of this host's control sockets."""
        with self._io.changed:
            reports, self._io.reports = self._io.reports, []
            moved = self._io.moved_bytes
        if moved > self._moved:
            reports.append((CONTROL_BYTES, float(moved - self._moved), 1.0))
        self._moved = moved
        return reports

    def spans(self) -> list[SpanOf]:
        """What was done since the last call."""
        with self._io.changed:
            spans, self._io.spans = self._io.spans, []
            return spans

    def doing(self) -> list[Doing]:
        """By the last heartbeat of each; from any thread."""
        with self._io.changed:
            return [c.doing for c in self._io.children.values() if not c.over.is_set()]

    def live_reports(self) -> list[Report]:
        """None: Workers' processes report while their kernels run."""
        return []

    def stacks(self) -> list[str]:
        """The main thread's stack of each Worker that is doing something."""
        with self._io.changed:
            busy = [c for c in self._io.children.values() if c.doing.node and not c.gone]
        return read_stacks(busy, STACK_WAIT)

    def endpoints(self) -> tuple[control.PeerAddress, ...]:
        """Where other hosts reach each Worker; empty for one that is gone or starting."""
        with self._io.changed:
            return tuple(_address(child) for child in self._io.children.values())

    def abandon(self, error: BaseException) -> None:
        """From any thread: make every wait of the loop's thread raise this."""
        self._io.abandon(error)

    def pids(self) -> dict[str, int]:
        """The process of each Worker."""
        return {name: child.process.pid for name, child in self._io.children.items()}


def _address(child: ChildProcess) -> control.PeerAddress:
    if child.gone:
        return control.PeerAddress(worker=child.name, epoch=child.epoch, gone=True)
    return control.PeerAddress(
        worker=child.name,
        epoch=child.epoch,
        endpoint=child.endpoint,
        key=child.key,
        meeting=child.meeting,
    )


def _describe_instruction(instruction: m.ToWorker) -> str:
    """Name its node, else its class, to say what a Worker that hangs was doing."""
    if isinstance(
        instruction, m.RunChunk | m.TrainStep | m.TrainPart | m.FinishStep | m.Go | m.Evaluate
    ):
        return instruction.node
    return type(instruction).__name__
