"""The Supervisor: the Workers of a run as processes of this host.

    thread   waits for                                          unblocked by
    loop     an event, an answer, an end (`next`, `ask`, ...)   I/O, or its own time limit
    I/O      a frame, an end, room to send, a silence           Workers, the loop (through a socket pair)

Owns: starting, connecting, watching, killing and reaping the processes. Does not own: who runs
what (plan), what a loss leads to (the coordinator), a Worker's inside (engine/launch/worker_process.py).

Every process is started by the loop's thread: the kernel kills a child when the thread that
started it ends, so no Worker outlives the run, whatever happens to this process.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataflow.errors import RunError
from dataflow.shipping import shipped
from engine.coordinator.messages import Event, From, Release, ToWorker, WorkerLost, WorkerOpened
from engine.launch.child import ChildProcess
from engine.launch.control import (
    Answer,
    Beat,
    Bound,
    Command,
    Connect,
    Failed,
    Forget,
    Network,
    Open,
    PeerAddresses,
    Quit,
    Request,
    WorkerUpdate,
)
from engine.launch.failures import Failures
from engine.launch.ranks import Meeting, groups, meetings
from engine.launch.routes import sources
from engine.launch.silence import silent, stacks
from engine.launch.wire import decode
from engine.launch.worker_process import KINDS
from engine.observe.reports import Doing, Report, SpanOf
from engine.observe.runfolder import RunFolder
from engine.options import RunOptions
from engine.plan.cluster import Cluster, detect
from engine.plan.plan import Plan
from engine.run.workers import Ask, WorkerGone

_GRACE = 3.0
"""Seconds to close kernels in."""
_REAP = 20.0
"""Seconds within which the kernel has ended a process that was killed."""

_FROM_WORKER = (Bound, WorkerUpdate, Answer, Beat, Failed)
CONTROL_BYTES = "coordinator/bytes"
"""The metric: bytes of control sockets that the process of the run sent and received."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A Supervisor's part of a run on several hosts. workers: those of its host, with their
    networks. on_change: called from any thread whenever there may be something new to hear.
    """

    workers: Mapping[str, Network | None]
    cluster: Cluster
    on_change: Callable[[], None]


class Supervisor:
    """One process for each Worker of a plan. See `engine.run.workers.Workers`."""

    def __init__(
        self, plan: Plan, folder: RunFolder, options: RunOptions, part: Part | None = None
    ) -> None:
        """folder: the run's, for logs and samples. part: of a run on several hosts; None where all
        Workers are here.
        """
        self._plan = plan
        self._part = part or Part(
            workers=dict.fromkeys(plan.workers),
            cluster=plan.cluster or detect(),
            on_change=lambda: None,
        )
        self._elsewhere: dict[str, tuple[str, str, int]] = {}
        """Where Workers on other hosts answer."""
        self._moved = 0
        self._moved_told = 0
        self._folder = folder
        self._options = options
        self._groups = groups(plan)
        self._worlds = plan.worlds
        self._children: dict[str, ChildProcess] = {}
        self._changed = threading.Condition()
        """Guards everything below, and the children."""
        self._events: deque[Event | From] = deque()
        self._answers: dict[int, Answer] = {}
        self._reports: list[Report] = []
        self._spans: list[SpanOf] = []
        self._failure: BaseException | None = None
        self._failures = Failures(self._groups)
        self._asked = 0
        self._watched: dict[int, ChildProcess] = {}
        """By process, until it is reaped; of a Worker that was killed to be started anew, two."""
        self._closing = False
        self._wake_end, self._woken_end = socket.socketpair()
        self._thread: threading.Thread | None = None

    # --- life -------------------------------------------------------------------------------------

    def open(self) -> Iterator[Event | From]:
        """All at once; yields what all of them told once the last is open.

        Raises what a kernel refuses its node with, WorkerGone where a process ends meanwhile;
        nothing is left then.
        """
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._thread = threading.Thread(target=self._watch_all, name="supervisor", daemon=True)
            self._thread.start()
            self._start(dict.fromkeys(self._part.workers, 0))
            opened = self._all_opened()
            undo.pop_all()
        yield from opened

    def respawn(self, workers: Sequence[str]) -> None:
        """Kill what is left of them, wait for the end of it, start the next incarnations."""
        old = [self._children[name] for name in workers]
        with self._changed:
            for child in old:
                child.replaced = True
        self._end(old)
        self._start({child.name: child.epoch + 1 for child in old})

    def close(self) -> None:
        """Ask all to end, kill those that do not, reap, close everything. Closing twice does
        nothing.
        """
        with self._changed:
            if self._closing:
                return
            self._closing = True
            left = list(self._watched.values())
        for child in left:
            child.send(Quit())
        self._wake()
        end = time.monotonic() + _GRACE
        for child in left:
            child.over.wait(max(0.0, end - time.monotonic()))
        self._end(left)
        if self._thread is not None:
            self._wake_end.close()  # which ends the thread
            self._thread.join()
        self._wake_end.close()
        self._woken_end.close()

    def _start(self, epochs: Mapping[str, int]) -> None:
        """Start these Workers; the plan is on its way to each, none is waited for."""
        meeting = meetings(list(epochs), self._groups)
        plan = shipped(self._plan, "the plan of a run with several workers")
        try:
            for name, epoch in epochs.items():
                child = self._child(name, epoch)
                self._send_open(child, plan, meeting.get(name))
                with self._changed:
                    self._children[name] = child
                    self._watched[child.process.pid] = child
        finally:
            for place in meeting.values():
                place.close()
        self._wake()

    def _child(self, name: str, epoch: int) -> ChildProcess:
        try:
            threads, device = _threads(self._plan, name), self._plan.devices.get(name)
            return ChildProcess(
                name, epoch, threads=threads, device=device, log=self._folder.log(name)
            )
        except OSError as error:
            raise RunError(
                f"worker {name}: expected its process to start, found: {error}. Fix: allow more"
                " processes and open files (ulimit -u, ulimit -n), or plan fewer workers."
            ) from error

    def _send_open(self, child: ChildProcess, plan: bytes, meeting: Meeting | None) -> None:
        opened = Open(
            worker=child.name,
            epoch=child.epoch,
            plan=plan,
            outbox=self._part.cluster.memory // 2 // len(self._part.workers),
            inproc=self._options.inproc,
            samples=self._folder.samples if child.name == self._plan.recorder else None,
            samples_every=self._options.samples_every,
            seat=None if meeting is None else meeting.seat(child.name),
            network=self._part.workers[child.name],
            spill=self._folder.path,
            verify=self._options.verify,
        )
        child.send(opened, () if meeting is None else (meeting.descriptor(),))
        if self._elsewhere:
            child.send(PeerAddresses(entries=tuple(self._elsewhere.values())))

    def _all_opened(self) -> list[Event | From]:
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._failed() or self._lost() or all(c.opened for c in self._children.values())
                )
            )
            self._raise_failure()
            if (lost := self._lost()) is not None:
                raise WorkerGone(lost.worker, lost.error)
            opened = list(self._events)
            self._events.clear()
            return opened

    def _end(self, children: Sequence[ChildProcess]) -> None:
        """Kill and wait; the I/O thread reaps."""
        for child in children:
            child.kill()
            if self._thread is None or not self._thread.is_alive():
                child.reap()
                child.over.set()
        end = time.monotonic() + _REAP
        for child in children:
            if not child.over.wait(max(0.0, end - time.monotonic())):
                raise RunError(
                    f"worker {child.name}: expected process {child.process.pid} to end within"
                    f" {_REAP:g} s of its kill, found it there. Fix: see what it waits for in"
                    f" /proc/{child.process.pid}/stack."
                )

    # --- the loop's thread ------------------------------------------------------------------------

    def tell(self, instruction: ToWorker) -> None:
        """To its Worker; to nobody where that is lost, which the coordinator is going to hear."""
        child = self._children[instruction.worker]
        with self._changed:
            if child.gone:
                return
            number = child.said
            child.said += 1
            if not isinstance(instruction, Release):
                child.told += 1
                child.under_way.append(getattr(instruction, "node", type(instruction).__name__))
        self._connect(child, sources(instruction))
        child.send(Command(epoch=child.epoch, number=number, instruction=instruction))
        self._wake_if_unsent(child)

    def next(self, timeout: float | None = None) -> Event | From | None:
        """The next event; None where none came in time, or none will. Raises what a kernel raised."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._failed() or self._events or not self._is_busy(), timeout
            )
            self._raise_failure()
            return self._events.popleft() if self._events else None

    @property
    def busy(self) -> bool:
        """Whether some Worker is starting, has something to end, or was found lost and not told of."""
        with self._changed:
            return self._is_busy()

    def ask(self, requests: Mapping[str, Ask]) -> dict[str, Any]:
        """Ask all of them at once, and wait for all answers."""
        numbers: dict[str, int] = {}
        for name, request in requests.items():
            self._asked += 1
            numbers[name] = self._asked
            child = self._children[name]
            self._connect(child, sources(request))
            child.send(Request(number=self._asked, request=request))
            self._wake_if_unsent(child)
        return {name: self._answer(name, number) for name, number in numbers.items()}

    def _answer(self, worker: str, number: int) -> Any:
        child = self._children[worker]
        with self._changed:
            self._changed.wait_for(
                lambda: self._failed() or number in self._answers or child.over.is_set()
            )
            self._raise_failure()
            answer = self._answers.pop(number, None)
        if answer is None:
            raise WorkerGone(worker, "it was lost while something was asked of it")
        if answer.lost:
            raise WorkerGone(
                answer.lost, f"it was lost while {worker} was asked for rows that it keeps"
            )
        return answer.ref

    def forget(self) -> None:
        """Tell all of them."""
        for child in self._children.values():
            child.send(Forget())

    def reports(self) -> list[Report]:
        """Metrics since the last call, and the bytes that came and went here."""
        with self._changed:
            found, self._reports = self._reports, []
            moved = self._moved + sum(c.link.moved for c in self._watched.values())
            if moved > self._moved_told:
                found.append((CONTROL_BYTES, float(moved - self._moved_told), 1.0))
            self._moved_told = moved
            return found

    def spans(self) -> list[SpanOf]:
        """What was done since the last call."""
        with self._changed:
            found, self._spans = self._spans, []
            return found

    def doing(self) -> list[Doing]:
        """What each said in its last heartbeat; from any thread."""
        with self._changed:
            return [c.doing for c in self._children.values()]

    def stacks(self) -> list[str]:
        """Of each that does something the stack of its main thread, which it writes into its log
        when it is asked.
        """
        with self._changed:
            busy = [c for c in self._children.values() if c.doing.node and not c.gone]
        return stacks(busy)

    def endpoints(self) -> tuple[tuple[str, str, int], ...]:
        """Where other hosts reach each Worker: (worker, endpoint, epoch); nowhere one that is gone,
        or begins.
        """
        with self._changed:
            gone = {name for name, c in self._children.items() if c.gone}
            return tuple(
                (n, "" if n in gone else c.endpoint, c.epoch) for n, c in self._children.items()
            )

    def meet(self, entries: Sequence[tuple[str, str, int]]) -> None:
        """Tell every Worker, now and when it is begun anew, where those of other hosts answer."""
        self._elsewhere |= {
            entry[0]: entry for entry in entries if entry[0] not in self._part.workers
        }
        for child in self._children.values():
            child.send(PeerAddresses(entries=tuple(self._elsewhere.values())))
            self._wake_if_unsent(child)

    def abandon(self, error: BaseException) -> None:
        """From any thread: whatever the loop's thread waits for here raises this."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def pids(self) -> dict[str, int]:
        """The process of each Worker."""
        return {name: child.process.pid for name, child in self._children.items()}

    def _connect(self, child: ChildProcess, peers: frozenset[str]) -> None:
        """Socket pairs for those whose rows it is going to ask for, and that are there; once for
        two incarnations.
        """
        for name in peers - {child.name}:
            peer = self._children.get(name)
            if (
                peer is None
                or peer.lost
                or peer.over.is_set()
                or (name, peer.epoch) in child.connected
            ):
                continue
            child.connected.add((name, peer.epoch))
            asks, serves = socket.socketpair()
            meeting = Meeting((name, child.name)) if (name, child.name) in self._worlds else None
            places = [(meeting.descriptor(),) if meeting else () for _ in range(2)]
            met = meeting is not None
            peer.send(Connect(peer=child.name, serve=True, met=met), (serves.detach(), *places[0]))
            self._wake_if_unsent(peer)
            child.send(Connect(peer=name, serve=False, met=met), (asks.detach(), *places[1]))
            if meeting is not None:
                meeting.close()

    def _is_busy(self) -> bool:
        return any(c.busy for c in self._children.values())

    def _failed(self) -> bool:
        return self._failure is not None

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _lost(self) -> WorkerLost | None:
        return next((e for e in self._events if isinstance(e, WorkerLost)), None)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_end.send(b"w", socket.MSG_DONTWAIT)

    def _wake_if_unsent(self, child: ChildProcess) -> None:
        if child.link.unsent:
            self._wake()

    # --- the I/O thread ---------------------------------------------------------------------------

    def _watch_all(self) -> None:
        """Until the loop closes its end of the wake socket."""
        with contextlib.ExitStack() as after, selectors.DefaultSelector() as selector:
            after.push(self._told_of_a_fault)
            selector.register(self._woken_end, selectors.EVENT_READ, None)
            before = time.monotonic()
            while True:
                self._register(selector)
                for key, events in selector.select(timeout=1.0):
                    if key.data is None:
                        if not self._woken_end.recv(4096):
                            return
                    else:
                        part, child = key.data
                        part(selector, child, events)
                before = self._look_for_silence(before)

    def _told_of_a_fault(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        """What goes wrong in this thread is raised in the loop's."""
        if error is None:
            return False
        self.abandon(error)
        self._part.on_change()
        return True

    def _register(self, selector: selectors.BaseSelector) -> None:
        """Watch what is new; want to know of room only where something is left to send."""
        with self._changed:
            children = list(self._watched.values())
        known = selector.get_map()
        for child in children:
            if child.ends not in known:
                selector.register(child.ends, selectors.EVENT_READ, (self._on_end, child))
                selector.register(child.link, selectors.EVENT_READ, (self._on_link, child))
            elif child.link.fileno() in known:
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if child.link.unsent else 0)
                if known[child.link.fileno()].events != wanted:
                    selector.modify(child.link, wanted, (self._on_link, child))

    def _on_link(self, selector: selectors.BaseSelector, child: ChildProcess, events: int) -> None:
        if child.over.is_set():  # it was in one list with its end, behind it
            return
        if events & selectors.EVENT_WRITE:
            with contextlib.suppress(OSError):
                child.link.flush()
        if events & selectors.EVENT_READ and not self._read(child):
            selector.unregister(child.link)
            with self._changed:
                child.lost = True
            child.kill()  # nobody can reach it any more

    def _on_end(self, selector: selectors.BaseSelector, child: ChildProcess, events: int) -> None:
        """What it said before its end is heard before the end."""
        del events
        selector.unregister(child.ends)
        if child.link.fileno() in selector.get_map():
            selector.unregister(child.link)
            while self._read(child, once=True):
                pass
        error = child.reap()
        with self._changed:
            del self._watched[child.process.pid]
            self._moved += child.link.moved
            if not (self._closing or child.replaced):
                self._events.append(WorkerLost(worker=child.name, epoch=child.epoch, error=error))
            child.over.set()
            self._changed.notify_all()
        self._part.on_change()

    def _read(self, child: ChildProcess, *, once: bool = False) -> bool:
        """Hear what has come. False: nothing more will (or, where `once`, nothing more is there)."""
        try:
            frames = child.link.receive()
            for frame in frames or ():
                self._hear(child, decode(frame.payload, _FROM_WORKER))
        except RunError as error:
            child.error = f"was killed as it sent what is no message: {error}"
            return False
        return frames is not None and not (once and not frames)

    def _hear(self, child: ChildProcess, message: Any) -> None:
        with self._changed:
            child.heard = time.monotonic()
            child.spoke = True
            match message:
                case WorkerUpdate():
                    self._take(child, message)
                case Bound(endpoint=endpoint):
                    child.endpoint = endpoint
                case Answer(number=number):
                    self._answers[number] = message
                case Beat(doing=doing):
                    child.doing = doing
                    return
                case Failed(kind=kind, text=text):
                    self._failures.told(child, KINDS.get(kind, RunError)(text), child.heard)
                    self._failure = self._failure or self._failures.judged(
                        self._children, child.heard
                    )
            self._changed.notify_all()
        self._part.on_change()

    def _take(self, child: ChildProcess, told: WorkerUpdate) -> None:
        for _ in range(min(told.ended - child.ended, len(child.under_way))):
            child.under_way.popleft()
        child.ended = max(child.ended, told.ended)
        child.opened = child.opened or any(isinstance(e.event, WorkerOpened) for e in told.events)
        self._events.extend(told.events)
        self._reports.extend(told.reports)
        self._spans.extend(told.spans)
        if any(
            end >= child.doing.since for _, _, _, end in told.spans
        ):  # it has ended since the last heartbeat
            child.doing = Doing(worker=child.name)

    def _look_for_silence(self, before: float) -> float:
        """Kill whoever has not been heard of for too long, judge what failed before; returns the
        time now.
        """
        now = time.monotonic()
        with self._changed:
            failed = self._failures.judged(self._children, now)
            children = [c for c in self._watched.values() if not c.lost]
            given_up = silent(children, before, now, self._options.heartbeat)
        for child in given_up:
            child.kill()
        if failed is not None:
            self.abandon(failed)
            self._part.on_change()
        return now


def _threads(plan: Plan, worker: str) -> int:
    return max((n.layout.threads for n in plan.nodes if worker in n.workers), default=1)
