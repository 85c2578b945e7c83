"""Messages as bytes, frames with descriptors, the order of an inbox."""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.batch import Keys
from dataflow.errors import RunError
from engine.protocol import messages as m
from engine.protocol.workers import Save
from engine.run.control import wire
from engine.run.control.control import Command, Quit, Request, WorkerUpdate
from engine.run.control.control_socket import LIMIT, ControlSocket
from engine.run.control.wire import (
    ASKS,
    CONTROL,
    EVENTS,
    HOSTING,
    INSTRUCTIONS,
    decode_message,
    encode_message,
)
from engine.run.worker_process.task_inbox import Inbox
from tests.kit.comparison import same_message
from tests.kit.nothing_left import descriptors
from tests.kit.turns import example_count

CLASSES = (*EVENTS, m.From, *INSTRUCTIONS, *ASKS, *CONTROL, *HOSTING)
UNIONS = {m.From: EVENTS, Command: INSTRUCTIONS, Request: ASKS}
UPDATE = {"model": "m", "writer": "t", "worker": "w"}


def run_chunk(number: Any, keys: Keys | None = None) -> m.RunChunk:
    return m.RunChunk(id=number, node="n", worker="w", step=1, keys=keys or Keys.of([number]))


def train_step(keys: Keys, **fields: Any) -> m.TrainStep:
    return m.TrainStep(id=0, node="t", worker="w", step=1, keys=keys, inputs={}, **fields)


array = st.builds(
    np.array,
    st.lists(st.integers(0, 100), max_size=4),
    st.sampled_from(["<i8", "<i4", "<u8", "u1", "<f4"]),
)
PLAIN = {
    str: st.text(max_size=6),
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    bytes: st.binary(max_size=8),
    np.ndarray: array,
    Path: st.text(max_size=6).map(Path),
    type(None): st.none(),
}


def values_of(hint: Any, holder: type) -> st.SearchStrategy[Any]:
    """Values of an annotation."""
    if isinstance(hint, type) and hint in PLAIN:
        return PLAIN[hint]
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        kinds = UNIONS.get(holder, inner)
        return st.one_of([values_of(kind, holder) for kind in kinds])
    if origin is Literal:
        return st.sampled_from(inner)
    if origin is tuple and inner[-1] is not Ellipsis:
        return st.tuples(*(values_of(kind, holder) for kind in inner))
    if origin is tuple:
        return st.lists(values_of(inner[0], holder), max_size=3).map(tuple)
    if origin is Mapping:
        return st.dictionaries(values_of(inner[0], holder), values_of(inner[1], holder), max_size=2)
    assert dataclasses.is_dataclass(hint) or issubclass(hint, msgspec.Struct), hint
    hints = get_type_hints(hint)
    told = dataclasses.fields if dataclasses.is_dataclass(hint) else msgspec.structs.fields
    return st.builds(hint, **{f.name: values_of(hints[f.name], hint) for f in told(hint)})


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_class_comes_back_as_it_was(kind: type) -> None:
    @settings(max_examples=12, database=None)
    @given(values_of(kind, kind))
    def comes_back(message: Any) -> None:
        assert same_message(decode_message(encode_message(message)), message)

    comes_back()


def test_numbers_of_numpy_and_strided_arrays_are_sent() -> None:
    message = decode_message(encode_message(run_chunk(np.int64(3), Keys.of(np.arange(8)[::2]))))
    assert message.id == 3
    assert message.keys.position.tolist() == [0, 2, 4, 6]


@settings(max_examples=example_count(300), database=None)
@given(st.binary(max_size=200))
def test_garbage_is_one_error(data: bytes) -> None:
    with pytest.raises(RunError, match="Fix: "):
        decode_message(data)


def for_a_rank() -> m.TrainStep:
    return train_step(Keys.of(range(40)), mine=np.arange(40) * 3, total=120)


@pytest.mark.parametrize(
    ("message", "refused_bits"),
    [
        (Command(instruction=run_chunk(1, Keys.of(range(3)))), 1),
        (for_a_rank(), 7),
    ],
    ids=["plain", "deflated, which has a checksum"],
)
def test_changed_bytes_are_an_error_or_a_message(message: Any, refused_bits: int) -> None:
    """Whatever bit is flipped: a message of the table comes out, or one RunError. refused_bits: so
    many of each byte make it an error, and more.
    """
    good, refused = encode_message(message), 0
    for at in range(len(good)):
        for bit in range(8):
            changed = bytearray(good)
            changed[at] ^= 1 << bit
            try:
                assert type(decode_message(changed)) in CLASSES
            except RunError:
                refused += 1
    assert refused > refused_bits * len(good)
    for end in range(len(good)):
        with pytest.raises(RunError):
            decode_message(good[:end])


