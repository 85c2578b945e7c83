"""Weights and columns between two Workers: the same bits, and the loss of an end.

Real processes and gloo; the data socket of a pair is a pipe. Marked gpu: on devices.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import closing
from multiprocessing.connection import Connection, Pipe
from typing import Any

import pytest
import torch

from dataflow.errors import RunError
from dataflow.kernel import Piece
from engine.channels.contract import BlockRequest, PeerLost
from engine.channels.shm.channel import ShmChannel
from engine.channels.tensors.pairs import TensorPairs
from engine.weights.pieces import DTYPES, to_batch
from engine.weights.snapshot import room, snapshot, verified
from tests.contracts.ranks import LIMIT, ListeningPlace, RankPool

pytestmark = pytest.mark.timeout(120)
RANKS = 2


def weights(version: int) -> list[Piece]:
    """Every dtype, a scalar, an empty piece, a non-contiguous one, one with gradients."""
    draw = torch.Generator().manual_seed(version)
    pieces = [
        Piece(f"of.{d}", torch.randint(0, 2, (3, 5), generator=draw).to(getattr(torch, d)))
        for d in DTYPES
    ]
    pieces += [
        Piece("scalar", torch.randn((), generator=draw)),
        Piece("none", torch.zeros(0, 3)),
        Piece("turned", torch.randn(4, 6, generator=draw).t()),
        Piece("parameter", torch.nn.Parameter(torch.randn(70_000, generator=draw))),
    ]
    return pieces


def test_a_snapshot_has_the_id_of_the_block_with_the_same_weights() -> None:
    given = weights(1)
    batch, digest, copies = snapshot(given)
    assert digest == to_batch(given)[1]
    assert "data" not in batch.names
    for piece, copy in zip(given, copies, strict=True):
        assert torch.equal(copy.to(torch.float64), piece.data.detach().to(torch.float64))
        assert copy.is_contiguous()
        assert copy.data_ptr() != piece.data.data_ptr() or not copy.numel()


def test_what_changed_is_named() -> None:
    batch, digest, copies = snapshot(weights(1))
    assert [p.name for p in verified(batch.records, copies, digest)] == [p.name for p in weights(1)]
    with pytest.raises(RunError, match="it is another version"):
        verified(batch.records, copies, snapshot(weights(2))[1])
    copies[-1][69_999] += 1
    with pytest.raises(RunError, match=r"'parameter' .*does not have the content"):
        verified(batch.records, copies, digest)
    with pytest.raises(RunError, match=r"expected piece 1 after 'of\.float64'"):
        verified(batch.records.take([0, 2]), [copies[0], copies[2]], digest)
    with pytest.raises(RunError, match="twice"):
        snapshot([*weights(1), weights(1)[0]])


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("turned", lambda t: t.reshape(4, 6), r"expected float32 \[6, 4\], found float32 \[4, 6\]"),
        ("scalar", lambda t: t.reshape(1), r"expected float32 \[\], found float32 \[1\]"),
        ("none", lambda t: t.reshape(3, 0), r"expected float32 \[0, 3\], found float32 \[3, 0\]"),
        ("of.int32", lambda t: t.view(torch.float32), r"expected int32 .*, found float32"),
        ("of.bool", lambda t: t.view(torch.uint8), r"expected bool .*, found uint8"),
        ("none", lambda t: t.long(), r"expected float32 .*, found int64"),
        ("parameter", lambda t: t[:-1], "does not have the content"),
        ("parameter", lambda t: torch.cat([t, t[:1]]), "does not have the content"),
    ],
)
def test_a_tensor_that_is_not_as_described_is_never_a_piece(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], problem: str
) -> None:
    """Even if its bytes are those that the writer hashed."""
    batch, digest, copies = snapshot(weights(1))
    at = batch.records.column("name").to_pylist().index(name)
    copies[at] = change(copies[at])
    with pytest.raises(RunError, match=rf"piece '{name}'.*{problem}"):
        verified(batch.records, copies, digest)


def test_every_described_piece_has_a_tensor() -> None:
    batch, digest, copies = snapshot(weights(1))
    for arrived in (copies[:-1], [*copies, copies[0]]):
        with pytest.raises(RunError, match=f"expected {len(copies)} pieces, found {len(arrived)}"):
            verified(batch.records, arrived, digest)


def test_room_is_made_for_descriptions_alone() -> None:
    batch, _, copies = snapshot(weights(1))
    empty = room(batch.records, "cpu")
    assert [(t.shape, t.dtype) for t in empty] == [(t.shape, t.dtype) for t in copies]
    with pytest.raises(RunError, match="expected the columns"):
        room(to_batch(weights(1))[0].records, "cpu")


def asks_of(block: int) -> list[BlockRequest]:
    """All weights of a block."""
    return [BlockRequest(worker="train", block=block)]


def test_a_request_for_tensors_goes_over_the_data_socket() -> None:
    asks, serves = socket.socketpair()
    came: queue.Queue[tuple[str, int, Sequence[BlockRequest]]] = queue.Queue()
    owner, other = ShmChannel("train", 0, _dials({})), ShmChannel("gen", 0, _dials({"train": asks}))
    owner.send_by(lambda *request: came.put(request))
    owner.serve("gen", serves)
    block = owner.keep(snapshot(weights(1))[0])
    for sequence in range(2):
        other.have_sent("train", sequence, asks_of(block))
        peer, number, (request,) = came.get(timeout=LIMIT)
        assert (peer, number, request.worker, request.block) == ("gen", sequence, "train", block)
        assert request.rows is None
    assert len(other.fetch([BlockRequest(worker="train", block=block)])[0]) == len(weights(1))
    owner.close()
    with pytest.raises(PeerLost):
        other.have_sent("train", 2, asks_of(block))
    other.close()


def test_who_sends_nothing_refuses_to_be_asked() -> None:
    asks, serves = socket.socketpair()
    owner, other = ShmChannel("train", 0, _dials({})), ShmChannel("gen", 0, _dials({"train": asks}))
    owner.serve("gen", serves)
    other.have_sent("train", 0, asks_of(0))
    with pytest.raises(PeerLost):
        other.fetch([BlockRequest(worker="train", block=0)])
    assert owner.refused == {"gen": 1}
    owner.close()
    other.close()


def _dials(sockets: dict[str, socket.socket]) -> Callable[[str], socket.socket]:
    def dial(peer: str) -> socket.socket:
        if peer not in sockets:
            raise PeerLost(peer, "nobody")
        return sockets.pop(peer)

    return dial


def test_a_request_without_a_world_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    pairs = TensorPairs("train", _nobody)
    pairs.asked("gen", 0, asks_of(1))
    assert "and has no world here" in caplog.text
    with pytest.raises(PeerLost, match="expected its process"):
        pairs.receive("gen", asks_of(1), lambda device: [])


def writer(listening: ListeningPlace, versions: dict[int, list[Piece]], **how: Any) -> TensorPairs:
    """A Worker that keeps these versions, met once."""
    pairs = TensorPairs("train", _nobody, **how)
    pairs.meet("gen", listening.end(), writes=True)
    for block, pieces in versions.items():
        pairs.keep(block, snapshot(pieces)[2])
    return pairs


def _nobody(peer: str, sequence: int, requests: Sequence[BlockRequest]) -> None:
    raise AssertionError(f"{peer} is asked for {requests}")


def serve(rank: int, port: int, listening: ListeningPlace, requests: Connection, count: int) -> int:
    """Answers this many requests, then waits until the reader is done."""
    pairs = writer(listening, {7: weights(1), 9: weights(2)})
    for _ in range(count):
        pairs.asked("gen", *requests.recv())
    requests.recv()
    pairs.close()
    return count


def reader(listening: ListeningPlace, requests: Connection, timeout: float = 20.0) -> TensorPairs:
    pairs = TensorPairs(
        "gen", lambda peer, sequence, wanted: requests.send((sequence, wanted)), timeout=timeout
    )
    pairs.meet("train", listening.end(), writes=False)
    return pairs


def read(
    rank: int, port: int, at: ListeningPlace, requests: Connection, blocks: tuple[int, ...]
) -> tuple[list[str], int]:
    """For each block, whether it came unchanged, or the error."""
    pairs, said = reader(at, requests), []
    for block in blocks:
        batch, digest, copies = snapshot(weights({7: 1, 9: 2}.get(block, 1)))
        try:
            arrived = pairs.receive(
                "train", asks_of(block), lambda device, of=batch.records: room(of, device)
            )
        except RunError as error:
            said.append(f"{type(error).__name__}: {error}")
            continue
        verified(batch.records, arrived, digest)
        said.append(str(all(torch.equal(a, b) for a, b in zip(arrived, copies, strict=True))))
    requests.send(None)
    moved = pairs.moved()
    pairs.close()
    return said, moved


def ends(
    ranks: RankPool,
    tasks: tuple[Callable[..., Any], Callable[..., Any]],
    *arguments: tuple[Any, ...],
) -> None:
    """Start the writer's process and the reader's."""
    for rank in (0, 1):
        ranks.tell(rank, tasks[rank], *arguments[rank])


def test_versions_come_in_the_order_they_are_asked_for(
    ranks: RankPool, listener: ListeningPlace
) -> None:
    mine, theirs = Pipe()
    ends(ranks, (serve, read), (listener, mine, 3), (listener, theirs, (9, 7, 9)))
    count, (said, moved) = ranks.answers([0, 1])
    assert (count, said) == (3, ["True"] * 3)
    assert moved == 3 * sum(t.numel() * t.element_size() for t in snapshot(weights(1))[2])


def test_a_block_that_is_gone_ends_the_world_for_both(
    ranks: RankPool, listener: ListeningPlace
) -> None:
    mine, theirs = Pipe()
    ends(ranks, (serve, read), (listener, mine, 2), (listener, theirs, (7, 8, 7)))
    _, (said, _) = ranks.answers([0, 1])
    assert said[0] == "True"
    assert said[1].startswith("PeerLost: train: receive 1 with gen did not end"), said
    assert said[2].startswith("PeerLost: train: expected its process"), said


def late(rank: int, port: int, at: ListeningPlace, requests: Connection) -> str:
    """Asks, and is not answered."""
    pairs = reader(at, requests, 1.0)
    with pytest.raises(PeerLost) as lost:
        pairs.receive("train", asks_of(7), lambda device: [])
    pairs.close()
    return str(lost.value)


def test_a_writer_that_does_not_come_is_lost(ranks: RankPool, listener: ListeningPlace) -> None:
    mine, theirs = Pipe()
    ranks.tell(1, late, listener, theirs)
    assert mine.recv()[0] == 0
    (said,) = ranks.answers([1])
    assert (
        "train: no world was formed with it for tensors: rank 1 of 2: expected all ranks within 1 s"
        in said
    )


def anew(rank: int, port: int, first: ListeningPlace, second: ListeningPlace) -> list[str]:
    """Both ends in one process, the reader twice: its second incarnation has a new world."""
    said = []
    pairs = writer(first, {7: weights(1)}, timeout=20)
    expected = snapshot(weights(1))
    for at in (first, second):
        if at is second:
            pairs.meet("gen", at.end(), writes=True)
        other = TensorPairs("gen", lambda peer, *wanted: pairs.asked("gen", *wanted), timeout=20)
        other.meet("train", at.end(), writes=False)
        arrived = other.receive(
            "train", asks_of(7), lambda device: room(expected[0].records, device)
        )
        said.append(next(p.name for p in verified(expected[0].records, arrived, expected[1])))
        other.close()
    pairs.close()
    return said


def test_a_reader_that_begins_anew_is_met_anew(ranks: RankPool, listener: ListeningPlace) -> None:
    with closing(ListeningPlace()) as again:
        ranks.tell(0, anew, listener, again)
        assert ranks.answers([0]) == [["of.float64"] * 2]


def test_a_writer_that_is_killed_is_lost_at_once(ranks: RankPool, listener: ListeningPlace) -> None:
    """Last, as it costs a process: it is killed between the first version and the second."""
    to_writer, writers = Pipe()
    from_reader, readers = Pipe()
    ends(ranks, (serve, read), (listener, writers, 1), (listener, readers, (7, 9)))
    to_writer.send(from_reader.recv())
    assert from_reader.recv()[0] == 1
    ranks.signal(0, signal.SIGKILL)
    said, _ = ranks.answers([1])[0]
    assert said[0] == "True"
    assert said[1].startswith("PeerLost: train: receive 1 with gen did not end"), said
    assert isinstance(ranks.answers([0])[0], EOFError)


def on_device(rank: int, port: int, listening: ListeningPlace) -> list[str]:
    """Both ends in one process, with weights on one device: payloads go through the host."""
    pairs = TensorPairs("train", _nobody, timeout=20)
    pairs.meet("gen", listening.end(), writes=True)
    pieces = [Piece(p.name, p.data.detach().to("cuda")) for p in weights(1)]
    batch, digest, copies = snapshot(pieces)
    pairs.keep(7, copies)
    other = TensorPairs("gen", lambda peer, *wanted: pairs.asked("gen", *wanted), timeout=20)
    other.meet("train", listening.end(), writes=False)
    arrived = other.receive("train", asks_of(7), lambda device: room(batch.records, device))
    verified(batch.records, arrived, digest)
    pairs.close()
    other.close()
    return [digest, str(copies[0].device), str(arrived[0].device)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_two_workers_on_one_device_go_by_the_host(listener: ListeningPlace) -> None:
    digest, kept, came = on_device(0, 0, listener)
    assert digest == to_batch(weights(1))[1]
    assert (kept, came) == ("cuda:0", "cpu")


def served_on_device(rank: int, port: int, listening: ListeningPlace, requests: Connection) -> str:
    """The writer on the first device."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    pairs = writer(listening, {}, timeout=20)
    pairs.keep(7, snapshot([Piece(p.name, p.data.detach().to("cuda")) for p in weights(1)])[2])
    pairs.asked("gen", *requests.recv())
    requests.recv()
    pairs.close()
    return ""


def read_on_device(rank: int, port: int, at: ListeningPlace, requests: Connection) -> list[str]:
    """The reader on the second."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    pairs = reader(at, requests)
    batch, digest, _ = snapshot(weights(1))
    arrived = pairs.receive("train", asks_of(7), lambda device: room(batch.records, device))
    verified(batch.records, arrived, digest)
    requests.send(None)
    pairs.close()
    return [str(t.device) for t in arrived]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices_send_by_nccl(listener: ListeningPlace) -> None:
    pool = RankPool(2)
    try:
        mine, theirs = Pipe()
        ends(pool, (served_on_device, read_on_device), (listener, mine), (listener, theirs))
        assert set(pool.answers([0, 1])[1]) == {"cuda:0"}
    finally:
        pool.close()


def test_nobody_keeps_descriptors_of_worlds_that_never_were() -> None:
    before = len(os.listdir("/proc/self/fd"))
    pairs = TensorPairs("train", _nobody)
    for _ in range(3):
        with closing(ListeningPlace()) as listening:
            pairs.meet("gen", listening.end(), writes=True)
    pairs.close()
    assert len(os.listdir("/proc/self/fd")) == before, LIMIT
