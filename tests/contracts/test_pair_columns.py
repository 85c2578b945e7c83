"""Device columns between two Workers: exactly the rows that are asked for, bit by bit.

Real processes and gloo; a pipe is the pair's data socket. Weights and lost ends: test_pairs.py.
"""

from __future__ import annotations

import itertools
import os
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from multiprocessing.connection import Connection, Pipe
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from dataflow.batch import Ragged
from dataflow.device import taken
from dataflow.errors import RunError
from engine.channels.contract import BlockRequest, PeerLost
from engine.channels.header import Wanted, encode
from engine.channels.shm.channel import ShmChannel
from engine.channels.shm.messages import SendTensors, decode_from_reader
from engine.channels.tensors.columns import ColumnStore
from engine.channels.tensors.hashes import of_tensors
from engine.channels.tensors.pairs import TensorPairs
from engine.channels.tensors.world import meeting_place
from tests.contracts.ranks import LIMIT, ListeningPlace, RankPool

pytestmark = pytest.mark.timeout(120)
RANKS = 2

DTYPES = ("float32", "float16", "float64", "uint8", "int32", "int64")
ROWS = 50


def columns(block: int, device: str = "cpu") -> dict[str, Ragged]:
    """Of each dtype vectors for tokens, and of each row a number; some rows have no token."""
    draw = torch.Generator().manual_seed(block)
    lengths = torch.randint(0, 4, (ROWS,), generator=draw).numpy()
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    by_name = {}
    for name in DTYPES:
        values = torch.randint(0, 100, (int(offsets[-1]), 3), generator=draw).to(
            getattr(torch, name)
        )
        by_name[name] = Ragged(values.to(device), offsets)
    by_name["of_row"] = Ragged(torch.randn(ROWS, generator=draw).to(device), np.arange(ROWS + 1))
    return by_name


NAMES = (*DTYPES, "of_row")
ASKED: list[list[BlockRequest]] = [
    [BlockRequest(worker="made", block=1, columns=NAMES, rows=np.array([3, 4, 5]))],
    [
        BlockRequest(worker="made", block=b, columns=NAMES, rows=np.array([49, b, 0]))
        for b in (2, 1, 2)
    ],
    [BlockRequest(worker="made", block=2, columns=("of_row", "int32"))],
    [BlockRequest(worker="made", block=1, columns=("uint8",), rows=np.zeros(0, np.int64))],
]
"""Adjacent rows; rows of several blocks, reordered, one block twice; a whole block; no row."""


def expected(requests: Sequence[BlockRequest]) -> list[Tensor]:
    tensors = []
    for request in requests:
        rows = np.arange(ROWS) if request.rows is None else request.rows
        tensors += [taken(columns(request.block)[name], rows).values for name in request.columns]
    return tensors


def test_the_store_picks_rows_until_it_forgets_them() -> None:
    store, kept = ColumnStore(), columns(1)
    store.keep(1, kept)
    for request in (ASKED[0][0], BlockRequest(worker="made", block=1, columns=NAMES)):
        found = store.picked(1, request.columns, request.rows)
        assert all(torch.equal(a, b) for a, b in zip(found, expected([request]), strict=True))
    assert store.picked(1, ("int64",), None)[0] is kept["int64"].values
    told = r"block 1: expected the device columns float32, .*, found other"
    with pytest.raises(RunError, match=told):
        store.picked(1, ("other",), None)
    for rows in ([0, 50], [-1]):
        with pytest.raises(RunError, match="block 1: expected rows below 50"):
            store.picked(1, ("int64",), np.array(rows))
    store.release(1)
    store.release(1)
    assert not len(store)
    with pytest.raises(KeyError):
        store.picked(1, ("int64",), None)


@pytest.mark.parametrize("asked", ASKED)
def test_requests_arrive_as_they_were_made(asked: list[BlockRequest]) -> None:
    sent = decode_from_reader(encode(SendTensors.of(4, asked)))
    assert isinstance(sent, SendTensors)
    assert sent.sequence == 4
    for was, now in zip(asked, sent.requests("made"), strict=True):
        assert (was.worker, was.block, was.columns) == (now.worker, now.block, now.columns)
        assert (was.rows is None) == (now.rows is None)
        assert was.rows is None or np.array_equal(was.rows, now.rows)


def test_rows_that_are_none_are_refused() -> None:
    with pytest.raises(RunError, match="expected rows as numbers of 8 bytes"):
        SendTensors(0, (Wanted(1, ("a",), b"123"),)).requests("made")


def test_a_request_that_no_socket_takes_at_once_arrives_whole() -> None:
    """Nobody sends the rest of it later: the asking side waits in the transfer."""
    asks, serves = socket.socketpair()
    came: queue.Queue[Sequence[BlockRequest]] = queue.Queue()
    owner, other = ShmChannel("made", 0, _nobody_else), ShmChannel("reads", 0, lambda peer: asks)
    owner.send_by(lambda peer, sequence, requests: came.put(requests))
    owner.serve("reads", serves)
    rows = np.arange(1_000_000)[::-1]
    other.have_sent("made", 0, [BlockRequest(worker="made", block=1, columns=("a",), rows=rows)])
    (request,) = came.get(timeout=LIMIT)
    assert np.array_equal(request.rows, rows)
    owner.close()
    other.close()


