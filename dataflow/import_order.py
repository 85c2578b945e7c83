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
_FOLDER_KINDS = ("stdlib", "platstdlib", "purelib", "platlib")
_PYTHON_FOLDERS = tuple(sysconfig.get_paths()[kind] for kind in _FOLDER_KINDS)
_PACKAGE_FOLDERS = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


def import_path() -> list[str]:
    """The folders that this process imports from, absolute, the user's last."""
    # A folder with the separator in its name cannot be handed to another process (_START).
    entries = [os.path.abspath(entry) for entry in sys.path if _SEPARATOR not in entry]
    user_folders = _user_folders(entries)
    others = [entry for entry in entries if entry not in user_folders]
    return list(dict.fromkeys(others + user_folders))


def _user_folders(entries: Sequence[str]) -> list[str]:
    """Those before the standard library that PYTHONPATH does not name."""
    stdlib = os.path.abspath(sysconfig.get_path("stdlib"))
    # Python puts a zip file of its library first, whether there is one or not.
    zip_name = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    libraries = {stdlib, os.path.join(os.path.dirname(stdlib), zip_name)}
    first_library = next((i for i, entry in enumerate(entries) if entry in libraries), 0)
    path_entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    # An empty or relative entry would be the current folder or one in it, which is the user's.
    python_path = {os.path.abspath(entry) for entry in path_entries if os.path.isabs(entry)}
    return [entry for entry in entries[:first_library] if entry not in python_path]


def is_installed(file: str) -> bool:
    """Whether a file is Python's or an installed package's: of this environment, or of another one
    that it builds on (`python -m venv --system-site-packages`).
    """
    return file.startswith(_PYTHON_FOLDERS) or any(folder in file for folder in _PACKAGE_FOLDERS)


def import_from(folders: Iterable[str]) -> None:
    """Import from these folders, too, after all others."""
    sys.path += [folder for folder in folders if folder not in sys.path]


def interpreter(code: str, title: str, *arguments: str) -> list[str]:
    """The command of a fresh interpreter with this one's import path, the user's folders last.

    title: shown in lists of processes. The code finds its arguments from `sys.argv[3]` on.
    """
    path = _SEPARATOR.join(import_path())
    return [sys.executable, "-P", "-c", _START + code, title, path, *arguments]


def find_module(name: str, behind: Sequence[str] = ()) -> ModuleSpec | None:
    """Find where `import name` would take that module from; None if nowhere. Imports nothing, not
    even the packages around it (`importlib.util.find_spec` runs those). behind: folders that come
    after all others.
    """
    spec: ModuleSpec | None = None
    folders: list[str] | None = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        prefix = ".".join(parts[:depth])
        spec = _find_spec(prefix, folders)
        if spec is None and depth == 1:
            spec = PathFinder.find_spec(prefix, list(behind))
        if spec is None:
            return None
        is_package = spec.submodule_search_locations is not None
        if depth < len(parts) and not is_package:
            return None
        folders = list(spec.submodule_search_locations or ())
    return spec


def describe_hidden_modules(folder: str) -> str | None:
    """Say in one line which modules of a folder cannot be imported, since our packages have their
    names; None if there are none. For a process that imports from that folder last.
    """
    if os.path.realpath(folder) == os.path.realpath(_ROOT):
        return None
    folders = [os.path.join(folder, name, "") for name in PACKAGES]
    files = [os.path.join(folder, f"{name}.py") for name in PACKAGES]
    hidden = [*filter(_has_modules, folders), *filter(os.path.isfile, files)]
    return _describe_clash(hidden, "hidden by")


def describe_replaced_packages() -> str | None:
    """Say in one line which modules are imported in the place of ours, None if there are none:
    `python file.py`, `python -m` and pytest import from the user's folder first.
    """
    others: list[str] = []
    for name in PACKAGES[1:]:  # the first one is this one: it has been imported
        spec = PathFinder.find_spec(name)
        if spec is None or not spec.origin:
            continue
        place = os.path.abspath(spec.origin)
        if place.endswith("__init__.py"):
            place = os.path.dirname(place)
        if os.path.dirname(place) != _ROOT:
            others.append(place)
    return _describe_clash(others, "imported in place of")


def _has_modules(folder: str) -> bool:
    pattern = os.path.join(escape(folder), "*.py")
    return bool(glob(pattern))


def _describe_clash(theirs: Sequence[str], relation: str) -> str | None:
    if not theirs:
        return None
    if len(theirs) == 1:
        verb, package, fix = "is", "package", "give it another name"
    else:
        verb, package, fix = "are", "packages", "give them other names"
    return (
        f"dataflow: {', '.join(theirs)} {verb} {relation} dataflow-rl's {package} of that name"
        f" (in {_ROOT}). Fix: {fix}."
    )


def _find_spec(name: str, folders: list[str] | None) -> ModuleSpec | None:
    loaded = getattr(sys.modules.get(name), "__spec__", None)
    if loaded is not None:
        return loaded
    for finder in sys.meta_path:
        if not hasattr(finder, "find_spec"):  # a finder of old
            continue
        spec = finder.find_spec(name, folders)
        if spec is not None:
            return spec
    return None
