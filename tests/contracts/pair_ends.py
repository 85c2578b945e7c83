"""The two ends of a pair, each in a process of its own: one owns columns and weights, one reads.

Owns: what is kept and asked for, and both ends' tasks for a RankPool. Does not own: any check.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataflow.batch import Ragged
from dataflow.device import take_tensor_rows
from dataflow.errors import RunError
from dataflow.kernel import Piece
from engine.channels.contract import BlockRequest
from engine.channels.tensors.pairs import TensorPairs
from engine.weights.hashed_pieces import DTYPES
from engine.weights.snapshot import copy_pieces
from tests.contracts.ranks import ListeningPlace

OWNER, READER = "made", "reads"
NAMES = ("float32", "float16", "float64", "uint8", "int32", "int64", "of_row")
ROWS = 50
VERSIONS = {7: 1, 9: 2}
"""The version of the weights in each block that has weights."""


def wanted(block: int, **which: Any) -> BlockRequest:
    """Weights, or columns and rows, of a block of the owner."""
    return BlockRequest(worker=OWNER, block=block, **which)


ASKED: list[list[BlockRequest]] = [
    [wanted(1, columns=NAMES, rows=np.array([3, 4, 5]))],
    [wanted(block, columns=NAMES, rows=np.array([49, block, 0])) for block in (2, 1, 2)],
    [wanted(2, columns=("of_row", "int32"))],
    [wanted(1, columns=("uint8",), rows=np.zeros(0, np.int64))],
]
"""Adjacent rows; rows of several blocks, reordered, one block twice; a whole block; no row."""


def columns(block: int, device: str = "cpu") -> dict[str, Ragged]:
    """Of each dtype vectors for tokens, and of each row a number; some rows have no token."""
    draw = torch.Generator().manual_seed(block)
    lengths = torch.randint(0, 4, (ROWS,), generator=draw).numpy()
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    by_name = {}
    for name in NAMES[:-1]:
        drawn = torch.randint(0, 100, (int(offsets[-1]), 3), generator=draw)
        by_name[name] = Ragged(drawn.to(device, getattr(torch, name)), offsets)
    by_name["of_row"] = Ragged(torch.randn(ROWS, generator=draw).to(device), np.arange(ROWS + 1))
    return by_name


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


def on_device(pieces: Sequence[Piece], device: str) -> list[Piece]:
    return [Piece(piece.name, piece.data.detach().to(device)) for piece in pieces]


def expected(requests: Sequence[BlockRequest]) -> list[Tensor]:
    """What the owner has of that, picked here."""
    tensors = []
    for request in requests:
        if request.block in VERSIONS:
            tensors += copy_pieces(weights(VERSIONS[request.block]))[2]
            continue
        kept = columns(request.block)
        rows = np.arange(ROWS) if request.rows is None else request.rows
        tensors += [take_tensor_rows(kept[name], rows).values for name in request.columns]
    return tensors


def room_like(tensors: Sequence[Tensor]) -> Callable[[str], list[Tensor]]:
    return lambda device: [torch.empty_like(tensor, device=device) for tensor in tensors]


def equal(arrived: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(torch.equal(a.cpu(), b) for a, b in zip(arrived, right, strict=True))


def not_asked(peer: str, sequence: int, requests: Sequence[BlockRequest]) -> None:
    raise AssertionError(f"{peer} is asked for {requests}")


def owner(
    listening: ListeningPlace,
    device: str = "cpu",
    content: bool = False,
    asks: Callable[..., None] = not_asked,
) -> TensorPairs:
    """The end that keeps everything, met once."""
    pairs = TensorPairs(OWNER, asks, timeout=20, content=content)
    pairs.meet(READER, listening.end(), writes=True)
    for block in (1, 2):
        pairs.columns.keep(block, columns(block, device))
    for block, version in VERSIONS.items():
        pairs.keep(block, copy_pieces(on_device(weights(version), device))[2])
    return pairs


def reader(
    at: ListeningPlace, requests: Connection, timeout: float = 20, content: bool = False
) -> TensorPairs:
    """The other end, which asks over a pipe."""
    asks = lambda peer, *what: requests.send(what)
    pairs = TensorPairs(READER, asks, timeout=timeout, content=content)
    pairs.meet(OWNER, at.end(), writes=False)
    return pairs


def serve(
    rank: int,
    port: int,
    listening: ListeningPlace,
    requests: Connection,
    device: str = "cpu",
    content: bool = False,
) -> None:
    """Answers everything until the reader is done."""
    pairs = owner(listening, device, content)
    while (request := requests.recv()) is not None:
        pairs.begin_send(READER, *request)
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
    pairs = reader(at, requests, content=content)
    said, devices = [], []
    for many in asked:
        right = expected(many)
        room = [t.new_empty((len(t) + longer, *t.shape[1:])) for t in right] if longer else right
        try:
            arrived = pairs.receive(OWNER, many, room_like(room))
        except RunError as error:
            said.append(f"{type(error).__name__}: {error}")
            continue
        devices += [str(tensor.device) for tensor in arrived]
        said.append(str(equal(arrived, right)))
    requests.send(None)
    moved = pairs.take_moved_bytes()
    pairs.close()
    return said, moved, devices
