"""Device columns and weights between two Workers: exactly what is asked for, bit by bit.

Real processes and gloo; a pipe is the pair's data socket. Lost ends: test_pairs.py.
"""

from __future__ import annotations

import itertools
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from multiprocessing.connection import Connection, Pipe
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from dataflow.errors import RunError
from engine.channels.block_requests import Wanted, encode
from engine.channels.contract import BlockRequest, PeerLost
from engine.channels.shm.channel import ShmChannel
from engine.channels.shm.messages import SendTensors, decode_from_reader
from engine.channels.tensors.column_hashes import of_tensors
from engine.channels.tensors.columns import ColumnStore
from engine.channels.tensors.pairs import TensorPairs
from engine.channels.tensors.world import meeting_place
from tests.contracts.pair_ends import (
    ASKED,
    NAMES,
    OWNER,
    READER,
    ROWS,
    columns,
    equal,
    expected,
    owner,
    read,
    reader,
    room_like,
    serve,
    wanted,
)
from tests.contracts.pull_rows import rollouts
from tests.contracts.ranks import LIMIT, ListeningPlace, RankPool

pytestmark = pytest.mark.timeout(120)
RANKS = 2

WEIGHTS = [[wanted(block)] for block in (9, 7, 9)]


def test_the_store_picks_rows_until_it_forgets_them() -> None:
    store, kept = ColumnStore(), columns(1)
    store.keep(1, kept)
    for request in (ASKED[0][0], wanted(1, columns=NAMES)):
        assert equal(store.pick_rows(1, request.columns, request.rows), expected([request]))
    assert store.pick_rows(1, ("int64",), None)[0] is kept["int64"].values
    told = r"block 1: expected the device columns float32, .*, found other"
    with pytest.raises(RunError, match=told):
        store.pick_rows(1, ("other",), None)
    for rows in ([0, 50], [-1]):
        with pytest.raises(RunError, match="block 1: expected rows below 50"):
            store.pick_rows(1, ("int64",), np.array(rows))
    store.release(1)
    store.release(1)
    assert not len(store)
    with pytest.raises(KeyError):
        store.pick_rows(1, ("int64",), None)


@pytest.mark.parametrize("asked", ASKED)
def test_requests_arrive_as_they_were_made(asked: list[BlockRequest]) -> None:
    sent = decode_from_reader(encode(SendTensors.of(4, asked)))
    assert isinstance(sent, SendTensors)
    assert sent.sequence == 4
    for was, now in zip(asked, sent.requests(OWNER), strict=True):
        assert (was.worker, was.block, was.columns) == (now.worker, now.block, now.columns)
        assert (was.rows is None) == (now.rows is None)
        assert was.rows is None or np.array_equal(was.rows, now.rows)


def test_rows_that_are_none_are_refused() -> None:
    with pytest.raises(RunError, match="expected rows as numbers of 8 bytes"):
        SendTensors(0, (Wanted(1, ("a",), b"123"),)).requests(OWNER)


Sockets = tuple[ShmChannel, ShmChannel]


@pytest.fixture
def data_socket() -> Iterator[Sockets]:
    """The owner's channel and the reader's, which are connected."""
    asks, serves = socket.socketpair()
    ours, theirs = ShmChannel(OWNER, 0, _nobody_else), ShmChannel(READER, 0, lambda peer: asks)
    ours.serve(READER, serves)
    yield ours, theirs
    ours.close()
    theirs.close()


def _nobody_else(peer: str) -> socket.socket:
    raise PeerLost(peer, "nobody")


@pytest.mark.parametrize("count", [3, 1_000_000], ids=["little", "much"])
def test_a_request_arrives_whole_over_the_socket_of_rows(data_socket: Sockets, count: int) -> None:
    """However large: nobody sends the rest of it later, the asking side waits in the transfer."""
    ours, theirs = data_socket
    came: queue.Queue[tuple[str, int, Sequence[BlockRequest]]] = queue.Queue()
    ours.send_by(lambda *request: came.put(request))
    rows = np.arange(count)[::-1]
    theirs.have_sent(OWNER, 5, [wanted(1, columns=("a",), rows=rows)])
    peer, sequence, (request,) = came.get(timeout=LIMIT)
    assert (peer, sequence) == (READER, 5)
    assert np.array_equal(request.rows, rows)
    block = ours.keep(rollouts(2, 3))
    assert theirs.fetch([wanted(block)])[0].num_rows == 2, "rows come over it, too"
    ours.close()
    with pytest.raises(PeerLost):
        theirs.have_sent(OWNER, 6, [wanted(1)])


def test_who_sends_nothing_refuses_to_be_asked(data_socket: Sockets) -> None:
    ours, theirs = data_socket
    theirs.have_sent(OWNER, 0, [wanted(0)])
    with pytest.raises(PeerLost):
        theirs.fetch([wanted(0)])
    assert ours.refusals == {READER: 1}


Transfers = tuple[list[str], int, list[str]]


