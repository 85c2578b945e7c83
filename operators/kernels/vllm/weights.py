"""Which weights a version consists of, and the memory in which they reach ranks in other processes.

Owns: the refusal of anything but one whole version, by name. Does not own: loading (rank.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dataflow.errors import KernelError, nearest
from dataflow.kernel import Piece


def require_whole(model: str, expected: Mapping[str, frozenset[str]], given: list[Piece]) -> None:
    """Raise KernelError unless every weight came once, by one of its names. expected: each name,
    with all names of that weight.
    """
    came = {piece.name for piece in given}
    for name in came:
        if name not in expected:
            near = nearest(name, expected)
            hint = f"did you mean {near}" if near else "writer and reader need the same base"
            raise KernelError(
                f"Model {model!r}: expected a weight of the engine, found {name!r}. Fix: {hint}."
            )
    for name, names in expected.items():
        if not names & came:
            raise KernelError(
                f"Model {model!r}: expected all weights, found {len(came)}: {name} did not come."
                " Fix: send all pieces."
            )


def require_shapes(model: str, shapes: Mapping[str, torch.Size], given: list[Piece]) -> None:
    """Raise KernelError for the first weight of another shape."""
    for piece in given:
        if tuple(piece.data.shape) != tuple(shapes[piece.name]):
            raise KernelError(
                f"Model {model!r}: weight {piece.name!r}: expected shape"
                f" {tuple(shapes[piece.name])}, found {tuple(piece.data.shape)}. Fix: writer and"
                " reader need the same base."
            )


def names_and_shapes(module: Any) -> tuple[dict[str, frozenset[str]], dict[str, torch.Size]]:
    """Of the weights of a module, which may be on the meta device: for each name all names of that
    weight (a tied one has several), and its shape.
    """
    found = dict(module.named_parameters(remove_duplicate=False))
    tied: dict[int, list[str]] = {}
    for name, weight in found.items():
        tied.setdefault(id(weight), []).append(name)
    names = {name: frozenset(tied[id(weight)]) for name, weight in found.items()}
    return names, {name: weight.shape for name, weight in found.items()}


class SharedWeights:
    """Memory that other processes of this user read by its path, and that ends with this one."""

    def __init__(self) -> None:
        self._file = os.memfd_create("weights")
        self._block: Tensor | None = None

    @property
    def path(self) -> str:
        """Where the ranks read it."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def write(self, pieces: list[Piece]) -> list[tuple[str, str, list[int], int]]:
        """Copy these weights; returns (name, dtype, shape, offset in bytes) of each."""
        offsets, total = [], 0
        for piece in pieces:
            offsets.append(total)
            total += -(-piece.data.numel() * piece.data.element_size() // 64) * 64
        block = self._room(total)
        manifest = []
        for piece, offset in zip(pieces, offsets, strict=True):
            data = piece.data.detach().cpu().contiguous()
            raw = (
                data.view(-1).view(torch.uint8) if data.dim() else data.reshape(1).view(torch.uint8)
            )
            block[offset : offset + len(raw)].copy_(raw)
            kind = str(data.dtype).removeprefix("torch.")
            manifest.append((piece.name, kind, list(data.shape), offset))
        return manifest

    def _room(self, size: int) -> Tensor:
        if self._block is None or len(self._block) != size:
            os.ftruncate(self._file, size)
            self._block = torch.from_file(self.path, shared=True, size=size, dtype=torch.uint8)
        return self._block

    def close(self) -> None:
        """Free the memory once no rank maps it."""
        self._block = None
        os.close(self._file)
