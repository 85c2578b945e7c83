"""A host's end of the link to the process of a run.

    thread   waits for                                          unblocked by
    I/O      a frame, a handshake, a message, a heartbeat       the run, the main thread, the clock
    main     a message of the run, a change here (`take`)       I/O, the Supervisor's thread

Owns: the ROUTER socket, authentication, the lease, one run at a time. Does not own: carrying out
messages (host.py), numbers and acknowledgements (line.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from dataflow.errors import RunError
from engine.channels.zmq.authenticator import CurveAuthenticator
from engine.channels.zmq.curve_keys import CurveKeyPair
from engine.launch import host_messages as hm
from engine.launch.control import Forget, PeerAddresses, Quit
from engine.launch.hostlink import BEAT, endpoint, living
from engine.launch.line import Envelope, Line, aside, opened
from engine.launch.wire import decode, encode
from engine.observe.reports import Doing
from engine.plan.cluster import Host, detect

_log = logging.getLogger(__name__)

CHANGED = object()
"""What `take` returns when something has changed on this host."""
_LARGEST = 1 << 30
"""Bytes of one message."""
_FROM_RUN = (hm.Begin, hm.Relay, hm.RelayRequest, hm.RespawnThere, Forget, PeerAddresses, Quit)


class Desk:
    """Serves one run. The I/O thread calls on_end when the run ends or is given up, and doing."""

    def __init__(self, host: Host, own: CurveKeyPair, client: bytes) -> None:
        """own: this host's keys; client: the public key of runs. Raises RunError if bind fails."""
        self.on_end: Callable[[], None] = lambda: None
        self.doing: Callable[[], list[Doing]] = list
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._pending = False
        self._line: Line | None = None
        self._lease = 0.0
        self._peer = b""
        self._heard = 0.0
        self._ended = False
        self._given_up = False
        self._over = False
        self._settled = threading.Event()
        self._to_say: deque[bytes] = deque()
        self._context = zmq.Context()
        self._router: zmq.Socket = self._context.socket(zmq.ROUTER)
        for option, value in (*living(30.0), (zmq.MAXMSGSIZE, _LARGEST), (zmq.CURVE_SERVER, 1)):
            self._router.setsockopt(option, value)
        self._router.setsockopt(zmq.IPV6, int(":" in host.address))
        self._router.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
        self._router.setsockopt(zmq.ZAP_DOMAIN, b"hosts")
        self._door = CurveAuthenticator(self._context, self._router, {client: "run"})
        try:
            self._router.bind(endpoint(host))
        except zmq.ZMQError as error:
            self._door.close()
            self._context.destroy(linger=0)
            raise RunError(
                f"host {host.name}: cannot answer at {endpoint(host)}: {error}. Fix: the address"
                " that the cluster file gives has to be this host's, and its port free."
            ) from error
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="desk", daemon=True)
        self._thread.start()

    @property
    def refused(self) -> int:
        """How many handshakes were refused."""
        return sum(self._door.refused.values())

    def take(self) -> Any:
        """The next message of the run, or CHANGED; None once the run has ended or is given up."""
        item = self._inbox.get()
        if item is CHANGED:
            self._pending = False
        return item

    def changed(self) -> None:
        """Let `take` return CHANGED; from any thread."""
        if not self._pending:
            self._pending = True
            self._inbox.put(CHANGED)

    def wake(self) -> None:
        """From any thread: let `take` return CHANGED, or None if no run has come yet."""
        if self._line is None:
            self._inbox.put(None)
        else:
            self.changed()

    def say(self, message: Any) -> None:
        """To the run; never blocks."""
        self._settled.clear()
        self._to_say.append(encode(message))
        os.eventfd_write(self._wake, 1)

    def settle(self, seconds: float) -> None:
        """Wait until the run has everything, at most `seconds`; not if it was given up."""
        if not self._given_up:
            self._settled.wait(seconds)

    def close(self) -> None:
        """End the thread, close the sockets."""
        self._over = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._door.close()
        self._context.destroy(linger=0)
        os.close(self._wake)

    # --- the I/O thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        self._door.register(poller)
        due = 0.0
        while not self._over:
            ready = dict(poller.poll(max(0, int((due - time.monotonic()) * 1e3))))
            self._door.answer(ready)
            if self._wake in ready:
                os.eventfd_read(self._wake)
            came = False
            while self._router.poll(0):
                came = self._receive() or came
            self._send(acknowledge=came)
            if time.monotonic() >= due:
                due = time.monotonic() + BEAT
                self._beat()

    def _receive(self) -> bool:
        """Whether a message of the run came."""
        peer, *frames = self._router.recv_multipart(zmq.NOBLOCK)
        try:
            envelope = opened(frames[0] if frames else b"")
            if self._line is None:
                return self._first(peer, envelope)
            if envelope.run == self._line.run:
                return self._hear(peer, envelope)
            if not self._looked(peer, envelope):
                refused = hm.Refused(why="it serves another run, or has given this up")
                self._put(peer, aside(envelope.run, encode(refused)))
        except RunError as error:
            _log.warning("what came was refused: %s", error)
        return False

    def _looked(self, peer: bytes, envelope: Envelope) -> bool:
        """Answer a Look; whether it was one."""
        if envelope.run or not isinstance(decode(envelope.body, (hm.Look,)), hm.Look):
            return False
        found = detect()
        here = hm.Here(cores=found.cores, memory=found.memory, gpus=found.gpus)
        self._put(peer, aside(b"", encode(here)))
        return True

    def _first(self, peer: bytes, envelope: Envelope) -> bool:
        """A run begins with message 0; any other belongs to a run that was given up."""
        if self._looked(peer, envelope):
            return False
        if envelope.number != 0:
            if envelope.body or envelope.ack:
                refused = hm.Refused(why="nothing is known of it here")
                self._put(peer, aside(envelope.run, encode(refused)))
            return False
        begin = decode(envelope.body, (hm.Begin,))
        self._line, self._lease = Line(envelope.run), begin.lease
        return self._hear(peer, envelope)

    def _hear(self, peer: bytes, envelope: Envelope) -> bool:
        assert self._line is not None
        self._peer, self._heard = peer, time.monotonic()
        bodies, _ = self._line.take(envelope, self._heard)
        for body in bodies:
            message = decode(body, _FROM_RUN)
            if isinstance(message, Quit):
                self._end()
            else:
                self._inbox.put(message)
        return bool(bodies)

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._inbox.put(None)
            self.on_end()

    def _send(self, *, acknowledge: bool) -> None:
        if self._line is None:
            return
        now = time.monotonic()
        frames = []
        while self._to_say:
            frames.append(self._line.say(self._to_say.popleft(), now))
        frames += self._line.again(now)
        for frame in frames or ([self._line.aside()] if acknowledge else []):
            self._put(self._peer, frame)
        if self._line.settled:
            self._settled.set()

    def _beat(self) -> None:
        if self._line is None:
            return
        beat = hm.HostBeat(now=time.monotonic(), doing=tuple(self.doing()))
        self._put(self._peer, self._line.aside(encode(beat)))
        silent = time.monotonic() - self._heard
        if silent > self._lease and not self._ended:
            text = "nothing was heard of the run for %.0f s: its Workers here are ended"
            _log.warning(text, silent)
            self._given_up = True
            self._end()

    def _put(self, peer: bytes, frame: bytes) -> None:
        with contextlib.suppress(zmq.Again, zmq.ZMQError):  # it is sent again later
            self._router.send_multipart([peer, frame], zmq.NOBLOCK)
