"""The dtype that a Model computes in: the one that it names, or by its base.

Owns: the rule, and reading the dtype of a base's weights. Does not own: reading files in general
(model_files.py), the dtype of what is saved (operators/kernels/torch/saving.py).

A graph says `auto`, and nothing of a machine: a base is looked at where it is planned, and where
its weights are loaded. Both ask here, so that they agree.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from dataflow.adapters import Lora
from dataflow.model import AUTO, Model
from dataflow.model_files import CONFIG, folder_of, read_object, stored_weights

ComputedDtype = Literal["float32", "bfloat16"]

_STORED_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
"""Names of dtypes in safetensors files, and torch's."""


def find_dtype(model: Model) -> ComputedDtype | None:
    """Find the dtype that a Model computes in; None if its base is not on this machine. Raises
    DataError for a damaged file.
    """
    if model.dtype != AUTO:
        return model.dtype
    folder = folder_of(model.base)
    if folder is None or not (folder / CONFIG).is_file():
        return None
    return choose_dtype(model, folder)


def choose_dtype(model: Model, folder: Path) -> ComputedDtype | None:
    """Choose the dtype that a Model computes in, whose base is this directory: the one that it
    names; else that of the Model that it follows; else bfloat16 if the base is in bfloat16, and
    float32 for every other base. None if this is what the cache has of a hub name, and that says
    nothing of its weights. Raises DataError for a damaged file.

    float16 is float32 here: its least number is 6e-8, to which gradients fall unless the loss is
    scaled (Micikevicius et al., arXiv:1710.03740, section 3.2), and nothing scales it here; and
    float32 has each of its numbers, which bfloat16 would round.

    A Model that follows at a rate below 1 is in float32 whatever its base: it moves by a rate's
    part of a difference, of which bfloat16, with 8 bits, has nothing left below 1/256 of a weight,
    so that it would stand still. Of one with an adapter by `lora` only that is in float32.
    """
    if model.dtype != AUTO:
        return model.dtype
    if model.follows is not None:
        # A user's module may compute in one dtype alone, which is then that of its base.
        if model.rate != 1.0 and not isinstance(model.adapter, Lora):
            return "float32"
        return choose_dtype(model.follows, folder)
    stored = stored_dtype(folder)
    if stored is None and not Path(model.base).expanduser().is_dir():
        # Its weights may still be to come, and every Worker has to choose the same.
        return None
    if stored == "bfloat16":
        return "bfloat16"
    return "float32"


def stored_dtype(folder: Path) -> str | None:
    """Read the dtype of a base's weights, by torch's name: as its config.json states it, else that
    of all its weights, float32 if they have several. None if neither tells, as where the weights
    are pickles. Raises DataError for a damaged file.
    """
    config = read_object(folder / CONFIG)
    stated = config.get("dtype", config.get("torch_dtype"))
    if isinstance(stated, str) and stated != AUTO:
        return stated.removeprefix("torch.")
    if not any(folder.glob("*.safetensors")):
        return None
    weights = stored_weights(folder)
    if not weights:
        return None
    stored_names = {weight.dtype for weight in weights.values()}
    if len(stored_names) > 1:
        return "float32"
    return _STORED_NAMES.get(stored_names.pop())
