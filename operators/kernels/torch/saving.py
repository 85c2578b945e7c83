"""Saving: a module as a Hugging Face directory in its base's own dtype, and exactly beside it.

Owns: which dtype is written, the weights before they were rounded to it, the tokenizer's files.
Does not own: loading (models.py), the optimizer's state (optimizer.py), which directory (the
engine).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils.hub import cached_file

from dataflow.adapter_config import BASE_DIGEST
from dataflow.errors import KernelError
from dataflow.model_dtype import stored_dtype
from dataflow.model_files import CONFIG
from dataflow.storage import replace_text, writing
from operators.kernels.torch.adapter_files import save_adapter
from operators.kernels.torch.adapters import describe_adapter, has_adapter, named_trained
from operators.kernels.torch.base_piece import find_base
from operators.kernels.torch.side_files import save_side
from operators.kernels.torch.side_modules import find_side
from operators.kernels.torch.transformers_log import quiet

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "tokenizer.model",
    "vocab.json", "merges.txt", "vocab.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip

EXACT = "exact"
"""The folder in a saved directory with the weights before they were rounded to its dtype."""

_NARROW = (torch.bfloat16, torch.float16)
"""The dtypes that a base may have and its module not."""


def exact_folder(base: str) -> str:
    """Where the weights of a base are: in the folder EXACT, if it has one."""
    exact = Path(base).expanduser() / EXACT
    return str(exact) if (exact / CONFIG).is_file() else base


def saved_dtype(base: str, module_dtype: torch.dtype) -> torch.dtype:
    """Find the dtype in which a module of this base and dtype is saved: the base's, unless that is
    wider.
    """
    path = Path(cached_file(base, CONFIG) or "")
    stored = stored_dtype(path.parent)
    dtype = getattr(torch, stored or "", module_dtype)
    if dtype in _NARROW and dtype.itemsize <= module_dtype.itemsize:
        return dtype
    return module_dtype


def save_model(
    module: PreTrainedModel,
    directory: Path | str,
    weights: Mapping[str, Tensor] | None = None,
    *,
    exact: bool = False,
) -> None:
    """Write a Hugging Face directory in the base's dtype: config, safetensors, generation config,
    and the base's tokenizer files. Of a module with an adapter only that is written, in peft's
    files; of one with a side module only that (side_files.py). Of one with a subset the config
    has the digest of its base, which peers ignore.

    weights: by name, if the module has only a part of them; None: the module's own. exact: if that
    dtype is not the module's, write the folder EXACT too, from which load_model reads the same
    bits. Plain transformers can load the result. Raises KernelError if the base's tokenizer is
    gone or a weight is too large for the dtype, StorageError if the disk is full or fails.
    """
    target, base = Path(directory), str(module.name_or_path)
    if has_adapter(module):
        trained = weights or dict(named_trained(module))
        save_adapter(target, describe_adapter(module), trained, find_base(module))
        return
    if find_side(module) is not None:
        save_side(target, module, find_base(module))
        return
    dtype = saved_dtype(base, module.dtype)
    settings: dict[str, str] = {}
    if dtype == module.dtype:
        _write(module, target, weights)
        _drop(target / EXACT)
    else:
        _write(module, target, _round_weights(module, weights, dtype))
        # save_pretrained has written the module's dtype.
        settings["dtype"] = str(dtype).removeprefix("torch.")
        if exact:
            _write(module, target / EXACT, weights)
        else:
            _drop(target / EXACT)
    if find_base(module):
        settings[BASE_DIGEST] = find_base(module)
    if settings:
        _change_config(target / CONFIG, settings)
    save_tokenizer(base, target)


def _change_config(path: Path, settings: Mapping[str, str]) -> None:
    """Change fields of a config.json that was written, or add them."""
    config = json.loads(path.read_text(encoding="utf-8")) | settings
    text = json.dumps(config, indent=2) + "\n"
    replace_text("the configuration", path, text)


def _drop(exact: Path) -> None:
    """Remove weights of an earlier save: they would be read in place of the new ones."""
    if exact.is_dir():
        shutil.rmtree(exact)


def _write(module: PreTrainedModel, target: Path, weights: Mapping[str, Tensor] | None) -> None:
    tensors = module.parameters() if weights is None else weights.values()
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    with writing("the weights", target, size), quiet(), _rust_errors():
        module.save_pretrained(target, state_dict=None if weights is None else dict(weights))


def _round_weights(
    module: PreTrainedModel, weights: Mapping[str, Tensor] | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Cast the weights to another dtype, on the host; tied ones once, by their first name."""
    if weights is None:
        checkpoint_names = module.state_dict(keep_vars=True).keys()
        buffers = {n: buffer for n, buffer in module.named_buffers() if n in checkpoint_names}
        weights = dict(module.named_parameters()) | buffers
    return {name: _cast(name, weight.detach(), dtype) for name, weight in weights.items()}


def _cast(name: str, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast one weight to the host. Raises KernelError for a number that becomes infinite."""
    if not weight.is_floating_point():
        return weight
    narrow = weight.to(device="cpu", dtype=dtype)
    if narrow.isinf().any():
        limit, greatest = torch.finfo(dtype).max, float(weight.abs().max())
        raise KernelError(
            f"weight {name!r}: expected numbers that the base's {dtype} has, at most {limit:g},"
            f" found {greatest:g}. Fix: a base in bfloat16 or float32, or a lower lr."
        )
    return narrow


@contextmanager
def _rust_errors() -> Iterator[None]:
    """Raise the system error inside a SafetensorError (`... (os error 28)`) as OSError."""
    try:
        yield
    except SafetensorError as error:
        match = re.search(r"os error (\d+)", str(error))
        if match is None:
            raise
        number = int(match[1])
        raise OSError(number, os.strerror(number)) from error


def save_tokenizer(base: str, target: Path) -> None:
    """Save a base's tokenizer; files of a directory are copied. Raises what save_model raises."""
    local = Path(base).expanduser()
    if not local.is_dir():
        with writing("the tokenizer", target):
            AutoTokenizer.from_pretrained(base, trust_remote_code=False).save_pretrained(target)
        return
    paths = [local / name for name in TOKENIZER_FILES]
    present = [path for path in paths if path.is_file()]
    if not present:
        raise KernelError(
            f"saving to {target}: expected tokenizer files in the base {base}, found none. Fix:"
            " keep the base in place."
        )
    for path in present:
        if path.parent.resolve() != target.resolve():
            # Without shutil, which tries again when a disk fails.
            with writing("the tokenizer", target / path.name):
                (target / path.name).write_bytes(path.read_bytes())
