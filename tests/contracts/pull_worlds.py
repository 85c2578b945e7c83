"""Several Workers' channels in one process, of each kind in the pull contract."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from engine.channels.contract import BlockRequest, Channel, PeerLost
from engine.channels.inproc import InprocChannel
from engine.channels.shm.channel import ShmChannel
from engine.channels.zmq.channel import ZmqChannel
from engine.channels.zmq.curve_keys import Address, CurveKeyPair


class ChannelWorld:
    """Channels a, b, c, ... that know each other; `kill` ends one as its process' death would."""

    def __init__(self, make: Callable[[ChannelWorld, str, int], Channel]) -> None:
        self._make = make
        self.channels: dict[str, Any] = {}
        self.changing = threading.Lock()
        """Held by who makes a connection to a channel, or lets one end: threads may do both."""

    def __getitem__(self, name: str) -> Any:
        if name not in self.channels:
            self.channels[name] = self._make(self, name, 0)
        return self.channels[name]

    def respawn(self, name: str, epoch: int) -> Any:
        self.channels[name] = self._make(self, name, epoch)
        return self.channels[name]

    def kill(self, name: str) -> None:
        with self.changing:
            killed = self.channels.pop(name)
        killed.close()

    def close(self) -> None:
        for name in list(self.channels):
            self.kill(name)


def of_a(block: int, **which: Any) -> list[BlockRequest]:
    """The request for a block of Worker a. which: columns and rows."""
    return [BlockRequest(worker="a", block=block, **which)]


def fetched(world: ChannelWorld, block: int, **which: Any) -> pa.RecordBatch:
    """What b gets of it."""
    (found,) = world["b"].fetch(of_a(block, **which))
    return found


def _dial(world: ChannelWorld, me: str) -> Callable[[str], socket.socket]:
    def dial(peer: str) -> socket.socket:
        with world.changing:
            if peer not in world.channels:
                raise PeerLost(peer, "is gone")
            mine, its = socket.socketpair()
            world.channels[peer].serve(me, its)
        return mine

    return dial


def inproc() -> ChannelWorld:
    """One process has one Worker: every name is the same channel."""
    one: list[InprocChannel] = []

    def make(_world: ChannelWorld, _name: str, epoch: int) -> Channel:
        if epoch or not one:
            one.append(InprocChannel(epoch))
        return one[-1]

    return ChannelWorld(make)


def shm(**options: Any) -> ChannelWorld:
    """Shared memory, with recycled slabs poisoned."""
    return ChannelWorld(
        lambda w, name, epoch: ShmChannel(name, epoch, _dial(w, name), **{"poison": True} | options)
    )


def zmq(*, curve: bool = False, bind: str = "tcp://127.0.0.1:*") -> ChannelWorld:
    """ZeroMQ over TCP."""
    keys: dict[str, CurveKeyPair] = {}
    allowed: dict[bytes, str] = {}

    def find(world: ChannelWorld) -> Callable[[str], Address]:
        def address(peer: str) -> Address:
            if peer not in world.channels:
                raise PeerLost(peer, "is gone")
            return world.channels[peer].address

        return address

    def make(world: ChannelWorld, name: str, epoch: int) -> Channel:
        own = keys.setdefault(name, CurveKeyPair.make()) if curve else None
        if own is not None:
            allowed[own.public] = name
        return ZmqChannel(
            name, epoch, find(world), bind=bind, keys=own, allowed=allowed, patience=20.0
        )

    return ChannelWorld(make)


KINDS: dict[str, Callable[[], ChannelWorld]] = {
    "inproc": inproc,
    "shm": shm,
    "shm-content": lambda: shm(verify="content"),
    "zmq": zmq,
    "zmq-curve": lambda: zmq(curve=True),
}
