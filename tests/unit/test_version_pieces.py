"""The pieces of a version by each route: the version that was asked for or an error, bytes that
come from elsewhere counted, and nothing of this Worker's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from dataflow.errors import RunError
from engine.channels.inproc import InprocChannel
from engine.channels.tensors.pairs import TensorPairs
from engine.channels.tensors.shared_memories import SharedMemories
from engine.protocol import messages as m
from engine.run.worker.counters import FlowCounts
from engine.run.worker.version_pieces import VersionPieces
from engine.weights.flat_copy import copy_flat
from engine.weights.hashed_pieces import to_batch
from engine.weights.snapshot import copy_pieces
from tests.contracts.pair_ends import OWNER, READER, not_asked, weights
from tests.contracts.ranks import ListeningPlace

ROUTES = ("pull", "collective", "ipc")


@dataclass(frozen=True, kw_only=True)
class Delivered:
    """What a Worker reads versions with. load: of version 1, which the owner keeps."""

    pieces: VersionPieces
    counts: FlowCounts
    memories: SharedMemories
    load: m.Load


@contextmanager
def keep_version(route: str, reader: str) -> Iterator[Delivered]:
    """The owner keeps a version for this route; reader: a Worker's name, perhaps the owner's."""
    channel, counts = InprocChannel(), FlowCounts(reader)
    own_memories = SharedMemories(OWNER, place="host")
    memories = own_memories
    with closing(ListeningPlace()) as place, closing(TensorPairs(OWNER, not_asked)) as own_pairs:
        pairs = own_pairs
        if reader != OWNER:
            memories = SharedMemories(reader, place="host")
            pairs = TensorPairs(reader, lambda _, *what: own_pairs.begin_send(reader, *what))
            own_pairs.meet(reader, place.end(), writes=True)
            pairs.meet(OWNER, place.end(), writes=False)
        block, digest = keep_block(route, channel, own_pairs, own_memories)
        load = m.Load(
            id=1,
            model="policy",
            writer="train_policy",
            reader="rollout",
            version=1,
            worker=reader,
            source=OWNER,
            block=block,
            digest=digest,
        )
        pieces = VersionPieces(reader, channel, counts, pairs, memories)
        yield Delivered(pieces=pieces, counts=counts, memories=memories, load=load)
        pairs.close()


def keep_block(
    route: str, channel: InprocChannel, pairs: TensorPairs, memories: SharedMemories
) -> tuple[int, str]:
    """Keep version 1 as `Delivery` does; its block and digest."""
    if route == "pull":
        batch, digest = to_batch(weights(1), channel.allocate)
        return channel.keep(batch), digest
    if route == "collective":
        batch, digest, tensors = copy_pieces(weights(1))
        block = channel.keep(batch)
        pairs.keep(block, tensors)
        return block, digest
    copied = copy_flat(weights(1), memories)
    block = channel.keep(copied.batch)
    memories.keep(block, copied.token)
    return block, copied.digest


def require_version(delivered: Delivered) -> int:
    """It is version 1; returns the bytes of its pieces."""
    fetched = delivered.pieces.fetch(delivered.load)
    for piece, expected in zip(fetched.pieces, weights(1), strict=True):
        assert piece.name == expected.name
        assert torch.equal(torch.as_tensor(piece.data).cpu(), expected.data.detach())
    assert fetched.end >= fetched.start
    return sum(torch.as_tensor(piece.data).nbytes for piece in fetched.pieces)


@pytest.mark.parametrize("route", ROUTES)
def test_pieces_from_another_worker_are_verified_and_counted(route: str) -> None:
    with keep_version(route, READER) as delivered:
        size = require_version(delivered)
        ((name, counted, _),) = delivered.counts.reports()
        assert name == f"flow/weights/policy->rollout@{READER}"
        assert size <= counted <= 2 * size + 10_000, "names and places are with them"
        assert delivered.memories.take_moved_bytes() == (size if route == "ipc" else 0)


@pytest.mark.parametrize("reader", [OWNER, READER])
@pytest.mark.parametrize("route", ROUTES)
def test_pieces_of_another_version_are_refused(route: str, reader: str) -> None:
    _, other_digest = to_batch(weights(2))
    with keep_version(route, reader) as delivered:
        load: Any = replace(delivered.load, digest=other_digest)
        with pytest.raises(RunError, match="it is another version"):
            delivered.pieces.fetch(load)


@pytest.mark.parametrize("route", ROUTES)
def test_weights_that_a_worker_has_itself_are_not_counted(route: str) -> None:
    with keep_version(route, OWNER) as delivered:
        require_version(delivered)
        assert not delivered.counts.reports()
        assert not delivered.memories.take_moved_bytes()
