"""Adapters as peft's files: adapter_model.safetensors and adapter_config.json.

Owns: writing and reading them, and the digest of the base that they were trained on. Does not own:
the matrices in a module (adapters.py), when they are written (the engine).

peft, vLLM and TRL read such a folder. The base's digest is in the header of the weights, which they
leave alone; adapter_config.json has only what peft knows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dataflow.adapter_config import (
    BASE_DIGEST,
    Complaint,
    find_adapter_complaint,
    find_base_complaint,
)
from dataflow.adapter_config import CONFIG as CONFIG
from dataflow.adapter_config import WEIGHTS as WEIGHTS
from dataflow.adapters import Lora
from dataflow.errors import KernelError
from dataflow.kernel import Piece
from dataflow.model import Model
from dataflow.storage import writing

_PREFIX = "base_model.model."
"""peft's, before the names of the base's modules."""


def save_adapter(
    folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor], base_digest: str = ""
) -> None:
    """Write an adapter's folder: `encode_adapter`. Raises StorageError if the disk is full or
    fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in encode_adapter(config, weights, base_digest).items():
        with writing("the adapter", folder / name, len(content)):
            (folder / name).write_bytes(content)


def encode_adapter(
    config: Mapping[str, Any], weights: Mapping[str, Tensor], base_digest: str = ""
) -> dict[str, bytes]:
    """The content of both files, by their names. config: peft's, as values of JSON. weights: by the
    names of their pieces.
    """
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        tensors[f"{_PREFIX}{name}"] = weight.detach().cpu().contiguous()
    header = {"format": "pt", BASE_DIGEST: base_digest}
    text = json.dumps(dict(config), indent=2, sort_keys=True) + "\n"
    return {WEIGHTS: sort_header(save(tensors, header)), CONFIG: text.encode()}


def sort_header(content: bytes) -> bytes:
    """The same file with its metadata in the order of their names: safetensors has them in any, and
    equal adapters are equal files.
    """
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"))
    return content[:8] + text.encode().ljust(end - 8) + content[end:]


def read_adapter(model: Model, folder: Path) -> list[Piece]:
    """Read an adapter's weights, by the names that they have in a module. Raises KernelError,
    naming the Model, for a folder without one, a damaged file, or one of another rank, scale or
    base.
    """
    assert isinstance(model.adapter, Lora)
    return read_part(model, folder / WEIGHTS, find_adapter_complaint(model.adapter, folder))


def read_part(model: Model, path: Path, complaint: Complaint | None) -> list[Piece]:
    """Read the weights of what a Model trains beside its base, by the names that they have in a
    module: without peft's prefix. complaint: what is wrong with their folder. Raises KernelError,
    naming the Model, for that, for weights beside another base, and for a damaged file.
    """
    where = f"Model {model.name!r}"
    if complaint is None:
        complaint = find_base_complaint(model.base, path)
    if complaint is not None:
        problem, fix = complaint
        raise KernelError(f"{where}: {problem}. Fix: {fix}.")
    pieces: list[Piece] = []
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                pieces.append(Piece(name.removeprefix(_PREFIX), file.get_tensor(name)))
    except SafetensorError as error:
        problem = f"{where}: {path} is damaged ({error})"
        raise KernelError(f"{problem}. Fix: another copy.") from None
    return pieces
