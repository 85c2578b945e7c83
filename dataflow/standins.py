"""Stand-ins for a user's functions, classes and schemas when nothing of the user's is imported.

Owns: the objects, one for each declaration (so that two readings of one graph agree), and the check
that a record's fields are as its class declares. Does not own: how declarations are written
(declarations.py), paths.

A stand-in has the name, the module and the signature of the original, and cannot be called.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from dataflow.errors import Fault, GraphError
from dataflow.schema import Schema


class Standin:
    """A user's function that was not imported. lost: no process can import it; place is its
    `file:line`.
    """

    def __init__(
        self,
        path: str,
        name: str,
        place: str,
        signature: inspect.Signature | None,
        *,
        lost: bool = False,
    ) -> None:
        module, _, qualname = path.partition(":")
        self.__module__ = module
        self.__qualname__ = qualname
        self.__name__ = name
        self.place = place
        self.lost = lost
        if signature is not None:
            self.__signature__ = signature

    def __repr__(self) -> str:
        return f"<{self.__module__}:{self.__qualname__}, not imported>"

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        where = f"{self.__module__}:{self.__qualname__}"
        problem = "it was read without being imported, and cannot be called"
        raise GraphError(
            Fault(rule="snapshot", where=where, problem=problem, fix="run or resume imports it")
        )


_functions: dict[Any, Standin] = {}
_classes: dict[Any, type] = {}
"""Of every process one for each declaration, so that two readings of a graph are equal."""
_is_lost: dict[type, bool] = {}
"""Every class that is a stand-in: whether no process can import the original."""


def has_name(thing: Any) -> bool | None:
    """Whether the original of a stand-in can be imported; None for what is no stand-in."""
    if isinstance(thing, Standin):
        return not thing.lost
    if isinstance(thing, type) and thing in _is_lost:
        return not _is_lost[thing]
    return None


def function(
    path: str,
    name: str,
    place: str = "",
    signature: inspect.Signature | None = None,
    *,
    lost: bool = False,
) -> Standin:
    """The stand-in of a function."""
    key = (path, name, place, str(signature), lost)
    return _functions.setdefault(key, Standin(path, name, place, signature, lost=lost))


def schema(
    path: str, bases: tuple[type[Schema], ...], body: Mapping[str, Any], *, lost: bool = False
) -> type[Schema]:
    """The stand-in of a user's schema. Raises GraphError if its columns contradict each other, or
    have invalid names.
    """
    key = (path, bases, repr(sorted(body.items())), lost)
    if key not in _classes:
        for name in body:
            if not name.isidentifier() or name.startswith("__"):
                raise _unusable(path, f"expected names of columns, found {name!r:.60}")
        _classes[key] = _make_class(path, bases, body, lost=lost)
    return _classes[key]


def plain_class(path: str, *, lost: bool = False) -> type:
    """The stand-in of a class that is not a schema."""
    key = (path, lost)
    if key not in _classes:
        _classes[key] = _make_class(path, (), {}, lost=lost)
    return _classes[key]


def record(path: str, fields: Mapping[str, Any], called: str = "") -> Any:
    """The stand-in of a frozen dataclass's instance. called: its name, if it is a function, too."""
    key = (path, tuple(fields), called)
    if key not in _classes:
        _classes[key] = _make_record_class(path, fields, called)
    return _classes[key](**fields)


def _make_record_class(path: str, fields: Mapping[str, Any], called: str) -> type:
    """The class of `record`'s instances. Another that has other fields is another class."""
    module, _, qualname = path.partition(":")
    body: dict[str, Any] = {"__module__": module, "__qualname__": qualname}
    if called:
        body |= {"__name__": called, "__call__": Standin.__call__}
    name = qualname.rpartition(".")[2]
    record_class = dataclasses.make_dataclass(name, list(fields), frozen=True, namespace=body)
    # Since Python 3.12 make_dataclass names the module that calls it.
    record_class.__module__, record_class.__qualname__ = module, qualname
    _is_lost[record_class] = False
    return record_class


