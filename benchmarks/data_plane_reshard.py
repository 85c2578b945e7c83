"""Resharding: rows from M processes to N others, each needed row once, directly or through one
process in between.

Owns: the processes, both ways, what is timed. Does not own: the channel (engine/channels), the
batch and how results are shown (data_plane.py).

Every producer has an equal part of the rows; every consumer wants an equal part of each producer's.
A round lasts from the first message to the producers until the last consumer reports torch views of
all columns.

    direct          producers keep their rows, as the engine's Workers do; consumers fetch them
    direct, joined  the same, and each consumer assembles one batch, as a kernel gets it
    direct, built   direct, with rows built in the outbox's memory, as the generate kernel does:
                    not even the producer copies them
    central         this process gathers all rows over ZeroMQ (one frame per buffer, no copy by the
                    library, no checksum), joins them and sends each consumer its part

What passes through this process is counted, and so is the time that all processes together spent on
cores: on a busy machine that says more than the clock.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import zmq

from benchmarks.data_plane_batch import MIB, built_in, make_batch, views
from benchmarks.report import SideResult
from dataflow.batch import Batch, Keys
from engine.channels.frames import put_together, take_apart
from engine.channels.layout import layout_from
from engine.channels.shm.channel import ShmChannel
from engine.protocol.refs import Gather
from engine.run.worker.input_batches import collect, requests

Way = Literal["direct", "direct, joined", "direct, built", "central"]
WAYS: tuple[Way, ...] = ("central", "direct", "direct, joined", "direct, built")
LEAST = 6.0
"""How many times as fast the direct way has to be."""
CONTROL = 0.001
"""Most bytes through this process per byte of rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshard:
    """How many processes, and the total bytes of rows."""

    producers: int
    consumers: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One resharding: wall-clock seconds, seconds of all cores, bytes sent and received here."""

    seconds: float
    on_cores: float
    through: int


class Pipe:
    """A pipe whose bytes are counted."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.moved = 0

    def send(self, message: Any) -> None:
        """Send a message."""
        data = pickle.dumps(message)
        self.moved += len(data)
        self._connection.send_bytes(data)

    def receive(self) -> Any:
        """Wait for the next one."""
        data = self._connection.recv_bytes()
        self.moved += len(data)
        return pickle.loads(data)


# --- directly -------------------------------------------------------------------------------------


def produce_directly(
    name: str, nbytes: int, peers: dict[str, socket.socket], built: bool, connection: Connection
) -> None:
    """On each message keep the rows and send their block's number; the next message frees them."""
    pipe, records = Pipe(connection), make_batch(nbytes)
    channel = ShmChannel(name, 0, _nobody)
    for peer, end in peers.items():
        channel.serve(peer, end)
    batch = Batch(
        Keys.of(range(records.num_rows)), built_in(channel, records) if built else records
    )
    pipe.send((records.num_rows, records.nbytes))
    while pipe.receive():
        block = channel.keep(batch)
        pipe.send(block)
        pipe.receive()
        channel.release(block)
    channel.close()


def consume_directly(
    name: str, peers: dict[str, socket.socket], joined: bool, connection: Connection
) -> None:
    """Fetch or assemble the rows of each gather that comes."""
    pipe, channel = Pipe(connection), ShmChannel(name, 0, peers.__getitem__)
    pipe.send((0, 0))
    while (gather := pipe.receive()) is not None:
        found = (
            [r.records for r in collect([gather], channel)]
            if joined
            else channel.fetch(requests(gather))
        )
        pipe.send(sum(views(records) for records in found))
    channel.close()


def once_directly(producers: list[Pipe], consumers: list[Pipe], rows: list[int]) -> int:
    """One round: who has what, then who wants what; no rows pass through here."""
    for pipe in producers:
        pipe.send(True)
    blocks = [pipe.receive() for pipe in producers]
    refs = tuple((f"p{i}", block) for i, block in enumerate(blocks))
    for index, pipe in enumerate(consumers):
        parts = [_part(count, index, len(consumers)) for count in rows]
        block = np.repeat(np.arange(len(rows), dtype=np.int32), [len(p) for p in parts])
        row = np.concatenate(parts)
        pipe.send(Gather(producer="rows", columns=(), refs=refs, block=block, row=row))
    for pipe in consumers:
        pipe.receive()
    return 0