def _nobody_else(peer: str) -> socket.socket:
    raise PeerLost(peer, "nobody")


def _not_asked(peer: str, sequence: int, requests: Sequence[BlockRequest]) -> None:
    raise AssertionError(f"{peer} is asked for {requests}")


def serve(
    rank: int,
    port: int,
    listening: ListeningPlace,
    requests: Connection,
    device: str = "cpu",
    content: bool = False,
) -> None:
    """Answers everything until the reader is done."""
    pairs = TensorPairs("made", _not_asked, timeout=20, content=content)
    pairs.meet("reads", listening.end(), writes=True)
    for block in (1, 2):
        pairs.columns.keep(block, columns(block, device))
    while (request := requests.recv()) is not None:
        pairs.asked("reads", *request)
    pairs.close()


def read(
    rank: int,
    port: int,
    at: ListeningPlace,
    requests: Connection,
    asked: list[list[BlockRequest]],
    longer: int = 0,
    content: bool = False,
) -> tuple[list[str], int, list[str]]:
    """The outcome of each transfer, bytes, devices. longer: values of room too many."""
    pairs = TensorPairs(
        "reads",
        lambda peer, sequence, wanted: requests.send((sequence, wanted)),
        timeout=20,
        content=content,
    )
    pairs.meet("made", at.end(), writes=False)
    said, devices = [], []
    for many in asked:
        wanted = expected(many)
        try:
            found = pairs.receive(
                "made",
                many,
                lambda device, of=wanted: [
                    t.new_empty((len(t) + longer, *t.shape[1:]), device=device) for t in of
                ],
            )
        except RunError as error:
            said.append(f"{type(error).__name__}: {error}")
            continue
        devices += [str(t.device) for t in found]
        said.append(str(all(torch.equal(a.cpu(), b) for a, b in zip(found, wanted, strict=True))))
    requests.send(None)
    moved = pairs.moved()
    pairs.close()
    return said, moved, devices


def transferred(
    ranks: RankPool, listener: ListeningPlace, asked: list[list[BlockRequest]], longer: int = 0
) -> tuple[list[str], int, list[str]]:
    mine, theirs = Pipe()
    ranks.tell(0, serve, listener, mine)
    ranks.tell(1, read, listener, theirs, asked, longer)
    return ranks.answers([0, 1])[1]


def test_the_rows_that_are_asked_for_come_and_no_others(
    ranks: RankPool, listener: ListeningPlace
) -> None:
    said, moved, devices = transferred(ranks, listener, ASKED)
    assert said == ["True"] * len(ASKED)
    assert moved == sum(t.nbytes for many in ASKED for t in expected(many))
    assert set(devices) == {"cpu"}


def served_with_hashes(
    rank: int, port: int, listening: ListeningPlace, requests: Connection, changed: int
) -> None:
    """changed: the transfers whose last value changes after it was hashed."""
    number = itertools.count()

    def hashed(tensors: Sequence[Tensor]) -> list[int]:
        hashes = of_tensors(tensors)
        if next(number) == changed:
            tensors[-1].view(torch.uint8).view(-1)[-1] ^= 1
        return hashes

    with mock.patch("engine.channels.tensors.pairs.of_tensors", hashed):
        serve(rank, port, listening, requests, "cpu", True)


@pytest.mark.parametrize("changed", [-1, 2])
def test_with_hashes_what_was_changed_on_its_way_is_refused(
    ranks: RankPool, listener: ListeningPlace, changed: int
) -> None:
    mine, theirs = Pipe()
    ranks.tell(0, served_with_hashes, listener, mine, changed)
    ranks.tell(1, read, listener, theirs, ASKED, 0, True)
    said, moved, _ = ranks.answers([0, 1])[1]
    if changed == -1:
        assert said == ["True"] * len(ASKED)
        assert moved == sum(t.nbytes for many in ASKED for t in expected(many)), (
            "hashes are no payload"
        )
        return
    assert said[:2] == ["True", "True"]
    assert said[2].startswith(
        "RunError: made: refused: block 2, columns of_row, int32: their values were changed"
    )
    assert said[3].startswith("PeerLost: made: expected its process"), (
        "no world is used again after that"
    )


def test_ends_that_do_not_agree_on_values_both_fail(
    ranks: RankPool, listener: ListeningPlace
) -> None:
    """No world is used again after that: its ends would not mean the same transfers any more."""
    said, moved, _ = transferred(ranks, listener, ASKED[:2], 1)
    assert said[0].startswith("RunError: "), said
    assert "expected one transfer on both ends" in said[0]
    assert said[1].startswith("PeerLost: made: expected its process"), said
    assert not moved