def test_what_ranks_are_told_is_deflated_and_comes_back() -> None:
    keys = Keys.of(range(1 << 40, (1 << 40) + 64))
    part = train_step(keys, mine=np.arange(64) * 7, total=448)
    for message in (part, Command(instruction=part)):
        assert same_message(decode_message(encode_message(message)), message)
    assert len(encode_message(part)) < len(encode_message(train_step(keys))) / 2


def test_deflated_bytes_that_become_too_many_are_refused_and_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deflated = encode_message(for_a_rank())
    monkeypatch.setattr(wire, "_INFLATED", 500)
    with pytest.raises(RunError, match="become more than 500"):
        decode_message(deflated)
    sent = encode_message(for_a_rank())
    assert len(sent) > len(deflated)
    assert same_message(decode_message(sent), for_a_rank())


def chunk_at(position: Any) -> list[Any]:
    """The body of a chunk whose keys have these positions."""
    keys = {"position": position, "sample": ["<i4", b""], "attempt": ["<i4", b""]}
    return ["RunChunk", {"id": 1, "node": "n", "worker": "w", "step": 1, "keys": keys}]


@pytest.mark.parametrize("body", [
    ["Quit"],
    ["NoSuch", {}],
    ["ChunkDone", {"chunk": "one", "node": "n"}],
    ["ChunkDone", {"node": "n"}],
    ["From", {"worker": "w", "epoch": 0, "number": 0, "event": ["Quit", {}]}],
    ["Offered", 5],
    chunk_at(["<U4", b"1234"]),
    chunk_at(["<i8", b"1234"]),
    chunk_at(["|O", b"12345678"]),
    chunk_at([[[[[]]]]]),
    chunk_at("text"),
    chunk_at(3),
], ids=str)  # fmt: skip
def test_what_no_class_and_no_array_has_is_refused(body: Any) -> None:
    with pytest.raises(RunError, match="Fix: "):
        decode_message(msgspec.msgpack.encode(body))


def test_only_what_is_expected_is_taken() -> None:
    data = encode_message(Quit())
    assert decode_message(data, (WorkerUpdate, Quit)) == Quit()
    with pytest.raises(RunError, match="Quit"):
        decode_message(data, (WorkerUpdate,))


def test_what_cannot_be_sent_says_so() -> None:
    with pytest.raises(RunError, match=r"expected one of .* found a dict"):
        encode_message({})
    for shape in ((2, 2, 2), (2, 0)):
        with pytest.raises(RunError, match="one or two dimensions"):
            encode_message(train_step(Keys.of([1]), mine=np.zeros(shape, np.int32)))


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_spans_of_a_chunk_keep_their_two_columns(rows: int) -> None:
    spans = np.arange(2 * rows, dtype=np.int32).reshape(rows, 2)
    chunk = dataclasses.replace(run_chunk(1), keys=Keys.of(range(rows)), spans=spans)
    arrived = decode_message(encode_message(chunk))
    assert arrived.spans.dtype == spans.dtype
    assert arrived.spans.tolist() == spans.tolist()
    assert arrived.spans.shape == (rows, 2)


