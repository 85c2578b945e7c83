"""Where code is imported from: the standard library, then what is installed, then the user's
folders.

Owns: that order, for this process and for those that it starts, and where a module would come from.
Does not own: which folders are the user's (the command line, a run's options), nor what goes by
value (shipping.py).

A `json.py` in the folder that a run is started in is the user's, and runs where the user's code
asks for it by path; it never takes the place of the `json` that Python, torch or this project mean.
Folders of PYTHONPATH stay where Python puts them: whoever sets it says that they come first.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder

_SEPARATOR = "\x1f"
_START = f"import sys; sys.path[:] = sys.argv[2].split({_SEPARATOR!r}); "
"""The first words of a process: before its path is set it imports what is built in alone."""


def import_path() -> list[str]:
    """The folders that this process imports from, absolute, those of the user last."""
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
    """Import from these folders, too: behind all others."""
    sys.path += [folder for folder in folders if folder not in sys.path]


def interpreter(code: str, title: str, *arguments: str) -> list[str]:
    """The command of a fresh interpreter that imports from where this one does, the user's folders
    last.

    title: what lists of processes show. The code finds its arguments from `sys.argv[3]` on.
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
    """Where `import name` would find that module, None where nowhere. No module is imported for it,
    no package either (`importlib.util.find_spec` runs the packages that a module lies in). behind:
    folders that come behind all others.
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
