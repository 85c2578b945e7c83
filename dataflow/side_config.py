"""What a saved side module must be, so that a Model can begin with it.

Owns: the names of its files, reading side_config.json without torch, and what is refused of it,
with the fix. Does not own: its weights (operators/kernels/torch/side_files.py), saved adapters of
other kinds (adapter_config.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dataflow.adapter_config import WEIGHTS as ADAPTER_WEIGHTS
from dataflow.adapter_config import Complaint, is_adapter_folder
from dataflow.adapters import Lora
from dataflow.model_files import listing, parse_object
from dataflow.side_module import Side

WEIGHTS, CONFIG = "side_model.safetensors", "side_config.json"


def has_trained_part(adapter: Lora | Side, folder: Path) -> bool:
    """Whether a folder has the weights that an adapter of this kind trains, and nothing else."""
    if isinstance(adapter, Side):
        return _is_side_folder(folder)
    return is_adapter_folder(folder)


def name_weights_file(adapter: Lora | Side) -> str:
    """Name the file with the weights of an adapter of this kind."""
    return WEIGHTS if isinstance(adapter, Side) else ADAPTER_WEIGHTS


def describe_side(adapter: Side) -> dict[str, Any]:
    """What is written to side_config.json, as values of JSON."""
    return {"function": adapter.path, "params": _read_params(adapter)}


def find_side_complaint(adapter: Side, folder: Path) -> Complaint | None:
    """Find why a Model with this side module cannot begin with what a folder has; None if it can.
    Raises DataError for a damaged file.
    """
    if not _is_side_folder(folder):
        what = listing(folder) if folder.is_dir() else "nothing there"
        problem = f"expected {WEIGHTS} and {CONFIG} in {folder}, found {what}"
        return problem, "a checkpoint of a run with such a Model"
    path = folder / CONFIG
    saved = parse_object(path, path.read_bytes())
    for problem in _list_differences(adapter, saved):
        return f"{path}: {problem}", "the same function and params as then"
    return None


def _is_side_folder(folder: Path) -> bool:
    return (folder / WEIGHTS).is_file() and (folder / CONFIG).is_file()


def _list_differences(adapter: Side, saved: dict[str, Any]) -> Iterator[str]:
    # By its own name: the module of a script is another where it is imported.
    function = str(saved.get("function", "")).rpartition(":")[2]
    expected = adapter.build.__qualname__
    if function != expected:
        yield f"expected a side module that {expected} made, found one of {function or 'nobody'}"
    params = _read_params(adapter)
    if saved.get("params") != params:
        yield f"expected params {params}, found {saved.get('params')}"


def _read_params(adapter: Side) -> dict[str, Any]:
    """The params as JSON has them: with lists for tuples."""
    return {name: _as_json(argument) for name, argument in adapter.params}


def _as_json(argument: Any) -> Any:
    if isinstance(argument, tuple):
        return [_as_json(part) for part in argument]
    return argument
