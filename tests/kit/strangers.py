"""Peers at a run's ports that do not belong to it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import zmq

from engine.channels.zmq.curve_keys import Address, CurveKeyPair


@contextlib.contextmanager
def stranger(address: Address, kind: str, keys: CurveKeyPair | None = None) -> Iterator[zmq.Socket]:
    """A peer that connects with `no key`, by the weaker mechanism `plain`, or else by keys that
    nobody there knows. keys: those of somebody who is known, and has no business there.
    """
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    if kind == "plain":
        socket.setsockopt(zmq.PLAIN_USERNAME, b"run")
        socket.setsockopt(zmq.PLAIN_PASSWORD, b"run")
    elif kind != "no key":
        own = keys or CurveKeyPair.make()
        assert address.key is not None
        socket.setsockopt(zmq.CURVE_SERVERKEY, address.key)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
    socket.connect(address.endpoint)
    try:
        yield socket
    finally:
        context.destroy(linger=0)
