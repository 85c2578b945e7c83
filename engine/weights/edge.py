"""A weight edge by the collective route: all pieces of a version, from layout to layout.

Owns: what each message of a transfer plan holds, and its verification. Does not own: the plan
(transfer.py), the ranks' connections (engine/channels/collective.py), loading (kernels).

One message a pair of ranks and version: the hashes of its moves, then their rows. A receiver gives
nothing out before everything that it gets is verified.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from dataflow.errors import RunError
from dataflow.kernel import Piece
from engine.channels.contract import Scheduled
from engine.weights.pieces import bytes_of, digest_of, hash_bytes
from engine.weights.transfer import Held, Move, Placed, pairs_of, transfer_plan

_HASH = 16


class WeightEdge:
    """One rank's end of an edge. source and destination: layouts of writer and reader, the same on
    every rank.

    sources and destinations: the ranks in the channel's world of the writer's and of the reader's
    ranks. Raises RunError for layouts that do not go together.
    """

    def __init__(
        self,
        channel: Scheduled,
        source: Sequence[Placed],
        destination: Sequence[Placed],
        *,
        sources: Sequence[int],
        destinations: Sequence[int],
    ) -> None:
        self._channel = channel
        self._source, self._destination = tuple(source), tuple(destination)
        self._sources, self._destinations = tuple(sources), tuple(destinations)
        self._pairs = pairs_of(transfer_plan(source, destination))
        self._version = 0

    def send(self, rank: int, pieces: Iterable[Piece]) -> None:
        """Send what writer rank `rank` has to send of one version; `pieces` are its rows of them,
        in layout order.

        Returns once the tensors may be changed. Raises RunError for pieces that are not those of
        the layout, and what the channel raises.
        """
        parts = _held(self._source, rank, pieces)
        for (source, destination), moves in self._pairs.items():
            if source == rank:
                rows = [_rows(parts[move.piece], move) for move in moves]
                hashes = torch.stack(
                    [self._hash(move, part) for move, part in zip(moves, rows, strict=True)]
                )
                self._channel.send(self._destinations[destination], self._version, [hashes, *rows])
        self._version += 1

    def receive(self, rank: int, *, device: torch.device | str = "cpu") -> list[Piece]:
        """The rows of one version that reader rank `rank` holds, on `device`; a piece of which it
        has none is left out.

        Raises RunError naming the piece and the sender where what came is not what was sent, and
        what the channel raises.
        """
        parts = {
            number: (
                held,
                torch.empty(
                    (held.high - held.low, *placed.shape[1:]), dtype=_dtype(placed), device=device
                ),
            )
            for number, placed in enumerate(self._destination)
            for held in _of_rank(placed, rank)
        }
        for (source, destination), moves in self._pairs.items():
            if destination == rank:
                rows = [_rows(parts[move.piece], move) for move in moves]
                hashes = torch.empty((len(moves), _HASH), dtype=torch.uint8, device=device)
                self._channel.receive(self._sources[source], self._version, [hashes, *rows])
                self._verify(source, moves, rows, hashes)
        self._version += 1
        return [Piece(self._destination[n].name, data.reshape(_shape(self._destination[n], held)))
                for n, (held, data) in parts.items()]  # fmt: skip

    def digest(self, pieces: Sequence[Piece]) -> str:
        """The version's id, from whole pieces: that of the same weights as a block (pieces.py)."""
        return digest_of(
            _hash(number, placed, placed.shape, piece.data)
            for number, (placed, piece) in enumerate(zip(self._destination, pieces, strict=True))
        )

    def _verify(
        self, source: int, moves: Sequence[Move], rows: Sequence[Tensor], hashes: Tensor
    ) -> None:
        for move, part, sent in zip(moves, rows, hashes, strict=True):
            if not torch.equal(self._hash(move, part), sent):
                raise RunError(
                    f"weights: piece {self._destination[move.piece].name!r}, rows {move.low} to"
                    f" {move.high}, does not have the content that rank {source} of its writer"
                    " hashed. Fix: look for what changed it on its way; memory or a transport is"
                    " at fault."
                )

    def _hash(self, move: Move, part: Tensor) -> Tensor:
        placed = self._destination[move.piece]
        found = _hash(move.piece, placed, (move.low, move.high, *placed.shape), part)
        return torch.frombuffer(bytearray(found), dtype=torch.uint8).to(part.device)


def _hash(number: int, placed: Placed, shape: tuple[int, ...], data: Tensor) -> bytes:
    running = hash_bytes(number, placed.name, placed.dtype, shape)
    running.update(np.ascontiguousarray(bytes_of(data).cpu().numpy()).data)
    return running.digest()


def _held(
    layout: Sequence[Placed], rank: int, pieces: Iterable[Piece]
) -> dict[int, tuple[Held, Tensor]]:
    """Number -> the rows that a rank has of a piece, and their tensor. Raises RunError where they
    do not match.
    """
    wanted = [
        (number, placed, held)
        for number, placed in enumerate(layout)
        for held in _of_rank(placed, rank)
    ]
    given = list(pieces)
    if [p.name for p in given] != [placed.name for _, placed, _ in wanted]:
        raise RunError(
            f"weights: rank {rank} has the pieces {[p.name for p in given][:5]}, its layout"
            f" {[placed.name for _, placed, _ in wanted][:5]}. Fix: make the layout of the pieces"
            " themselves."
        )
    for piece, (_, placed, held) in zip(given, wanted, strict=True):
        if (tuple(piece.data.shape), piece.data.dtype) != (_shape(placed, held), _dtype(placed)):
            raise RunError(
                f"weights: rank {rank}: piece {piece.name!r} is {piece.data.dtype}"
                f" {list(piece.data.shape)}, expected {placed.dtype} {list(_shape(placed, held))}."
                " Fix: make the layout of the pieces themselves."
            )
    rows = ((held.high - held.low, *placed.shape[1:]) for _, placed, held in wanted)
    return {
        number: (held, piece.data.detach().reshape(shape))
        for (number, _, held), piece, shape in zip(wanted, given, rows, strict=True)
    }


def _of_rank(placed: Placed, rank: int) -> list[Held]:
    """What a rank holds of a piece: one interval at most."""
    found = [held for held in placed.held if held.rank == rank]
    if len(found) > 1:
        raise RunError(
            f"weights: rank {rank} holds {placed.name!r} in {len(found)} parts. Fix: one interval a"
            " rank."
        )
    return found


def _rows(part: tuple[Held, Tensor], move: Move) -> Tensor:
    held, data = part
    return data[move.low - held.low : move.high - held.low]


def _shape(placed: Placed, held: Held) -> tuple[int, ...]:
    return (held.high - held.low, *placed.shape[1:]) if placed.shape else ()


def _dtype(placed: Placed) -> torch.dtype:
    return getattr(torch, placed.dtype)
