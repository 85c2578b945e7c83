"""The script that this process runs, and what of it other processes can import.

Owns: whether a script is a module, too; a snapshot's names for what the script defines; the words
for what no other process finds. Does not own: snapshots (snapshot.py), the import path
(importing.py).

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

from dataflow.importing import import_path, located
from dataflow.loss import LossDeclaration
from dataflow.schema import Schema
from dataflow.user import OperatorDeclaration
from dataflow.written import LOST, place_of

MAIN = "__main__"
_KINDS = {"<lambda>": "a lambda", "<locals>": "defined within another function"}
_FIX = "a def at the top level of a file of its own; or resume(folder, graph=...) in Python"


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """module: the name by which other processes can import this process's script; empty where they
    cannot, and why.
    """

    module: str = ""
    why: str = ""


def script() -> Script:
    """This process's script, as seen by the one that calls."""
    main = sys.modules[MAIN]
    file = getattr(main, "__file__", None)
    if not isinstance(file, str) or not Path(file).is_file():
        return Script(why="defined in a notebook or an interactive session, which has no file")
    path = Path(file).resolve()
    spec: ModuleSpec | None = main.__spec__
    name = spec.name if spec is not None else path.stem
    found = located(name) if "." in name else PathFinder.find_spec(name, import_path())
    if found is None or found.origin is None or Path(found.origin).resolve() != path:
        return Script(why=f"defined in {path.name}, which is not what `import {name}` finds")
    if not _guarded(main, path):
        start = 'if __name__ == "__main__":'
        return Script(why=f"defined in {path.name}, which starts the run outside of `{start}`")
    return Script(module=name)


def _guarded(main: ModuleType, path: Path) -> bool:
    """Whether the line of the script that runs now is one that an import of it leaves out."""
    frame = sys._getframe()
    while frame is not None and not (
        frame.f_globals is vars(main) and frame.f_code.co_name == "<module>"
    ):
        frame = frame.f_back
    text = path.read_text(encoding="utf-8", errors="surrogateescape")
    return frame is not None and any(frame.f_lineno in lines for lines in guards(text))


def guards(text: str) -> Iterator[range]:
    """The lines of each `if __name__ == "__main__":` at the top level of a source text."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return
    for each in body:
        if isinstance(each, ast.If) and ast.unparse(each.test) in (
            "__name__ == '__main__'",
            "'__main__' == __name__",
        ):
            last = each.orelse[0].lineno - 1 if each.orelse else each.end_lineno
            yield range(each.lineno, (last or each.lineno) + 1)


def kept(text: str) -> tuple[str, Script, str]:
    """A snapshot's text with names that other processes find, as far as there are any. Also returns
    the script, and one line about what they do not find; empty if that is nothing.
    """
    if f'"{LOST}"' not in text:
        return text, Script(), ""
    document, of = json.loads(text), script()
    if of.module:
        document = _named(document, of.module)
    lost = list(_lost(document, ""))
    again = json.dumps(document, indent=2, allow_nan=False) + "\n"
    return again, of, _notice(lost, of) if lost else ""


def _named(value: Any, module: str, key: str = "") -> Any:
    """A document with the script's importable parts by the name of its module."""
    if isinstance(value, list):
        return [_named(each, module, key) for each in value]
    if isinstance(value, str):
        return _path(value, module) or value
    if not isinstance(value, dict):
        return value
    if LOST in value:
        path = _path(value[LOST], module, str(value.get("at", "")))
        kind = "class" if "at" not in value else "function"
        return value if not path else path if key == "operator" else {kind: path}
    named: dict[str, Any] = {}
    for name, each in value.items():
        known = _path(name.partition(" ")[0], module, name.partition(" ")[2])
        named[known or name] = _named(each, module, name)
    return named


def _path(path: str, module: str, at: str = "") -> str:
    """The path of what `__main__:name` names, if that is a function, operator, loss or schema at
    the script's top level, and the one meant; else nothing.
    """
    of, _, name = path.partition("@")[0].partition(":")
    if of != MAIN or not name or "<" in name:
        return ""
    found: Any = sys.modules[MAIN]
    for part in name.split("."):
        found = getattr(found, part, None)
    if isinstance(found, (OperatorDeclaration, LossDeclaration)):
        found = found.fn
    function = inspect.isfunction(found)
    same = function and (not at or place_of(found).get("at") == at)
    schema = not at and isinstance(found, type) and issubclass(found, Schema)
    return f"{module}:{name}" if same or schema else ""


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
        why = of.why or "which is not at the top level of the script by that name"
    place = f" ({at.rsplit('/', 1)[-1]})" if at else ""
    what = f"node {node!r} has {name!r}{place}, {why or 'which has no name of its own'}"
    more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
    return f"`dataflow resume` will not be able to go on with this run: {what}{more}. Fix: {_FIX}."
