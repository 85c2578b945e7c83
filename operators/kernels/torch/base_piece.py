"""The base's digest on a weight edge: a part of a Model is of use on its own base alone.

Owns: the piece that has it, and the refusal of another base. Does not own: the digest
(dataflow/base_digest.py), the other pieces (models.py).

It travels as every piece does, by any route and to replicas that join later.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from dataflow.base_digest import base_digest
from dataflow.errors import KernelError
from dataflow.kernel import Piece
from dataflow.model_files import folder_of

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
