"""Routes for a batch from one process to another: this project's channels, and alternatives.

Owns: for each route a sender and a receiver that transfer the same Arrow columns. Does not own: the
batch, the processes, the clock (data_plane.py).

A sender's `send` returns a token, which goes to the receiver over a pipe; that pipe is the
coordinator's part in the engine. Libraries of peers are imported only if their route is measured.
"""

from __future__ import annotations

import socket
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa
import zmq

from benchmarks.data_plane_batch import built_in
from dataflow.batch import Batch, Keys
from engine.channels.contract import BlockRequest
from engine.channels.frames import put_together, take_apart
from engine.channels.layout import layout_from
from engine.channels.shm.channel import ShmChannel
from engine.channels.zmq.channel import ZmqChannel
from engine.channels.zmq.curve_keys import Address, CurveKeyPair

Token = Any
Verify = Literal["structure", "content"]


class Sender(Protocol):
    """The producing end."""

    def prepare(self, records: pa.RecordBatch) -> None:
        """Set the batch that `send` sends from now on; not timed."""
        ...

    def send(self) -> Token:
        """Send the batch."""
        ...

    def done(self, token: Token) -> None:
        """The receiver has released the batch; not timed."""
        ...


Receive = Callable[[Token], pa.RecordBatch]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """start: creates the sender and what the receiver needs (picklable into a spawned process).
    receive: the other end, as a context manager around the function that takes a token. copies:
    whether any byte of the batch is copied.
    """

    name: str
    start: Callable[[], tuple[Sender, Any]]
    receive: Callable[[Any], Any]
    copies: bool = True


# --- shared memory --------------------------------------------------------------------------------


class ShmSender:
    """Copies the batch into a slab, or (`born`) keeps what was built there."""

    def __init__(self, channel: ShmChannel, *, born: bool) -> None:
        self._channel = channel
        self._born = born
        self._batch = Batch(Keys.of([]), pa.RecordBatch.from_arrays([], names=[]))

    def prepare(self, records: pa.RecordBatch) -> None:
        self._batch = Batch(
            Keys.of(range(records.num_rows)),
            built_in(self._channel, records) if self._born else records,
        )

    def send(self) -> int:
        return self._channel.keep(self._batch)

    def done(self, token: int) -> None:
        self._channel.release(token)


def shm(name: str, *, born: bool = False, verify: Verify = "structure") -> Route:
    """This project's channel on one host."""

    def start() -> tuple[Sender, Any]:
        mine, its = socket.socketpair()
        channel = ShmChannel("a", 0, _nobody, verify=verify)
        channel.serve("b", mine)
        return ShmSender(channel, born=born), (its, verify)

    return Route(name=name, start=start, receive=_from_shm, copies=not born)


@contextmanager
def _from_shm(given: tuple[socket.socket, Verify]) -> Iterator[Receive]:
    connection, verify = given
    channel = ShmChannel("b", 0, lambda _: connection, verify=verify)
    yield lambda block: channel.fetch([BlockRequest(worker="a", block=block)])[0]
    channel.close()


def _nobody(peer: str) -> socket.socket:
    raise AssertionError(f"the producer asks nobody, but was to ask {peer}")


# --- ZeroMQ ---------------------------------------------------------------------------------------


class ZmqSender:
    """Keeps the batch; the receiver requests it."""

    def __init__(self, channel: ZmqChannel) -> None:
        self.channel = channel
        self._batch = Batch(Keys.of([]), pa.RecordBatch.from_arrays([], names=[]))

    def prepare(self, records: pa.RecordBatch) -> None:
        self._batch = Batch(Keys.of(range(records.num_rows)), records)

    def send(self) -> int:
        return self.channel.keep(self._batch)

    def done(self, token: int) -> None:
        self.channel.release(token)


def ours_over_zmq(name: str, *, bind: str = "", curve: bool = False) -> Route:
    """This project's channel between hosts. bind: tcp, or ipc if empty."""

    def start() -> tuple[Sender, Any]:
        keys, other = (CurveKeyPair.make(), CurveKeyPair.make()) if curve else (None, None)
        allowed = {} if other is None else {other.public: "b"}
        where = bind or f"ipc://{tempfile.mkdtemp()}/rows"
        channel = ZmqChannel("a", 0, _no_address, bind=where, keys=keys, allowed=allowed)
        pair = None if other is None else (other.public, other.secret)
        return ZmqSender(channel), (channel.address.endpoint, channel.address.key, pair)

    return Route(name=name, start=start, receive=_from_zmq)


