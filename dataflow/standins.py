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
_lost: dict[type, bool] = {}
"""Every class that is a stand-in: whether no process can import the original."""


def has_name(thing: Any) -> bool | None:
    """Whether the original of a stand-in can be imported; None for what is no stand-in."""
    lost = thing.lost if isinstance(thing, Standin) else None
    if isinstance(thing, type):
        lost = _lost.get(thing)
    return None if lost is None else not lost


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
                raise GraphError(_unusable(path, f"expected names of columns, found {name!r:.60}"))
        _classes[key] = _class(path, bases, dict(body), lost=lost)
    return _classes[key]


def plain_class(path: str, *, lost: bool = False) -> type:
    """The stand-in of a class that is not a schema."""
    key = (path, lost)
    if key not in _classes:
        _classes[key] = _class(path, (), {}, lost=lost)
    return _classes[key]


def record(path: str, fields: Mapping[str, Any], called: str = "") -> Any:
    """The stand-in of a frozen dataclass's instance. called: its name, if it is a function, too."""
    key = (path, tuple(fields), called)
    if key not in _classes:
        body: dict[str, Any] = {"__name__": called, "__call__": Standin.__call__} if called else {}
        module, _, qualname = path.partition(":")
        body |= {"__module__": module, "__qualname__": qualname}
        made = dataclasses.make_dataclass(
            qualname.rpartition(".")[2], list(fields), frozen=True, namespace=body
        )
        made.__module__, made.__qualname__ = module, qualname
        _classes[key], _lost[made] = made, False
    return _classes[key](**fields)


def _class(path: str, bases: tuple[type, ...], body: dict[str, Any], *, lost: bool) -> type:
    module, _, qualname = path.partition(":")
    made = type(
        qualname.rpartition(".")[2], bases, {**body, "__module__": module, "__qualname__": qualname}
    )
    _lost[made] = lost
    return made


def _unusable(where: str, problem: str) -> Fault:
    return Fault(
        rule="snapshot", where=where, problem=problem, fix="give the graph.json that a run wrote"
    )


def made(kind: type[Any], fields: Mapping[str, Any], where: str) -> Any:
    """An instance of one of this project's own dataclasses. Raises GraphError if a field is
    unknown, missing or not of its declared type: a file may say anything.
    """
    hints = _hints(kind)
    known = {f.name: f for f in dataclasses.fields(kind) if f.init}
    for name, value in fields.items():
        if name not in known:
            raise GraphError(_unusable(where, f"{kind.__name__} has no field {name!r:.60}"))
        if not fits(value, hints[name]):
            found = (
                f"expected {kind.__name__}.{name} to be {_said(hints[name])}, found {value!r:.60}"
            )
            raise GraphError(_unusable(where, found))
    needed = [n for n, f in known.items() if _required(f) and n not in fields]
    if needed:
        raise GraphError(
            _unusable(where, f"{kind.__name__} needs {', '.join(needed)}, which are not there")
        )
    return kind(**fields)


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


@functools.cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)


def _said(hint: Any) -> str:
    return str(getattr(hint, "__name__", hint)).replace("typing.", "").replace("dataflow.", "")


def fits(value: Any, hint: Any) -> bool:
    """Whether a value has the type that an annotation names, including containers' contents."""
    if hint is Any or isinstance(hint, TypeVar):
        return True
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, part) for part in inside)
    if origin is Literal:
        return any(type(value) is type(part) and value == part for part in inside)
    if origin is not None:
        return _fits_generic(value, origin, inside)
    return _fits_plain(value, hint)


def _fits_plain(value: Any, hint: Any) -> bool:
    if hint in (None, type(None)):
        return value is None
    if hint in (int, float):
        numbers = (int, np.integer) if hint is int else (int, float, np.integer, np.floating)
        return isinstance(value, numbers) and not isinstance(value, bool)
    return callable(value) if hint is Callable else isinstance(value, hint)


def _fits_generic(value: Any, origin: Any, inside: tuple[Any, ...]) -> bool:
    if origin is tuple:
        return isinstance(value, tuple) and _fits_tuple(value, inside)
    if origin is type:
        return isinstance(value, type) and (inside[0] is Any or issubclass(value, inside[0]))
    if origin is collections.abc.Callable:
        return callable(value)
    return isinstance(value, origin) and _fits_contents(value, origin, inside)


def _fits_tuple(value: tuple[Any, ...], inside: tuple[Any, ...]) -> bool:
    if len(inside) == 2 and inside[1] is Ellipsis:
        return all(fits(part, inside[0]) for part in value)
    return len(value) == len(inside) and all(map(fits, value, inside))


def _fits_contents(value: Any, origin: Any, inside: tuple[Any, ...]) -> bool:
    if issubclass(origin, collections.abc.Mapping):
        return all(fits(k, inside[0]) and fits(v, inside[1]) for k, v in value.items())
    if issubclass(origin, collections.abc.Sequence):
        return not isinstance(value, str) and all(fits(part, inside[0]) for part in value)
    return True
