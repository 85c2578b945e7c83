"""The base's digest on a weight edge: a part of a Model is of use on its own base alone.

Owns: the piece that has it, and the refusal of another base, also of a saved subset's. Does not
own: the digest (dataflow/base_digest.py), that of a saved adapter (dataflow/adapter_config.py), the
other pieces (models.py).

It travels as every piece does, by any route and to replicas that join later.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dataflow.adapter_config import BASE_DIGEST
from dataflow.base_digest import base_digest
from dataflow.errors import KernelError
from dataflow.kernel import Piece
from dataflow.model import Model
from dataflow.model_files import CONFIG, folder_of, maybe_object

NAME = "base.digest"


def note_base(module: nn.Module, base: str) -> None:
    """Note the digest of the base that a module was loaded from; none of a base whose files do not
    tell, or that is not on this machine.
    """
    folder = folder_of(base)
    noting: Any = module
    noting.base_digest = base_digest(folder) if folder is not None else ""


def find_base(module: nn.Module) -> str:
    """The digest that was noted; empty if none was."""
    return str(getattr(module, "base_digest", ""))


def require_saved_base(model: Model, directory: Path) -> None:
    """Raise KernelError if a directory's subset was trained beside another base than the Model's,
    as far as both are known: it has the whole of that base, and of it the subset would be taken.
    """
    folder = folder_of(model.base)
    digest = base_digest(folder) if folder is not None else ""
    saved_digest = maybe_object(directory / CONFIG).get(BASE_DIGEST, "")
    if digest and saved_digest and digest != saved_digest:
        raise KernelError(
            f"Model {model.name!r}: expected weights that were trained beside its base"
            f" {model.base}, digest {digest}, found in {directory} some of a base of digest"
            f" {saved_digest}. Fix: the base beside which they were trained."
        )


def base_pieces(module: nn.Module) -> list[Piece]:
    """The piece with the module's digest, uint8 [16] on the module's device; none without one."""
    digest = find_base(module)
    if not digest:
        return []
    device = next(module.parameters()).device
    numbers = torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8, device=device)
    return [Piece(NAME, numbers)]


def take_base(pieces: Iterable[Piece], digest: str, base: str) -> list[Piece]:
    """Return the pieces without the digest that is among them. digest: of the reader's base, empty
    if it is not known. Raises KernelError if they are of another base.
    """
    weights: list[Piece] = []
    for piece in pieces:
        if piece.name != NAME:
            weights.append(piece)
            continue
        numbers = piece.data.tolist()
        written = bytes(numbers).hex()
        if digest and written != digest:
            raise KernelError(
                f"base {base}: expected weights that were trained beside it as it is here, digest"
                f" {digest}, found some that were trained beside one of digest {written}. Fix: the"
                " same files of the base for writer and readers, on all hosts."
            )
    return weights