@contextmanager
def _from_zmq(given: tuple[str, bytes | None, tuple[bytes, bytes] | None]) -> Iterator[Receive]:
    endpoint, key, pair = given
    own = None if pair is None else CurveKeyPair(public=pair[0], secret=pair[1])
    address = Address(endpoint=endpoint, key=key)
    channel = ZmqChannel(
        "b", 0, lambda _: address, bind=f"ipc://{tempfile.mkdtemp()}/rows", keys=own
    )
    yield lambda block: channel.fetch([BlockRequest(worker="a", block=block)])[0]
    channel.close()


def _no_address(peer: str) -> Address:
    raise AssertionError(f"the producer asks nobody, but was to ask {peer}")


class BareSender:
    """One frame per buffer over a PUSH socket, and nothing else: the cost of the library itself."""

    def __init__(self, endpoint: str) -> None:
        self._socket: zmq.Socket = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.bind(endpoint)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._records = pa.RecordBatch.from_arrays([], names=[])

    def prepare(self, records: pa.RecordBatch) -> None:
        self._records = records

    def send(self) -> Token:
        framed = take_apart(self._records)
        self._socket.send_multipart(
            [b if b is not None else b"" for b in framed.buffers], copy=False
        )
        return framed.layout.encoded, framed.rows, framed.nodes

    def done(self, token: Token) -> None:
        """Nothing to release."""


def bare_zmq(name: str, endpoint: str) -> Route:
    """ZeroMQ without requests, checks or checksums."""

    def start() -> tuple[Sender, Any]:
        sender = BareSender(endpoint or f"ipc://{tempfile.mkdtemp()}/bare")
        return sender, sender.endpoint

    return Route(name=name, start=start, receive=_from_bare)


@contextmanager
def _from_bare(endpoint: str) -> Iterator[Receive]:
    pull: zmq.Socket = zmq.Context.instance().socket(zmq.PULL)
    pull.connect(endpoint)

    def receive(token: Token) -> pa.RecordBatch:
        schema, rows, nodes = token
        buffers = [
            pa.py_buffer(f.buffer) if len(f) else None for f in pull.recv_multipart(copy=False)
        ]
        return put_together(layout_from(schema), rows, nodes, buffers)

    yield receive
    pull.close(0)


# --- bare sockets ---------------------------------------------------------------------------------


class SocketSender:
    """The buffers one after another over a connected stream socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._records = pa.RecordBatch.from_arrays([], names=[])

    def prepare(self, records: pa.RecordBatch) -> None:
        self._records = records

    def send(self) -> Token:
        framed = take_apart(self._records)
        return (
            framed.layout.encoded,
            framed.rows,
            framed.nodes,
            [0 if b is None else b.size for b in framed.buffers],
        )

    def after_token(self) -> None:
        """Send the buffers, once the receiver knows their lengths."""
        for buffer in take_apart(self._records).buffers:
            if buffer is not None:
                self._connection.sendall(buffer)

    def done(self, token: Token) -> None:
        """Nothing to release."""


def bare_socket(name: str, pair: Callable[[], tuple[socket.socket, socket.socket]]) -> Route:
    """The cost of the kernel's sockets: into memory that is used again, unchecked."""

    def start() -> tuple[Sender, Any]:
        mine, its = pair()
        return SocketSender(mine), its

    return Route(name=name, start=start, receive=_from_socket)


def _over_tcp() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        mine = socket.create_connection(server.getsockname())
        its, _ = server.accept()
    for end in (mine, its):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return mine, its


