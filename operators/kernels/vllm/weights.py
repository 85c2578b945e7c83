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
from operators.kernels.torch.adapters import named_trained


def require_whole(model: str, expected: Mapping[str, frozenset[str]], pieces: list[Piece]) -> None:
    """Raise KernelError unless every weight came, by one of its names, and nothing else. expected:
    each name, with all names of that weight.
    """
    piece_names = {piece.name for piece in pieces}
    for name in piece_names:
        if name not in expected:
            near = nearest(name, expected)
            hint = f"did you mean {near}" if near else "writer and reader need the same base"
            raise KernelError(
                f"Model {model!r}: expected a weight of the engine, found {name!r}. Fix: {hint}."
            )
    for name, names in expected.items():
        if not names & piece_names:
            raise KernelError(
                f"Model {model!r}: expected all weights, found {len(piece_names)}: {name} did not"
                " come. Fix: send all pieces."
            )


def require_shapes(model: str, shapes: Mapping[str, torch.Size], pieces: list[Piece]) -> None:
    """Raise KernelError for the first weight of another shape."""
    for piece in pieces:
        expected = tuple(shapes[piece.name])
        shape = tuple(piece.data.shape)
        if shape != expected:
            raise KernelError(
                f"Model {model!r}: weight {piece.name!r}: expected shape"
                f" {expected}, found {shape}. Fix: writer and reader need the same base."
            )


def names_and_shapes(module: Any) -> tuple[dict[str, frozenset[str]], dict[str, torch.Size]]:
    """Of the trained weights of a module, which may be on the meta device: for each name all names
    of that weight (a tied one has several), and its shape.
    """
    weights = dict(named_trained(module, remove_duplicate=False))
    tied: dict[int, list[str]] = {}
    for name, weight in weights.items():
        tied.setdefault(id(weight), []).append(name)
    names = {name: frozenset(tied[id(weight)]) for name, weight in weights.items()}
    return names, {name: weight.shape for name, weight in weights.items()}


_ALIGNMENT = 64
"""Bytes at multiples of which each weight begins."""


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
        offsets: list[int] = []
        total = 0
        for piece in pieces:
            offsets.append(total)
            size = piece.data.numel() * piece.data.element_size()
            total += -(-size // _ALIGNMENT) * _ALIGNMENT
        block = self._make_room(total)
        manifest: list[tuple[str, str, list[int], int]] = []
        for piece, offset in zip(pieces, offsets, strict=True):
            tensor = piece.data.detach().cpu().contiguous()
            flat = tensor.view(-1)  # a number without dimensions becomes one with one, too
            raw = flat.view(torch.uint8)
            block[offset : offset + len(raw)].copy_(raw)
            dtype = str(tensor.dtype).removeprefix("torch.")
            manifest.append((piece.name, dtype, list(tensor.shape), offset))
        return manifest

    def _make_room(self, size: int) -> Tensor:
        if self._block is None or len(self._block) != size:
            os.ftruncate(self._file, size)
            self._block = torch.from_file(self.path, shared=True, size=size, dtype=torch.uint8)
        return self._block

    def close(self) -> None:
        """Free the memory once no rank maps it."""
        self._block = None
        os.close(self._file)
