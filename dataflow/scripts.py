"""The script that this process runs, and what of it other processes can import.

Owns: whether a script is a module, too; a snapshot's names for what the script defines; the words
for what no other process finds. Does not own: snapshots (snapshot.py), the import path
(import_order.py).

What a script defines belongs to a module `__main__`, which is another one in every process. Its
file can be imported by its own name where that neither starts the run again nor finds another file:
the run is started under `if __name__ == "__main__":`.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from dataflow.declarations import strangers
from dataflow.import_order import find_module, import_path
from dataflow.importable_names import MAIN, Declaration, find_at_name
from dataflow.json_values import LOST, place_entry
from dataflow.program import AnyGraph
from dataflow.program_snapshot import write_snapshot

_KINDS = {"<lambda>": "a lambda", "<locals>": "defined within another function"}
_FIX = (
    "a def or class at the top level of a file of its own; or graph= of resume and rerun in Python"
)
_GUARD_TESTS = ("__name__ == '__main__'", "'__main__' == __name__")
"""As ast.unparse writes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """module: the name by which other processes can import this process's script; empty where they
    cannot, and why. unbound: names of the script that an import of it leaves out, or gives
    something else.
    """

    module: str = ""
    why: str = ""
    unbound: frozenset[str] = frozenset()


def script() -> Script:
    """This process's script, as seen by the one that calls."""
    main = sys.modules[MAIN]
    file = getattr(main, "__file__", None)
    if not isinstance(file, str) or not Path(file).is_file():
        return Script(why="defined in a notebook or an interactive session, which has no file")
    path = Path(file).resolve()
    spec: ModuleSpec | None = main.__spec__
    name = spec.name if spec is not None else path.stem
    if "." in name:
        imported = find_module(name)
    else:
        imported = PathFinder.find_spec(name, import_path())
    if imported is None or imported.origin is None or Path(imported.origin).resolve() != path:
        return Script(why=f"defined in {path.name}, which is not what `import {name}` finds")
    text = path.read_text(encoding="utf-8", errors="surrogateescape")
    line = _running_line(main)
    # An import of the script leaves out what is guarded.
    if not any(line in lines for lines in guards(text)):
        start = 'if __name__ == "__main__":'
        return Script(why=f"defined in {path.name}, which starts the run outside of `{start}`")
    return Script(module=name, unbound=frozenset(bound_under_guards(text, line)))


def _running_line(main: ModuleType) -> int:
    """The line of the script that runs now; 0 if none does."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals is vars(main) and frame.f_code.co_name == "<module>":
            return frame.f_lineno
        frame = frame.f_back
    return 0


def guards(text: str) -> Iterator[range]:
    """The lines of each `if __name__ == "__main__":` at the top level of a source text."""
    for guard in _find_guards(text):
        last = guard.orelse[0].lineno - 1 if guard.orelse else guard.end_lineno
        yield range(guard.lineno, (last or guard.lineno) + 1)


def bound_under_guards(text: str, until: int) -> Iterator[str]:
    """The names that a source text gives to something under `if __name__ == "__main__":`, up to a
    line.
    """
    for guard in _find_guards(text):
        for statement in guard.body:
            if statement.lineno < until:
                yield from _bound_names(statement)


def _bound_names(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement, or one in it, defines, assigns or imports."""
    for node in ast.walk(statement):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]


def _find_guards(text: str) -> Iterator[ast.If]:
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return
    for statement in body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) in _GUARD_TESTS:
            yield statement


def write_importable_snapshot(source: AnyGraph) -> tuple[str, Script, str]:
    """Write a snapshot's text, with names that other processes find, as far as there are any. Also
    returns the script, and one line about what they do not find; empty if that is nothing.
    """
    text = write_snapshot(source)
    if f'"{LOST}"' not in text:
        return text, Script(), ""
    document = json.loads(text)
    this_script = script()
    if this_script.module:
        document = _Renaming(this_script, _find_strangers(source)).rename(document)
    lost_parts = list(_find_lost(document, ""))
    importable_text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    notice = _describe_lost(lost_parts, this_script) if lost_parts else ""
    return importable_text, this_script, notice


