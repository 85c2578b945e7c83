"""A thread that answers peers at a socket, which only peers with a known key reach.

    waits for                   unblocked by
    a request or a handshake    the peer; `close`, from the Worker's own threads

Owns: the ROUTER socket, its thread, refusing whoever's key is not, or no longer, known. Does not
own: keys (curve_keys.py), handshakes (authenticator.py), what is answered (server.py,
rendezvous.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections import Counter

import zmq

from dataflow.errors import RunError
from engine.channels.zmq.authenticator import CurveAuthenticator
from engine.channels.zmq.curve_keys import CurveKeyPair, Names

_log = logging.getLogger(__name__)

_UNSENT = 1024
"""Messages that a peer may leave unread; more are dropped, and the peer times out."""


class GuardedServer(ABC):
    """Answers requests from its own thread, once it was started, until `close`."""

    def __init__(
        self,
        name: str,
        context: zmq.Context,
        *,
        what: str,
        largest: int,
        bind: str,
        keys: CurveKeyPair | None,
        allowed: Names,
    ) -> None:
        """what: the peers want. largest: bytes of a request. Raises RunError if bind fails."""
        self.over = False
        self.router = _router(context, keys, what, largest)
        guard = CurveAuthenticator(context, self.router, allowed) if keys else None
        self._authenticator = guard
        # Handshakes and messages of each peer that were refused.
        self.refused = Counter[str]() if guard is None else guard.refused
        try:
            self.router.bind(bind)
        except zmq.ZMQError as error:
            self._close()
            problem = f"cannot bind {bind}: {error}. Fix: name an address of this host."
            raise RunError(f"{name}: {problem}") from error
        self.endpoint = self.router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name=f"{what} of {name}", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """End the thread and close the sockets."""
        if not self.over:
            self.over = True
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            os.close(self._wake)

    @abstractmethod
    def serve(self, identity: zmq.Frame, frames: list[zmq.Frame]) -> None:
        """Answer one message. Raises RunError for one that is refused."""

    def _run(self) -> None:
        try:
            self._answer_all()
        finally:
            self._close()

    def _close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.close()
        self.router.close(0)

    def _answer_all(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        poller.register(self.router, zmq.POLLIN)
        if self._authenticator is not None:
            self._authenticator.register(poller)
        while self._wake not in (ready := dict(poller.poll())):
            if self._authenticator is not None:
                self._authenticator.answer(ready)
            if self.router in ready:
                self._take()

    def _take(self) -> None:
        """Answer one message, or refuse it."""
        identity, *frames = self.router.recv_multipart(copy=False)
        try:
            if self._authenticator is not None and not self._authenticator.knows(identity):
                raise RunError("its key is no longer one of this run")
            self.serve(identity, frames)
        except RunError as error:
            peer = user(identity)
            self.refused[peer] += 1
            _log.warning("%s: request refused: %s", peer, error)


def _router(context: zmq.Context, keys: CurveKeyPair | None, what: str, largest: int) -> zmq.Socket:
    router: zmq.Socket = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.SNDHWM, _UNSENT)
    router.setsockopt(zmq.MAXMSGSIZE, largest)
    router.setsockopt(zmq.LINGER, 0)
    if keys is not None:
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        router.setsockopt(zmq.ZAP_DOMAIN, what.encode())
    return router


def user(frame: zmq.Frame) -> str:
    """The peer's name if it has a key, else its address."""
    for what in ("User-Id", "Peer-Address"):
        with contextlib.suppress(zmq.ZMQError):
            if property_text := frame.get(what):
                return str(property_text)
    return "a peer"
