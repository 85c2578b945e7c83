"""Snapshots of weights, and pairs of Workers whose other end is lost, late or begins anew.

Real processes and gloo; the data socket of a pair is a pipe. Transfers: test_pair_columns.py.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection, Pipe

import pyarrow as pa
import pytest
import torch

from dataflow.batch import Batch
from dataflow.errors import RunError
from engine.channels.contract import PeerLost
from engine.channels.tensors.pairs import TensorPairs
from engine.weights import snapshot
from engine.weights.hashed_pieces import DESCRIPTION, to_batch
from engine.weights.snapshot import copy_pieces, make_room, verify_pieces
from tests.contracts.pair_ends import (
    OWNER,
    READER,
    equal,
    expected,
    not_asked,
    on_device,
    owner,
    read,
    reader,
    room_like,
    serve,
    wanted,
    weights,
)
from tests.contracts.ranks import LIMIT, ListeningPlace, RankPool

pytestmark = pytest.mark.timeout(120)
RANKS = 2

WEIGHTS = [wanted(7)]


def test_a_snapshot_has_the_id_of_the_block_with_the_same_weights() -> None:
    given = weights(1)
    batch, digest, copies = copy_pieces(given)
    assert digest == to_batch(given)[1]
    assert "data" not in batch.names
    for piece, copy in zip(given, copies, strict=True):
        assert torch.equal(copy.to(torch.float64), piece.data.detach().to(torch.float64))
        assert copy.is_contiguous()
        assert copy.data_ptr() != piece.data.data_ptr() or not copy.numel()


def test_what_changed_is_named() -> None:
    batch, digest, copies = copy_pieces(weights(1))
    assert [p.name for p in verify_pieces(batch.records, copies, digest)] == [
        p.name for p in weights(1)
    ]
    with pytest.raises(RunError, match="it is another version"):
        verify_pieces(batch.records, copies, copy_pieces(weights(2))[1])
    copies[-1][69_999] += 1
    with pytest.raises(RunError, match=r"'parameter' .*does not have the content"):
        verify_pieces(batch.records, copies, digest)
    with pytest.raises(RunError, match=r"expected piece 1 after 'of\.float64'"):
        verify_pieces(batch.records.take([0, 2]), [copies[0], copies[2]], digest)
    with pytest.raises(RunError, match="twice"):
        copy_pieces([*weights(1), weights(1)[0]])


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
    batch, digest, copies = copy_pieces(weights(1))
    at = batch.records.column("name").to_pylist().index(name)
    copies[at] = change(copies[at])
    with pytest.raises(RunError, match=rf"piece '{name}'.*{problem}"):
        verify_pieces(batch.records, copies, digest)


def test_every_described_piece_has_a_tensor() -> None:
    batch, digest, copies = copy_pieces(weights(1))
    for arrived in (copies[:-1], [*copies, copies[0]]):
        with pytest.raises(RunError, match=f"expected {len(copies)} pieces, found {len(arrived)}"):
            verify_pieces(batch.records, arrived, digest)


def test_room_is_made_for_descriptions_alone() -> None:
    batch, _, copies = copy_pieces(weights(1))
    empty = make_room(batch.records, "cpu")
    assert [(t.shape, t.dtype) for t in empty] == [(t.shape, t.dtype) for t in copies]
    with pytest.raises(RunError, match="expected the columns"):
        make_room(to_batch(weights(1))[0].records, "cpu")


def copy_as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> tuple[Batch, str, list[torch.Tensor]]:
    """A copy with the hashes that a GPU would make."""
    monkeypatch.setattr(snapshot, "_choose_hash", lambda tensors: "device")
    return copy_pieces(weights(1))


def test_hashes_of_a_device_are_verified_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, digest, copies = copy_as_on_a_device(monkeypatch)
    assert digest != to_batch(weights(1))[1]
    assert len(verify_pieces(batch.records, copies, digest)) == len(copies)
    copies[-1][69_999] += 1
    with pytest.raises(RunError, match=r"'parameter' .*does not have the content"):
        verify_pieces(batch.records, copies, digest)


@pytest.mark.parametrize("kinds", [["md5"], ["device", "xxh3"]], ids=["unknown", "mixed"])
def test_hashes_of_another_kind_are_refused(
    monkeypatch: pytest.MonkeyPatch, kinds: list[str]
) -> None:
    batch, digest, copies = copy_as_on_a_device(monkeypatch)
    place = DESCRIPTION.get_field_index("hash_kind")
    column = pa.array((kinds * len(copies))[: len(copies)])
    records = batch.records.set_column(place, DESCRIPTION.field(place), column)
    with pytest.raises(RunError, match="expected hashes of one kind, xxh3 or device, found"):
        verify_pieces(records, copies, digest)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_weights_on_a_device_are_hashed_there() -> None:
    """A reader that has them on its CPU computes the same hashes."""
    batch, digest, copies = copy_pieces(on_device(weights(1), "cuda"))
    assert set(batch.records.column("hash_kind").to_pylist()) == {"device"}
    assert {copy.device.type for copy in copies} == {"cuda"}
    for arrived in (copies, [copy.cpu() for copy in copies]):
        pieces = verify_pieces(batch.records, arrived, digest)
        assert [piece.name for piece in pieces] == [piece.name for piece in weights(1)]


def test_a_request_without_a_world_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    pairs = TensorPairs(OWNER, not_asked)
    pairs.begin_send(READER, 0, WEIGHTS)
    assert "and has no world here" in caplog.text
    with pytest.raises(PeerLost, match="expected its process"):
        pairs.receive(READER, WEIGHTS, lambda device: [])


def late(rank: int, port: int, at: ListeningPlace, requests: Connection) -> str:
    """Asks, and is not answered."""
    pairs = reader(at, requests, timeout=1.0)
    with pytest.raises(PeerLost) as lost:
        pairs.receive(OWNER, WEIGHTS, lambda device: [])
    pairs.close()
    return str(lost.value)


def test_an_owner_that_does_not_come_is_lost(ranks: RankPool, listener: ListeningPlace) -> None:
    mine, theirs = Pipe()
    ranks.tell(1, late, listener, theirs)
    assert mine.recv()[0] == 0
    (said,) = ranks.answers([1])
    problem = "rank 1 of 2: expected all ranks within 1 s"
    assert f"made: no world was formed with it for tensors: {problem}" in said


def anew(rank: int, port: int, first: ListeningPlace, second: ListeningPlace) -> list[bool]:
    """Both ends in one process, the reader twice: its second incarnation has a new world."""
    pairs, right, same = owner(first), expected(WEIGHTS), []
    for at in (first, second):
        if at is second:
            pairs.meet(READER, at.end(), writes=True)
        other = TensorPairs(READER, lambda _, *what: pairs.begin_send(READER, *what), timeout=20)
        other.meet(OWNER, at.end(), writes=False)
        same.append(equal(other.receive(OWNER, WEIGHTS, room_like(right)), right))
        other.close()
    pairs.close()
    return same


def test_an_owner_that_cannot_send_ends_the_world_whatever_is_wrong(
    listener: ListeningPlace, caplog: pytest.LogCaptureFixture
) -> None:
    """Else its reader would wait until the time limit."""
    pairs = owner(listener)
    pairs.keep(7, ["no tensor"])  # type: ignore[list-item]
    other = TensorPairs(READER, lambda _, *what: pairs.begin_send(READER, *what), timeout=20)
    other.meet(OWNER, listener.end(), writes=False)
    with pytest.raises(RunError):
        other.receive(OWNER, WEIGHTS, room_like(expected(WEIGHTS)))
    assert "block 7 was not sent to reads: AttributeError" in caplog.text
    assert not pairs._worlds
    for each in (pairs, other):
        each.close()


def test_a_reader_that_begins_anew_is_met_anew(ranks: RankPool, listener: ListeningPlace) -> None:
    with closing(ListeningPlace()) as again:
        ranks.tell(0, anew, listener, again)
        assert ranks.answers([0]) == [[True, True]]


def test_an_owner_that_is_killed_is_lost_at_once(ranks: RankPool, listener: ListeningPlace) -> None:
    """Last, as it costs a process: it is killed between the first transfer and the second."""
    to_owner, owners = Pipe()
    from_reader, readers = Pipe()
    ranks.tell(0, serve, listener, owners)
    ranks.tell(1, read, listener, readers, [WEIGHTS, [wanted(9)]])
    to_owner.send(from_reader.recv())
    assert from_reader.recv()[0] == 1
    ranks.signal(0, signal.SIGKILL)
    said, _, _ = ranks.answers([1])[0]
    assert said[0] == "True"
    assert said[1].startswith("PeerLost: made: receive 1 with reads did not end"), said
    assert isinstance(ranks.answers([0])[0], EOFError)


def test_nobody_keeps_descriptors_of_worlds_that_never_were() -> None:
    before = len(os.listdir("/proc/self/fd"))
    pairs = TensorPairs(OWNER, not_asked)
    for _ in range(3):
        with closing(ListeningPlace()) as listening:
            pairs.meet(READER, listening.end(), writes=True)
    pairs.close()
    assert len(os.listdir("/proc/self/fd")) == before, LIMIT
