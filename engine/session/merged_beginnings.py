"""Whole weights with which a phase begins, where the phase before it trained an adapter.

Owns: which Models begin merged, and the directory of each. Does not own: merging (`dataflow
merge`), whose weights a Model begins with (dataflow/program.py).

A Model without an adapter has whole weights: those of its base with the adapter in them. They are
made once, in a process of its own, since this one needs no torch; what is there is used again.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from dataflow.adapter_config import is_adapter_folder
from dataflow.errors import RunError
from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.storage import writing

MERGED = "merged"
"""The folder beside the checkpoints."""
_COMMAND = "import sys; from engine.cli import main; sys.exit(main(sys.argv[1:]))"


def merge_beginnings(graph: Graph, starts: Mapping[str, str], checkpoints: Path) -> dict[str, str]:
    """The directories with which a phase's Models begin, those of Models without an adapter merged.
    starts: as the phase that changed them left them. Raises RunError if one cannot be merged.
    """
    models = {state.name: state for state in graph.states if isinstance(state, Model)}
    merged: dict[str, str] = {}
    for name, start in starts.items():
        model = models.get(name)
        has_adapter = model is None or model.adapter is not None
        if has_adapter or not is_adapter_folder(Path(start)):
            merged[name] = start
        else:
            merged[name] = str(_merge(name, Path(start), checkpoints.absolute()))
    return merged


def _merge(model: str, folder: Path, checkpoints: Path) -> Path:
    """The directory with a Model's merged weights, made unless it is there."""
    target = checkpoints / MERGED / "_".join(folder.relative_to(checkpoints).parts)
    if target.is_dir():
        return target
    with writing("merged weights", target):
        target.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-c", _COMMAND, "merge", str(folder), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        raise RunError(
            f"Model {model!r}: its adapter in {folder} could not be merged into its base, with"
            f" which this phase begins: {lines[-1]}"
        )
    return target
