"""The thread of a Worker that sends rows to peers on other hosts.

    waits for                   unblocked by
    a request or a handshake    the peer; `close`, from the Worker's own threads

Owns: the ROUTER socket. Does not own: its peers (authenticator.py), multipart.py, blocks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa
import zmq

from dataflow.errors import DataError, RunError
from engine.channels import multipart
from engine.channels.contract import BlockRequest
from engine.channels.frames import checksums
from engine.channels.header import Answer, FetchRequest, MissingColumn, Reply, UnknownBlock, Wanted
from engine.channels.zmq.authenticator import CurveAuthenticator
from engine.channels.zmq.curve_keys import CurveKeyPair

_log = logging.getLogger(__name__)

_UNSENT = 1024
"""Messages that a peer may leave unread; more are dropped, and the peer times out."""

Find = Callable[[BlockRequest], pa.RecordBatch]
"""Rows of a block; raises KeyError and DataError."""


class ZmqServer:
    """Answers requests from its own thread, until `close`. `endpoint`: where it is bound."""

    def __init__(
        self,
        name: str,
        epoch: int,
        context: zmq.Context,
        *,
        bind: str,
        find: Find,
        keys: CurveKeyPair | None,
        allowed: Mapping[bytes, str],
    ) -> None:
        self._name = name
        self._find = find
        self._epoch = epoch
        self._over = False
        self._router = _router(context, keys)
        self._authenticator = CurveAuthenticator(context, self._router, allowed) if keys else None
        # Handshakes and messages of each peer that were refused.
        self.refused = Counter[str]() if not self._authenticator else self._authenticator.refused
        try:
            self._router.bind(bind)
        except zmq.ZMQError as error:
            self._close()
            problem = f"cannot bind {bind}: {error}. Fix: name an address of this host."
            raise RunError(f"{name}: {problem}") from error
        self.endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name=f"rows of {name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and close the sockets."""
        if not self._over:
            self._over = True
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            os.close(self._wake)

    def _run(self) -> None:
        try:
            self._answer_all()
        finally:
            self._close()

    def _close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.close()
        self._router.close(0)

    def _answer_all(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        if self._authenticator is not None:
            self._authenticator.register(poller)
        while self._wake not in (ready := dict(poller.poll())):
            if self._authenticator is not None:
                self._authenticator.answer(ready)
            if self._router in ready:
                self._serve()

    def _serve(self) -> None:
        """Answer one request."""
        identity, *frames = self._router.recv_multipart(copy=False)
        try:
            if len(frames) != 1:
                raise RunError(f"expected one frame, found {len(frames)}")
            request = multipart.request_of(frames[0].buffer)
            answers, rows = self._answers(request)
        except RunError as error:
            peer = _user(identity)
            self.refused[peer] += 1
            _log.warning("%s: request refused: %s", peer, error)
            return
        try:
            self._reply(identity.bytes, request.id, answers, rows)
        except zmq.ZMQError as error:  # the peer is gone, or takes nothing more
            what = "%s: an answer of %d frames could not be sent: %s"
            _log.warning(what, _user(identity), len(rows), error)

    def _answers(self, request: FetchRequest) -> tuple[list[Answer], list[pa.Buffer]]:
        answers: list[Answer] = []
        frames: list[pa.Buffer] = []
        for wanted in request.wanted:
            answer, buffers = self._answer(wanted)
            answers.append(answer)
            frames += buffers
        return answers, frames

    def _answer(self, wanted: Wanted) -> tuple[Answer, list[pa.Buffer]]:
        try:
            return multipart.framed(wanted.block, self._find(wanted.request(self._name)))
        except KeyError:
            return UnknownBlock(wanted.block, self._epoch), []
        except DataError as error:
            return MissingColumn(wanted.block, str(error)), []
        except pa.ArrowException as error:
            raise RunError(f"rows that block {wanted.block} does not have: {error}") from error

    def _reply(
        self, peer: bytes, number: int, answers: list[Answer], frames: Sequence[pa.Buffer]
    ) -> None:
        """Send answers; hash a large one's frames while they are on their way."""
        first, *rest = multipart.parts_of(frames)
        if not rest:
            self._send(peer, Reply(number, multipart.summed(answers, first)), first)
            return
        self._send(peer, Reply(number, answers, len(rest)), first)
        sums = checksums(first)
        for index, part in enumerate(rest):
            self._send(peer, multipart.FramesPart(number, index), part)
            sums += checksums(part)
        self._send(peer, multipart.FrameSums(number, sums))

    def _send(
        self, peer: bytes, message: multipart.Message, frames: Sequence[pa.Buffer] = ()
    ) -> None:
        self._router.send_multipart(
            [peer, multipart.sealed(message), *frames], zmq.NOBLOCK, copy=False
        )


def _router(context: zmq.Context, keys: CurveKeyPair | None) -> zmq.Socket:
    router: zmq.Socket = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.SNDHWM, _UNSENT)
    router.setsockopt(zmq.MAXMSGSIZE, multipart.LARGEST_REQUEST)
    router.setsockopt(zmq.LINGER, 0)
    if keys is not None:
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        router.setsockopt(zmq.ZAP_DOMAIN, b"rows")
    return router


def _user(frame: zmq.Frame) -> str:
    """The peer's name if it has a key, else its address."""
    for what in ("User-Id", "Peer-Address"):
        with contextlib.suppress(zmq.ZMQError):
            if found := frame.get(what):
                return str(found)
    return "a peer"
