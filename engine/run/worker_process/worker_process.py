"""A Worker's process: what runs on the other end of the Supervisor's control socket.

    thread    waits for                          unblocked by
    control   a frame, or the next heartbeat     the Supervisor; EOF ends the process at once
    main      an instruction or a request        control (task_inbox.py)
    both      room in the control socket         the Supervisor's I/O thread, which never blocks

Owns: the process (signals, log, heartbeat) and its two threads. Does not own: the death of the
process that started it (engine/run/control/lifeline.py), kernels and instructions
(engine/run/worker), their order (task_inbox.py), messages (control.py), how
ranks meet (worker_ranks.py).

Nothing here imports torch at the start, since the first heartbeat is due before that is done.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import cloudpickle

from dataflow.arrow_without_pandas import keep_pandas_out
from dataflow.errors import ProcessLost
from dataflow.kernel import PRINTED
from dataflow.signals import leave_signals_to_the_run
from engine.channels.contract import PeerLost
from engine.channels.descriptors import make_room_for_peers
from engine.keep.worker_logs import log_to_stderr, make_output_ignore_full_disk
from engine.plan.plan import Plan
from engine.plan.run_limits import BEAT
from engine.protocol import messages as m
from engine.protocol.reports import Doing, Report
from engine.run.control import control
from engine.run.control.control_socket import ControlSocket, Frame
from engine.run.control.wire import TO_WORKER, decode_message, encode_message
from engine.run.loop.watchdog import STACK_SIGNAL
from engine.run.worker.counters import PeakReports
from engine.run.worker.timing import ENGINE
from engine.run.worker_process.task_inbox import Inbox
from engine.run.worker_process.worker_updates import Updates

_WAITS_FOR_MORE = (m.Reported, m.Tombstoned, m.ChunkDone, m.Stepped, m.Evaluated, m.Recorded)
"""Events that come before another one, or the end, of an instruction: sent in one frame with it."""
_LEAST_ENGINE = 1e-3
"""Seconds of processors beside nodes that are told together, at least."""
_log = logging.getLogger(__name__)


class FailureReport:
    """A context that sends the Supervisor any exception that leaves it, even SystemExit; but where
    a kernel has lost a process of its own, this one ends, so that the Worker is lost.
    """

    def __init__(self, link: ControlSocket, worker: str) -> None:
        self._link = link
        self._worker = worker
        self.failed = False

    def __enter__(self) -> FailureReport:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is None:
            return False
        if isinstance(error, ProcessLost):
            end(1, str(error))
        self.failed = True
        self._link.send(encode_message(control.Failed.of(error, self._worker)))
        traceback.print_exception(error)
        return True


class _Printed(logging.Handler):
    """Hands what users' functions print to the process of the run, which shows it."""

    def __init__(self, updates: Updates) -> None:
        super().__init__()
        self._updates = updates

    def emit(self, record: logging.LogRecord) -> None:
        self._updates.add_printed_line(record.getMessage())


