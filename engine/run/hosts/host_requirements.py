"""What the process of a run and a node of its cluster must have in common.

Owns: looking, and saying what differs. Does not own: asking a node (engine/run/hosts/ray.py), what
that means for a plan (passes/place.py), digests (engine/keep/checkpoint/content_digests.py).

A node imports the user's modules and this package from its own disk, and reads models and data
there: with other files at the same paths it would compute other numbers.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import dataflow
from engine.keep.checkpoint.content_digests import code_digest, file_digest, model_content
from engine.plan.cluster import detect

_PACKAGES = ("dataflow-rl", "torch")
_OURS = ("dataflow", "operators", "graphs", "engine")
_CODE = "the code of dataflow-rl"
_SHOWN = 12
"""Characters of a digest."""


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


def look(paths: Iterable[str], *, whole: bool = False) -> Looked:
    """Look at this machine, and at these paths. whole: read large files in full."""
    machine = detect()
    versions = {name: _version(name) for name in _PACKAGES}
    return Looked(
        memory=machine.memory,
        gpus=machine.gpus,
        kind=machine.kind,
        versions={
            "Python": ".".join(platform.python_version_tuple()[:2]),
            **versions,
            _CODE: _package_digest(),
        },
        paths={path: stamp(path, whole=whole) for path in paths},
    )


def describe_difference(here: Looked, node: Looked) -> str:
    """What a node has otherwise, as a problem with its fix; empty if nothing."""
    for name, version in here.versions.items():
        if (other := node.versions.get(name, "")) != version:
            expected = f"expected {name} {version} as here, found {other or 'none'}"
            return f"{expected}. Fix: the same version on every node."
    for path, mark in here.paths.items():
        if (other := node.paths.get(path, "")) != mark:
            expected = f"expected {path} as here ({mark}), found {other or 'nothing'}"
            return f"{expected}. Fix: a file system that every node mounts at the same place."
    return ""


def stamp(path: str, *, whole: bool = False) -> str:
    """What is at a path: `file of 12 bytes, content 0f3a...`. A source file is its code: comments
    and blank lines do not count. Large files are read in samples unless all of them is wanted.
    """
    if os.path.isfile(path) and path.endswith(".py"):
        text = Path(path).read_text(encoding="utf-8", errors="surrogateescape")
        return f"source file, content {code_digest(text)[:_SHOWN]}"
    if os.path.isfile(path):
        digest = file_digest(Path(path), whole=whole).hex()
        return f"file of {os.path.getsize(path)} bytes, content {digest[:_SHOWN]}"
    if not os.path.isdir(path):
        return ""
    sizes = [entry.stat().st_size for entry in os.scandir(path) if entry.is_file()]
    content = model_content(path, whole=whole)
    assert content is not None, "it is a folder"
    listed = f"folder with {len(sizes)} files of {sum(sizes)} bytes"
    return f"{listed}, content {content.digest[:_SHOWN]}"


@functools.cache
def _package_digest() -> str:
    """Of all source files of this package: the version stays the same while it is developed."""
    root = Path(dataflow.__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for package in _OURS:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:_SHOWN]


def _version(package: str) -> str:
    """Without a local build's tag: a node with GPUs may have CUDA's torch, another the CPU's."""
    try:
        return metadata.version(package).partition("+")[0]
    except metadata.PackageNotFoundError:
        return ""