def _make_class(path: str, bases: tuple[type, ...], body: Mapping[str, Any], *, lost: bool) -> type:
    module, _, qualname = path.partition(":")
    name = qualname.rpartition(".")[2]
    standin_class = type(name, bases, {**body, "__module__": module, "__qualname__": qualname})
    _is_lost[standin_class] = lost
    return standin_class


def _unusable(where: str, problem: str) -> GraphError:
    fix = "give the graph.json that a run wrote"
    return GraphError(Fault(rule="snapshot", where=where, problem=problem, fix=fix))


def make_instance(kind: type[Any], fields: Mapping[str, Any], where: str) -> Any:
    """Make an instance of one of this project's own dataclasses. Raises GraphError if a field is
    unknown, missing or not of its declared type: a file may say anything.
    """
    hints = _hints(kind)
    known_fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    for name, field_value in fields.items():
        if name not in known_fields:
            raise _unusable(where, f"{kind.__name__} has no field {name!r:.60}")
        if not fits(field_value, hints[name]):
            expected = f"expected {kind.__name__}.{name} to be {_describe(hints[name])}"
            raise _unusable(where, f"{expected}, found {field_value!r:.60}")
    missing = [
        name for name, field in known_fields.items() if _is_required(field) and name not in fields
    ]
    if missing:
        problem = f"{kind.__name__} needs {', '.join(missing)}, which are not there"
        raise _unusable(where, problem)
    return kind(**fields)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


@functools.cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)


def _describe(hint: Any) -> str:
    """An annotation, as messages write it."""
    return str(getattr(hint, "__name__", hint)).replace("typing.", "").replace("dataflow.", "")


def fits(thing: Any, hint: Any) -> bool:
    """Whether a thing has the type that an annotation names, including containers' contents."""
    if hint is Any or isinstance(hint, TypeVar):
        return True
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(thing, part) for part in inside)
    if origin is Literal:
        # True == 1, and they are not the same literal.
        return any(type(thing) is type(part) and thing == part for part in inside)
    if origin is not None:
        return _fits_generic(thing, origin, inside)
    return _fits_plain(thing, hint)


def _fits_plain(thing: Any, hint: Any) -> bool:
    if hint in (None, type(None)):
        return thing is None
    if hint is int:
        return isinstance(thing, (int, np.integer)) and not isinstance(thing, bool)
    if hint is float:
        numbers = (int, float, np.integer, np.floating)
        return isinstance(thing, numbers) and not isinstance(thing, bool)
    return callable(thing) if hint is Callable else isinstance(thing, hint)


def _fits_generic(thing: Any, origin: Any, inside: tuple[Any, ...]) -> bool:
    """origin, inside: as typing.get_origin and get_args take an annotation apart."""
    if origin is tuple:
        return isinstance(thing, tuple) and _fits_tuple(thing, inside)
    if origin is type:
        return isinstance(thing, type) and (inside[0] is Any or issubclass(thing, inside[0]))
    if origin is collections.abc.Callable:
        return callable(thing)
    return isinstance(thing, origin) and _fits_contents(thing, origin, inside)


def _fits_tuple(parts: tuple[Any, ...], inside: tuple[Any, ...]) -> bool:
    if len(inside) == 2 and inside[1] is Ellipsis:
        return all(fits(part, inside[0]) for part in parts)
    return len(parts) == len(inside) and all(map(fits, parts, inside))


def _fits_contents(container: Any, origin: Any, inside: tuple[Any, ...]) -> bool:
    if issubclass(origin, collections.abc.Mapping):
        keys = all(fits(key, inside[0]) for key in container)
        return keys and all(fits(part, inside[1]) for part in container.values())
    if issubclass(origin, collections.abc.Sequence):
        return not isinstance(container, str) and all(fits(part, inside[0]) for part in container)
    return True
