"""The I/O thread of a Supervisor: it reads from its Workers' processes and reaps them.

    waits for                                      unblocked by
    a frame, an end, room to send, a silence       Workers, the clock
    a new process, an unsent frame, the end        the loop's thread (`watch`, `send`, `close`)

Owns: reading, reaping, judging silence and failures, and what the loop has not taken yet. Does not
own: starting processes, what they are sent (supervisor.py).
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dataflow.errors import RunError
from engine.protocol import messages as m
from engine.protocol.reports import Doing, Report, SpanOf
from engine.run.control import control
from engine.run.control.thread_errors import ErrorsTo
from engine.run.control.wire import TO_SUPERVISOR, decode_message
from engine.run.launch.child import ChildProcess, wait_until_over
from engine.run.launch.failures import Failures
from engine.run.launch.heartbeat import mark_silent
from engine.run.launch.ranks import Group

_REAP = 20.0
"""Seconds for the kernel to end a process that was killed."""


class WorkerIO:
    """`changed` guards this and the children. The loop takes events, replies, reports, spans, and
    what users' functions printed.
    """

    def __init__(
        self,
        groups: Mapping[str, Group],
        heartbeat: float,
        on_change: Callable[[], None],
        far: Mapping[str, float],
    ) -> None:
        """groups, far: see Failures."""
        self.changed = threading.Condition()
        self.children: dict[str, ChildProcess] = {}
        """The newest incarnation of each Worker."""
        self.events: deque[m.Event | m.From] = deque()
        self.replies: dict[int, control.RequestReply] = {}
        self.reports: list[Report] = []
        self.spans: list[SpanOf] = []
        self.printed: list[str] = []
        self.failure: BaseException | None = None
        self._failures = Failures(groups, far)
        self._heartbeat = heartbeat
        self._on_change = on_change
        self._watched: dict[ChildProcess, None] = {}
        """In order, until they are reaped; a Worker that is restarting may have two."""
        self._moved = 0
        self._closing = False
        self._wake_end, self._woken_end = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    # --- the loop's thread ------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def watch(self, child: ChildProcess) -> None:
        """Watch the new incarnation of its Worker."""
        with self.changed:
            self.children[child.name] = child
            self._watched[child] = None
        self._wake()

    def send(
        self, child: ChildProcess, message: control.Control, descriptors: tuple[int, ...] = ()
    ) -> None:
        """Never blocks: the I/O thread sends what does not fit now."""
        child.send(message, descriptors)
        if child.link.unsent:
            self._wake()

    def wait_for(self, holds: Callable[[], Any], timeout: float | None = None) -> None:
        """With `changed` held: wait until this holds. Raises the failure there is."""
        self.changed.wait_for(lambda: self.failure is not None or holds(), timeout)
        self.raise_failure()

    def raise_failure(self) -> None:
        """With `changed` held: raise the failure there is, if any."""
        if self.failure is not None:
            raise self.failure

    def note_gone(self, worker: str, epoch: int) -> None:
        """A Worker of another host has ended; ranks here that fail beside it are no failures."""
        with self.changed:
            self._failures.note_gone(worker, epoch)

    def abandon(self, error: BaseException) -> None:
        """From any thread: make every wait of the loop's thread raise this."""
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    @property
    def busy(self) -> bool:
        """With `changed` held: whether any Worker is busy."""
        return any(c.busy for c in self.children.values())

    @property
    def moved_bytes(self) -> int:
        """With `changed` held: bytes sent and received on control sockets so far."""
        return self._moved + sum(c.link.moved for c in self._watched)

    def closing(self) -> list[ChildProcess] | None:
        """Report no end from now on. Returns the children that are left, None if called before."""
        with self.changed:
            if self._closing:
                return None
            self._closing = True
            return list(self._watched)

    def end(self, children: Sequence[ChildProcess]) -> None:
        """Kill them and wait until they are reaped: by the I/O thread if it runs, else here."""
        for child in children:
            child.kill()
            if not self._thread.is_alive():
                child.reap()
                child.over.set()
        for child in wait_until_over(children, _REAP):
            pid, expected = child.process.pid, f"to end within {_REAP:g} s of its kill"
            fix = f"Fix: see what it waits for in /proc/{pid}/stack."
            problem = f"expected process {pid} {expected}, found it there"
            raise RunError(f"worker {child.name}: {problem}. {fix}")

    def close(self) -> None:
        """End the thread."""
        self._wake_end.close()  # the thread ends at EOF
        if self._thread.ident is not None:
            self._thread.join()
        self._woken_end.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_end.send(b"w", socket.MSG_DONTWAIT)

    # --- the I/O thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        with ErrorsTo(self._raise_in_the_loop), selectors.DefaultSelector() as selector:
            selector.register(self._woken_end, selectors.EVENT_READ, None)
            before = time.monotonic()
            while True:
                self._register(selector)
                for key, events in selector.select(timeout=1.0):
                    if key.data is None:
                        if not self._woken_end.recv(4096):
                            return
                    else:
                        act, child = key.data
                        act(selector, child, events)
                before = self.look_for_silence(before)

    def _raise_in_the_loop(self, error: BaseException) -> None:
        """Let the loop raise what goes wrong in this thread."""
        self.abandon(error)
        self._on_change()

    def _register(self, selector: selectors.BaseSelector) -> None:
        """Watch new children; wait for room only where something is left to send."""
        with self.changed:
            children = list(self._watched)
        known = selector.get_map()
        for child in children:
            if child.ends not in known:
                selector.register(child.ends, selectors.EVENT_READ, (self._on_end, child))
                selector.register(child.link, selectors.EVENT_READ, (self._on_link, child))
            elif child.link.fileno() in known:
                wanted = selectors.EVENT_READ
                if child.link.unsent:
                    wanted |= selectors.EVENT_WRITE
                if known[child.link.fileno()].events != wanted:
                    selector.modify(child.link, wanted, (self._on_link, child))

    def _on_link(self, selector: selectors.BaseSelector, child: ChildProcess, events: int) -> None:
        if child.over.is_set():  # its end came before this in the same list
            return
        if events & selectors.EVENT_WRITE:
            with contextlib.suppress(OSError):
                child.link.flush()
        if events & selectors.EVENT_READ and not self._read(child):
            selector.unregister(child.link)
            with self.changed:
                child.lost = True
            child.kill()  # nobody can reach it any more

    def _on_end(self, selector: selectors.BaseSelector, child: ChildProcess, events: int) -> None:
        """Read what it sent before its end, reap it, report the loss."""
        del events
        selector.unregister(child.ends)
        if child.link.fileno() in selector.get_map():
            selector.unregister(child.link)
            while self._read(child, once=True):
                pass
        error = child.reap()
        # Its events are in the list already: the coordinator hears them before the loss.
        with self.changed:
            del self._watched[child]
            self._moved += child.link.moved
            if not (self._closing or child.replaced):
                epoch = child.epoch
                self.events.append(m.WorkerLost(worker=child.name, epoch=epoch, error=error))
            child.over.set()
            self.changed.notify_all()
        self._on_change()

    def _read(self, child: ChildProcess, *, once: bool = False) -> bool:
        """Read what has come. False: nothing more will come; with `once`, nothing is left."""
        try:
            frames = child.link.receive()
            for frame in frames or ():
                self._hear(child, decode_message(frame.payload, TO_SUPERVISOR))
        except RunError as error:
            child.error = f"was killed as it sent what is no message: {error}"
            return False
        return frames is not None and not (once and not frames)

    def _hear(self, child: ChildProcess, message: control.ToSupervisor) -> None:
        with self.changed:
            child.heard = time.monotonic()
            first, child.spoke = not child.spoke, True
            match message:
                case control.WorkerUpdate():
                    self._take(child, message)
                case control.ChannelBound():
                    child.endpoint, child.key = message.endpoint, message.key
                    child.meeting = message.meeting
                case control.RequestReply(number=number):
                    self.replies[number] = message
                case control.Beat(doing=doing):
                    child.doing = doing
                    if not first:
                        return
                case control.Failed():
                    self._failures.add(child, message.error(), child.heard)
                    verdict = self._failures.judge(self.children, child.heard)
                    self.failure = self.failure or verdict
            self.changed.notify_all()
        self._on_change()

    def _take(self, child: ChildProcess, update: control.WorkerUpdate) -> None:
        for _ in range(min(update.ended - child.ended, len(child.under_way))):
            child.under_way.popleft()
        child.ended = max(child.ended, update.ended)
        child.opened |= any(isinstance(each.event, m.WorkerOpened) for each in update.events)
        self.events.extend(update.events)
        self.reports.extend(update.reports)
        self.spans.extend(update.spans)
        self.printed.extend(update.printed)
        if any(span.end >= child.doing.since for span in update.spans if not span.waits):
            child.doing = Doing(worker=child.name)  # it has ended since the last heartbeat

    def look_for_silence(self, before: float) -> float:
        """Kill silent Workers, judge earlier failures. before: the last call. Returns the time."""
        now = time.monotonic()
        with self.changed:
            failed = self._failures.judge(self.children, now)
            children = [c for c in self._watched if not c.lost]
            given_up = mark_silent(children, before, now, self._heartbeat)
        for child in given_up:
            child.kill()
        if failed is not None:
            self.abandon(failed)
            self._on_change()
        return now
