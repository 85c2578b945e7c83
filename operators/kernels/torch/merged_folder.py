"""An adapter's folder and its base, merged into one whole Hugging Face directory.

Owns: which base it is, and the directory. Does not own: peft's files (adapter_files.py), what they
must say (dataflow/adapter_config.py), the merged numbers (merged_matrices.py), saving (saving.py).
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from dataflow.adapter_config import SavedAdapter, read_saved_adapter
from dataflow.errors import KernelError
from dataflow.model import Model
from dataflow.model_files import folder_of, is_path
from operators.kernels.torch.adapter_files import read_adapter
from operators.kernels.torch.adapter_layers import is_added
from operators.kernels.torch.adapters import BaseWeights, add_adapter, share_base
from operators.kernels.torch.merged_matrices import unload_adapter
from operators.kernels.torch.models import load_model, load_pieces
from operators.kernels.torch.saving import save_model, saved_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedModel:
    """What was merged. error: which share of the adapter's update rounding to the dtype took."""

    base: str
    dtype: str
    error: float


def merge_folder(folder: Path, target: Path, base: str = "") -> MergedModel:
    """Write a whole Hugging Face directory: the base of an adapter's folder, with the adapter
    merged into its matrices in float32 and cast last to the base's dtype; its configuration,
    tokenizer and generation configuration.

    base: a directory or name; by default the one that the adapter names. target: nothing, or an
    empty directory; it is there completely or not at all. Raises KernelError for a folder without
    an adapter that works here, for a base that is not there, and for another one than the adapter
    was trained beside, as far as both are known; StorageError if the disk is full or fails.
    """
    saved = read_saved_adapter(folder)
    if not isinstance(saved, SavedAdapter):
        problem, fix = saved
        raise KernelError(f"{problem}. Fix: {fix}.")
    base = base or saved.base
    _require_base(folder, base)
    model = Model(
        folder.resolve().name, base, trainable=True, adapter=saved.adapter, head=saved.head
    )
    module = _load(model, folder)
    dtype = saved_dtype(base, module.dtype)
    error = unload_adapter(module)
    partial = target.with_name(f"{target.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)  # of a merge that was killed
    save_model(module, partial)
    os.replace(partial, target)
    return MergedModel(base=base, dtype=str(dtype).removeprefix("torch."), error=error)


def _require_base(folder: Path, base: str) -> None:
    if not base:
        problem = "expected the name of its base in adapter_config.json, found none"
        raise KernelError(f"{folder}: {problem}. Fix: --base DIRECTORY.")
    if folder_of(base) is None and is_path(base):
        problem = f"expected the adapter's base, found nothing at {base}"
        raise KernelError(f"{folder}: {problem}. Fix: --base DIRECTORY, where it is now.")


def _load(model: Model, folder: Path) -> PreTrainedModel:
    """The base's module with the adapter beside it, as it was saved: not rounded to the module's
    dtype, as it is for computing.
    """
    plain = Model(model.name, model.base, trainable=True, head=model.head)
    module = load_model(plain, "cpu")
    share_base(module, model, BaseWeights())
    add_adapter(module, model, seed=0)
    for name, parameter in module.named_parameters():
        if is_added(name):
            parameter.data = parameter.data.to(torch.float32)
    load_pieces(module, read_adapter(model, folder))
    return module