class WorkerProcess:
    """One incarnation of a Worker: its inbox, its updates, its two threads."""

    def __init__(
        self, link: ControlSocket, opened: control.Open, descriptors: tuple[int, ...]
    ) -> None:
        from engine.run.worker_process.worker_channel import worker_channel

        self._link = link
        self._open = opened
        self._descriptors = descriptors
        self._inbox = Inbox()
        self._updates = Updates(link, opened.worker, opened.epoch)
        logging.getLogger(PRINTED).addHandler(_Printed(self._updates))
        self._channel = worker_channel(opened)
        # Else peers would take a Worker that lives for lost, and ask it again and again.
        self._channel.shm.fail_by(_end_without_rows)
        if self._channel.bound is not None:
            self._link.send(encode_message(self._channel.bound))
        self._peaks = PeakReports(opened.worker)
        self._engine_before = 0.0
        """Seconds of processors that this process has taken beside nodes and has told."""
        self._worker: Any = None
        self._began = time.monotonic()
        self._busy = False
        self._over = threading.Event()

    # --- the control thread -----------------------------------------------------------------------

    def listen(self, early: Sequence[Frame]) -> None:
        """Read frames and send heartbeats. early: frames that came with Open."""
        for frame in early:
            self._handle(frame)
        poll = select.poll()  # select() cannot watch descriptors above 1,023
        poll.register(self._link, select.POLLIN)
        due = time.monotonic()
        while True:
            if time.monotonic() >= due:
                due = time.monotonic() + BEAT
                beat = control.Beat(doing=self._doing())
                self._link.send(encode_message(beat))
                self._report_live()
            if not poll.poll(max(0.0, due - time.monotonic()) * 1e3):
                continue
            frames = self._link.receive()
            if frames is None:
                raise ConnectionResetError
            for frame in frames:
                self._handle(frame)
            self._updates.flush_ended()

    def _report_live(self) -> None:
        """With each heartbeat once it is open, whatever its kernel does: memory, and waits."""
        if self._worker is not None:
            self._updates.report([*self._memory(), *self._worker.waits.reports()])
            self._updates.flush()
            self._worker.runs.ask_for_watermark()

    def _memory(self) -> list[Report]:
        return self._peaks.reports(self._channel.shm.nbytes)

    def _handle(self, frame: Frame) -> None:
        match decode_message(frame.payload, TO_WORKER):
            case control.Command(instruction=instruction):
                self._accept(instruction)
            case control.Request() as request:
                self._inbox.put(request)
                if self._worker is not None:
                    self._worker.runs.interrupt()
            case control.Connect() as connect:
                self._channel.connect(connect, frame.descriptors)
            case control.PeerAddresses() as where:
                self._channel.write(where)
            case control.Forget():
                fetches = 0
                if self._worker is not None:
                    fetches = self._worker.delivery.forget()
                    self._worker.runs.forget()
                self._updates.count_ended(self._inbox.forget() + fetches)
            case control.Quit():
                # First: the main thread looks at it once it is busy, so one of both sees the other.
                self._over.set()
                if self._busy:  # the result is not wanted, and nothing of it is durable
                    self._end_busy()
                self._inbox.close()

    def _end_busy(self) -> NoReturn:
        """End at once, but for recorded rows of chunks that have ended."""
        if self._worker is not None and self._worker.recorder is not None:
            self._worker.recorder.flush()
        end(0)

    def _accept(self, instruction: m.ToWorker) -> None:
        """Release at once, and begin what is fetched beside the kernels. All else comes in turn, or
        within a run that lets it.
        """
        match instruction:
            case m.Release():
                self._worker.release(instruction.blocks)
                if self._updates.note_spill(self._spilled_bytes):
                    self._updates.flush()
            case m.FetchAhead():
                self._worker.rows.ahead.begin(instruction)
            case m.Load():
                delivery = self._worker.delivery
                if not delivery.fetch_beside(instruction, self._take_weights, self._tell):
                    self._take_weights(instruction)
            case _:
                self._worker.runs.fetch_ahead(instruction)
                self._put(instruction)

    def _take_weights(self, load: m.Load) -> None:
        """Let a running chunk load it, unless earlier ones wait; else before the next chunk, or
        within a run that lets it. From any thread.
        """
        if not self._inbox.has_weights() and self._worker.delivery.interrupt_with(load):
            self._updates.count_ended()
            self._updates.flush_ended()
        else:
            self._put(load)

    def _put(self, instruction: m.ToWorker) -> None:
        self._inbox.put(instruction)
        self._worker.runs.announce(instruction)

    def _tell(self, event: m.Event) -> None:
        self._updates.event(event)
        self._updates.flush()

    def _doing(self) -> Doing:
        if self._worker is None:
            worker, since = self._open.worker, self._began
            return Doing(
                worker=worker, node="its start", what="imports", since=since, computes=False
            )
        return self._worker.timing.doing

    # --- the main thread --------------------------------------------------------------------------

    def work(self) -> None:
        """Open the kernels, then carry out the inbox until Quit; after a failure wait for Quit."""
        with FailureReport(self._link, self._open.worker) as report:
            self._busy = True
            if not self._over.is_set():
                self._begin()
            self._busy = False
            while (item := self._inbox.take()) is not None:
                self._busy = True
                if self._over.is_set():
                    break
                if isinstance(item, control.Request):
                    self._reply(item)
                else:
                    self._execute(item)
                self._busy = False
        if report.failed:
            self._busy = False
            self._over.wait()
        if self._worker is not None:
            self._worker.close()

    def _begin(self) -> None:
        from engine.run.worker.newest_rows import NewestRows
        from engine.run.worker.worker import Worker
        from engine.run.worker_process.worker_ranks import join_ranks

        opened, plan = self._open, cloudpickle.loads(self._open.plan)
        keep_pandas_out()  # unless the user's functions have it
        make_room_for_peers(len(plan.workers))
        gc.enable()  # off since the start (engine/run/launch/child.py)
        ranks = join_ranks(opened, plan, self._descriptors, self._channel)
        self._worker = Worker(
            opened.worker,
            plan,
            channel=self._channel.channel,
            inproc=opened.inproc,
            samples=_samples(opened, plan),
            recorder=_recorder(opened, plan),
            group=ranks.group,
            replica_group=ranks.replica_group,
            cast=ranks.broadcast,
            pairs=self._channel.pairs,
            memories=self._channel.memories,
            newest=None if opened.folder is None else NewestRows(opened.folder),
        )
        self._worker.timing.span = self._updates.span
        self._worker.runs.take_next = self._take_within
        self._worker.runs.ranks.hear(self._take_out, self._wait_for)
        for event in self._worker.open():
            self._updates.event(event)
        # A run may end before the next heartbeat.
        self._updates.report([*self._worker.reports(), *self._memory()])
        self._updates.event(m.WorkerOpened(worker=opened.worker, epoch=opened.epoch))
        self._updates.flush()
        gc.collect()
        gc.freeze()  # what imports and opening have made stays
        self._engine_before = self._count_engine()

    def _execute(self, instruction: m.ToWorker) -> None:
        for event in self._worker.execute(instruction):
            self._updates.event(event)
            if not isinstance(event, _WAITS_FOR_MORE):
                self._flush()
            while isinstance(request := self._inbox.within(), control.Request):
                self._reply(request)
        self._updates.count_ended()
        self._flush()
        if isinstance(instruction, m.RunChunk):
            for event in self._worker.delivery.settle():
                self._updates.event(event)
                self._flush()

    def _take_within(self, passes: Callable[[m.ToWorker], bool]) -> m.ToWorker | None:
        """What a run that goes on carries out next, once requests are answered."""
        while isinstance(item := self._inbox.within(passes), control.Request):
            self._reply(item)
        if item is not None:
            self._updates.count_ended()  # the run itself has not ended
        elif self._updates.has_events:  # which would wait for the run's next rows
            self._flush()
        return item

    def _take_out(self, instruction: m.ToWorker) -> None:
        """A run that goes on carries this out next."""
        self._inbox.remove(instruction)
        self._updates.count_ended()

    def _wait_for(self, wanted: Callable[[m.ToWorker], bool]) -> m.ToWorker | None:
        """Wait for an instruction that a run needs before it begins; None at the end."""
        self._flush()
        while isinstance(item := self._inbox.wait_for(wanted), control.Request):
            self._reply(item)
        if item is not None:
            self._updates.count_ended()
        return item

    def _reply(self, request: control.Request) -> None:
        self._flush()
        number = request.number
        try:
            ref = self._worker.files.answer(request.request)
            reply = control.RequestReply(number=number, ref=ref)
        except PeerLost as lost:
            reply = control.RequestReply(number=number, lost=lost.peer)
        self._flush()
        self._link.send(encode_message(reply))

    def _spilled_bytes(self) -> int:
        return self._channel.channel.spilled_bytes

    def _flush(self) -> None:
        self._updates.note_spill(self._spilled_bytes)
        self._updates.report(self._worker.reports())
        self._updates.report(self._channel.reports())
        if self._peaks.has_grown():
            self._updates.report(self._memory())
        self._updates.report(self._engine())
        self._updates.flush()

    def _engine(self) -> list[Report]:
        """What this process computed beside nodes, once that is long enough to be told."""
        seconds = self._count_engine()
        new_seconds = seconds - self._engine_before
        if new_seconds < _LEAST_ENGINE:
            return []
        self._engine_before = seconds
        report = ENGINE, new_seconds, 1.0
        return [report]

    def _count_engine(self) -> float:
        """Seconds of processors that this process has taken beside nodes."""
        in_nodes = self._worker.timing.computed
        return time.process_time() - in_nodes


