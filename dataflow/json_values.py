"""Values as JSON, and back: the parameters, schemas and declarations of a snapshot.

Owns: the written form of each kind of value, and importing what a path names. Does not own: the
document (snapshot.py), the stand-ins used when nothing is imported (declarations.py).

Plain JSON values represent themselves; everything else is an object whose first key says what it
is: {"tuple": [...]}, {"function": "module:qualname"}, {"record": "module:Class", "fields": {...}}
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
from dataflow.importable_names import Declaration, find_at_name, is_importable_by_name
from dataflow.loss_terms import LossFunction
from dataflow.operator import Operator
from dataflow.standins import Standin
from dataflow.user import OperatorDeclaration

LOST = "local"
"""The key of a function or class that no other process can find: written with its name and place,
never imported.
"""

_ROOT = Path(__file__).resolve().parent.parent
_OWN_PACKAGES = ("dataflow", "operators")
_ANEW = "write the snapshot anew"


def is_own_module(module: str) -> bool:
    """Whether a module is part of this project: such modules may always be imported."""
    package, _, name = module.partition(".")
    # isidentifier: a snapshot may come from anywhere, and its path must not leave the folder.
    if package not in _OWN_PACKAGES or not name.isidentifier():
        return False
    return (_ROOT / package / f"{name}.py").is_file()


def snapshot_error(problem: str, fix: str, where: str = "snapshot") -> GraphError:
    """Make the error for a snapshot that cannot be read."""
    return GraphError(Fault(rule="snapshot", where=where, problem=problem, fix=fix))


class Parts(Protocol):
    """What the paths of a snapshot refer to."""

    def operator(self, entry: Any, where: str) -> Operator:
        """Return the operator at a path, or one that no other process can import."""
        ...

    def function(self, path: str, where: str) -> Any: ...

    def class_at(self, path: str, where: str) -> Any:
        """Return a class."""
        ...

    def record(self, path: str, fields: dict[str, Any], where: str) -> Any:
        """Return an instance of a dataclass."""
        ...

    def lost_object(self, entry: Mapping[str, Any], where: str) -> Any:
        """Return a function or class that no other process can import."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Plain:
    """JSON already: `encode` returns it as it is."""

    json: Any


def encode(value: Any, where: str) -> Any:
    """Turn a value into JSON that `decode` turns into an equal one of the same type. Raises
    GraphError for a value without a written form.
    """
    if isinstance(value, Plain):
        return value.json
    # By type, not isinstance: a subclass such as an IntEnum would come back as a plain number.
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    for kind, encode_kind in _ENCODERS:
        if isinstance(value, kind):
            return encode_kind(value, where)
    if dataclasses.is_dataclass(value):  # before functions: some dataclasses can be called
        return _encode_record(value, where)
    if callable(value):
        return _encode_function(value)
    problem = f"a {type(value).__name__} has no written form"
    fix = (
        "numbers, text, lists, tuples, dicts, functions of a module, and frozen dataclasses of"
        " these can be kept"
    )
    raise snapshot_error(problem, fix, where)


def _encode_arrow(kind: pa.DataType, where: str) -> dict[str, Any]:
    schema = pa.schema([pa.field("", kind)])
    serialized = base64.b64encode(schema.serialize())
    return {"arrow": serialized.decode(), "reads": str(kind)}  # `reads` is for people only


def _encode_numpy(number: np.generic, where: str) -> dict[str, Any]:
    return {"numpy": number.dtype.str, "value": encode(number.item(), where)}


def _encode_dtype(dtype: np.dtype[Any], where: str) -> dict[str, Any]:
    return {"dtype": dtype.str}


def _encode_dict(mapping: Mapping[Any, Any], where: str) -> dict[str, Any]:
    return {"dict": [[encode(k, where), encode(v, where)] for k, v in mapping.items()]}


def _encode_tuple(parts: Sequence[Any], where: str) -> dict[str, Any]:
    return {"tuple": [encode(part, where) for part in parts]}


