"""What the process of a run and a node of its cluster must have in common.

Owns: looking, and saying what differs. Does not own: asking a node (engine/launch/ray.py), what
that means for a plan (passes/place.py).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata

from engine.plan.cluster import detect

_PACKAGES = ("dataflow-rl", "torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """What is here: bytes of memory, of each GPU's memory, their kind; versions by name; by path,
    what is there, empty for nothing.
    """

    memory: int
    gpus: tuple[int, ...]
    kind: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    paths: Mapping[str, str] = field(default_factory=dict)


def look(paths: Iterable[str]) -> Looked:
    """Look at this machine, and at these paths."""
    machine = detect()
    versions = {name: _version(name) for name in _PACKAGES}
    return Looked(
        memory=machine.memory,
        gpus=machine.gpus,
        kind=machine.kind,
        versions={"Python": ".".join(platform.python_version_tuple()[:2]), **versions},
        paths={path: stamp(path) for path in paths},
    )


def refusal(here: Looked, there: Looked) -> str:
    """What a node has otherwise, as a problem with its fix; empty if nothing."""
    for name, version in here.versions.items():
        if (other := there.versions.get(name, "")) != version:
            expected = f"expected {name} {version} as here, found {other or 'none'}"
            return f"{expected}. Fix: the same version on every node."
    for path, mark in here.paths.items():
        if (other := there.paths.get(path, "")) != mark:
            expected = f"expected {path} as here ({mark}), found {other or 'nothing'}"
            return f"{expected}. Fix: a file system that every node mounts at the same place."
    return ""


def stamp(path: str) -> str:
    """What is at a path, without reading it: `file of 12 bytes`."""
    if os.path.isfile(path):
        return f"file of {os.path.getsize(path)} bytes"
    if not os.path.isdir(path):
        return ""
    sizes = [entry.stat().st_size for entry in os.scandir(path) if entry.is_file()]
    return f"folder with {len(sizes)} files of {sum(sizes)} bytes"


def _version(package: str) -> str:
    """Without a local build's tag: a node with GPUs may have CUDA's torch, another the CPU's."""
    try:
        return metadata.version(package).partition("+")[0]
    except metadata.PackageNotFoundError:
        return ""
