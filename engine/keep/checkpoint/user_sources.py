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
from dataflow.import_order import is_installed
from dataflow.loss import LossFunction
from dataflow.model import Model
from dataflow.scripts import MAIN, guards
from engine.keep.checkpoint.content_digests import CONTENT, Files, code_content, code_digest

_ROOT = Path(dataflow.__file__).resolve().parents[1]
_OURS = tuple(f"{_ROOT / package}/" for package in ("dataflow", "operators", "graphs", "engine"))


def sources_of(graph: Graph, files: Files, script: str) -> dict[str, str]:
    """Module, or `__main__:function` -> the content of its code. script: see `provenance`."""
    digests: dict[str, str] = {}
    modules = _modules_of(graph)
    for definition in _things(graph):
        module = sys.modules.get(getattr(definition, "__module__", None) or "")
        if module is not None and _is_users(module):
            continue
        if script and module is not None and module is sys.modules[MAIN]:
            modules.setdefault(script, module)
        elif _stands_alone(definition, module):
            text = _source(definition)
            if text:
                digest = f"{CONTENT}{code_digest(text)}"
            else:
                digest = ""
            digests[f"__main__:{definition.__qualname__}"] = digest
    for name, module in _with_imports(modules).items():
        path = Path(module.__file__ or "")
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
        digests[name] = files.content(f"source {name}", path.name, code_content(_cut_main(text)))
    return dict(sorted(digests.items()))


def imported_files(graph: Graph) -> list[str]:
    """The user's source files that a process imports that runs the graph."""
    return [module.__file__ or "" for module in _with_imports(_modules_of(graph)).values()]


def _modules_of(graph: Graph) -> dict[str, ModuleType]:
    """The user's modules, by name, that define a function or class of the graph."""
    modules: dict[str, ModuleType] = {}
    for definition in _things(graph):
        module = sys.modules.get(getattr(definition, "__module__", None) or "")
        if module is not None and _is_users(module):
            modules.setdefault(module.__name__, module)
    return modules


def _cut_main(text: str) -> str:
    """A source without what an import of it leaves out: `if __name__ == "__main__":`."""
    left_out: set[int] = set()
    for line_numbers in guards(text):
        left_out.update(line_numbers)
    numbered = enumerate(text.splitlines(keepends=True), start=1)
    return "".join(line for number, line in numbered if number not in left_out)


def _things(graph: Graph) -> Iterator[Any]:
    """Every function and class that a graph names."""
    for node in graph.nodes:
        if node.operator.function is not None:
            yield node.operator.function
        yield from node.schemas
        for parameter in node.params.values():
            yield from _within(parameter)
    for state in graph.states:
        if isinstance(state, Model):
            yield from _within(state.adapter)


def _within(parameter: Any) -> Iterator[Any]:
    parts = _parts(parameter)
    yield from _definitions(parameter) if parts is None else ()
    for part in parts or ():
        yield from _within(part)


def _parts(whole: Any) -> Iterable[Any] | None:
    """A value's parts; None for one that is not taken apart."""
    if isinstance(whole, functools.partial):
        return whole.func, whole.args, whole.keywords
    if isinstance(whole, (LossFunction, type)):
        return None
    if dataclasses.is_dataclass(whole):
        return type(whole), *(getattr(whole, field.name) for field in dataclasses.fields(whole))
    if isinstance(whole, Mapping):
        return whole.values()
    if isinstance(whole, (list, tuple)):
        return whole
    return None


def _definitions(definition: Any) -> Iterable[Any]:
    """The functions and classes that define a value without parts."""
    if isinstance(definition, LossFunction):
        return (definition.fn,)
    if inspect.ismethod(definition):
        owner = definition.__self__
        return definition.__func__, owner if isinstance(owner, type) else type(owner)
    if isinstance(definition, type) or inspect.isroutine(definition):
        return (inspect.unwrap(definition) if callable(definition) else definition,)
    if callable(definition):
        return (type(definition),)
    return ()


def _is_users(module: ModuleType) -> bool:
    """Whether it is the user's: not installed, not ours, not the script that starts the run."""
    file = getattr(module, "__file__", None)
    if module.__name__ == MAIN or not isinstance(file, str) or not file.endswith(".py"):
        return False
    resolved = str(Path(file).resolve())
    return not is_installed(file) and not is_installed(resolved) and not resolved.startswith(_OURS)


def _stands_alone(definition: Any, module: ModuleType | None) -> bool:
    """Whether only its own text defines it, in the script or a notebook."""
    has_name = getattr(definition, "__qualname__", None) is not None
    return has_name and (module is None or module.__name__ == MAIN)


def _source(definition: Any) -> str:
    """Read a module's source; empty if unknown, which is not compared."""
    try:
        return inspect.getsource(definition)
    except (OSError, TypeError):
        return ""


def _with_imports(modules: Mapping[str, ModuleType]) -> dict[str, ModuleType]:
    """Add to these modules the user's modules that they import, or import something from."""
    modules_by_name, waiting = dict(modules), list(modules.values())
    while waiting:
        importer = waiting.pop()
        for member in list(vars(importer).values()):
            if isinstance(member, ModuleType):
                module = member
            else:
                module = sys.modules.get(_module_of(member))
            if module is None or module.__name__ in modules_by_name or not _is_users(module):
                continue
            if module is member and module.__name__.startswith(f"{importer.__name__}."):
                continue  # importing a submodule anywhere adds its name to the package
            modules_by_name[module.__name__] = module
            waiting.append(module)
    return modules_by_name


def _module_of(member: Any) -> str:
    has_module = isinstance(member, type) or inspect.isroutine(member)
    if has_module:
        name = getattr(member, "__module__", None)
    else:
        name = None
    if isinstance(name, str):
        return name
    return ""
