"""Keys that Workers make for themselves: who is answered while peers come, go and come back."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

import pytest

from engine.channels.contract import PeerLost
from engine.channels.routed_channel import AddressBook, AddressEntry, RoutedChannel
from engine.channels.shm.channel import ShmChannel
from engine.channels.zmq.channel import ZmqChannel
from engine.channels.zmq.curve_keys import CurveKeyPair, PeerKeys
from engine.run.control import control, wire
from engine.run.control.control_socket import ControlSocket
from engine.run.worker_process.worker_process import WorkerProcess
from tests.contracts.pull_rows import rollouts
from tests.contracts.pull_worlds import of_a

pytestmark = pytest.mark.timeout(60)


class FarWorker:
    """One incarnation of a Worker that is alone on its host, with keys of its own."""

    def __init__(self, name: str, epoch: int = 0) -> None:
        self.name, self.book, self.keys = name, AddressBook(), CurveKeyPair.make()
        shm = ShmChannel(name, epoch, _nobody)
        far = ZmqChannel(
            name,
            epoch,
            self.book.address,
            keys=self.keys,
            allowed=self.book.keys,
            patience=1.0,
            heartbeat=1.0,
            outbox=shm,
        )
        self.channel = RoutedChannel(shm, near=frozenset(), far=far, book=self.book, lease=1.0)
        public = self.keys.public
        self.entry = AddressEntry(endpoint=self.channel.endpoint, epoch=epoch, key=public)

    def knows(self, other: FarWorker) -> None:
        """It is told of another one."""
        self.book.write(other.name, other.entry)


def _nobody(peer: str) -> socket.socket:
    raise AssertionError(f"{peer} is on another host")


@contextmanager
def far_workers(*names: str) -> Iterator[list[FarWorker]]:
    workers = [FarWorker(name, epoch) for epoch, name in enumerate(names) if name]
    yield workers
    for worker in workers:
        worker.channel.close()


def test_after_a_respawn_only_the_new_key_is_answered() -> None:
    """Not even over a connection that the old process made while its key was known."""
    with far_workers("a", "b", "b") as (a, old, new):
        request = of_a(a.channel.keep(rollouts(3, 4)))
        for one, other in ((a, old), (old, a), (new, a)):
            one.knows(other)
        assert old.channel.fetch(request)[0].num_rows == 3
        a.knows(new)
        assert new.channel.fetch(request)[0].num_rows == 3
        with pytest.raises(PeerLost):
            old.channel.fetch(request)
        assert a.channel.refusals["b"] > 0, "it was refused over its old connection"
        a.knows(old)  # a message that was late
        with pytest.raises(PeerLost):
            old.channel.fetch(request)
        assert new.channel.fetch(request)[0].num_rows == 3


def test_whoever_asks_before_its_key_is_known_asks_again() -> None:
    with far_workers("a", "b") as (a, b):
        b.knows(a)
        request = of_a(a.channel.keep(rollouts(3, 4)))
        waits, refused = b.book.wait, threading.Event()

        def wait(seconds: float) -> None:
            if not refused.is_set():
                refused.set()
                a.knows(b)
            waits(seconds)

        b.book.wait = wait  # type: ignore[method-assign]
        assert b.channel.fetch(request)[0].num_rows == 3
        assert refused.is_set()
        assert sum(a.channel.refusals.values()) >= 1


def test_whose_key_never_comes_is_refused_for_no_longer_than_the_lease() -> None:
    with far_workers("a", "b") as (a, b):
        b.knows(a)
        request = of_a(a.channel.keep(rollouts(3, 4)))
        with pytest.raises(PeerLost, match="refused the connection, or has another key"):
            b.channel.fetch(request)


def test_a_peer_has_one_key_and_none_once_it_is_gone() -> None:
    keys = PeerKeys()
    keys.put("b", b"first")
    keys.put("c", b"third")
    keys.put("b", b"second")
    assert [keys.get(k) for k in (b"first", b"second", b"third", b"")] == [None, "b", "c", None]
    keys.put("b", b"")
    assert [keys.get(k) for k in (b"second", b"third", b"")] == [None, "c", None]


@pytest.mark.parametrize("private", [False, True])
def test_a_worker_tells_its_public_key_and_never_the_secret_one(
    monkeypatch: pytest.MonkeyPatch, private: bool
) -> None:
    pair = CurveKeyPair.make()
    monkeypatch.setattr(CurveKeyPair, "make", staticmethod(lambda: pair))
    network = control.Network(
        worker="w", address="127.0.0.1", near=("w",), private=private, lease=5.0
    )
    opened = control.Open(worker="w", epoch=3, plan=b"", outbox=1 << 20, network=network)
    said = messages_of(opened)
    (bound,) = [m for m in map(wire.decode_message, said) if isinstance(m, control.ChannelBound)]
    assert bound.key == (b"" if private else pair.public)
    assert not [data for data in (*said, wire.encode_message(opened)) if pair.secret in data]


def messages_of(opened: control.Open) -> list[bytes]:
    """What a Worker's process says when it starts, and when it fails with its keys in hand."""
    mine, theirs = socket.socketpair()
    life = WorkerProcess(ControlSocket(theirs), opened, ())
    life._over.set()  # it does not wait for Quit
    life.work()  # there is no plan
    life._channel.channel.close()
    theirs.close()
    mine.setblocking(False)
    link, said = ControlSocket(mine), []
    while (frames := link.receive()) is not None:
        said += [bytes(frame.payload) for frame in frames]
    mine.close()
    return said


def test_no_message_has_room_for_a_secret() -> None:
    for kind in (*wire.CONTROL, *wire.HOSTING, control.Network, control.PeerAddress):
        named = {field.name: str(field.type) for field in fields(kind)}
        assert "secret" not in named
        assert not [shown for shown in named.values() if "CurveKeyPair" in shown]
