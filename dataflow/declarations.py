"""A snapshot's declarations of a user's own parts, so that a graph can be drawn, checked and
planned without importing them.

Owns: which functions, operators, schemas and records of a graph are declared and how, and the
parts built from that (`Declared`). Does not own: the written form of a value (json_values.py), the
stand-ins (standins.py).

    "declared": {"functions": {path: {"name", "parameters"}},
                 "operators": {path: record},
                 "schemas": {path: {"bases", "body"}, or null for another class},
                 "called": {path: name}}

This project's own parts are named by their path and looked up in its modules. A path that no other
process can import ends with its file:line, as two such functions can share a name.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from dataflow import standins
from dataflow.errors import GraphError
from dataflow.graph import Graph
from dataflow.importable_names import MAIN, Declaration, found_by_name, is_where_named
from dataflow.json_values import LOST, decode, encode, own, place_of, unread, written_operator
from dataflow.operator import Operator
from dataflow.schema import Schema

_ANEW = "write the snapshot anew, by a run of this version"
_CALLED = (
    *("data_columns", "data_overlap", "data_rows", "data_longest", "data_tokens"),
    "data_files",
)
"""Fields of an Operator that name a function, which a check or a run calls."""
_SELDOM = (
    *("fixed", "log_probs", "replayed", "parts", "conventions", "data_longest"),
    "data_tokens",
)
"""Fields that are left out if they have their default."""
_NOT_KEPT = ("row", "vocabulary")
"""What a schema's body may set besides its columns."""


def declarations(graph: Graph) -> dict[str, Any]:
    """The `declared` of a graph's snapshot. Raises GraphError for what has no written form."""
    parts = _collected(graph).parts
    return {name: dict(sorted(part.items())) for name, part in parts.items()}


def strangers(graph: Graph) -> set[str]:
    """Of functions and classes with a name in the script, those that stand elsewhere in it, as keys
    of the declarations: `__main__:name file:line`.
    """
    return _collected(graph).strangers


def _collected(graph: Graph) -> _Collector:
    found = _Collector()
    for node in graph.nodes:
        found.operator(node.operator)
        found.value(tuple(node.schemas))
        found.value(node.params)
    return found


class _Collector:
    def __init__(self) -> None:
        self.parts: dict[str, dict[str, Any]] = {
            "functions": {},
            "operators": {},
            "schemas": {},
            "called": {},
        }
        self.strangers: set[str] = set()
        """Keys of what has a name of the script's, to which that does not lead."""

    def operator(self, operator: Operator) -> None:
        entry = written_operator(operator)
        path, at = (entry, "") if isinstance(entry, str) else (entry[LOST], entry.get("at", ""))
        if own(path.partition(":")[0]) and isinstance(entry, str):
            return
        written = encode(dataclasses.replace(operator, path=path), f"operator {operator.name!r}")
        for name in (n for n in _SELDOM if not getattr(operator, n)):
            del written["fields"][name]
        self.parts["operators"][_key(path, at)] = written
        self.value([getattr(operator, f.name) for f in dataclasses.fields(operator)])

    def value(self, value: Any) -> None:
        if isinstance(value, (list, tuple)):
            for part in value:
                self.value(part)
        elif isinstance(value, Mapping):
            self.value([*value.keys(), *value.values()])
        elif isinstance(value, type):
            self._schema(value)
        elif dataclasses.is_dataclass(value):
            self._record(value)
        elif callable(value):
            self._function(value)

    def _schema(self, kind: type) -> None:
        path = _path(kind)
        if kind.__module__ == MAIN and not is_where_named(kind):
            self.strangers.add(path)
        if own(kind.__module__) or path in self.parts["schemas"]:
            return
        if not issubclass(kind, Schema):
            self.parts["schemas"][path] = None
            return
        bases = [base for base in kind.__bases__ if issubclass(base, Schema)]
        self.value(bases)
        written = {"bases": [_path(base) for base in bases], "body": _body(kind)}
        self.parts["schemas"][path] = written

    def _record(self, value: Any) -> None:
        called: bool = callable(value)
        if called and not own(type(value).__module__):
            self.parts["called"][_path(type(value))] = getattr(
                value, "__name__", type(value).__qualname__
            )
        self.value([getattr(value, f.name) for f in dataclasses.fields(value)])

    def _function(self, value: Callable[..., Any]) -> None:
        module = getattr(value, "__module__", "?")
        named = found_by_name(value)
        if own(module) and named:
            return
        path = f"{module}:{getattr(value, '__qualname__', type(value).__qualname__)}"
        name = getattr(value, "__name__", type(value).__name__)
        entry = {"name": name, "parameters": _parameters(value)}
        key = _key(path, "" if named else place_of(value).get("at", ""))
        self.parts["functions"][key] = entry
        if module == MAIN and not (hasattr(value, "__qualname__") and is_where_named(value)):
            self.strangers.add(key)


