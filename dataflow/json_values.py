"""Values as JSON, and back: the parameters, schemas and declarations of a snapshot.

Owns: the written form of each kind of value, and importing what a path names. Does not own: the
document (snapshot.py), the stand-ins used when nothing is imported (declarations.py).

Plain JSON values represent themselves; all else is an object of one key that says what it is:
{"tuple": [...]}, {"function": "module:qualname"}, {"record": "module:Class", "fields": {...}}, ...
"""

from __future__ import annotations

import base64
import dataclasses
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from dataflow.errors import Fault, GraphError, nearest
from dataflow.importable_names import Declaration, at_name, found_by_name
from dataflow.loss_terms import LossFunction
from dataflow.operator import Operator
from dataflow.standins import Standin
from dataflow.user import OperatorDeclaration

LOST = "local"
"""The key of a function or class that no other process can find: written with its name and place,
never imported.
"""

_ROOT = Path(__file__).resolve().parent.parent
_OWN = ("dataflow", "operators")


def own(module: str) -> bool:
    """Whether a module is part of this project: such modules may always be imported."""
    package, _, name = module.partition(".")
    return package in _OWN and name.isidentifier() and (_ROOT / package / f"{name}.py").is_file()


def unread(problem: str, fix: str, where: str = "snapshot") -> GraphError:
    """The error of a snapshot that cannot be read."""
    return GraphError(Fault(rule="snapshot", where=where, problem=problem, fix=fix))


class Parts(Protocol):
    """What the paths of a snapshot refer to."""

    def operator(self, entry: Any, where: str) -> Operator:
        """The operator at a path, or one that no other process can import."""
        ...

    def function(self, path: str, where: str) -> Any: ...

    def named(self, path: str, where: str) -> Any:
        """A class."""
        ...

    def record(self, path: str, fields: dict[str, Any], where: str) -> Any:
        """An instance of a dataclass."""
        ...

    def lost(self, entry: Mapping[str, Any], where: str) -> Any:
        """Something that no other process can import."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Plain:
    """JSON already."""

    value: Any


def encode(value: Any, where: str) -> Any:
    """A value as JSON that `decode` turns into an equal one of the same type. Raises GraphError for
    others.
    """
    if isinstance(value, Plain):
        return value.value
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    for known, written in _FORMS:
        if isinstance(value, known):
            return written(value, where)
    if dataclasses.is_dataclass(value):  # before functions: some dataclasses can be called
        return _record(value, where)
    if callable(value):
        return _function(value)
    problem = f"a {type(value).__name__} has no written form"
    fix = (
        "numbers, text, lists, tuples, dicts, functions of a module, and frozen dataclasses of"
        " these can be kept"
    )
    raise GraphError(Fault(rule="snapshot", where=where, problem=problem, fix=fix))


def _arrow(kind: pa.DataType, where: str) -> dict[str, Any]:
    schema = pa.schema([pa.field("", kind)])
    return {"arrow": base64.b64encode(schema.serialize()).decode(), "reads": str(kind)}


def _numpy(value: np.generic, where: str) -> dict[str, Any]:
    return {"numpy": value.dtype.str, "value": encode(value.item(), where)}


def _items(value: Mapping[Any, Any], where: str) -> dict[str, Any]:
    return {"dict": [[encode(k, where), encode(v, where)] for k, v in value.items()]}


def _tuple(value: Sequence[Any], where: str) -> dict[str, Any]:
    return {"tuple": [encode(item, where) for item in value]}


def _list(value: Sequence[Any], where: str) -> list[Any]:
    return [encode(item, where) for item in value]


def _class(value: type, where: str) -> dict[str, Any]:
    path = f"{value.__module__}:{value.__qualname__}"
    return {"class": path} if found_by_name(value) else {LOST: path}


_FORMS: tuple[tuple[Any, Callable[[Any, str], Any]], ...] = (
    (np.generic, _numpy),
    (np.dtype, lambda value, where: {"dtype": value.str}),
    (pa.DataType, _arrow),
    (list, _list),
    (tuple, _tuple),
    ((dict, MappingProxyType), _items),
    (type, _class),
)
"""Tried in this order; anything left is a function or a dataclass."""


def _record(value: Any, where: str) -> dict[str, Any]:
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
    if isinstance(value, LossFunction):
        fields["fn"] = Plain(_function(fields["fn"]))
    kind = _class(type(value), where)
    return (
        kind
        if LOST in kind
        else {"record": kind["class"], "fields": {k: encode(v, where) for k, v in fields.items()}}
    )


def _function(value: Callable[..., Any]) -> dict[str, Any]:
    if found_by_name(value):
        return {"function": f"{value.__module__}:{value.__qualname__}"}
    name = getattr(value, "__qualname__", type(value).__qualname__)
    return {LOST: f"{getattr(value, '__module__', '?')}:{name}", **place_of(value)}


def written_operator(operator: Operator) -> Any:
    """The path of an operator; where that does not lead to it, an object that says so."""
    path, local, at = operator.path.partition("@")
    module, _, qualname = path.partition(":")
    if isinstance(operator.function, Standin):
        return {LOST: path, **({"at": at} if at else {})} if local else path
    if not local and (own(module) or _is_operator(at_name(module, qualname), operator)):
        return path
    place = {} if operator.function is None else place_of(operator.function)
    return {LOST: path, **place}


def _is_operator(named: Any, operator: Operator) -> bool:
    named = named.operator if isinstance(named, OperatorDeclaration) else named
    return named == operator and named.function is operator.function


def place_of(value: Callable[..., Any]) -> dict[str, Any]:
    code = getattr(value, "__code__", None)
    at = (
        value.place
        if isinstance(value, Standin)
        else f"{code.co_filename}:{code.co_firstlineno}"
        if code
        else ""
    )
    return {"at": at} if at else {}


class Imported:
    """The things themselves: a path's module is imported."""

    def operator(self, entry: Any, where: str) -> Operator:
        """Raises GraphError if there is none at that path."""
        found = _find(entry, where)
        found = found.operator if isinstance(found, OperatorDeclaration) else found
        if not isinstance(found, Operator):
            problem = f"expected an operator at {entry}, found {type(found).__name__}"
            raise unread(problem, "write the snapshot anew", where)
        return found

    def function(self, path: str, where: str) -> Any:
        """The plain function of a declaration."""
        found = _find(path, where)
        return found.fn if isinstance(found, Declaration) else found

    def named(self, path: str, where: str) -> Any:
        """Whatever is there."""
        return _find(path, where)

    def record(self, path: str, fields: dict[str, Any], where: str) -> Any:
        """Raises GraphError if the class has other fields."""
        kind = _find(path, where)
        known = (
            {f.name for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
        )
        if not isinstance(kind, type) or not fields.keys() <= known:
            raise unread(f"{path} has other fields now", "write the snapshot anew", where)
        return kind(**fields)

    def lost(self, entry: Mapping[str, Any], where: str) -> Any:
        """Raises GraphError: it cannot be imported."""
        raise unread(
            f"{entry[LOST]} cannot be imported",
            "a def or class at the top level of a module, by its own name",
            where,
        )


def decode(value: Any, where: str, parts: Parts | None = None) -> Any:
    """What `encode` wrote. Raises GraphError if it names something that is not found. parts: what
    paths refer to; by default the things themselves.
    """
    parts = parts or Imported()
    if isinstance(value, list):
        return [decode(item, where, parts) for item in value]
    if not isinstance(value, dict):
        return value
    key = next(iter(value), "nothing")
    if key not in _READERS:
        raise unread(
            f"expected a written value, found an object with {key!r}",
            "do not edit snapshots by hand",
            where,
        )
    return _READERS[key](value, where, parts)


def _read_dict(entry: Mapping[str, Any], where: str, parts: Parts) -> dict[Any, Any]:
    return {decode(k, where, parts): decode(v, where, parts) for k, v in entry["dict"]}


def _read_record(entry: Mapping[str, Any], where: str, parts: Parts) -> Any:
    fields = {key: decode(value, where, parts) for key, value in entry["fields"].items()}
    return parts.record(entry["record"], fields, where)


def _read_arrow(entry: Mapping[str, Any], where: str, parts: Parts) -> pa.DataType:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(entry["arrow"]))).field(0).type