def transferred(
    ranks: RankPool,
    listener: ListeningPlace,
    asked: list[list[BlockRequest]],
    *how: Any,
    serves: tuple[Any, ...] = (serve,),
) -> Transfers:
    """What `read` returns. how: its further arguments. serves: the owner's task and its own."""
    mine, theirs = Pipe()
    task, *more = serves
    ranks.tell(0, task, listener, mine, *more)
    ranks.tell(1, read, listener, theirs, asked, *how)
    return ranks.answers([0, 1])[1]


@pytest.mark.long
@pytest.mark.parametrize("asked", [ASKED, WEIGHTS], ids=["columns", "weights"])
def test_what_is_asked_for_comes_and_nothing_else(
    ranks: RankPool, listener: ListeningPlace, asked: list[list[BlockRequest]]
) -> None:
    said, moved, devices = transferred(ranks, listener, asked)
    assert said == ["True"] * len(asked)
    assert moved == sum(t.nbytes for many in asked for t in expected(many))
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
    serves = (served_with_hashes, changed)
    said, moved, _ = transferred(ranks, listener, ASKED, 0, True, serves=serves)
    if changed == -1:
        assert said == ["True"] * len(ASKED)
        payload = sum(t.nbytes for many in ASKED for t in expected(many))
        assert moved == payload, "hashes are no payload"
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
    wanted(3, columns=("int64",)),
    wanted(1, columns=("int64",), rows=np.array([ROWS])),
    wanted(1, columns=("other",)),
    wanted(8),
], ids=["block", "row", "column", "weights"])  # fmt: skip
def test_a_wrong_request_ends_the_world_for_both(
    ranks: RankPool, listener: ListeningPlace, wrong: BlockRequest
) -> None:
    mine, theirs = Pipe()
    ranks.tell(0, serve, listener, mine)
    ranks.tell(1, ask_wrongly, listener, theirs, wrong)
    first, second = ranks.answers([0, 1])[1]
    assert "made: receive 0 with reads did not end" in first
    assert "made: expected its process" in second


def ask_wrongly(
    rank: int, port: int, at: ListeningPlace, requests: Connection, wrong: BlockRequest
) -> list[str]:
    """What is said of it, and of a right request after it."""
    pairs, said = reader(at, requests), []
    for request in (wrong, ASKED[0][0]):
        with pytest.raises(PeerLost) as error:
            pairs.receive(OWNER, [request], room_like([torch.zeros(1, 3, dtype=torch.int64)]))
        said.append(str(error.value))
    requests.send(None)
    pairs.close()
    return said


def deserted(rank: int, port: int) -> str:
    """Reads from a peer whose data socket closes once it was asked, met where nobody else is."""
    asks, serves = socket.socketpair()
    ours, theirs = ShmChannel(OWNER, 0, _nobody_else), ShmChannel(READER, 0, lambda peer: asks)
    was_asked = threading.Event()
    ours.send_by(lambda peer, sequence, requests: was_asked.set())
    ours.serve(READER, serves)

    def die() -> None:
        was_asked.wait(LIMIT)
        ours.close()

    threading.Thread(target=die).start()
    pairs = TensorPairs(READER, theirs.have_sent, timeout=1000.0, alive=theirs.require)
    pairs.meet(OWNER, meeting_place(), writes=False)
    with pytest.raises(PeerLost) as error:
        pairs.receive(OWNER, ASKED[0], lambda device: [])
    return str(error.value)


def test_who_dies_before_a_world_is_formed_is_not_waited_for() -> None:
    """In its own process: a connection stays open, in a thread, as long as it lives."""
    with closing(RankPool(1)) as pool:
        pool.tell(0, deserted)
        assert "made: its process is gone" in pool.answers([0])[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rows_are_picked_on_the_device() -> None:
    store, kept = ColumnStore(), columns(1, "cuda")
    store.keep(1, kept)
    picked_rows = store.pick_rows(1, NAMES, ASKED[1][1].rows)
    assert {t.device.type for t in picked_rows} == {"cuda"}
    assert equal(picked_rows, expected([ASKED[1][1]]))


@pytest.mark.gpu
@pytest.mark.parametrize(("devices", "lie_on"), [
    pytest.param("00", "cpu", marks=pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device")),
    pytest.param("01", "cuda:0", marks=pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason="needs two CUDA devices")),
], ids=["one device: by the host", "two devices: by nccl"])  # fmt: skip
def test_values_on_devices(listener: ListeningPlace, devices: str, lie_on: str) -> None:
    """Both ends in their own processes, each of which sees one device."""
    asked, (mine, theirs) = [*ASKED, *WEIGHTS], Pipe()
    with closing(RankPool(2)) as pool:
        pool.tell(0, seeing, devices[0], serve, listener, mine, "cuda")
        pool.tell(1, seeing, devices[1], read, listener, theirs, asked)
        said, _, lay = pool.answers([0, 1])[1]
    assert said == ["True"] * len(asked)
    assert set(lay) == {lie_on}


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
    pairs = owner(listening, asks=lambda peer, *what: tells.send(what))
    pairs.meet(READER, at.end(), writes=False)

    def answer() -> None:
        while (request := hears.recv()) is not None:
            pairs.begin_send(READER, *request)

    thread = threading.Thread(target=answer)
    thread.start()
    same = True
    for many in (ASKED * count)[:count]:
        right = expected(many)
        same &= equal(pairs.receive(READER, many, room_like(right)), right)
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
