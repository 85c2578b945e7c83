"""Peers that answer a reader of the data plane wrongly, and the outcome for the reader."""

from __future__ import annotations

import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import zmq
from pull_mutants import bytes_mutated, value_mutated

from dataflow.batch import Batch
from dataflow.errors import DataError, RunError
from engine.channels.block_requests import Answer, Reply, Wanted, encode
from engine.channels.contract import BlockRequest
from engine.channels.frames import checksums
from engine.channels.layout import SchemaLayout
from engine.channels.multipart import (
    FramesPart,
    FrameSums,
    add_checksums,
    frame_block,
    request_of,
    seal_message,
)
from engine.channels.shm.block_index import NOTES, ROOM, SIZE
from engine.channels.shm.fd_socket import FdSocket
from engine.channels.shm.messages import IndexHere, SchemaHere, SlabHere
from engine.channels.shm.outbox import SlabOutbox
from engine.channels.shm.reader import SlabReader
from engine.channels.shm.slabs import Slab, SlabPool

Asked = pa.RecordBatch | type[Exception] | None
"""None: neither refused nor accepted; the reader asks."""


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def outcome(what: Callable[[], pa.RecordBatch | None]) -> Asked:
    """The rows, or the kind of clear error."""
    try:
        return what()
    except (RunError, DataError, KeyError) as error:
        return type(error)


class Owner:
    """Plays the owner of one block, honestly or not, over a socket pair."""

    def __init__(self, rows: Batch) -> None:
        self.outbox = SlabOutbox(SlabPool(limit=1 << 30), 0)
        self.block = self.outbox.keep(rows)

    def described(self, *, content: bool) -> tuple[Answer, list[Slab], SchemaLayout]:
        """Where the block is, with its checksums."""
        wanted = Wanted(self.block)
        if content:
            self.outbox.sum_up([wanted])
        answer, slabs, layout = self.outbox.describe(wanted)
        assert layout is not None
        return answer, slabs, layout

    def says(self, number: int, *, content: bool) -> list[tuple[bytes, int | None]]:
        """The messages of an honest answer, with their descriptors."""
        answer, slabs, layout = self.described(content=content)
        here = [(encode(SlabHere(s.number, s.size, s.on_disk)), s.descriptor) for s in slabs]
        return [
            *here,
            (encode(SchemaHere(layout.hash, layout.encoded)), None),
            (encode(Reply(number, [answer])), None),
        ]


@contextmanager
def reading(content: bool) -> Iterator[tuple[SlabReader, FdSocket]]:
    """A reader of Worker a's blocks, and the end at which a answers."""
    mine, its = socket.socketpair()
    with (
        closing(SlabReader("a", mine, content=content)) as reader,
        closing(FdSocket(its)) as sender,
    ):
        yield reader, sender


def answered(
    owner: Owner,
    content: bool,
    change: Callable[[list[tuple[bytes, int | None]]], list[tuple[bytes, int | None]]],
) -> Asked:
    """What a reader makes of a changed answer, followed by an honest one."""
    request = BlockRequest(worker="a", block=owner.block)
    with reading(content) as (reader, sender):
        number = reader.ask([request])
        honest = owner.says(number, content=content)
        for message, descriptor in [*change(honest), *honest]:
            sender.send(message, descriptor)
        return outcome(lambda: reader.answer(number, [request], time.monotonic() + 5.0)[0])


def noted(
    owner: Owner,
    content: bool,
    change: Callable[[bytes], bytes] | None,
    spoil: Callable[[bytes], bytes],
) -> Asked:
    """What a reader makes of a forged index. change: its text, hashed again; spoil: its memory."""
    request = BlockRequest(worker="a", block=owner.block)
    index, memory = owner.outbox.index, owner.outbox.index._memory
    at = owner.block % NOTES * ROOM
    note = slice(at, at + ROOM)
    honest = bytes(memory[note])
    with reading(content) as (reader, sender):
        sender.send(encode(IndexHere(SIZE)), index.descriptor)
        for message, descriptor in owner.says(reader.ask([request]), content=content):
            sender.send(message, descriptor)
        reader.answer(1, [request], time.monotonic() + 5.0)
        if change is not None:
            answer, _, _ = owner.described(content=content)
            index.note(owner.block, change(encode(answer)))
        memory[note] = spoil(bytes(memory[note]))[:ROOM].ljust(ROOM, b"\0")
        found = outcome(lambda: reader.look(request))
    memory[note] = honest
    return found


