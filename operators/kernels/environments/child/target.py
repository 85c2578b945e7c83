"""The environment's class or functions, as a template finds them.

Owns: unpickling (in the run's own interpreter) and importing by name or by file. Does not own: how
they are described (targets.py beside this package), what an adapter does with them.

    {"kind": "text", "text": ...}                                 a name that the adapter knows
    {"kind": "module", "module": ..., "qualname": ..., "folder": ...}
    {"kind": "file", "path": ..., "qualname": ...}
    {"kind": "list", "members": [...]}
    {"kind": "pickle"}                                            in the frame that follows
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import sys
import zlib
from typing import Any


def load_target(described: dict[str, Any], pickled: bytes) -> Any:
    """Find the target. Raises what importing it raises."""
    kind = described["kind"]
    if kind == "pickle":
        return pickle.loads(pickled)
    if kind == "text":
        return described["text"]
    if kind == "list":
        return [load_target(member, b"") for member in described["members"]]
    if kind == "file":
        module = _load_file(described["path"])
    else:
        _import_from(described["folder"])
        module = importlib.import_module(described["module"])
    thing: Any = module
    for name in described["qualname"].split("."):
        thing = getattr(thing, name)
    return thing


def _load_file(path: str) -> Any:
    """The module of a file, under a name of its own; the same one for every target in it."""
    stem = os.path.splitext(os.path.basename(path))[0]
    name = f"dataflow_target_{stem}_{zlib.crc32(path.encode()):x}"
    if name in sys.modules:
        return sys.modules[name]
    _import_from(os.path.dirname(path))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _import_from(folder: str) -> None:
    """Import from this folder, too, after all others."""
    if folder and folder not in sys.path:
        sys.path.append(folder)
