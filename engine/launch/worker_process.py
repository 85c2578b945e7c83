"""A Worker's process: what runs on the other end of the Supervisor's control socket.

    thread    waits for                                   unblocked by
    control   a frame, or a second without one            the Supervisor; its end (EOF) ends the process at once
    main      an instruction or a request (inbox.py)      control
    both      room in the control socket                  the Supervisor's I/O thread, which never waits for anybody

Owns: the process (signals, parent's death, log, heartbeat), numbering what is told. Does not
own: kernels and instructions (worker.py), their order (inbox.py), bytes (wire.py, link.py).

Nothing here may be imported from torch: its threads are set in the environment by whoever
started the process, and the first heartbeat is due before the imports are through.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn

import cloudpickle

from dataflow.errors import (
    CheckpointError,
    DataError,
    DataflowError,
    KernelError,
    PlanError,
    RunError,
    StorageError,
)
from dataflow.signals import left_to_the_run
from engine.channels.contract import PeerLost
from engine.coordinator.messages import (
    ChunkDone,
    Evaluated,
    Event,
    From,
    Load,
    Recorded,
    Release,
    RunChunk,
    Spilled,
    Stepped,
    Tombstoned,
    ToWorker,
    WorkerOpened,
)
from engine.coordinator.ordered_inbox import OrderedInbox
from engine.launch.control import (
    Answer,
    Beat,
    Bound,
    Command,
    Connect,
    Failed,
    Forget,
    Open,
    PeerAddresses,
    Quit,
    Request,
    WorkerUpdate,
)
from engine.launch.control_socket import ControlSocket, Frame
from engine.launch.inbox import Inbox
from engine.launch.wire import decode, encode
from engine.observe.logs import output_that_cannot_fail, to_log
from engine.observe.reports import Doing, SpanOf
from engine.plan.plan import Plan
from engine.run.outside import STACK_SIGNAL

BEAT = 1.0
"""Seconds between two heartbeats."""
KINDS: Mapping[str, type[DataflowError]] = {
    kind.__name__: kind
    for kind in (PlanError, DataError, KernelError, RunError, CheckpointError, StorageError)
}
"""Errors that arrive as what they were; of a subclass the nearest of these."""

_TO_WORKER = (Command, Request, Connect, PeerAddresses, Forget, Quit)
_WAITS_FOR_MORE = (Tombstoned, ChunkDone, Stepped, Evaluated, Recorded)
"""Events with which, or soon after which, their instruction ends: one frame says both."""
_log = logging.getLogger(__name__)


class Outgoing:
    """What this incarnation tells, in numbered events; from any thread."""

    def __init__(self, link: ControlSocket, worker: str, epoch: int) -> None:
        self._link = link
        self._worker = worker
        self._epoch = epoch
        self._lock = threading.Lock()
        self._number = 0
        self._spills = False
        self._ended = 0
        self._ended_told = 0
        self._events: list[From] = []
        self._reports: list[Any] = []
        self._spans: list[SpanOf] = []

    def event(self, event: Event) -> None:
        """To be told with the next flush."""
        with self._lock:
            self._number_event(event)

    def _number_event(self, event: Event) -> None:
        self._events.append(
            From(worker=self._worker, epoch=self._epoch, number=self._number, event=event)
        )
        self._number += 1

    def spilled(self, nbytes: Callable[[], int]) -> bool:
        """To be told, likewise, when it begins and when it ends; returns whether one of them is the
        case. Request within the lock, so that the last word is true.
        """
        with self._lock:
            now = nbytes()
            changed = bool(now) != self._spills
            if changed:
                self._spills = bool(now)
                self._number_event(Spilled(worker=self._worker, nbytes=now))
            return changed

    def report(self, reports: list[Any]) -> None:
        """Metrics, likewise."""
        with self._lock:
            self._reports += reports

    def span(self, node: str, what: str, start: float, end: float) -> None:
        """Something that was done, likewise."""
        with self._lock:
            self._spans.append((f"{self._worker}/{node}", what, start, end))

    def ended(self, count: int = 1) -> None:
        """So many instructions more have ended, likewise."""
        with self._lock:
            self._ended += count

    def flush_ended(self) -> None:
        """Tell how many have ended, unless that is told."""
        with self._lock:
            told = self._ended == self._ended_told
        if not told:
            self.flush()

    def flush(self) -> None:
        """Tell what there is, in one frame."""
        with self._lock:
            told = WorkerUpdate(
                events=tuple(self._events),
                reports=tuple(self._reports),
                spans=tuple(self._spans),
                ended=self._ended,
            )
            self._events, self._reports, self._spans = [], [], []
            self._ended_told = self._ended
            self._link.send(encode(told))  # within the lock: what is numbered first is sent first


class Peers:
    """Data sockets to other Workers that the Supervisor sent and the channel has not taken yet."""

    def __init__(self) -> None:
        self._sockets: dict[str, socket.socket] = {}
        self._lock = threading.Lock()

    def put(self, peer: str, sock: socket.socket) -> None:
        """The next one to this peer; one that nobody took is of an incarnation that is gone."""
        with self._lock:
            earlier = self._sockets.pop(peer, None)
            self._sockets[peer] = sock
        if earlier is not None:
            earlier.close()

    def dial(self, peer: str) -> socket.socket:
        """A socket to this peer's channel. Raises PeerLost where there is none: the Supervisor
        sends one before the instruction that needs it, if the peer is alive.
        """
        with self._lock:
            sock = self._sockets.pop(peer, None)
        if sock is None:
            raise PeerLost(
                peer,
                "expected its process, found none that runs. Fix: see its log for why it ended.",
            )
        return sock


class Telling:
    """Whatever leaves this context as an exception, an exit of the user's code included, is told to
    the Supervisor, and `failed` is set.
    """

    def __init__(self, link: ControlSocket, worker: str) -> None:
        self._link, self._worker = link, worker
        self.failed = False

    def __enter__(self) -> Telling:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None:
            return False
        self.failed = True
        self._link.send(encode(failure(error, self._worker)))
        traceback.print_exception(error)
        return True


def failure(error: BaseException, worker: str) -> Failed:
    """What an exception is told as; one that is not ours is a fault of the engine, whose traceback
    the log has.
    """
    if isinstance(error, DataflowError):
        kind = next(
            (k.__name__ for k in type(error).__mro__ if k.__name__ in KINDS), RunError.__name__
        )
        return Failed(kind=kind, text=str(error))
    told = " ".join(f"{type(error).__name__}: {error}".split())
    text = (
        f"worker {worker}: internal error: {told}. Fix: report it with the traceback at the end of"
        " its log."
    )
    return Failed(kind=RunError.__name__, text=text)


class WorkerProcess:
    """One life of a Worker: its inbox, what it tells, its two threads."""

    def __init__(self, link: ControlSocket, opened: Open, descriptors: tuple[int, ...]) -> None:
        from engine.launch.worker_channel import place

        self._link = link
        self._open = opened
        self._descriptors = descriptors
        self._inbox = Inbox()
        self._fence: OrderedInbox[ToWorker] = OrderedInbox(opened.epoch)
        self._out = Outgoing(link, opened.worker, opened.epoch)
        self._peers = Peers()
        self._place = place(opened, self._peers.dial)
        if self._place.channel.endpoint:
            self._link.send(encode(Bound(endpoint=self._place.channel.endpoint)))
        self._worker: Any = None
        self._began = time.monotonic()
        self._busy = False
        self._over = threading.Event()

    # --- the control thread -----------------------------------------------------------------------

    def listen(self, early: Sequence[Frame] = ()) -> None:
        """Frames and heartbeats, until the process ends. early: frames that came with the one that
        opened it.
        """
        for frame in early:
            self._hear(frame)
        poll = select.poll()  # select knows no descriptor above 1,023
        poll.register(self._link, select.POLLIN)
        due = time.monotonic()
        while True:
            if time.monotonic() >= due:
                due = time.monotonic() + BEAT
                self._link.send(encode(Beat(doing=self._doing())))
            if not poll.poll(max(0.0, due - time.monotonic()) * 1e3):
                continue
            frames = self._link.receive()
            if frames is None:
                raise ConnectionResetError
            for frame in frames:
                self._hear(frame)
            self._out.flush_ended()

    def _hear(self, frame: Frame) -> None:
        match decode(frame.payload, _TO_WORKER):
            case Command() as tell:
                for instruction in self._fence.take(tell.epoch, tell.number, tell.instruction):
                    self._told(instruction)
            case Request() as asked:
                self._inbox.put(asked)
            case Connect() as connect:
                self._connect(connect, frame.descriptors)
            case PeerAddresses() as where:
                self._place.write(where)
            case Forget():
                self._out.ended(self._inbox.forget())
            case Quit():
                if self._busy:  # what it makes is not wanted, and nothing of it is durable
                    end(0)
                self._over.set()
                self._inbox.close()

    def _told(self, instruction: ToWorker) -> None:
        """Released at once, of which nothing is told. Weights interrupt a running chunk that takes
        them, unless others wait, which come first.
        """
        if isinstance(instruction, Release):
            self._worker.release(instruction.blocks)
            if self._out.spilled(self._spilled):
                self._out.flush()
            return
        weights = isinstance(instruction, Load)
        if weights and not self._inbox.has_weights() and self._worker.interrupt_with(instruction):
            self._out.ended()
        else:
            self._inbox.put(instruction)

    def _connect(self, connect: Connect, descriptors: tuple[int, ...]) -> None:
        sock = socket.socket(fileno=descriptors[0])
        if connect.serve:
            self._place.serve(connect.peer, sock, descriptors[1] if connect.met else None)
            return
        if connect.met:
            self._place.pairs.meet(connect.peer, descriptors[1], writes=False)
        self._peers.put(connect.peer, sock)

    def _doing(self) -> Doing:
        if self._worker is None:
            return Doing(
                worker=self._open.worker, node="its start", what="imports", since=self._began
            )
        return self._worker.doing

    # --- the main thread --------------------------------------------------------------------------

    def work(self) -> None:
        """Open the kernels and carry out what comes, until Quit; after a failure only that is
        waited for.
        """
        with Telling(self._link, self._open.worker) as telling:
            self._busy = True
            self._begin()
            self._busy = False
            while (item := self._inbox.take()) is not None:
                self._busy = True
                if isinstance(item, Request):
                    self._answer(item)
                else:
                    self._execute(item)
                self._busy = False
        if telling.failed:
            self._busy = False
            self._over.wait()
        if self._worker is not None:
            self._worker.close()

    def _begin(self) -> None:
        from engine.worker.worker import Worker

        opened, plan = self._open, cloudpickle.loads(self._open.plan)
        group, cast = _ranks(opened, plan, self._descriptors)
        self._worker = Worker(
            opened.worker,
            plan,
            channel=self._place.channel,
            inproc=opened.inproc,
            samples=_samples(opened),
            group=group,
            cast=cast,
            pairs=self._place.pairs,
        )
        self._worker.span = self._out.span
        for event in self._worker.open():
            self._out.event(event)
        self._out.report(self._worker.reports())
        self._out.event(WorkerOpened(worker=opened.worker, epoch=opened.epoch))
        self._out.flush()
        gc.collect()
        gc.freeze()  # what was made by imports and by opening stays

    def _execute(self, instruction: ToWorker) -> None:
        for event in self._worker.execute(instruction):
            self._out.event(event)
            if not isinstance(event, _WAITS_FOR_MORE):
                self._flush()
            self._within()
        self._out.ended()
        self._flush()
        if isinstance(instruction, RunChunk):
            for event in self._worker.settle():
                self._out.event(event)
                self._flush()

    def _within(self) -> None:
        """What need not wait for the end of a chunk that is suspended."""
        while (asked := self._inbox.within()) is not None:
            self._answer(asked)

    def _answer(self, asked: Request) -> None:
        self._flush()
        try:
            answer = Answer(number=asked.number, ref=self._worker.answer(asked.request))
        except PeerLost as lost:
            answer = Answer(number=asked.number, lost=lost.peer)
        self._flush()
        self._link.send(encode(answer))

    def _spilled(self) -> int:
        return self._place.channel.spilled

    def _flush(self) -> None:
        self._out.spilled(self._spilled)
        self._out.report([*self._worker.reports(), *self._place.reports()])
        self._out.flush()


def _samples(opened: Open) -> Any:
    """Written before they are told of, so that who writes them has no state."""
    from engine.observe.samples import SampleWriter

    return (
        None if opened.samples is None else SampleWriter(opened.samples, every=opened.samples_every)
    )


def _ranks(opened: Open, plan: Plan, descriptors: tuple[int, ...]) -> tuple[Any, Any]:
    """The process group of this Worker's ranks, and its end of broadcasts of rows to those that
    have the same.
    """
    if (seat := opened.seat) is None:
        return None, None
    from engine.channels.tensors.row_broadcast import join
    from engine.channels.tensors.world import rendezvous, world

    node = next(n for n in plan.nodes if n.ranks > 1 and opened.worker in n.workers)
    store = rendezvous(descriptors[0])
    group = world(seat.rank, seat.world, store)
    tensor = node.layout.tensor
    if tensor == 1:
        return group, None
    return group, join(store, seat.rank, tensor, node.workers, content=opened.verify == "content")


# --- the process ----------------------------------------------------------------------------------


def main(descriptor: int, parent: int) -> None:
    """The Worker on the other end of this socket. parent: the process that has to be there."""
    die_with(parent)
    left_to_the_run()
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, all_threads=True)
    output_that_cannot_fail()
    to_log("%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("engine").setLevel(logging.INFO)
    sock = socket.socket(fileno=descriptor)
    sock.set_inheritable(False)
    link = ControlSocket(sock)
    frame, *early = _first(link)
    opened = decode(frame.payload, (Open,))
    life = WorkerProcess(link, opened, frame.descriptors)
    _log.info("worker %s, epoch %d, process %d", opened.worker, opened.epoch, os.getpid())
    threading.Thread(target=_listen, args=(life, early), name="control", daemon=True).start()
    ended_well = False
    try:
        life.work()
        ended_well = True
    finally:  # no finalisation: threads of kernels may be anywhere, and nothing here outlives the process
        if not ended_well:
            traceback.print_exc()
        end(0 if ended_well else 1)


def _listen(life: WorkerProcess, early: Sequence[Frame]) -> None:
    """The control thread: where it fails, or the Supervisor's end is closed, nobody can reach this
    process any more.
    """
    try:
        life.listen(early)
    except ConnectionError:
        end(1, "the process of the run is gone")
    finally:
        traceback.print_exc()
        end(1, "the control thread failed")


def _first(link: ControlSocket) -> list[Frame]:
    """What comes first, and whatever comes with it."""
    while True:
        frames = link.receive()
        if frames is None:
            end(1, "the process of the run is gone")
        if frames:
            return frames


def end(code: int, why: str = "") -> NoReturn:
    """End this process now. Children end with it: they hold a pipe to it, and die with their
    parent.
    """
    if why:
        print(f"ended: {why}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def die_with(parent: int) -> None:
    """On Linux: SIGKILL for this process when the thread that started it ends, also where that has
    ended already.
    """
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        end(1, "the process of the run is gone")