def _body(schema: type[Schema]) -> dict[str, Any]:
    """What the class itself declares, in written form; not what it inherits."""
    kept: dict[str, Any] = {c.name: c for c in schema.columns.values() if c.name in vars(schema)}
    kept |= {name: vars(schema)[name] for name in _NOT_KEPT if name in vars(schema)}
    return {name: encode(part, f"schema {schema.__name__}") for name, part in kept.items()}


def _path(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _key(path: str, at: str) -> str:
    return f"{path} {at}" if at else path


def _parameters(function: Callable[..., Any]) -> list[dict[str, Any]] | None:
    """The parameters of its signature; None if it has none. A default without a written form
    becomes one that no value equals.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    found = []
    for p in signature.parameters.values():
        entry: dict[str, Any] = {"name": p.name, "kind": p.kind.name}
        if p.annotation is not p.empty:
            entry["annotation"] = (
                p.annotation
                if isinstance(p.annotation, str)
                else inspect.formatannotation(p.annotation)
            )
        if p.default is not p.empty:
            entry["default"] = _default(p.default)
        found.append(entry)
    return found


def _default(value: Any) -> Any:
    try:
        return encode(value, "default")
    except GraphError:
        return {LOST: f"?:{type(value).__qualname__}"}


class Declared:
    """Stand-ins for the user's own parts: nothing of the user's is imported or can be called.

    declared: the snapshot's; empty if an earlier version wrote it.
    """

    def __init__(self, declared: Mapping[str, Any]) -> None:
        names = ("functions", "operators", "schemas", "called")
        if not all(isinstance(declared.get(name, {}), dict) for name in names):
            raise unread("expected declarations by path, found something else", _ANEW)
        self._functions, self._operators, self._schemas, self._called = (
            declared.get(name, {}) for name in names
        )
        self._reading: set[str] = set()

    def operator(self, entry: Any, where: str) -> Operator:
        """This project's operator, by look-up, or the user's, by its declaration."""
        path, at = (entry[LOST], entry.get("at", "")) if isinstance(entry, dict) else (entry, "")
        if own(path.partition(":")[0]) and not isinstance(entry, dict):
            found = _own(path, where)
        else:
            found = decode(self._entry(self._operators, _key(path, at), where), where, self)
        if not isinstance(found, Operator):
            raise unread(
                f"expected an operator at {path}, found {type(found).__name__}", _ANEW, where
            )
        if own(path.partition(":")[0]):
            return found
        _require_declaration(found, path, where)
        return dataclasses.replace(found, path=f"{path}@{at}") if isinstance(entry, dict) else found

    def function(self, path: str, where: str) -> Any:
        """See Parts."""
        if own(path.partition(":")[0]):
            found = _own(path, where)
            return found.fn if isinstance(found, Declaration) else found
        return self._standin(path, "", where)

    def named(self, path: str, where: str) -> Any:
        """See Parts."""
        if own(path.partition(":")[0]):
            return _own(path, where)
        return self._schema(path, where)

    def record(self, path: str, fields: dict[str, Any], where: str) -> Any:
        """See Parts. Fields of this project's own classes must have the declared types."""
        if own(path.partition(":")[0]):
            kind = _own(path, where)
            if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
                raise unread(f"expected a record at {path}, found {kind!r:.60}", _ANEW, where)
            return standins.made(kind, fields, where)
        if not all(name.isidentifier() and not name.startswith("__") for name in fields):
            raise unread(
                f"expected the fields of {path}, found {', '.join(fields)!r:.60}", _ANEW, where
            )
        return standins.record(path, fields, str(self._called.get(path, "")))

    def lost(self, entry: Mapping[str, Any], where: str) -> Any:
        """See Parts."""
        path, at = entry[LOST], entry.get("at", "")
        return (
            self._schema(path, where, lost=True)
            if path in self._schemas
            else self._standin(path, at, where, lost=True)
        )

    def _standin(self, path: str, at: str, where: str, *, lost: bool = False) -> standins.Standin:
        entry = self._functions.get(_key(path, at), {})
        made = [_parameter(p, where, self) for p in entry.get("parameters") or ()]
        signature = inspect.Signature(made) if entry.get("parameters") is not None else None
        name = entry.get("name", path.rpartition(":")[2].rpartition(".")[2])
        return standins.function(path, str(name), at, signature, lost=lost)

    def _schema(self, path: str, where: str, *, lost: bool = False) -> type[Any]:
        entry = self._entry(self._schemas, path, where)
        if entry is None:
            return standins.plain_class(path, lost=lost)
        if path in self._reading:
            raise unread(f"{path} is declared as a base of its own", _ANEW, where)
        self._reading.add(path)
        bases = tuple(self.named(base, where) for base in entry["bases"]) or (Schema,)
        self._reading.discard(path)
        body = {name: decode(part, where, self) for name, part in entry["body"].items()}
        if not all(isinstance(base, type) and issubclass(base, Schema) for base in bases):
            raise unread(f"expected schemas as bases of {path}, found {bases!r:.60}", _ANEW, where)
        return standins.schema(path, bases, body, lost=lost)

    def _entry(self, part: Mapping[str, Any], key: str, where: str) -> Any:
        if key not in part:
            raise unread(
                f"{key} is not declared in it, and nothing is imported to look at a graph",
                _ANEW,
                where,
            )
        return part[key]


def _require_declaration(found: Operator, path: str, where: str) -> None:
    """Raises GraphError for the declaration of another operator, or of one that calls functions."""
    called = next((name for f in _CALLED if (name := getattr(found, f))), "")
    if called:
        problem = f"{path} reads data by {called}, and nothing that a file names is called"
    elif found.path != path:
        problem = f"expected the declaration of {path}, found that of {found.path}"
    else:
        return
    raise unread(problem, "name its module:function, not graph.json", where)


def _own(path: str, where: str) -> Any:
    """An object that a module of this project defines itself (not one that it imports)."""
    module_name, _, name = path.partition(":")
    module = importlib.import_module(module_name)
    found = getattr(module, name, None)
    defined = (
        found.path.partition(":")[0]
        if isinstance(found, Operator)
        else getattr(found, "__module__", None)
    )
    if found is None or defined != module_name:
        raise unread(f"{path} is not found: {module_name!r} has no {name!r}", _ANEW, where)
    return found


def _parameter(entry: Mapping[str, Any], where: str, parts: Declared) -> inspect.Parameter:
    default = (
        decode(entry["default"], where, parts) if "default" in entry else inspect.Parameter.empty
    )
    annotation = entry.get("annotation", inspect.Parameter.empty)
    kind = getattr(inspect.Parameter, entry["kind"])
    return inspect.Parameter(entry["name"], kind, default=default, annotation=annotation)