@pytest.mark.parametrize("wrong", [
    BlockRequest(worker="made", block=3, columns=("int64",)),
    BlockRequest(worker="made", block=1, columns=("int64",), rows=np.array([ROWS])),
    BlockRequest(worker="made", block=1, columns=("other",)),
], ids=["block", "row", "column"])  # fmt: skip
def test_a_wrong_request_ends_the_world(
    ranks: RankPool, listener: ListeningPlace, wrong: BlockRequest
) -> None:
    mine, theirs = Pipe()
    ranks.tell(0, serve, listener, mine)
    ranks.tell(1, ask_wrongly, listener, theirs, wrong)
    assert "made: receive 0 with reads did not end" in ranks.answers([0, 1])[1]


def ask_wrongly(
    rank: int, port: int, at: ListeningPlace, requests: Connection, wrong: BlockRequest
) -> str:
    pairs = TensorPairs(
        "reads", lambda peer, sequence, wanted: requests.send((sequence, wanted)), timeout=20
    )
    pairs.meet("made", at.end(), writes=False)
    with pytest.raises(PeerLost) as error:
        pairs.receive(
            "made", [wrong], lambda device: [torch.empty(1, 3, dtype=torch.int64, device=device)]
        )
    requests.send(None)
    pairs.close()
    return str(error.value)


def deserted(rank: int, port: int) -> str:
    """Reads from a peer whose data socket closes once it was asked, met where nobody else is."""
    asks, serves = socket.socketpair()
    owner, other = ShmChannel("made", 0, _nobody_else), ShmChannel("reads", 0, lambda peer: asks)
    was_asked = threading.Event()
    owner.send_by(lambda peer, sequence, requests: was_asked.set())
    owner.serve("reads", serves)

    def die() -> None:
        was_asked.wait(LIMIT)
        owner.close()

    threading.Thread(target=die).start()
    pairs = TensorPairs("reads", other.have_sent, timeout=1000.0, alive=other.require)
    pairs.meet("made", meeting_place(), writes=False)
    with pytest.raises(PeerLost) as error:
        pairs.receive("made", ASKED[0], lambda device: [])
    return str(error.value)


def test_who_dies_before_a_world_is_formed_is_not_waited_for() -> None:
    """In its own process: a connection stays open, in a thread, as long as it lives."""
    pool = RankPool(1)
    try:
        pool.tell(0, deserted)
        assert "made: its process is gone" in pool.answers([0])[0]
    finally:
        pool.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rows_are_picked_on_the_device() -> None:
    store, kept = ColumnStore(), columns(1, "cuda")
    store.keep(1, kept)
    found = store.picked(1, NAMES, ASKED[1][1].rows)
    assert {t.device.type for t in found} == {"cuda"}
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected([ASKED[1][1]]), strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_two_workers_on_one_device_go_by_the_host(listener: ListeningPlace) -> None:
    assert on_devices(listener, ("0", "0")) == (["True"] * len(ASKED), {"cpu"})


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices_send_by_nccl(listener: ListeningPlace) -> None:
    assert on_devices(listener, ("0", "1")) == (["True"] * len(ASKED), {"cuda:0"})


def on_devices(listener: ListeningPlace, devices: tuple[str, str]) -> tuple[list[str], set[str]]:
    """Both ends in their own processes, each of which sees one device."""
    pool = RankPool(2)
    try:
        mine, theirs = Pipe()
        pool.tell(0, seeing, devices[0], serve, listener, mine, "cuda")
        pool.tell(1, seeing, devices[1], read, listener, theirs, ASKED)
        said, _, lay = pool.answers([0, 1])[1]
        return said, set(lay)
    finally:
        pool.close()


def seeing(
    rank: int, port: int, device: str, what: Callable[..., object], *arguments: object
) -> object:
    os.environ["CUDA_VISIBLE_DEVICES"] = device
    return what(rank, port, *arguments)


def both(
    rank: int,
    port: int,
    listening: ListeningPlace,
    at: ListeningPlace,
    hears: Connection,
    tells: Connection,
    count: int,
) -> bool:
    """Both own and read: while one waits for a transfer, its threads send to the other."""
    name, peer = (("a", "b"), ("b", "a"))[rank]
    pairs = TensorPairs(
        name, lambda peer, sequence, wanted: tells.send((sequence, wanted)), timeout=20
    )
    pairs.meet(peer, listening.end(), writes=True)
    pairs.meet(peer, at.end(), writes=False)
    for block in (1, 2):
        pairs.columns.keep(block, columns(block))

    def answer() -> None:
        while (request := hears.recv()) is not None:
            pairs.asked(peer, *request)

    thread = threading.Thread(target=answer)
    thread.start()
    same = True
    for many in (ASKED * count)[:count]:
        wanted = expected(many)
        found = pairs.receive(
            peer, many, lambda device, of=wanted: [torch.empty_like(t, device=device) for t in of]
        )
        same &= all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    tells.send(None)
    thread.join()
    pairs.close()
    return same


def test_two_that_read_from_each_other_do_not_wait_for_each_other(
    ranks: RankPool, listener: ListeningPlace
) -> None:
    (mine, to_mine), (theirs, to_theirs) = Pipe(), Pipe()
    with closing(ListeningPlace()) as other:
        ranks.tell(0, both, listener, other, mine, to_theirs, 12)
        ranks.tell(1, both, other, listener, theirs, to_mine, 12)
        assert ranks.answers([0, 1]) == [True, True]
