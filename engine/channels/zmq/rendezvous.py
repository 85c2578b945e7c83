"""Where the ranks of a group on several hosts meet: keys and values kept by its first rank.

Owns: the values, requests that wait for one, the messages of both ends. Does not own: the socket
and its thread (guarded_socket.py), asking (rendezvous_client.py), what ranks agree on
(engine/channels/tensors/world.py).

    what          answered
    set           at once
    add           at once: the new number; a missing one is 0
    check         at once: whether all keys are there
    compare_set   at once: the value afterwards, which is `desired` if it was `expected`
    get           with the value, once it is there
    wait          once all keys are there

A client has one request at a time, and asks again under the same number when a connection broke: it
is carried out once. Waiting has no limit here, since the client's next request ends it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import zmq

from dataflow.errors import RunError
from engine.channels.zmq.curve_keys import CurveKeyPair, Names, require_safe
from engine.channels.zmq.guarded_socket import GuardedServer

What = Literal["set", "add", "check", "compare_set", "get", "wait"]
_LARGEST = 1 << 20
"""Bytes of a message."""
_VALUES: dict[What, int] = {"set": 1, "compare_set": 2}
"""How many values come with a request, if any."""
_DIGITS = 19


class StoreRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """client: random, of one end. number: counts its requests, from 1."""

    client: bytes
    number: int
    what: What
    keys: list[str]
    values: list[bytes] = []
    amount: int = 0


class StoreReply(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The answer to the request of this number."""

    number: int
    value: bytes = b""


_REQUEST = msgspec.msgpack.Decoder(StoreRequest)
encoded = msgspec.msgpack.encode


@dataclass(slots=True)
class _Client:
    """One end: where it is now, its last request, and the answer to that, None while it waits."""

    identity: bytes
    request: StoreRequest
    answer: bytes | None = None


@dataclass(slots=True)
class _Values:
    """What the ranks have set."""

    held: dict[str, bytes] = field(default_factory=dict)

    def carry_out(self, request: StoreRequest) -> bytes | None:
        """The answer; None if it has to wait. Raises RunError for what cannot be."""
        keys, values = request.keys, request.values
        if request.what in ("wait", "check"):
            all_set = all(key in self.held for key in keys)
            if request.what == "check":
                return b"%d" % all_set
            return b"" if all_set else None
        if len(keys) != 1 or len(values) != _VALUES.get(request.what, 0):
            contents = f"{len(keys)} keys, {len(values)} values"
            raise RunError(f"expected a request of one key, found {request.what} of {contents}")
        return self._of_one(request, keys[0])

    def _of_one(self, request: StoreRequest, key: str) -> bytes | None:
        values = request.values
        match request.what:
            case "set":
                self.held[key] = values[0]
                return b""
            case "add":
                self.held[key] = b"%d" % (_number(self.held.get(key, b"0")) + request.amount)
            case "compare_set":
                expected, desired = values
                if self.held.get(key, b"") != expected:
                    return self.held.get(key, expected)
                self.held[key] = desired
        return self.held.get(key)


def _number(text: bytes) -> int:
    digits = text.removeprefix(b"-")
    if not digits.isdigit() or len(digits) > _DIGITS:
        raise RunError("expected a number to add to, found another value")
    return int(text)


@dataclass(frozen=True, slots=True)
class _RanksOnly:
    """The names of these Workers alone."""

    names: Names
    ranks: frozenset[str]

    def get(self, key: bytes, /) -> str | None:
        """See Names."""
        name = self.names.get(key)
        return name if name in self.ranks else None


class MeetingServer(GuardedServer):
    """The first rank's end. ranks: the Workers that may ask. keys: None in a private network."""

    def __init__(
        self,
        name: str,
        ranks: Iterable[str],
        *,
        bind: str,
        keys: CurveKeyPair | None,
        allowed: Names,
        private: bool = False,
    ) -> None:
        require_safe(bind, keys, private=private)
        self._context = zmq.Context()
        only = _RanksOnly(allowed, frozenset(ranks))
        try:
            super().__init__(
                name,
                self._context,
                what="meeting",
                largest=_LARGEST,
                bind=bind,
                keys=keys,
                allowed=only,
            )
        except RunError:
            self._context.destroy(linger=0)
            raise
        self._values = _Values()
        self._clients: dict[bytes, _Client] = {}
        self.start()

    def close(self) -> None:
        """End the thread; whoever asks finds nobody."""
        super().close()
        self._context.destroy(linger=0)

    def serve(self, identity: zmq.Frame, frames: list[zmq.Frame]) -> None:
        """See GuardedServer."""
        request = _request(frames)
        client = self._clients.get(request.client)
        if client is not None and request.number <= client.request.number:
            if request.number == client.request.number:
                client.identity = identity.bytes
                self._say(client)
            return
        answer = self._values.carry_out(request)
        client = _Client(identity.bytes, request, answer)
        self._clients[request.client] = client
        self._say(client)
        if request.what in ("set", "add", "compare_set"):
            self._answer_waiting()

    def _answer_waiting(self) -> None:
        for client in self._clients.values():
            if client.answer is None:
                client.answer = self._values.carry_out(client.request)
                self._say(client)

    def _say(self, client: _Client) -> None:
        if client.answer is not None:
            reply = encoded(StoreReply(client.request.number, client.answer))
            with contextlib.suppress(zmq.ZMQError):  # it is gone, or asks again
                self.router.send_multipart([client.identity, reply], zmq.NOBLOCK)


def _request(frames: list[zmq.Frame]) -> StoreRequest:
    if len(frames) != 1:
        raise RunError(f"expected one frame, found {len(frames)}")
    try:
        return _REQUEST.decode(frames[0].buffer)
    except (msgspec.DecodeError, RecursionError, ValueError, OverflowError) as error:
        raise RunError(f"expected a request of a rank, found {error}") from error
