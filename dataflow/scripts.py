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
from dataflow.program_snapshot import written
from dataflow.schema import Schema

_KINDS = {"<lambda>": "a lambda", "<locals>": "defined within another function"}
_FIX = "a def at the top level of a file of its own; or graph= of resume and rerun in Python"


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
    found = find_module(name) if "." in name else PathFinder.find_spec(name, import_path())
    if found is None or found.origin is None or Path(found.origin).resolve() != path:
        return Script(why=f"defined in {path.name}, which is not what `import {name}` finds")
    text = path.read_text(encoding="utf-8", errors="surrogateescape")
    line = _line(main)
    # An import of the script leaves out what is guarded.
    if not any(line in lines for lines in guards(text)):
        start = 'if __name__ == "__main__":'
        return Script(why=f"defined in {path.name}, which starts the run outside of `{start}`")
    return Script(module=name, unbound=frozenset(bound_under_guards(text, line)))


def _line(main: ModuleType) -> int:
    """The line of the script that runs now; 0 if none does."""
    frame = sys._getframe()
    while frame is not None and not (
        frame.f_globals is vars(main) and frame.f_code.co_name == "<module>"
    ):
        frame = frame.f_back
    return 0 if frame is None else frame.f_lineno


def guards(text: str) -> Iterator[range]:
    """The lines of each `if __name__ == "__main__":` at the top level of a source text."""
    for each in _guards(text):
        last = each.orelse[0].lineno - 1 if each.orelse else each.end_lineno
        yield range(each.lineno, (last or each.lineno) + 1)


def bound_under_guards(text: str, until: int) -> Iterator[str]:
    """The names that a source text gives to something under `if __name__ == "__main__":`, up to a
    line.
    """
    parts = (part for guard in _guards(text) for part in guard.body if part.lineno < until)
    for part in parts:
        for each in ast.walk(part):
            if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield each.name
            elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                yield each.id
            elif isinstance(each, ast.alias):
                yield (each.asname or each.name).partition(".")[0]


def _guards(text: str) -> Iterator[ast.If]:
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return
    for each in body:
        if isinstance(each, ast.If) and ast.unparse(each.test) in (
            "__name__ == '__main__'",
            "'__main__' == __name__",
        ):
            yield each


def kept(source: AnyGraph) -> tuple[str, Script, str]:
    """The text of a snapshot, with names that other processes find, as far as there are any. Also
    returns the script, and one line about what they do not find; empty if that is nothing.
    """
    text = written(source)
    if f'"{LOST}"' not in text:
        return text, Script(), ""
    document, of = json.loads(text), script()
    if of.module:
        document = _Renaming(of, _strangers(source)).named(document)
    lost = list(_lost(document, ""))
    again = json.dumps(document, indent=2, allow_nan=False) + "\n"
    return again, of, _notice(lost, of) if lost else ""


def _strangers(source: AnyGraph) -> set[str]:
    return {key for phase in source.phases for key in strangers(phase.graph)}


class _Renaming:
    """A document with the script's importable parts by the name of its module. strangers: what has
    a name of the script's, to which that does not lead.
    """

    def __init__(self, of: Script, strangers: set[str]) -> None:
        self._of = of
        self._strangers = strangers

    def named(self, value: Any, key: str = "") -> Any:
        """A part of the document; key: its own in the object around it."""
        if isinstance(value, list):
            return [self.named(each, key) for each in value]
        if isinstance(value, str):
            return self._path(value) or value
        if not isinstance(value, dict):
            return value
        if LOST in value:
            path = self._path(value[LOST], str(value.get("at", "")))
            kind = "class" if "at" not in value else "function"
            return value if not path else path if key == "operator" else {kind: path}
        named: dict[str, Any] = {}
        for name, each in value.items():
            known = self._path(name.partition(" ")[0], name.partition(" ")[2])
            named[known or name] = self.named(each, name)
        return named

    def _path(self, path: str, at: str = "") -> str:
        """The path of what `__main__:name` names, if that is a function, operator, loss or schema
        at the script's top level, and the one meant; else nothing.
        """
        of, _, name = path.partition("@")[0].partition(":")
        if of != MAIN or not name or "<" in name or name.partition(".")[0] in self._of.unbound:
            return ""
        if (f"{path} {at}" if at else path) in self._strangers:
            return ""
        there = find_at_name(MAIN, name)
        if isinstance(there, Declaration):
            there = there.fn
        function = inspect.isfunction(there)
        same = function and (not at or place_entry(there).get("at") == at)
        schema = not at and isinstance(there, type) and issubclass(there, Schema)
        return f"{self._of.module}:{name}" if same or schema else ""


def _lost(value: Any, node: str) -> Iterator[tuple[str, str, str]]:
    """(node, path, place) of what is there only by a name that no other process finds."""
    if isinstance(value, dict):
        if LOST in value:
            yield node, str(value[LOST]), str(value.get("at", ""))
        for key, each in value.items():
            for number, part in enumerate(each if key == "nodes" else ()):
                yield from _lost(part, str(part.get("name", number)))
            if key not in ("nodes", "declared"):
                yield from _lost(each, node)
    elif isinstance(value, list):
        for each in value:
            yield from _lost(each, node)


def _notice(lost: list[tuple[str, str, str]], of: Script) -> str:
    node, path, at = lost[0]
    module, _, name = path.rpartition(":")
    why = next((told for mark, told in _KINDS.items() if mark in name), "")
    if not why and module == MAIN:
        why = of.why or "which an import of the script does not find by that name"
    elif not why and at:
        why = "whose name leads to another function"
    place = f" ({at.rsplit('/', 1)[-1]})" if at else ""
    what = f"node {node!r} has {name!r}{place}, {why or 'which has no name of its own'}"
    more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
    return f"`dataflow resume` will not be able to go on with this run: {what}{more}. Fix: {_FIX}."
