"""The run's end of the link to another host's Supervisor.

    thread   waits for                                        unblocked by
    I/O      a frame, something to say, the next heartbeat    the host, the loop, the clock
    loop     nothing here (hosts.py waits for all links)      -

Owns: the DEALER socket, which reconnects by itself, and the lease. Does not own: numbers and
acknowledgements (line.py), the messages (hosts.py).
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import zmq

from dataflow.errors import RunError
from engine.channels.zmq.curve_keys import CurveKeyPair
from engine.launch.host_messages import Here, HostBeat, Look, Refused
from engine.launch.line import Line, aside, opened
from engine.launch.wire import decode, encode
from engine.observe.reports import Doing
from engine.plan.cluster import Host

_log = logging.getLogger(__name__)

BEAT = 0.5
"""Seconds between two heartbeats."""
_ASIDES = (HostBeat, Here, Refused)


class HostLink:
    """One conversation with one host. The I/O thread calls on_change when `hear` has something."""

    def __init__(
        self,
        host: Host,
        own: CurveKeyPair,
        server: bytes,
        lease: float,
        on_change: Callable[[], None],
    ) -> None:
        self.host = host
        self.doing: tuple[Doing, ...] = ()
        self.ahead = math.inf
        """Seconds by which this host's clock is ahead, plus the time of the fastest message."""
        self.moved = 0
        """Bytes sent and received."""
        self._lease = lease
        self._on_change = on_change
        self._line = Line(secrets.token_bytes(16))
        self._heard = time.monotonic()
        self._spoke = False
        self._refusal = ""
        self._changed = threading.Condition()
        """Guards what follows."""
        self._to_say: deque[bytes] = deque()
        self._came: deque[bytes] = deque()
        self._failure: RunError | None = None
        self._over = False
        self._context = zmq.Context()
        self._socket = dealer(self._context, host, own, server, lease)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name=f"link to {host.name}", daemon=True)
        self._thread.start()

    def say(self, message: Any) -> None:
        """Send, and send again until it has arrived; never blocks. A closed link sends nothing."""
        with self._changed:
            if not self._over:
                self._to_say.append(encode(message))
                os.eventfd_write(self._wake, 1)

    def hear(self) -> list[Any]:
        """The messages since the last call. Raises RunError once the host is given up."""
        with self._changed:
            found = [*self._came]
            self._came.clear()
            if not found and self._failure is not None:
                raise self._failure
        return [decode(body) for body in found]

    def close(self) -> None:
        """End the thread, close the socket."""
        with self._changed:
            if self._over:
                return
            self._over = True
            closed = f"host {self.host.name}: the link to it is closed"
            self._failure = self._failure or RunError(closed)
            os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._context.destroy(linger=0)
        os.close(self._wake)

    # --- the I/O thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        due = 0.0
        while not self._over:
            ready = dict(poller.poll(max(0, int((due - time.monotonic()) * 1e3))))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if self._socket in ready:
                self._receive()
            self._send()
            if time.monotonic() >= due:
                due = time.monotonic() + BEAT
                self._put(self._line.aside())
                self._look_for_silence()

    def _receive(self) -> None:
        """Read all that has come, before silence is judged."""
        came = False
        while self._socket.poll(0):
            data = self._socket.recv(zmq.NOBLOCK)
            self.moved += len(data)
            came = self._take(data) or came
        if came:
            self._put(self._line.aside())  # acknowledged at once
            self._on_change()

    def _take(self, data: bytes) -> bool:
        """Take one frame; whether `hear` has something new."""
        try:
            envelope = opened(data)
            if envelope.run != self._line.run:
                return False
            bodies, said = self._line.take(envelope, time.monotonic())
            beat = decode(said, _ASIDES) if said else None
        except RunError as error:
            _log.warning("host %s: %s", self.host.name, error)
            return False
        if isinstance(beat, Refused):
            return self._refused(beat.why)
        self._heard, self._spoke = time.monotonic(), True
        if isinstance(beat, HostBeat):
            self.ahead = min(self.ahead, self._heard - beat.now)
            self.doing = tuple(replace(d, since=d.since + self.ahead) for d in beat.doing)
        with self._changed:
            self._came.extend(bodies)
        return bool(bodies)

    def _refused(self, why: str) -> bool:
        """Before the run begins the host may become free; later it has given the run up."""
        if self._spoke:
            fix = "Fix: dataflow resume, from the last checkpoint."
            return self._fail(f"has given this run up: {why}. {fix}")
        if why != self._refusal:
            _log.warning("host %s: %s; waiting for it", self.host.name, why)
        self._refusal = why
        return False

    def _send(self) -> None:
        with self._changed:
            bodies = [*self._to_say]
            self._to_say.clear()
        now = time.monotonic()
        for frame in [*(self._line.say(body, now) for body in bodies), *self._line.again(now)]:
            self._put(frame)

    def _put(self, frame: bytes) -> None:
        """Send now; without a connection it is sent again later."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
            self.moved += len(frame)
        except zmq.Again:
            pass

    def _look_for_silence(self) -> None:
        silent = time.monotonic() - self._heard
        if silent <= self._lease:
            return
        where = f"tcp://{self.host.address}:{self.host.port}"
        if self._spoke:
            problem = f"not heard of for {silent:.0f} s (the lease is {self._lease:g} s)."
            fix = f"see {where} and the network to it; then dataflow resume,"
            self._fail(f"{problem} Fix: {fix} from the last checkpoint.")
        else:
            told = f", it said: {self._refusal}" if self._refusal else ""
            problem = f"expected an answer at {where} within {self._lease:g} s, found none{told}"
            fix = f"dataflow host CLUSTER {self.host.name} there, with the same key file"
            self._fail(f"{problem}. Fix: {fix}.")
        self._on_change()

    def _fail(self, problem: str) -> bool:
        with self._changed:
            self._failure = self._failure or RunError(f"host {self.host.name}: {problem}")
        return True


def look(host: Host, own: CurveKeyPair, server: bytes, lease: float) -> Here:
    """What a host has. Raises RunError if it does not answer."""
    context = zmq.Context()
    try:
        socket = dealer(context, host, own, server, lease)
        end = time.monotonic() + lease
        while time.monotonic() < end:
            if socket.poll(int(BEAT * 1e3), zmq.POLLOUT):
                socket.send(aside(b"", encode(Look())))
            if socket.poll(int(BEAT * 1e3)):
                found = decode(opened(socket.recv()).body, _ASIDES)
                if isinstance(found, Here):
                    return found
    finally:
        context.destroy(linger=0)
    raise RunError(
        f"host {host.name}: expected it to say what it has at tcp://{host.address}:{host.port},"
        f" found no answer within {lease:g} s. Fix: dataflow host CLUSTER {host.name} there, with"
        " the same key file; or give cores and memory_gib in the cluster file."
    )


def dealer(
    context: zmq.Context, host: Host, own: CurveKeyPair, server: bytes, lease: float
) -> zmq.Socket:
    """A socket that reconnects to a host; without a connection nothing is queued."""
    found: zmq.Socket = context.socket(zmq.DEALER)
    reconnect = ((zmq.IMMEDIATE, 1), (zmq.RECONNECT_IVL, 100), (zmq.RECONNECT_IVL_MAX, 1000))
    for option, value in (*living(lease), *reconnect, (zmq.CONNECT_TIMEOUT, 2000)):
        found.setsockopt(option, value)
    found.setsockopt(zmq.IPV6, int(":" in host.address))
    found.setsockopt(zmq.CURVE_SERVERKEY, server)
    found.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
    found.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
    found.connect(endpoint(host))
    return found


def endpoint(host: Host) -> str:
    """Where a host's Supervisor answers."""
    address = f"[{host.address}]" if ":" in host.address else host.address
    return f"tcp://{address}:{host.port}"


def living(lease: float) -> tuple[tuple[int, int], ...]:
    """Options of both ends: a silent connection is dropped long before the lease is over."""
    silence = int(min(3.0, lease / 4) * 1e3)
    return ((zmq.LINGER, 0), (zmq.HEARTBEAT_IVL, silence // 3), (zmq.HEARTBEAT_TIMEOUT, silence))