def _part(rows: int, index: int, parts: int) -> np.ndarray:
    return np.arange(rows * index // parts, rows * (index + 1) // parts, dtype=np.int32)


def _nobody(peer: str) -> socket.socket:
    raise AssertionError(f"the producer asks nobody, but was to ask {peer}")


# --- through one process --------------------------------------------------------------------------


def produce_centrally(endpoint: str, nbytes: int, connection: Connection) -> None:
    """Send the rows at each request."""
    pipe, records, push = Pipe(connection), make_batch(nbytes), _bare(zmq.PUSH)
    push.connect(endpoint)
    pipe.send((records.num_rows, records.nbytes))
    while pipe.receive():
        pipe.moved += _push(push, records)
        pipe.receive()
    push.close()


def consume_centrally(endpoint: str, connection: Connection) -> None:
    """Take what comes."""
    pipe, pull = Pipe(connection), _bare(zmq.PULL)
    pull.connect(endpoint)
    pipe.send((0, 0))
    while pipe.receive() is not None:
        pipe.send(views(_pull(pull)[0]))
    pull.close()


def once_centrally(
    producers: list[Pipe], consumers: list[Pipe], gather: zmq.Socket, scatter: list[zmq.Socket]
) -> int:
    """One round; returns the bytes of rows that passed through here."""
    for pipe in producers:
        pipe.send(True)
    parts = [_pull(gather) for _ in producers]
    whole = pa.concat_batches([records for records, _ in parts])
    through = sum(size for _, size in parts)
    for index, (pipe, push) in enumerate(zip(consumers, scatter, strict=True)):
        mine = _part(whole.num_rows, index, len(consumers))
        pipe.send(True)
        through += _push(push, whole.slice(int(mine[0]), len(mine)))
    for pipe in consumers:
        pipe.receive()
    return through


def _bare(kind: int) -> zmq.Socket:
    found: zmq.Socket = zmq.Context.instance().socket(kind)
    found.setsockopt(zmq.LINGER, 0)
    return found


def _push(push: zmq.Socket, records: pa.RecordBatch) -> int:
    framed = take_apart(records)
    head = pickle.dumps((framed.layout.encoded, framed.rows, framed.nodes))
    push.send_multipart([head, *(b if b is not None else b"" for b in framed.buffers)], copy=False)
    return framed.nbytes


def _pull(pull: zmq.Socket) -> tuple[pa.RecordBatch, int]:
    head, *frames = pull.recv_multipart(copy=False)
    schema, rows, nodes = pickle.loads(head.buffer)
    buffers = [pa.py_buffer(f.buffer) if len(f) else None for f in frames]
    return put_together(layout_from(schema), rows, nodes, buffers), sum(map(len, frames))


# --- processes ------------------------------------------------------------------------------------


@contextmanager
def world(way: Way, setting: Reshard) -> Iterator[Callable[[], Round]]:
    """The processes of one way; yields the function that runs a round."""
    with tempfile.TemporaryDirectory() as folder:
        running: list[Any] = []
        made = (
            _central(setting, folder, running)
            if way == "central"
            else _direct(setting, way, running)
        )
        try:
            yield made
        finally:
            for process in running:
                process.kill()
                process.join()


def _direct(setting: Reshard, way: Way, running: list[Any]) -> Callable[[], Round]:
    many, few = range(setting.producers), range(setting.consumers)
    pairs = {(p, c): socket.socketpair() for p in many for c in few}
    size = setting.nbytes // setting.producers
    built, joined = way == "direct, built", way == "direct, joined"
    producers, consumers = [], []
    for p in many:
        ends = {f"c{c}": pairs[p, c][0] for c in few}
        producers.append(_started(running, produce_directly, f"p{p}", size, ends, built))
    for c in few:
        ends = {f"p{p}": pairs[p, c][1] for p in many}
        consumers.append(_started(running, consume_directly, f"c{c}", ends, joined))
    rows = [pipe.receive()[0] for pipe in producers]
    for pipe in consumers:
        pipe.receive()
    for end in chain.from_iterable(pairs.values()):
        end.close()
    return lambda: _timed(
        producers, consumers, running, lambda: once_directly(producers, consumers, rows)
    )


def _central(setting: Reshard, folder: str, running: list[Any]) -> Callable[[], Round]:
    gather, scatter = _bare(zmq.PULL), [_bare(zmq.PUSH) for _ in range(setting.consumers)]
    gather.bind(f"ipc://{folder}/gather")
    for index, push in enumerate(scatter):
        push.bind(f"ipc://{folder}/{index}")
    size = setting.nbytes // setting.producers
    producers = [
        _started(running, produce_centrally, f"ipc://{folder}/gather", size)
        for _ in range(setting.producers)
    ]
    consumers = [
        _started(running, consume_centrally, f"ipc://{folder}/{c}")
        for c in range(setting.consumers)
    ]
    for pipe in [*producers, *consumers]:
        pipe.receive()
    return lambda: _timed(
        producers, consumers, running, lambda: once_centrally(producers, consumers, gather, scatter)
    )


def _timed(
    producers: list[Pipe], consumers: list[Pipe], running: list[Any], what: Callable[[], int]
) -> Round:
    pipes, processes = [*producers, *consumers], [os.getpid(), *(p.pid for p in running)]
    before, spent = sum(pipe.moved for pipe in pipes), _on_cores(processes)
    start = time.perf_counter()
    payload = what()
    seconds = time.perf_counter() - start
    spent = _on_cores(processes) - spent
    through = payload + sum(pipe.moved for pipe in pipes) - before
    for pipe in producers:
        pipe.send(True)
    return Round(seconds=seconds, on_cores=spent, through=through)


def _on_cores(processes: list[int]) -> float:
    """Seconds that all threads of these processes have run."""
    files = [f for number in processes for f in Path(f"/proc/{number}/task").glob("*/schedstat")]
    return sum(int(f.read_text().split()[0]) for f in files) / 1e9


def _started(running: list[Any], target: Callable[..., None], *arguments: Any) -> Pipe:
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    process = context.Process(target=target, args=(*arguments, its), daemon=True)
    process.start()
    its.close()
    running.append(process)
    return Pipe(mine)


# --- results --------------------------------------------------------------------------------------


def measure(setting: Reshard, rounds: int) -> dict[Way, list[Round]]:
    """Rounds of all ways in turn, after three of each that do not count."""
    with ExitStack() as stack:
        once: dict[Way, Callable[[], Round]] = {}
        for way in WAYS:
            once[way] = stack.enter_context(world(way, setting))
        found = [{way: one() for way, one in once.items()} for _ in range(rounds + 3)]
    return {way: [one[way] for one in found[3:]] for way in once}


def results(setting: Reshard, found: dict[Way, list[Round]]) -> list[SideResult]:
    """Milliseconds of each way, the central one's ratio, and the share of bytes it moves."""
    name = f"{setting.producers} to {setting.consumers}, {setting.nbytes // MIB} MB"
    rows = []
    for way, many in found.items():
        share = max(r.through for r in many) / setting.nbytes
        goal = None if way == "central" else CONTROL
        on_cores = 1e3 * median(r.on_cores for r in many)
        rows += [
            SideResult(
                name=f"{name}, {way}", value=1e3 * median(r.seconds for r in many), unit="ms"
            ),
            SideResult(name=f"{name}, {way}, on cores", value=on_cores, unit="ms"),
            SideResult(
                name=f"{name}, {way}, through one",
                value=share,
                unit="of all bytes",
                goal=goal,
                least=False,
            ),
        ]
    goals: dict[Way, float | None] = {
        "direct": LEAST,
        "direct, joined": None,
        "direct, built": LEAST,
    }
    for way, goal in goals.items():
        pairs = list(zip(found["central"], found[way], strict=True))
        faster = median(c.seconds / d.seconds for c, d in pairs)
        rows.append(SideResult(name=f"{name}, central / {way}", value=faster, unit="x", goal=goal))
    return rows