def _find_strangers(source: AnyGraph) -> set[str]:
    keys: set[str] = set()
    for phase in source.phases:
        keys.update(strangers(phase.graph))
    return keys


class _Renaming:
    """A document with the script's importable parts by the name of its module. strangers: what has
    a name of the script's, to which that does not lead.
    """

    def __init__(self, this_script: Script, strangers: set[str]) -> None:
        self._script = this_script
        self._strangers = strangers

    def rename(self, part: Any, key: str = "") -> Any:
        """The same part of the document; key: its own in the object around it."""
        if isinstance(part, list):
            return [self.rename(element, key) for element in part]
        if isinstance(part, str):
            return self._find_path(part) or part
        if not isinstance(part, dict):
            return part
        if LOST in part:
            return self._rename_lost(part, key)
        renamed: dict[str, Any] = {}
        for name, inner in part.items():
            # A key of `declared` is a path, with a place behind it where two have one path.
            path, _, at = name.partition(" ")
            renamed[self._find_path(path, at) or name] = self.rename(inner, name)
        return renamed

    def _rename_lost(self, part: dict[str, Any], key: str) -> Any:
        path = self._find_path(part[LOST], str(part.get("at", "")))
        if not path:
            return part
        if key == "operator":
            return path
        kind = "class" if "at" not in part else "function"
        return {kind: path}

    def _find_path(self, path: str, at: str = "") -> str:
        """The path of what `__main__:name` names, if that is a function, operator, loss or class
        at the script's top level, and the one meant; else nothing.
        """
        module, _, name = path.partition("@")[0].partition(":")
        if module != MAIN or not name or "<" in name:
            return ""
        if name.partition(".")[0] in self._script.unbound:
            return ""
        # As declarations.py writes them.
        key = f"{path} {at}" if at else path
        if key in self._strangers:
            return ""
        thing = find_at_name(MAIN, name)
        if isinstance(thing, Declaration):
            thing = thing.fn
        is_function = inspect.isfunction(thing)
        is_same = is_function and (not at or place_entry(thing).get("at") == at)
        is_class = not at and isinstance(thing, type)
        return f"{self._script.module}:{name}" if is_same or is_class else ""


_OWNERS = {"nodes": "node", "states": "Model"}
"""What the entries of a graph's lists are; of States only Models hold functions."""


def _find_lost(part: Any, owner: str) -> Iterator[tuple[str, str, str]]:
    """(owner, path, place) of what is there only by a name that no other process finds."""
    if isinstance(part, dict):
        if LOST in part:
            yield owner, str(part[LOST]), str(part.get("at", ""))
        for key, inner in part.items():
            # A node's own `states` are numbers of these.
            if key in _OWNERS and isinstance(inner, list):
                for number, entry in enumerate(inner):
                    yield from _find_lost(entry, f"{_OWNERS[key]} {entry.get('name', number)!r}")
            elif key != "declared":
                yield from _find_lost(inner, owner)
    elif isinstance(part, list):
        for element in part:
            yield from _find_lost(element, owner)


def _describe_lost(lost_parts: list[tuple[str, str, str]], this_script: Script) -> str:
    """The line about the first of them."""
    owner, path, at = lost_parts[0]
    module, _, name = path.rpartition(":")
    why = next((reason for mark, reason in _KINDS.items() if mark in name), "")
    if not why and module == MAIN:
        why = this_script.why or "which an import of the script does not find by that name"
    elif not why and at:
        why = "whose name leads to another function"
    place = f" ({at.rsplit('/', 1)[-1]})" if at else ""
    what = f"{owner} has {name!r}{place}, {why or 'which has no name of its own'}"
    others = len(lost_parts) - 1
    more = f" (and {others} more)" if others else ""
    return f"`dataflow resume` will not be able to go on with this run: {what}{more}. Fix: {_FIX}."