def _encode_list(parts: Sequence[Any], where: str) -> list[Any]:
    return [encode(part, where) for part in parts]


def _encode_class(kind: type, where: str) -> dict[str, Any]:
    path = f"{kind.__module__}:{kind.__qualname__}"
    return {"class": path} if is_importable_by_name(kind) else {LOST: path}


_ENCODERS: tuple[tuple[Any, Callable[[Any, str], Any]], ...] = (
    (np.generic, _encode_numpy),
    (np.dtype, _encode_dtype),
    (pa.DataType, _encode_arrow),
    (list, _encode_list),
    (tuple, _encode_tuple),
    ((dict, MappingProxyType), _encode_dict),
    (type, _encode_class),
)
"""Tried in this order; anything else is a function or a dataclass."""


def _encode_record(record: Any, where: str) -> dict[str, Any]:
    kind = _encode_class(type(record), where)
    if LOST in kind:
        return kind
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        if not field.init:
            continue
        content = getattr(record, field.name)
        if field.name == "fn" and isinstance(record, LossFunction):
            # Always as a function, even if it is a dataclass that can be called.
            fields["fn"] = _encode_function(content)
        else:
            fields[field.name] = encode(content, where)
    return {"record": kind["class"], "fields": fields}


def _encode_function(function: Callable[..., Any]) -> dict[str, Any]:
    if is_importable_by_name(function):
        return {"function": f"{function.__module__}:{function.__qualname__}"}
    module = getattr(function, "__module__", "?")
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return {LOST: f"{module}:{name}", **place_entry(function)}


def encode_operator(operator: Operator) -> Any:
    """Return the path of an operator; where that does not lead to it, an object that says so."""
    path, is_local, place = operator.path.partition("@")
    if isinstance(operator.function, Standin):
        if not is_local:
            return path
        return {LOST: path, "at": place} if place else {LOST: path}
    if not is_local and _is_where_named(operator, path):
        return path
    if operator.function is None:
        return {LOST: path}
    return {LOST: path, **place_entry(operator.function)}


def _is_where_named(operator: Operator, path: str) -> bool:
    """Whether another process that imports this path gets this very operator."""
    module, _, qualname = path.partition(":")
    if is_own_module(module):
        return True
    named = find_at_name(module, qualname)
    if isinstance(named, OperatorDeclaration):
        named = named.operator
    # Operators are equal whatever function they call, so that this is compared beside.
    return named == operator and named.function is operator.function


def place_entry(function: Callable[..., Any]) -> dict[str, Any]:
    """Return {"at": "file:line"} of a function or its stand-in; {} if the place is not known."""
    if isinstance(function, Standin):
        place = function.place
    else:
        code = getattr(function, "__code__", None)
        place = f"{code.co_filename}:{code.co_firstlineno}" if code else ""
    return {"at": place} if place else {}


class Imported:
    """The things themselves: a path's module is imported."""

    def operator(self, entry: Any, where: str) -> Operator:
        """Import an operator. Raises GraphError if there is none at that path."""
        operator = _import_object(entry, where)
        if isinstance(operator, OperatorDeclaration):
            operator = operator.operator
        if not isinstance(operator, Operator):
            problem = f"expected an operator at {entry}, found {type(operator).__name__}"
            raise snapshot_error(problem, _ANEW, where)
        return operator

    def function(self, path: str, where: str) -> Any:
        """Import a function; of a declaration, the plain one."""
        function = _import_object(path, where)
        return function.fn if isinstance(function, Declaration) else function

    def class_at(self, path: str, where: str) -> Any:
        """Import whatever is there."""
        return _import_object(path, where)

    def record(self, path: str, fields: dict[str, Any], where: str) -> Any:
        """Import a class and make one. Raises GraphError if the class has other fields."""
        kind = _import_object(path, where)
        known: set[str] = set()
        if dataclasses.is_dataclass(kind):
            known = {field.name for field in dataclasses.fields(kind)}
        if not isinstance(kind, type) or not fields.keys() <= known:
            raise snapshot_error(f"{path} has other fields now", _ANEW, where)
        return kind(**fields)

    def lost_object(self, entry: Mapping[str, Any], where: str) -> Any:
        """Raise GraphError: it cannot be imported."""
        raise snapshot_error(
            f"{entry[LOST]} cannot be imported",
            "a def or class at the top level of a module, by its own name",
            where,
        )