def noted_wrongly(owner: Owner, content: bool, rng: np.random.Generator) -> Asked:
    """What a reader makes of a wrong note, forged with a right hash or accidental."""
    if rng.random() < 0.5:
        return noted(owner, content, lambda text: value_mutated(text, rng), lambda there: there)
    return noted(owner, content, None, lambda there: bytes_mutated(there, rng))


@contextmanager
def liar(records: pa.RecordBatch, rng: np.random.Generator) -> Iterator[str]:
    """Another host that answers every request wrongly, then honestly; yields where."""
    answer, buffers = frame_block(0, records)
    frames, sums = [b.to_pybytes() for b in buffers], checksums(buffers)
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    endpoint = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
    over = threading.Event()

    def honest(number: int) -> list[list[bytes]]:
        """The messages for few bytes, or for many."""
        if rng.random() < 0.5:
            return [[seal_message(Reply(number, add_checksums([answer], buffers))), *frames]]
        parts = [(Reply(number, [answer], 2), frames[:2]), (FramesPart(number, 0), frames[2:4])]
        parts += [(FramesPart(number, 1), frames[4:]), (FrameSums(number, sums), [])]
        return [[seal_message(message), *more] for message, more in parts]

    def play() -> None:
        while not over.is_set():
            if router.poll(50):
                identity, question = router.recv_multipart()
                right = honest(request_of(question).id)
                for message in (*changed_replies(right, rng), *right):
                    router.send_multipart([identity, *message])

    thread = threading.Thread(target=play)
    thread.start()
    try:
        yield endpoint
    finally:
        over.set()
        thread.join()
        router.close(0)
        context.destroy(linger=0)


def changed_replies(messages: list[list[bytes]], rng: np.random.Generator) -> list[list[bytes]]:
    """An answer between hosts with one thing wrong: in a message, or in the order of several."""
    which = int(rng.integers(0, len(messages)))
    before, after = messages[:which], messages[which + 1 :]
    match int(rng.integers(0, 6)) if len(messages) > 1 else 0:
        case 4:
            return [*before, *after]
        case 5:
            return [*before, messages[which], *messages[which:]]
        case _:
            return [*before, changed_frames(messages[which], rng), *after]


def changed_frames(frames: list[bytes], rng: np.random.Generator) -> list[bytes]:
    """An answer between hosts with one thing wrong."""
    which = int(rng.integers(0, len(frames)))
    match int(rng.integers(0, 6)):
        case 0 | 1:  # a liar who can compute checksums
            return [seal_message(value_mutated(frames[0][8:], rng)), *frames[1:]]
        case 2:
            return [bytes_mutated(frames[0], rng), *frames[1:]]
        case 3:
            return [*frames[:which], bytes_mutated(frames[which], rng), *frames[which + 1 :]]
        case 4:
            return [*frames[:which], *frames[which + 1 :]] or [b""]
        case _:
            return [*frames[:which], frames[which], *frames[which:]]


def changed_messages(
    messages: list[tuple[bytes, int | None]], rng: np.random.Generator
) -> list[tuple[bytes, int | None]]:
    """What an owner of slabs answers, with one thing wrong."""
    which = int(rng.choice(len(messages), p=[0.15, 0.15, 0.7]))
    mutate = bytes_mutated if rng.random() < 0.3 else value_mutated
    message, descriptor = messages[which]
    return [*messages[:which], (mutate(message, rng), descriptor), *messages[which + 1 :]]
