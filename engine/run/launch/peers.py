"""Data sockets between the Workers of this host, made before they are needed.

Owns: whose rows an instruction or a request needs, connecting both ends. Does not own: what the
ends do with their sockets (engine/run/worker_process/worker_channel.py), fetching
(engine/channels).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping
from itertools import chain

from dataflow.errors import RunError
from engine.channels.descriptors import explain_shortage
from engine.protocol import messages as m
from engine.protocol.refs import Gather
from engine.protocol.workers import Ask, Save
from engine.run.control.control import Connect
from engine.run.launch.child import ChildProcess
from engine.run.launch.ranks import Meeting

Send = Callable[[ChildProcess, Connect, tuple[int, ...]], None]


def sources(message: m.ToWorker | Ask) -> frozenset[str]:
    """The Workers that keep the rows or weights of this message."""
    match message:
        case m.RunChunk() | m.FetchAhead() | m.TrainStep() | m.TrainPart():
            return _keepers(chain.from_iterable(message.inputs.values()))
        case m.Evaluate() | m.Record():
            return _keepers(chain.from_iterable(message.inputs.values()))
        case Save():
            return _keepers(gather for _, gather in message.rows.values())
        case m.Load():
            return frozenset({message.source} - {""})
    return frozenset()


def _keepers(gathers: Iterable[Gather]) -> frozenset[str]:
    refs = chain.from_iterable(gather.refs for gather in gathers)
    return frozenset(worker for worker, _ in refs)


def connect_peers(
    child: ChildProcess,
    message: m.ToWorker | Ask,
    children: Mapping[str, ChildProcess],
    worlds: Iterable[tuple[str, str]],
    send: Send,
) -> None:
    """Connect a Worker to those whose rows this message needs. worlds: pairs that share tensors."""
    # Before the message, over the same control socket: the Worker has its end when it reads the
    # message. It then needs no waiting, and one without a socket to a peer knows that it is gone.
    for name in sources(message) - {child.name}:
        peer = children.get(name)
        # By epoch: a peer that was restarted needs a new socket, its old one has lost an end.
        if peer is None or peer.gone or (name, peer.epoch) in child.connected:
            continue
        child.connected.add((name, peer.epoch))
        try:
            asks, serves = socket.socketpair()
            meeting = Meeting((name, child.name)) if (name, child.name) in worlds else None
        except OSError as error:
            problem = f"worker {child.name}: expected a socket to {name}, found: "
            raise RunError(f"{problem}{explain_shortage(error) or error}.") from error
        tensors = meeting is not None
        for end, other, sock in ((peer, child, serves), (child, peer, asks)):
            connection = Connect(peer=other.name, serve=sock is serves, tensors=tensors)
            descriptors = [sock.detach()]
            if meeting is not None:
                descriptors.append(meeting.descriptor())
            send(end, connection, tuple(descriptors))
        if meeting is not None:
            meeting.close()
