"""A snapshot's declarations of a user's own parts, so that a graph can be drawn, checked and
planned without importing them.

Owns: which functions, operators, schemas and records of a graph are declared and how, and the
parts built from that (`DeclaredParts`). Does not own: the written form of a value (json_values.py),
the stand-ins (standins.py).

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
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dataflow import standins
from dataflow.errors import GraphError
from dataflow.graph import Graph
from dataflow.importable_names import MAIN, Declaration, is_importable_by_name, is_where_named
from dataflow.json_values import (
    LOST,
    decode,
    encode,
    encode_operator,
    is_own_module,
    place_entry,
    snapshot_error,
)
from dataflow.model import Model
from dataflow.operator import Operator
from dataflow.schema import Schema

_ANEW = "write the snapshot anew, by a run of this version"
_FUNCTION_FIELDS = (
    "data_columns",
    "data_overlap",
    "data_rows",
    "data_longest",
    "data_tokens",
    "data_files",
)
"""Fields of an Operator that name a function, which a check or a run calls."""
_SELDOM_SET = (
    "fixed",
    "log_probs",
    "replayed",
    "parts",
    "conventions",
    "data_longest",
    "data_tokens",
)
"""Fields that are left out if they have their default."""
_SCHEMA_SETTINGS = ("row", "vocabulary")
"""What a schema's body may set besides its columns."""
_KINDS = ("functions", "operators", "schemas", "called")


def declarations(graph: Graph) -> dict[str, Any]:
    """Write a graph's `declared`. Raises GraphError for what has no written form."""
    declared = _collect(graph).declared
    # Sorted: the same graph is the same document, in whatever order its parts were found.
    return {kind: _sort_by_key(entries) for kind, entries in declared.items()}


def _sort_by_key(entries: Mapping[str, Any]) -> dict[str, Any]:
    return dict(sorted(entries.items()))


def strangers(graph: Graph) -> set[str]:
    """Find the script's functions and classes whose name leads to something else in it. Returns
    their keys in the declarations: `__main__:name file:line`.
    """
    return _collect(graph).strangers


def _collect(graph: Graph) -> _Collector:
    collector = _Collector()
    for node in graph.nodes:
        collector.add_operator(node.operator)
        collector.add(tuple(node.schemas))
        collector.add(node.params)
    for state in graph.states:
        if isinstance(state, Model):
            collector.add(state.adapter)
    return collector


class _Collector:
    def __init__(self) -> None:
        self.declared: dict[str, dict[str, Any]] = {kind: {} for kind in _KINDS}
        self.strangers: set[str] = set()
        """Keys of what belongs to the script, under a name that does not lead to it."""

    def add_operator(self, operator: Operator) -> None:
        """Declare a user's operator, and all that its fields hold."""
        entry = encode_operator(operator)
        path, place = _path_and_place(entry)
        if _is_own(path) and isinstance(entry, str):
            return
        record = encode(dataclasses.replace(operator, path=path), f"operator {operator.name!r}")
        for name in _SELDOM_SET:
            if not getattr(operator, name):
                del record["fields"][name]
        self.declared["operators"][_key(path, place)] = record
        self.add(_field_values(operator))

    def add(self, content: Any) -> None:
        """Declare the functions, schemas and records in a parameter's or a field's content."""
        if isinstance(content, (list, tuple)):
            for part in content:
                self.add(part)
        elif isinstance(content, Mapping):
            self.add([*content.keys(), *content.values()])
        elif isinstance(content, type):
            self._add_class(content)
        elif dataclasses.is_dataclass(content):  # before functions: some can be called
            self._add_record(content)
        elif callable(content):
            self._add_function(content)

    def _add_class(self, kind: type) -> None:
        path = _path(kind)
        if kind.__module__ == MAIN and not is_where_named(kind):
            self.strangers.add(path)
        if is_own_module(kind.__module__) or path in self.declared["schemas"]:
            return
        if not issubclass(kind, Schema):
            self.declared["schemas"][path] = None
            return
        bases = [base for base in kind.__bases__ if issubclass(base, Schema)]
        self.add(bases)
        body = _encode_body(kind)
        self.declared["schemas"][path] = {"bases": [_path(base) for base in bases], "body": body}

    def _add_record(self, record: Any) -> None:
        kind = type(record)
        is_function: bool = callable(record)
        if is_function and not is_own_module(kind.__module__):
            self.declared["called"][_path(kind)] = getattr(record, "__name__", kind.__qualname__)
        self.add(_field_values(record))

    def _add_function(self, function: Callable[..., Any]) -> None:
        module = getattr(function, "__module__", "?")
        importable = is_importable_by_name(function)
        if is_own_module(module) and importable:
            return
        kind = type(function)
        path = f"{module}:{getattr(function, '__qualname__', kind.__qualname__)}"
        place = "" if importable else place_entry(function).get("at", "")
        key = _key(path, place)
        self.declared["functions"][key] = {
            "name": getattr(function, "__name__", kind.__name__),
            "parameters": _encode_parameters(function),
        }
        if module == MAIN and not (hasattr(function, "__qualname__") and is_where_named(function)):
            self.strangers.add(key)


