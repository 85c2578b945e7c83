"""`dataflow merge FOLDER OUT`: an adapter merged into its base, as a whole model.

Owns: the command's options, and where OUT may be. Does not own: merging, which imports torch
(operators/kernels/torch/merged_folder.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from engine.cli.screen import read_flags, say
from engine.cli.target import UsageError

_WHERE = "dataflow merge"
_MERGING = "operators.kernels.torch.merged_folder"
"""Imported by its name, as kernels are."""
_NOTICEABLE = 0.05
"""The share of an update that is worth a line when rounding takes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOptions:
    """Merge an adapter into its base, and write a whole Hugging Face directory: merged in float32
    and cast last to the base's dtype, with its tokenizer. Whatever loads a model loads it.
    """

    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """With adapter_model.safetensors and adapter_config.json: of a train node in a checkpoint of a
    run (runs/NAME/checkpoints/step_4/train_policy), a best version, or what PEFT has saved."""
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """The directory to write; there must be nothing in it."""
    base: str = ""
    """Directory or hub name of its base, if it is not where adapter_config.json says. Another base
    than the adapter was trained beside is refused."""


def main(arguments: Sequence[str]) -> int:
    """Merge, and say what was made; raises UsageError where OUT is in use."""
    about = MergeOptions.__doc__ or ""
    options = read_flags(MergeOptions, args=arguments, prog=_WHERE, about=about)
    target = Path(options.out)
    _require_room(target)
    merging = importlib.import_module(_MERGING)
    merged = merging.merge_folder(Path(options.folder), target, options.base)
    say(f"{target}: {options.folder} merged into {merged.base}, in {merged.dtype}")
    if merged.error > _NOTICEABLE:
        say(f"rounding to {merged.dtype} took {merged.error:.0%} of the adapter's update")
    return 0


def _require_room(target: Path) -> None:
    """Raise UsageError where something is there already; an empty directory may be."""
    if target.is_dir():
        if not any(target.iterdir()):
            return
        obstacle = "a directory that is not empty"
    elif target.exists():
        obstacle = "a file"
    else:
        return
    problem = f"expected {str(target)!r} not to be there, found {obstacle}"
    raise UsageError(_WHERE, problem, f"another directory, as {target}_2")