def _number(entry: Mapping[str, Any], where: str) -> type[Any]:
    kind = np.dtype(entry["numpy"])
    if kind.kind not in "biufcSU":
        raise unread(
            f"expected a number of NumPy, found {entry['numpy']!r:.60}",
            "write the snapshot anew",
            where,
        )
    return kind.type


_READERS: Mapping[str, Callable[[Mapping[str, Any], str, Parts], Any]] = {
    "float": lambda entry, where, parts: float(entry["float"]),
    "numpy": lambda entry, where, parts: _number(entry, where)(
        decode(entry["value"], where, parts)
    ),
    "dtype": lambda entry, where, parts: np.dtype(entry["dtype"]),
    "arrow": _read_arrow,
    "tuple": lambda entry, where, parts: tuple(
        decode(item, where, parts) for item in entry["tuple"]
    ),
    "dict": _read_dict,
    "class": lambda entry, where, parts: parts.named(entry["class"], where),
    "function": lambda entry, where, parts: parts.function(entry["function"], where),
    "record": _read_record,
    LOST: lambda entry, where, parts: parts.lost(entry, where),
}


def _find(path: str, where: str) -> Any:
    """The object at module:qualname. Raises GraphError that names the nearest one there is."""
    module_name, _, qualname = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        problem = f"{path} is not found: no module {error.name!r}"
        raise unread(
            problem, f"put the file of {module_name!r} where Python finds it", where
        ) from None
    for part in qualname.split("."):
        if not hasattr(found, part):
            near = nearest(part, (name for name in vars(found) if not name.startswith("__")))
            fix = (
                f"{near!r} is there"
                if near
                else f"give {module_name!r} what the graph was made with"
            )
            raise unread(f"{path} is not found: {module_name!r} has no {part!r}", fix, where)
        found = getattr(found, part)
    return found
