"""Whole matrices for an engine, with a version of an adapter merged into those of its base.

Owns: the base's matrices, read from its files for each version, and the merged ones. Does not own:
the numbers (torch/merged_matrices.py), loading them (engine.py, rank.py), whether they are exact
enough (the probe of the weight edge: engine/weights/probe.py).

The engine has no second copy of the base: its files are in the system's cache since it started.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from dataflow.errors import KernelError
from dataflow.kernel import Piece
from dataflow.model_files import folder_of, header
from operators.kernels.torch.merged_matrices import (
    add_update,
    list_layers,
    share_lost,
    sum_squares,
)


class MergingWeights:
    """Makes weights for an engine of versions of a Model's adapter."""

    def __init__(self, model: str, described: Any, base: str, dtype: str) -> None:
        """described: the Model's module with its adapter, on the meta device. base: directory.
        dtype: that the engine computes in. Raises KernelError if a matrix is not in the files.
        """
        self.error = 0.0
        """The share of the last version's update that rounding took."""
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._layers = list_layers(described)
        self._files = _find_files(base)
        for path in self._layers:
            if f"{path}.weight" not in self._files:
                raise KernelError(
                    f"Model {model!r}: expected {path}.weight in the safetensors files of its base"
                    f" {base}, to merge its adapter into, found none. Fix: merge=False."
                )

    @torch.no_grad()
    def merge(self, pieces: list[Piece]) -> list[Piece]:
        """The merged matrices, of a version's pieces."""
        return list(self._merge({piece.name: piece.data for piece in pieces}))

    def _merge(self, weights: Mapping[str, Tensor]) -> Iterator[Piece]:
        rounded = updated = 0.0
        for path, layer in self._layers.items():
            matrix = self._read(f"{path}.weight")
            first, second = weights[f"{path}.lora_A.weight"], weights[f"{path}.lora_B.weight"]
            exact = add_update(layer, matrix, first.cpu(), second.cpu())
            merged = exact.to(self._dtype)
            updated += sum_squares(exact - matrix.float())
            rounded += sum_squares(exact - merged.float())
            yield Piece(f"{path}.weight", merged)
        self.error = share_lost(rounded, updated)

    def _read(self, name: str) -> Tensor:
        """A matrix of the base, as the engine had it when it started."""
        with safe_open(self._files[name], framework="pt") as file:
            return file.get_tensor(name).to(self._dtype)


def _find_files(base: str) -> dict[str, Path]:
    """The safetensors file of each tensor of a base."""
    folder = folder_of(base)
    files: dict[str, Path] = {}
    if folder is not None:
        for path in sorted(folder.glob("*.safetensors")):
            files |= dict.fromkeys(header(path), path)
    return files
