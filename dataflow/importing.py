"""Where code is imported from: the standard library, then installed packages, then the user's
folders.

Owns: that order, for this process and those that it starts, and finding a module. Does not own:
which folders are the user's (the command line, a run's options), what is sent by value
(shipping.py).

A `json.py` in the folder in which a run is started is the user's, and runs if the user's code asks
for it by path; it never replaces the `json` that Python, torch or this project mean. Folders of
PYTHONPATH stay where Python puts them: setting it means that they come first.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder

_SEPARATOR = "\x1f"
_START = f"import sys; sys.path[:] = sys.argv[2].split({_SEPARATOR!r}); "
"""The first words of a process: until its path is set it imports only built-in modules."""


def import_path() -> list[str]:
    """The folders that this process imports from, absolute, the user's last."""
    entries = [os.path.abspath(p) for p in sys.path if _SEPARATOR not in p]
    users = _user_folders(entries)
    return list(dict.fromkeys([*(e for e in entries if e not in users), *users]))


def _user_folders(entries: Sequence[str]) -> list[str]:
    """Those before the standard library that PYTHONPATH does not name."""
    stdlib = os.path.abspath(sysconfig.get_path("stdlib"))
    zipped = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    ours = {stdlib, os.path.join(os.path.dirname(stdlib), zipped)}
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    given = {os.path.abspath(p) for p in named if os.path.isabs(p)}
    first = next((i for i, entry in enumerate(entries) if entry in ours), 0)
    return [entry for entry in entries[:first] if entry not in given]


def import_from(folders: Iterable[str]) -> None:
    """Also import from these folders, after all others."""
    sys.path += [folder for folder in folders if folder not in sys.path]


def interpreter(code: str, title: str, *arguments: str) -> list[str]:
    """The command of a fresh interpreter with this one's import path, the user's folders last.

    title: shown in lists of processes. The code finds its arguments from `sys.argv[3]` on.
    """
    return [
        sys.executable,
        "-P",
        "-c",
        _START + code,
        title,
        _SEPARATOR.join(import_path()),
        *arguments,
    ]


def located(name: str, behind: Sequence[str] = ()) -> ModuleSpec | None:
    """Where `import name` would find that module, or None; imports nothing, not even the packages
    around it (`importlib.util.find_spec` runs those). behind: folders that come after all others.
    """
    spec: ModuleSpec | None = None
    folders: list[str] | None = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        whole = ".".join(parts[:depth])
        spec = _spec(whole, folders) or (
            PathFinder.find_spec(whole, list(behind)) if depth == 1 else None
        )
        if spec is None or (depth < len(parts) and spec.submodule_search_locations is None):
            return None
        folders = list(spec.submodule_search_locations or ())
    return spec


def _spec(name: str, folders: list[str] | None) -> ModuleSpec | None:
    loaded = getattr(sys.modules.get(name), "__spec__", None)
    if loaded is not None:
        return loaded
    found = (
        finder.find_spec(name, folders) for finder in sys.meta_path if hasattr(finder, "find_spec")
    )
    return next((spec for spec in found if spec is not None), None)