Pair = tuple[ControlSocket, ControlSocket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ends = [ControlSocket(s) for s in socket.socketpair()]
    yield ends[0], ends[1]
    for link in ends:
        link.close()


def receive(link: ControlSocket, count: int) -> list[Any]:
    """This many frames, as they come."""
    frames: list[Any] = []
    while len(frames) < count:
        came = link.receive()
        assert came is not None
        frames += came
    return frames


def test_frames_come_whole_and_in_order(pair: Pair) -> None:
    sent = [bytes([i]) * size for i, size in enumerate((0, 1, 100_000, 3_000_000, 7))]
    writer = threading.Thread(target=lambda: [pair[0].send(payload) for payload in sent])
    writer.start()
    assert [frame.payload for frame in receive(pair[1], len(sent))] == sent
    writer.join()


def test_descriptors_come_with_their_frame_and_are_closed_here(pair: Pair) -> None:
    read, write = os.pipe()
    before = descriptors()
    pair[0].send(b"none")
    pair[0].send(b"two", (read, write))
    pair[0].send(b"none")
    frames = receive(pair[1], 3)
    assert descriptors() == before, "two were closed and two came"
    assert [len(frame.descriptors) for frame in frames] == [0, 2, 0]
    there, back = frames[1].descriptors
    assert not os.get_inheritable(there)
    os.write(back, b"through")
    assert os.read(there, 10) == b"through"
    os.close(there)
    os.close(back)


def test_what_does_not_fit_waits_and_flush_goes_on(pair: Pair) -> None:
    pair[0].sock.setblocking(False)
    payload = os.urandom(4_000_000)
    pair[0].send(payload)
    assert pair[0].unsent
    frames: list[Any] = []
    while not frames:
        frames = pair[1].receive() or []
        pair[0].flush()
    assert frames[0].payload == payload
    assert not pair[0].unsent


def test_the_other_end_gone(pair: Pair) -> None:
    pair[1].close()
    assert pair[0].receive() is None
    read, write = os.pipe()
    with pytest.raises(OSError, match="pipe"):
        pair[0].send(b"x", (write,))
    assert os.read(read, 1) == b"", "the descriptor was not closed"
    os.close(read)


@pytest.mark.parametrize(
    ("size", "rest", "told"),
    [(LIMIT + 1, b"\0", "at most"), (1, b"\x02x", "2 descriptors, found 0")],
    ids=["too large", "descriptors that do not come"],
)
def test_absurd_frames_are_refused(pair: Pair, size: int, rest: bytes, told: str) -> None:
    pair[0].sock.sendall(size.to_bytes(8, "little") + rest)
    with pytest.raises(RunError, match=told):
        pair[1].receive()


def load(version: int) -> m.Load:
    return m.Load(id=version, reader="n", version=version, **UPDATE)


TRAIN = train_step(Keys.of([0]))
RECORD = m.Record(id=9, step=1, keys={"t": Keys.of([0])}, inputs={}, worker="w")
SAVE = Request(number=1, request=Save(directory=Path("x")))


def inbox_of(*items: Any) -> Inbox:
    inbox = Inbox()
    for item in items:
        inbox.put(item)
    return inbox


def order(*items: Any) -> list[Any]:
    inbox = inbox_of(*items)
    return [inbox.take() for _ in items]


def test_chunks_and_steps_keep_their_order() -> None:
    items = [run_chunk(1), TRAIN, run_chunk(2), RECORD, run_chunk(3)]
    assert order(*items) == items


def test_weights_go_and_requests_pass_chunks_and_nothing_else() -> None:
    one, two, go = load(1), load(2), m.Go(id=0, node="t", worker="w")
    a, b, c = run_chunk(1), run_chunk(2), run_chunk(3)
    assert order(a, TRAIN, b, one, c, SAVE, two, go) == [a, TRAIN, one, SAVE, two, go, b, c]


def test_within_a_chunk_only_requests_that_wait_for_chunks() -> None:
    chunk = run_chunk(1)
    inbox = inbox_of(chunk, run_chunk(2), SAVE)
    assert inbox.within() is None, "nothing has begun"
    assert inbox.take() is SAVE
    inbox.put(SAVE)
    assert inbox.within() is None, "a request is answered to its end"
    assert inbox.take() is SAVE
    assert inbox.take() is chunk
    inbox.put(SAVE)
    assert [inbox.within(), inbox.within()] == [SAVE, None]
    inbox.put(load(1))
    inbox.put(SAVE)
    assert inbox.within() is None, "it passed weights that it was told before"
    assert inbox.has_weights()


def test_within_an_offer_no_request_as_other_ranks_may_have_it_later() -> None:
    offer = m.Offer(id=9, version=1, **UPDATE)
    inbox = inbox_of(offer, SAVE)
    assert inbox.take() is offer
    assert inbox.within() is None
    assert inbox.take() is SAVE


def test_forget_leaves_requests() -> None:
    follow = dataclasses.replace(load(1), leader="l", rate=0.5)
    inbox = inbox_of(run_chunk(1), TRAIN, follow, SAVE)
    assert inbox.forget() == 3
    assert inbox.take() is SAVE


def test_close_wakes_whoever_waits() -> None:
    inbox = Inbox()
    taken: list[Any] = []
    waiting = threading.Thread(target=lambda: taken.append(inbox.take()))
    waiting.start()
    inbox.close()
    waiting.join(10)
    assert taken == [None]


def test_an_event_is_small() -> None:
    """What the coordinator decodes for each event: a few dozen bytes beside the arrays."""
    done = m.From(worker="gen", epoch=0, number=7, event=m.ChunkDone(id=3, node="rollout"))
    assert len(encode_message(WorkerUpdate(events=(done,), ended=4))) < 160
    assert len(encode_message(m.Stepped(id=1, node="t", step=1, worker="w"))) < 60
