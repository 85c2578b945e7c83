"""Where code is imported from: the standard library, then installed packages, then the user's
folders.

Owns: that order, for this process and those that it starts, finding a module, what counts as
installed, and telling a user whose folder has the name of one of our packages. Does not own: which
folders are the user's (the command line, a run's options), what is sent by value (shipping.py).

A `json.py` in the folder in which a run is started is the user's, and runs if the user's code asks
for it by path; it never replaces the `json` that Python, torch or this project mean. Folders of
PYTHONPATH stay where Python puts them: setting it means that they come first.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from glob import escape, glob
from importlib.machinery import ModuleSpec, PathFinder

PACKAGES = ("dataflow", "operators", "graphs", "engine")
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
"""The folder that has our packages."""
_SEPARATOR = "\x1f"
_START = f"import sys; sys.path[:] = sys.argv[2].split({_SEPARATOR!r}); "
"""The first words of a process: until its path is set it imports only built-in modules."""
_PYTHON = tuple(
    sysconfig.get_paths()[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")
)
_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


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


def installed(file: str) -> bool:
    """Whether a file is Python's or an installed package's: of this environment, or of another one
    that it builds on (`python -m venv --system-site-packages`).
    """
    return file.startswith(_PYTHON) or any(folder in file for folder in _PACKAGES)


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


def hidden_in(folder: str) -> str | None:
    """One line on modules of a folder that cannot be imported, since our packages have their names;
    None if there are none. For a process that imports from that folder last.
    """
    if os.path.realpath(folder) == os.path.realpath(_ROOT):
        return None
    folders = [f"{name}{os.sep}" for name in PACKAGES if _has_modules(os.path.join(folder, name))]
    files = [f"{name}.py" for name in PACKAGES if os.path.isfile(f"{folder}{os.sep}{name}.py")]
    return _told([os.path.join(folder, name) for name in folders + files], _ROOT, "hidden by")


def packages_hidden() -> str | None:
    """One line on modules in whose place ours cannot be imported, None if there are none: `python
    file.py`, `python -m` and pytest import from the user's folder first.
    """
    found = (PathFinder.find_spec(name) for name in PACKAGES[1:])
    origins = [os.path.abspath(spec.origin) for spec in found if spec and spec.origin]
    places = [os.path.dirname(o) if o.endswith("__init__.py") else o for o in origins]
    others = [place for place in places if os.path.dirname(place) != _ROOT]
    return _told(others, _ROOT, "imported in place of")


def _has_modules(folder: str) -> bool:
    return bool(glob(os.path.join(escape(folder), "*.py")))


def _told(theirs: Sequence[str], ours: str, how: str) -> str | None:
    if not theirs:
        return None
    one = len(theirs) == 1
    return (
        f"dataflow: {', '.join(theirs)} {'is' if one else 'are'} {how} dataflow-rl's"
        f" {'package' if one else 'packages'} of that name (in {ours})."
        f" Fix: give {'it another name' if one else 'them other names'}."
    )


def _spec(name: str, folders: list[str] | None) -> ModuleSpec | None:
    loaded = getattr(sys.modules.get(name), "__spec__", None)
    if loaded is not None:
        return loaded
    found = (
        finder.find_spec(name, folders) for finder in sys.meta_path if hasattr(finder, "find_spec")
    )
    return next((spec for spec in found if spec is not None), None)
