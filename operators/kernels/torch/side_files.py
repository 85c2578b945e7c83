"""Side modules as files: side_model.safetensors and side_config.json.

Owns: writing and reading them; the digest of the base is in the header of the weights. Does not
own: the module (side_modules.py), what is refused of a folder (dataflow/side_config.py), when they
are written (the engine).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor, nn

from dataflow.adapter_config import BASE_DIGEST
from dataflow.kernel import Piece
from dataflow.model import Model
from dataflow.side_config import CONFIG, WEIGHTS, find_side_complaint
from dataflow.side_module import Side
from dataflow.storage import writing
from operators.kernels.torch.adapter_files import read_part, sort_header
from operators.kernels.torch.side_modules import named_side


def save_side(folder: Path, module: nn.Module, base_digest: str = "") -> None:
    """Write a side module's folder. Raises StorageError if the disk is full or fails."""
    tensors: dict[str, Tensor] = {}
    for name, weight in named_side(module):
        tensors[name] = weight.detach().cpu().contiguous()
    header = {"format": "pt", BASE_DIGEST: base_digest}
    described: Any = module
    text = json.dumps(described.side_config, indent=2, sort_keys=True) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    contents = {WEIGHTS: sort_header(save(tensors, header)), CONFIG: text.encode()}
    for name, content in contents.items():
        with writing("the side module", folder / name, len(content)):
            (folder / name).write_bytes(content)


def read_side(model: Model, side: Side, folder: Path) -> list[Piece]:
    """Read a side module's weights, by the names that they have in a module. Raises KernelError,
    naming the Model, for a folder without one, or one of another function, other params or another
    base; DataError for a damaged file.
    """
    return read_part(model, folder / WEIGHTS, find_side_complaint(side, folder))
