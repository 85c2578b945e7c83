"""Matrices into which a Model's adapter is merged: W + factor * B A, anew for each version.

Owns: the merged copies of a module's matrices, and the float32 in which they are computed. Does not
own: the adapter's matrices (adapters.py), whether the result is exact enough (merged_probe.py),
folders (merged_folder.py).

W is the base's own matrix, which other modules share: nothing is written to it, and each version is
merged from it, never from the last one. What a version loses is its rounding to the module's dtype
alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from operators.kernels.torch.adapters import ADAPTER, has_adapter

_BASE = "base_matrix"
"""The name that a layer has for the base's matrix, beside the merged one."""


class MergedMatrices:
    """The merged matrices of one module with an adapter, which computes with them alone."""

    def __init__(self, module: nn.Module) -> None:
        """Give the module copies of its own, merged; its base stays as it is."""
        self._layers = list(list_layers(module).values())
        for layer in self._layers:
            base = _matrix_of(layer)
            # Registered, so that it moves with the module to another device.
            layer.register_parameter(_BASE, base)
            copy = base.detach().clone()
            _put_matrix(layer, nn.Parameter(copy, requires_grad=False))
        self._set_merged(is_merged=True)
        self.merge()

    @torch.no_grad()
    def merge(self) -> None:
        """Merge the adapter as it is now into the base, in place of the last version."""
        for layer in self._layers:
            _matrix_of(layer).copy_(compute_merged(layer, layer.get_parameter(_BASE)))

    @torch.no_grad()
    def measure_error(self) -> float:
        """Measure how much of the adapter's update rounding takes away: the norm of the difference
        between what was merged and what should have been, by that of the update. 0 without one.
        """
        rounded = updated = 0.0
        for layer in self._layers:
            base = layer.get_parameter(_BASE)
            exact = compute_merged(layer, base)
            rounded += sum_squares(exact - _matrix_of(layer).float())
            updated += sum_squares(exact - base.float())
        return share_lost(rounded, updated)

    @contextmanager
    def unmerged(self) -> Iterator[None]:
        """Compute with the base and the adapter beside it, as the trainer does, in this block."""
        merged = [_matrix_of(layer) for layer in self._layers]
        for layer in self._layers:
            _put_matrix(layer, layer.get_parameter(_BASE))
        self._set_merged(is_merged=False)
        try:
            yield
        finally:
            for layer, matrix in zip(self._layers, merged, strict=True):
                _put_matrix(layer, matrix)
            self._set_merged(is_merged=True)

    def _set_merged(self, *, is_merged: bool) -> None:
        """Tell peft's layers whether to leave the adapter's matrices out."""
        for layer in self._layers:
            layer.merged_adapters = [ADAPTER] if is_merged else []


def merge_adapter(module: nn.Module) -> None:
    """Let a module with an adapter compute with merged matrices from now on, with those of each
    version after `merge_again`.
    """
    noting: Any = module
    noting.merged_matrices = MergedMatrices(module)


def find_merged(module: nn.Module) -> MergedMatrices | None:
    """The merged matrices of a module; None if it has none."""
    return getattr(module, "merged_matrices", None)


def merge_again(module: nn.Module) -> None:
    """Merge what was loaded, if the module has merged matrices."""
    merged = find_merged(module)
    if merged is not None:
        merged.merge()


@torch.no_grad()
def unload_adapter(module: nn.Module) -> float:
    """Merge the adapter into the module's own matrices, and leave a plain module behind: as its
    base was, with other weights. For modules that share none. Returns what rounding took away, as
    `MergedMatrices.measure_error`.
    """
    rounded = updated = 0.0
    for layer in list_layers(module).values():
        matrix = _matrix_of(layer)
        exact = compute_merged(layer, matrix)
        updated += sum_squares(exact - matrix.float())
        matrix.copy_(exact)
        rounded += sum_squares(exact - matrix.float())
    for path, layer in list_layers(module).items():
        parent_path, _, leaf = path.rpartition(".")
        # One layer may be around another, of which the outermost is replaced.
        if leaf != "base_layer":
            setattr(module.get_submodule(parent_path), leaf, layer.get_base_layer())
    plain: Any = module
    del plain.peft_config
    return share_lost(rounded, updated)


def compute_merged(layer: Any, matrix: Tensor) -> Tensor:
    """Compute matrix + factor * B A in float32, in the matrix's shape."""
    return add_update(layer, matrix, layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight)


def add_update(layer: Any, matrix: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Compute matrix + factor * B A in float32, for a layer that may be on the meta device. first:
    A; second: B.
    """
    update = _multiply(layer, first.float(), second.float())
    return torch.add(matrix.float(), update, alpha=layer.scaling[ADAPTER])


def _multiply(layer: Any, first: Tensor, second: Tensor) -> Tensor:
    """B A, as the layer's matrix lies. first: A, [rank, in]; of experts [experts * rank, in]."""
    experts = getattr(layer, "num_experts", 0)
    if not experts:
        product = second @ first
        return product.T if layer.fan_in_fan_out else product
    of_experts = first.view(experts, -1, first.shape[-1])
    to_experts = second.view(second.shape[0], -1, experts)
    # By transformers' word for experts whose matrices are [in, out], which peft goes by, too.
    if getattr(layer.get_base_layer(), "is_transposed", False):
        return torch.einsum("ore,eri->eio", to_experts, of_experts)
    return torch.einsum("ore,eri->eoi", to_experts, of_experts)


def share_lost(rounded: float, updated: float) -> float:
    """The norm of what rounding took by that of the update, from sums of squares; 0 without one."""
    return math.sqrt(rounded / updated) if updated else 0.0


def sum_squares(numbers: Tensor) -> float:
    return float(numbers.square().sum(dtype=torch.float64))


def list_layers(module: nn.Module) -> dict[str, Any]:
    """The layers that peft made, each of one matrix of the base, by their paths."""
    assert has_adapter(module)
    return {path: part for path, part in module.named_modules() if hasattr(part, "lora_A")}


def _matrix_of(layer: Any) -> nn.Parameter:
    return getattr(layer.get_base_layer(), _name_of(layer))


def _put_matrix(layer: Any, matrix: nn.Parameter) -> None:
    setattr(layer.get_base_layer(), _name_of(layer), matrix)


def _name_of(layer: Any) -> str:
    """The name of its matrix in the base's layer: peft says it of experts' weights alone."""
    return getattr(layer, "parameter_name", "weight")