def decode(entry: Any, where: str, parts: Parts | None = None) -> Any:
    """Turn what `encode` wrote into the value again. Raises GraphError if it names something that
    is not found. parts: what paths refer to; by default the things themselves.
    """
    parts = parts or Imported()
    if isinstance(entry, list):
        return [decode(part, where, parts) for part in entry]
    if not isinstance(entry, dict):
        return entry
    kind = next(iter(entry), "nothing")
    if kind not in _DECODERS:
        raise snapshot_error(
            f"expected a written value, found an object with {kind!r}",
            "do not edit snapshots by hand",
            where,
        )
    return _DECODERS[kind](entry, where, parts)


def _decode_numpy(entry: Mapping[str, Any], where: str, parts: Parts) -> Any:
    dtype = np.dtype(entry["numpy"])
    # Numbers and text only. NumPy's other kinds are times, records and Python objects.
    if dtype.kind not in "biufcSU":
        problem = f"expected a number of NumPy, found {entry['numpy']!r:.60}"
        raise snapshot_error(problem, _ANEW, where)
    return dtype.type(decode(entry["value"], where, parts))


def _decode_tuple(entry: Mapping[str, Any], where: str, parts: Parts) -> tuple[Any, ...]:
    return tuple(decode(part, where, parts) for part in entry["tuple"])


def _decode_dict(entry: Mapping[str, Any], where: str, parts: Parts) -> dict[Any, Any]:
    return {decode(k, where, parts): decode(v, where, parts) for k, v in entry["dict"]}


def _decode_record(entry: Mapping[str, Any], where: str, parts: Parts) -> Any:
    fields = {name: decode(field, where, parts) for name, field in entry["fields"].items()}
    return parts.record(entry["record"], fields, where)


def _decode_arrow(entry: Mapping[str, Any], where: str, parts: Parts) -> pa.DataType:
    serialized = pa.py_buffer(base64.b64decode(entry["arrow"]))
    return pa.ipc.read_schema(serialized).field(0).type


_DECODERS: Mapping[str, Callable[[Mapping[str, Any], str, Parts], Any]] = {
    "float": lambda entry, where, parts: float(entry["float"]),
    "numpy": _decode_numpy,
    "dtype": lambda entry, where, parts: np.dtype(entry["dtype"]),
    "arrow": _decode_arrow,
    "tuple": _decode_tuple,
    "dict": _decode_dict,
    "class": lambda entry, where, parts: parts.class_at(entry["class"], where),
    "function": lambda entry, where, parts: parts.function(entry["function"], where),
    "record": _decode_record,
    LOST: lambda entry, where, parts: parts.lost_object(entry, where),
}


def _import_object(path: str, where: str) -> Any:
    """Import the object at module:qualname. Raises GraphError that names the nearest one there."""
    module_name, _, qualname = path.partition(":")
    try:
        place: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        problem = f"{path} is not found: no module {error.name!r}"
        fix = f"put the file of {module_name!r} where Python finds it"
        raise snapshot_error(problem, fix, where) from None
    for part in qualname.split("."):
        if not hasattr(place, part):
            problem = f"{path} is not found: {module_name!r} has no {part!r}"
            fix = f"give {module_name!r} what the graph was made with"
            near = nearest(part, (name for name in vars(place) if not name.startswith("__")))
            if near:
                fix = f"{near!r} is there"
            raise snapshot_error(problem, fix, where)
        place = getattr(place, part)
    return place