@contextmanager
def _from_socket(connection: socket.socket) -> Iterator[Receive]:
    arena = np.zeros(0, np.uint8)

    def receive(token: Token) -> pa.RecordBatch:
        nonlocal arena
        schema, rows, nodes, lengths = token
        starts = np.cumsum([0, *(-(-n // 64) * 64 for n in lengths)])
        if len(arena) < starts[-1]:
            arena = np.ones(int(starts[-1]), np.uint8)
        parts = [arena[s : s + n] for s, n in zip(starts.tolist(), lengths, strict=False)]
        for part in parts:
            _fill(connection, part.data)
        return put_together(
            layout_from(schema),
            rows,
            nodes,
            [pa.py_buffer(p.data) if len(p) else None for p in parts],
        )

    yield receive
    connection.close()


def _fill(connection: socket.socket, target: memoryview) -> None:
    while len(target):
        target = target[connection.recv_into(target) :]


# --- others ---------------------------------------------------------------------------------------


class GlooSender:
    """One send per buffer; the receiver gets the lengths over the pipe."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._records = pa.RecordBatch.from_arrays([], names=[])
        self._ready = False

    def prepare(self, records: pa.RecordBatch) -> None:
        if not self._ready:
            _gloo(self._store, rank=0)
            self._ready = True
        self._records = records

    def send(self) -> Token:
        framed = take_apart(self._records)
        lengths = [0 if b is None else b.size for b in framed.buffers]
        return framed.layout.encoded, framed.rows, framed.nodes, lengths

    def after_token(self) -> None:
        """Send the buffers, once the receiver knows their lengths."""
        import torch
        from torch import distributed

        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        for buffer in take_apart(self._records).buffers:
            if buffer is not None and buffer.size:
                distributed.send(torch.from_numpy(np.frombuffer(buffer, np.uint8)), 1)

    def done(self, token: Token) -> None:
        """Nothing to release."""


def gloo(name: str) -> Route:
    """torch.distributed's point-to-point calls on the CPU."""

    def start() -> tuple[Sender, Any]:
        store = Path(tempfile.mkdtemp()) / "store"
        return GlooSender(store), store

    return Route(name=name, start=start, receive=_from_gloo)


def _gloo(store: Path, rank: int) -> None:
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)


@contextmanager
def _from_gloo(store: Path) -> Iterator[Receive]:
    import torch
    from torch import distributed

    _gloo(store, rank=1)

    def receive(token: Token) -> pa.RecordBatch:
        schema, rows, nodes, lengths = token
        parts = [torch.empty(n, dtype=torch.uint8) for n in lengths]
        for part in parts:
            if len(part):
                distributed.recv(part, 0)
        buffers = [pa.py_buffer(p.numpy()) if len(p) else None for p in parts]
        return put_together(layout_from(schema), rows, nodes, buffers)

    yield receive
    distributed.destroy_process_group()


class FlightSender:
    """A Flight server in a thread of this process, from which the receiver gets the batch."""

    def __init__(self) -> None:
        from pyarrow import flight

        sender = self

        class RouteServer(flight.FlightServerBase):
            """Serves the one batch."""

            def do_get(self, context: Any, ticket: Any) -> Any:
                return flight.RecordBatchStream(
                    pa.RecordBatchReader.from_batches(sender.records.schema, [sender.records])
                )

        self.records = pa.RecordBatch.from_arrays([], names=[])
        self.server = RouteServer("grpc://127.0.0.1:0")

    def prepare(self, records: pa.RecordBatch) -> None:
        self.records = records

    def send(self) -> Token:
        return b""

    def done(self, token: Token) -> None:
        """Nothing to release."""


def arrow_flight(name: str) -> Route:
    """Arrow's own transport."""

    def start() -> tuple[Sender, Any]:
        sender = FlightSender()
        return sender, sender.server.port

    return Route(name=name, start=start, receive=_from_flight)


@contextmanager
def _from_flight(port: int) -> Iterator[Receive]:
    from pyarrow import flight

    client = flight.connect(f"grpc://127.0.0.1:{port}")
    yield lambda _: client.do_get(flight.Ticket(b"")).read_chunk().data
    client.close()


ROUTES: tuple[Route, ...] = (
    shm("shm, one copy"),
    shm("shm, built in the slab", born=True),
    shm("shm, one copy, content verified", verify="content"),
    ours_over_zmq("zmq tcp", bind="tcp://127.0.0.1:*"),
    ours_over_zmq("zmq ipc"),
    ours_over_zmq("zmq tcp, CURVE", bind="tcp://127.0.0.1:*", curve=True),
    bare_zmq("bare zmq tcp", "tcp://127.0.0.1:*"),
    bare_zmq("bare zmq ipc", ""),
    bare_socket("bare socket tcp", _over_tcp),
    bare_socket("bare socket unix", socket.socketpair),
    gloo("gloo"),
    arrow_flight("Arrow Flight"),
)
