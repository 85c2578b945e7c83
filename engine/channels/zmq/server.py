"""Rows for peers on other hosts: requests and their answers, at a Worker's guarded socket.

Owns: which request is answered how. Does not own: the socket and its thread (guarded_socket.py),
bytes (engine/channels/multipart.py), blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import pyarrow as pa
import zmq

from dataflow.errors import DataError, RunError
from engine.channels import multipart
from engine.channels.block_requests import (
    Answer,
    FetchRequest,
    MissingColumn,
    Reply,
    UnknownBlock,
    Wanted,
)
from engine.channels.contract import BlockRequest
from engine.channels.frames import checksums
from engine.channels.zmq.curve_keys import CurveKeyPair, Names
from engine.channels.zmq.guarded_socket import GuardedServer, user

_log = logging.getLogger(__name__)

Find = Callable[[BlockRequest], pa.RecordBatch]
"""Rows of a block; raises KeyError and DataError."""


class ZmqServer(GuardedServer):
    """Answers requests for rows. `endpoint`: where it is bound."""

    def __init__(
        self,
        name: str,
        epoch: int,
        context: zmq.Context,
        *,
        bind: str,
        find: Find,
        keys: CurveKeyPair | None,
        allowed: Names,
    ) -> None:
        largest = multipart.LARGEST_REQUEST
        super().__init__(
            name, context, what="rows", largest=largest, bind=bind, keys=keys, allowed=allowed
        )
        self._name = name
        self._find = find
        self._epoch = epoch
        self.start()

    def serve(self, identity: zmq.Frame, frames: list[zmq.Frame]) -> None:
        """See GuardedServer."""
        if len(frames) != 1:
            raise RunError(f"expected one frame, found {len(frames)}")
        request = multipart.request_of(frames[0].buffer)
        answers, rows = self._answers(request)
        try:
            self._reply(identity.bytes, request.id, answers, rows)
        except zmq.ZMQError as error:  # the peer is gone, or takes nothing more
            what = "%s: an answer of %d frames could not be sent: %s"
            _log.warning(what, user(identity), len(rows), error)

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
            return multipart.frame_block(wanted.block, self._find(wanted.request(self._name)))
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
        first, *rest = multipart.split_frames(frames)
        if not rest:
            self._send(peer, Reply(number, multipart.add_checksums(answers, first)), first)
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
        self.router.send_multipart(
            [peer, multipart.seal_message(message), *frames], zmq.NOBLOCK, copy=False
        )
