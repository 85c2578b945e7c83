"""Those who answer a reader of the data plane wrongly, and what it makes of that."""

from __future__ import annotations

import resource
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
from pull_mutants import bytes_mutated, value_mutated

from dataflow.batch import Batch
from dataflow.errors import DataError, RunError
from engine.channels.contract import Request
from engine.channels.descriptors import Ask, Reply, ShapeHere, SlabHere, encode
from engine.channels.multipart import _sealed
from engine.channels.outbox import SlabOutbox
from engine.channels.packets import Packets
from engine.channels.reader import Reader, deadline_in
from engine.channels.slabs import SlabPool

Asked = pa.RecordBatch | type[Exception]


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def outcome(what: Callable[[], pa.RecordBatch]) -> Asked:
    """The rows, or what kind of clear error there was."""
    try:
        return what()
    except (RunError, DataError, KeyError) as error:
        return type(error)


class Owner:
    """Plays the owner of one block, honestly or not, over a socket pair."""

    def __init__(self, rows: Batch) -> None:
        self.outbox = SlabOutbox(SlabPool(limit=1 << 30), 0)
        self.block = self.outbox.keep(rows)

    def says(self, number: int, *, content: bool) -> list[tuple[bytes, int | None]]:
        """The messages of an honest answer, with their descriptors."""
        answer, slabs, forms = self.outbox.describe(Ask(self.block, (), content))
        assert forms is not None
        here = [(encode(SlabHere(s.number, s.size, s.on_disk)), s.descriptor) for s in slabs]
        return [*here, (encode(ShapeHere(forms.hash, forms.data)), None), (encode(Reply(number, [answer])), None)]


def answered(
    owner: Owner, content: bool, change: Callable[[list[tuple[bytes, int | None]]], list[tuple[bytes, int | None]]]
) -> Asked:
    """What a reader makes of an answer that was changed, with an honest one to the same request behind it."""
    mine, its = socket.socketpair()
    reader, sender = Reader("a", mine, content=content), Packets(its)
    request = Request(worker="a", block=owner.block)
    try:
        number = reader.ask([request])
        honest = owner.says(number, content=content)
        for message, descriptor in [*change(honest), *honest]:
            sender.send(message, descriptor)
        return outcome(lambda: reader.answer(number, [request], deadline_in(5.0))[0])
    finally:
        reader.close()
        sender.close()


def changed_frames(frames: list[bytes], rng: np.random.Generator) -> list[bytes]:
    """An answer between hosts with one thing wrong."""
    which = int(rng.integers(0, len(frames)))
    match int(rng.integers(0, 6)):
        case 0 | 1:  # a liar who knows how to make checksums
            return [_sealed(value_mutated(frames[0][8:], rng)), *frames[1:]]
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
