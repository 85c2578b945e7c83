"""Which weights of a base a Model trains, by the names and shapes that its files have.

Owns: what an adapter adds and what a subset takes, counted without torch. Does not own: the modules
(operators/kernels/torch/adapters.py, which chooses by the same names), reading files
(model_files.py), bytes and seconds (engine/plan/cost).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from dataflow.adapters import ALL_LINEAR, Lora, WeightSubset, is_at, leaf_of
from dataflow.model import Model
from dataflow.side_module import Side

Shapes = Mapping[str, tuple[int, ...]]
"""Of each weight by its name: of a linear layer [out, in], of fused experts [experts, out, in]."""

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_TABLES = ("wte", "wpe", "lm_head", "score", "classifier")
_EMBEDDING = "embed_"
"""Modules that have a matrix and get no adapter, by their leaves: heads, and embeddings."""
_LAST_NORMS = ("norm", "norm_f", "ln_f", "final_layernorm", "final_layer_norm")
"""Modules behind the last decoder layer, by their leaves."""
_MATRIX = ".weight"
_ROUTERS = ("gate", "router", "router.layer")
"""Modules that choose experts and are no linear layers, by the last parts of their paths."""
_EXPERT = re.compile(r"\.experts\.\d+\.(\w+)$")
EXPERT_MATRICES = ("gate_proj", "up_proj", "down_proj")
_GATES, _GATED = ("gate_proj", "w1"), ("up_proj", "w3")
"""Two matrices of an expert in files, which are one in the module, and get one adapter."""
_FUSED = 3
"""Dimensions of a weight that has the matrices of all experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedPart:
    """What a Model trains where that is not all of it. parameters: of these weights, and so of a
    version. is_added: whether they are beside those of the base. layers: decoder layers that a
    backward pass goes through. own_share: of what it goes through, the share that has gradients of
    its own. mergeable: parameters of the base's matrices into which an adapter can be merged.
    is_counted: False if they are those of a user's module, of which only a head is counted.
    read_layers: decoder layers of which a pass keeps what they leave. narrow: numbers of a token
    between the two matrices of all layers, which a training pass keeps; of experts, of which a
    token has few, none count.
    """

    parameters: int
    layers: int
    is_added: bool = False
    own_share: float = 0.0
    mergeable: int = 0
    is_counted: bool = True
    read_layers: int = 0
    narrow: int = 0

    def scaled(self, part: int, whole: int) -> TrainedPart:
        """What a rank trains that has so many parameters of a whole base."""
        return replace(
            self,
            parameters=-(-self.parameters * part // whole),
            mergeable=-(-self.mergeable * part // whole),
        )


def count_trained_part(model: Model, shapes: Shapes, head: int) -> TrainedPart | None:
    """Count what a Model trains of a base with these weights; None if that is all, or nothing.
    head: parameters of a scalar head.
    """
    if not model.is_partial:
        return None
    layers = count_layers(shapes)
    heads = head if model.head == "scalar" else 0
    if isinstance(model.adapter, Side):
        return TrainedPart(
            parameters=heads, layers=0, is_added=True, is_counted=False, read_layers=layers
        )
    if model.adapter is not None:
        return _count_adapter(model.adapter, shapes, layers, heads)
    assert model.subset is not None
    return _count_subset(model.subset, shapes, layers, heads)


def find_missing_targets(adapter: Lora, shapes: Shapes) -> list[str]:
    """The targets that no linear layer has."""
    if adapter.targets == ALL_LINEAR:
        return [] if _list_matrices(shapes) else [ALL_LINEAR]
    paths = _list_linear(shapes)
    missing: list[str] = []
    for name in adapter.target_names:
        if not any(is_at(path, name) for path in paths):
            missing.append(name)
    return missing


def find_confused_targets(adapter: Lora, shapes: Shapes) -> list[str]:
    """The paths of targets that are no expert's, and are called like an expert's matrix."""
    confused: list[str] = []
    for path in _list_linear(shapes):
        if leaf_of(path) in EXPERT_MATRICES and _is_target(adapter, path):
            confused.append(path)
    return confused


def list_leaves(shapes: Shapes) -> list[str]:
    """The names that targets may have: `down_proj`, `q_proj`."""
    return sorted({leaf_of(path) for path in _list_linear(shapes)})


def count_layers(names: Iterable[str]) -> int:
    """Count the decoder layers of a base, by the names of its weights."""
    numbers = (_layer_of(name) for name in names)
    return 1 + max((number for number in numbers if number is not None), default=-1)


def find_subset(subset: WeightSubset, names: Iterable[str], layers: int) -> list[str]:
    """The names of those weights that a subset of a base with so many layers has."""
    first = subset.first_layer(layers)
    chosen: list[str] = []
    for name in names:
        layer = _layer_of(name)
        is_behind = layer is None and is_last_norm(name)
        is_in_layers = layer is not None and layer >= first
        if (is_behind or is_in_layers) and subset.has_part(name):
            chosen.append(name)
    return chosen


def is_last_norm(name: str) -> bool:
    """Whether a weight that is in no decoder layer is of the norm behind them."""
    return leaf_of(name.rpartition(".")[0]) in _LAST_NORMS


def _count_adapter(adapter: Lora, shapes: Shapes, layers: int, heads: int) -> TrainedPart:
    parameters, first, mergeable, narrow = heads, layers, 0, 0
    for path, shape in _list_matrices(shapes).items():
        if _is_target(adapter, path):
            *experts, rows, columns = shape
            parameters += prod(experts) * adapter.rank * (rows + columns)
            mergeable += prod(shape)
            narrow += 0 if _is_expert(path, shape) else adapter.rank
            first = min(first, _layer_of(f"{path}.") or 0)
    return TrainedPart(
        parameters=parameters,
        layers=layers - first,
        is_added=True,
        mergeable=mergeable,
        narrow=narrow,
    )


def _count_subset(subset: WeightSubset, shapes: Shapes, layers: int, heads: int) -> TrainedPart:
    names = find_subset(subset, shapes, layers)
    parameters = sum(prod(shapes[name]) for name in names)
    numbers = [layer for name in names if (layer := _layer_of(name)) is not None]
    first = min(numbers, default=layers)
    passed = sum(prod(shapes[name]) for name in shapes if (_layer_of(name) or 0) >= first)
    return TrainedPart(
        parameters=parameters + heads,
        layers=layers - first,
        own_share=min(1.0, parameters / passed) if passed and first < layers else 0.0,
    )


def _list_matrices(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """The matrices of linear layers and of experts, by the paths of their modules."""
    return dict(_walk_matrices(shapes))


def _list_linear(shapes: Shapes) -> list[str]:
    """The paths of the linear layers, but for those of experts."""
    matrices = _list_matrices(shapes)
    return [path for path, shape in matrices.items() if not _is_expert(path, shape)]


def _is_expert(path: str, shape: tuple[int, ...]) -> bool:
    """Whether a matrix is of an expert, or of all of them."""
    return len(shape) == _FUSED or _EXPERT.search(path) is not None


def _walk_matrices(shapes: Shapes) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, shape in shapes.items():
        path = name.removesuffix(_MATRIX)
        if not _is_matrix(name, shape) or _is_table(leaf_of(path)):
            continue
        expert = _EXPERT.search(path)
        matrix = "" if expert is None else expert[1]
        if matrix in _GATES:
            rows, columns = shape
            yield f"{path.removesuffix(matrix)}gate_up_proj", (2 * rows, columns)
        elif matrix not in _GATED:
            yield path, shape


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a weight is a linear layer's, or has the matrices of experts."""
    if len(shape) == _FUSED:
        return True
    is_router = any(is_at(name.removesuffix(_MATRIX), router) for router in _ROUTERS)
    return len(shape) == 2 and name.endswith(_MATRIX) and not is_router


def _is_table(leaf: str) -> bool:
    """Whether a module of this name is a head or an embedding."""
    return leaf in _TABLES or leaf.startswith(_EMBEDDING)


def _is_target(adapter: Lora, path: str) -> bool:
    if adapter.targets == ALL_LINEAR:
        return True
    return any(is_at(path, name) for name in adapter.target_names)


def _layer_of(name: str) -> int | None:
    """The number of the decoder layer that a weight is in; None if it is in none."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None