def _samples(opened: control.Open, plan: Plan) -> Any:
    """The recorder's sample files, which it writes at once, so that it has no state."""
    from engine.keep.samples import SampleWriter

    if opened.samples is None:
        return None
    return SampleWriter(
        opened.samples,
        every=opened.samples_every,
        first=plan.first,
        phase=plan.phase_number,
    )


def _recorder(opened: control.Open, plan: Plan) -> Any:
    """What records this Worker's rows, if the run records any."""
    from engine.keep.record.recorder import RowRecorder

    if opened.record is None:
        return None
    return RowRecorder(opened.record, opened.worker, plan)


def main(descriptor: int) -> None:
    """Run the Worker at this end of a control socket."""
    leave_signals_to_the_run()
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, all_threads=True)
    make_output_ignore_full_disk()
    log_to_stderr("%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("engine").setLevel(logging.INFO)
    sock = socket.socket(fileno=descriptor)
    sock.set_inheritable(False)  # a child of a kernel would keep it open after this process
    link = ControlSocket(sock)
    frame, *early = _first(link)
    opened = decode_message(frame.payload, (control.Open,))
    life = WorkerProcess(link, opened, frame.descriptors)
    _log.info("worker %s, epoch %d, process %d", opened.worker, opened.epoch, os.getpid())
    threading.Thread(target=_listen, args=(life, early), name="control", daemon=True).start()
    ended_well = False
    try:
        life.work()
        ended_well = True
    finally:  # no finalisation: threads of kernels may still run
        if not ended_well:
            traceback.print_exc()
        end(0 if ended_well else 1)


def _listen(life: WorkerProcess, early: Sequence[Frame]) -> None:
    """The control thread. The process ends with it, since nobody could reach it without."""
    try:
        life.listen(early)
    except ConnectionError:
        end(1, "the process of the run is gone")
    finally:
        traceback.print_exc()
        end(1, "the control thread failed")


def _end_without_rows(error: BaseException) -> NoReturn:
    traceback.print_exception(error)
    end(1, "the thread that tells peers where rows are failed")


def _first(link: ControlSocket) -> list[Frame]:
    """The first frame, and those that came with it."""
    while not (frames := link.receive()):
        if frames is None:
            end(1, "the process of the run is gone")
    return frames


def end(code: int, why: str = "") -> NoReturn:
    """End this process now. Its children see the end of their pipe, or of their parent, and end."""
    if why:
        print(f"ended: {why}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