def _field_values(record: Any) -> list[Any]:
    return [getattr(record, field.name) for field in dataclasses.fields(record)]


def _encode_body(schema: type[Schema]) -> dict[str, Any]:
    """What the class itself declares, in written form; not what it inherits."""
    own_names = vars(schema)
    body: dict[str, Any] = {c.name: c for c in schema.columns.values() if c.name in own_names}
    body |= {name: own_names[name] for name in _SCHEMA_SETTINGS if name in own_names}
    return {name: encode(part, f"schema {schema.__name__}") for name, part in body.items()}


def _path(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _path_and_place(entry: Any) -> tuple[str, str]:
    """Of an operator's entry in a snapshot; no place where other processes can import the path."""
    if isinstance(entry, dict):
        return entry[LOST], entry.get("at", "")
    return entry, ""


def _is_own(path: str) -> bool:
    return is_own_module(path.partition(":")[0])


def _key(path: str, place: str) -> str:
    return f"{path} {place}" if place else path


def _encode_parameters(function: Callable[..., Any]) -> list[dict[str, Any]] | None:
    """The parameters of its signature; None if it has none. A default without a written form
    becomes one that no value equals.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    return [_encode_parameter(parameter) for parameter in signature.parameters.values()]


def _encode_parameter(parameter: inspect.Parameter) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": parameter.name, "kind": parameter.kind.name}
    annotation = parameter.annotation
    if isinstance(annotation, str):
        entry["annotation"] = annotation
    elif annotation is not parameter.empty:
        entry["annotation"] = inspect.formatannotation(annotation)
    if parameter.default is not parameter.empty:
        entry["default"] = _encode_default(parameter.default)
    return entry


def _encode_default(default: Any) -> Any:
    try:
        return encode(default, "default")
    except GraphError:
        return {LOST: f"?:{type(default).__qualname__}"}


class DeclaredParts:
    """Stand-ins for the user's own parts: nothing of the user's is imported or can be called.

    declared: the snapshot's; empty if an earlier version wrote it.
    """

    def __init__(self, declared: Mapping[str, Any]) -> None:
        if not all(isinstance(declared.get(kind, {}), dict) for kind in _KINDS):
            raise snapshot_error("expected declarations by path, found something else", _ANEW)
        self._functions = declared.get("functions", {})
        self._operators = declared.get("operators", {})
        self._schemas = declared.get("schemas", {})
        self._called = declared.get("called", {})
        self._schemas_in_progress: set[str] = set()
        """Their bases are being read: a file may name a schema as a base of its own."""

    def operator(self, entry: Any, where: str) -> Operator:
        """Return this project's operator, by look-up, or the user's, by its declaration."""
        path, place = _path_and_place(entry)
        is_lost = isinstance(entry, dict)
        if _is_own(path) and not is_lost:
            operator = _import_own(path, where)
        else:
            declaration = self._entry(self._operators, _key(path, place), where)
            operator = decode(declaration, where, self)
        if not isinstance(operator, Operator):
            problem = f"expected an operator at {path}, found {type(operator).__name__}"
            raise snapshot_error(problem, _ANEW, where)
        if _is_own(path):
            return operator
        _require_declaration(operator, path, where)
        if is_lost:
            return dataclasses.replace(operator, path=f"{path}@{place}")
        return operator

    def function(self, path: str, where: str) -> Any:
        """See Parts."""
        if not _is_own(path):
            return self._make_function(path, "", where)
        function = _import_own(path, where)
        return function.fn if isinstance(function, Declaration) else function

    def class_at(self, path: str, where: str) -> Any:
        """See Parts."""
        if _is_own(path):
            return _import_own(path, where)
        return self._make_class(path, where)

    def record(self, path: str, fields: dict[str, Any], where: str) -> Any:
        """See Parts. Fields of this project's own classes must have the declared types."""
        if _is_own(path):
            kind = _import_own(path, where)
            if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
                problem = f"expected a record at {path}, found {kind!r:.60}"
                raise snapshot_error(problem, _ANEW, where)
            return standins.make_instance(kind, fields, where)
        # Names of the file become attributes of a class: no dunder method may be among them.
        if not all(name.isidentifier() and not name.startswith("__") for name in fields):
            problem = f"expected the fields of {path}, found {', '.join(fields)!r:.60}"
            raise snapshot_error(problem, _ANEW, where)
        return standins.record(path, fields, str(self._called.get(path, "")))

    def lost_object(self, entry: Mapping[str, Any], where: str) -> Any:
        """See Parts."""
        path = entry[LOST]
        if path in self._schemas:
            return self._make_class(path, where, lost=True)
        return self._make_function(path, entry.get("at", ""), where, lost=True)

    def _make_function(
        self, path: str, place: str, where: str, *, lost: bool = False
    ) -> standins.Standin:
        entry = self._functions.get(_key(path, place), {})
        signature = None
        if entry.get("parameters") is not None:
            parameters = [_decode_parameter(p, where, self) for p in entry["parameters"] or ()]
            signature = inspect.Signature(parameters)
        name = entry.get("name", path.rpartition(":")[2].rpartition(".")[2])
        return standins.function(path, str(name), place, signature, lost=lost)

    def _make_class(self, path: str, where: str, *, lost: bool = False) -> type[Any]:
        entry = self._entry(self._schemas, path, where)
        if entry is None:
            return standins.plain_class(path, lost=lost)
        if path in self._schemas_in_progress:
            raise snapshot_error(f"{path} is declared as a base of its own", _ANEW, where)
        self._schemas_in_progress.add(path)
        bases = tuple(self.class_at(base, where) for base in entry["bases"]) or (Schema,)
        self._schemas_in_progress.discard(path)
        body = {name: decode(part, where, self) for name, part in entry["body"].items()}
        if not all(isinstance(base, type) and issubclass(base, Schema) for base in bases):
            problem = f"expected schemas as bases of {path}, found {bases!r:.60}"
            raise snapshot_error(problem, _ANEW, where)
        return standins.schema(path, bases, body, lost=lost)

    def _entry(self, entries: Mapping[str, Any], key: str, where: str) -> Any:
        if key not in entries:
            problem = f"{key} is not declared in it, and nothing is imported to look at a graph"
            raise snapshot_error(problem, _ANEW, where)
        return entries[key]


def _require_declaration(operator: Operator, path: str, where: str) -> None:
    """Raises GraphError for the declaration of another operator, or of one that calls functions."""
    called = next(_named_functions(operator), "")
    if called:
        problem = f"{path} reads data by {called}, and nothing that a file names is called"
    elif operator.path != path:
        problem = f"expected the declaration of {path}, found that of {operator.path}"
    else:
        return
    raise snapshot_error(problem, "name its module:function, not graph.json", where)


def _named_functions(operator: Operator) -> Iterator[str]:
    for field in _FUNCTION_FIELDS:
        if name := getattr(operator, field):
            yield name


def _import_own(path: str, where: str) -> Any:
    """An object that a module of this project defines itself (not one that it imports)."""
    module_name, _, name = path.partition(":")
    module = importlib.import_module(module_name)
    thing = getattr(module, name, None)
    if isinstance(thing, Operator):
        defining_module = thing.path.partition(":")[0]
    else:
        defining_module = getattr(thing, "__module__", None)
    if thing is None or defining_module != module_name:
        problem = f"{path} is not found: {module_name!r} has no {name!r}"
        raise snapshot_error(problem, _ANEW, where)
    return thing


def _decode_parameter(
    entry: Mapping[str, Any], where: str, parts: DeclaredParts
) -> inspect.Parameter:
    default: Any = inspect.Parameter.empty
    if "default" in entry:
        default = decode(entry["default"], where, parts)
    annotation = entry.get("annotation", inspect.Parameter.empty)
    kind = getattr(inspect.Parameter, entry["kind"])
    return inspect.Parameter(entry["name"], kind, default=default, annotation=annotation)
