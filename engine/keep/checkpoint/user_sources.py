"""The user's source files of a run: those that define a function or class of its graph, and what
these import of the user's.

Owns: which files count, and their contents. Does not own: what counts within a file
(content_digests.py), comparing (provenance.py).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import dataflow
from dataflow.graph import Graph
from dataflow.importing import installed
from dataflow.loss import LossFunction
from dataflow.scripts import MAIN, guards
from engine.keep.checkpoint.content_digests import CONTENT, Files, code_content, code_digest

_ROOT = Path(dataflow.__file__).resolve().parents[1]
_OURS = tuple(f"{_ROOT / package}/" for package in ("dataflow", "operators", "graphs", "engine"))


def sources_of(graph: Graph, files: Files, script: str) -> dict[str, str]:
    """Module, or `__main__:function` -> the content of its code. script: see `provenance`."""
    found: dict[str, str] = {}
    modules = _modules_of(graph)
    for thing in _things(graph):
        module = sys.modules.get(getattr(thing, "__module__", None) or "")
        if module is not None and _is_users(module):
            continue
        if script and module is not None and module is sys.modules[MAIN]:
            modules.setdefault(script, module)
        elif _stands_alone(thing, module):
            text = _source(thing)
            digest = f"{CONTENT}{code_digest(text)}" if text else ""
            found[f"__main__:{thing.__qualname__}"] = digest
    for name, module in _with_imports(modules).items():
        path = Path(module.__file__ or "")
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
        found[name] = files.content(f"source {name}", path.name, code_content(_imported(text)))
    return dict(sorted(found.items()))


def imported_files(graph: Graph) -> list[str]:
    """The user's source files that a process imports that runs the graph."""
    return [module.__file__ or "" for module in _with_imports(_modules_of(graph)).values()]


def _modules_of(graph: Graph) -> dict[str, ModuleType]:
    """The user's modules, by name, that define a function or class of the graph."""
    modules: dict[str, ModuleType] = {}
    for thing in _things(graph):
        module = sys.modules.get(getattr(thing, "__module__", None) or "")
        if module is not None and _is_users(module):
            modules.setdefault(module.__name__, module)
    return modules


def _imported(text: str) -> str:
    """A source without what an import of it leaves out: `if __name__ == "__main__":`."""
    left_out = {number for lines in guards(text) for number in lines}
    numbered = enumerate(text.splitlines(keepends=True), start=1)
    return "".join(line for number, line in numbered if number not in left_out)


def _things(graph: Graph) -> Iterator[Any]:
    """Every function and class that a graph names."""
    for node in graph.nodes:
        if node.operator.function is not None:
            yield node.operator.function
        yield from node.schemas
        for value in node.params.values():
            yield from _within(value)


def _within(value: Any) -> Iterator[Any]:
    parts = _parts(value)
    yield from _definitions(value) if parts is None else ()
    for part in parts or ():
        yield from _within(part)


def _parts(value: Any) -> Iterable[Any] | None:
    """A value's parts; None for one that is not taken apart."""
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, (LossFunction, type)):
        return None
    if dataclasses.is_dataclass(value):
        return type(value), *(getattr(value, field.name) for field in dataclasses.fields(value))
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple)) else None


def _definitions(value: Any) -> Iterable[Any]:
    """The functions and classes that define a value without parts."""
    if isinstance(value, LossFunction):
        return (value.fn,)
    if inspect.ismethod(value):
        owner = value.__self__
        return value.__func__, owner if isinstance(owner, type) else type(owner)
    if isinstance(value, type) or inspect.isroutine(value):
        return (inspect.unwrap(value) if callable(value) else value,)
    return (type(value),) if callable(value) else ()


def _is_users(module: ModuleType) -> bool:
    """Whether it is the user's: not installed, not ours, not the script that starts the run."""
    file = getattr(module, "__file__", None)
    if module.__name__ == MAIN or not isinstance(file, str) or not file.endswith(".py"):
        return False
    resolved = str(Path(file).resolve())
    return not installed(file) and not installed(resolved) and not resolved.startswith(_OURS)


def _stands_alone(thing: Any, module: ModuleType | None) -> bool:
    """Whether only its own text defines it, in the script or a notebook."""
    own = getattr(thing, "__qualname__", None) is not None
    return own and (module is None or module.__name__ == MAIN)


def _source(thing: Any) -> str:
    """Its source; empty if unknown, which is not compared."""
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        return ""


def _with_imports(modules: Mapping[str, ModuleType]) -> dict[str, ModuleType]:
    """These modules, and the user's modules that they import, or import something from."""
    found, left = dict(modules), list(modules.values())
    while left:
        importer = left.pop()
        for value in list(vars(importer).values()):
            module = value if isinstance(value, ModuleType) else sys.modules.get(_module_of(value))
            if module is None or module.__name__ in found or not _is_users(module):
                continue
            if module is value and module.__name__.startswith(f"{importer.__name__}."):
                continue  # importing a submodule anywhere adds its name to the package
            found[module.__name__] = module
            left.append(module)
    return found


def _module_of(value: Any) -> str:
    named = isinstance(value, type) or inspect.isroutine(value)
    name = getattr(value, "__module__", None) if named else None
    return name if isinstance(name, str) else ""
