"""The arguments of a tool's call: whether they fit its schema, and as what a function gets them.

Owns: that check, in words that a model can act on, and Enum members, tuples and integers from JSON.
Does not own: schemas (tool_schemas.py), calls (tool_calls.py).
"""

from __future__ import annotations

import enum
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .tool_schemas import UNIONS, describe_type

_JSON_TYPES = {
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


def find_argument_problem(schema: Mapping[str, Any], arguments: Any) -> str | None:
    """What is wrong with a call's arguments, as the end of a sentence; None if they fit.

    schema: the `parameters` of a tool.
    """
    if not isinstance(arguments, dict):
        return f"expected arguments to be an object, found {_show(arguments)}"
    properties = schema.get("properties", {})
    for name in arguments:
        if name not in properties:
            takes = ", ".join(properties) or "none"
            return f"there is no argument {name!r}; the arguments are: {takes}"
    for name in schema.get("required", ()):
        if name not in arguments:
            return f"the argument {name!r} is missing"
    for name, argument in arguments.items():
        problem = _find_misfit(properties[name], argument)
        if problem:
            return f"expected {name} to be {problem}"
    return None


def _find_misfit(schema: Mapping[str, Any], argument: Any) -> str | None:
    """`integer, found "three"`, or None where the argument fits."""
    if argument is None and schema.get("nullable"):
        return None
    if "anyOf" in schema:
        misfits = [_find_misfit(kind, argument) for kind in schema["anyOf"]]
        return None if None in misfits else misfits[0]
    if "enum" in schema and argument not in schema["enum"]:
        choices = ", ".join(_show(choice) for choice in schema["enum"])
        return f"one of {choices}, found {_show(argument)}"
    names = schema.get("type", [])
    names = [names] if isinstance(names, str) else names
    if names and not any(_has_type(argument, name) for name in names):
        return f"{' or '.join(names)}, found {_show(argument)}"
    return _find_inner_misfit(schema, argument)


def _find_inner_misfit(schema: Mapping[str, Any], argument: Any) -> str | None:
    """The misfit of something inside a list or an object."""
    parts: list[tuple[Any, Any]] = []
    if isinstance(argument, list) and "items" in schema:
        parts = [(schema["items"], part) for part in argument]
    elif isinstance(argument, list) and "prefixItems" in schema:
        kinds = schema["prefixItems"]
        if len(kinds) != len(argument):
            return f"a list of {len(kinds)}, found {_show(argument)}"
        parts = list(zip(kinds, argument))  # noqa: B905 - Python 3.9 has no strict
    elif isinstance(argument, dict) and isinstance(schema.get("additionalProperties"), dict):
        parts = [(schema["additionalProperties"], part) for part in argument.values()]
    for kind, part in parts:
        problem = _find_misfit(kind, part)
        if problem:
            return f"with parts that are {problem}"
    return None


def _has_type(argument: Any, name: str) -> bool:
    if isinstance(argument, bool):
        return name == "boolean"
    if name == "integer" and isinstance(argument, float):
        return argument.is_integer()
    return isinstance(argument, _JSON_TYPES.get(name, ()))


def _show(argument: Any) -> str:
    return json.dumps(argument, default=repr, ensure_ascii=False)[:80]


def convert_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Turn JSON arguments that fit into what the annotations say: members of an Enum, tuples, and
    integers that were written as 3.0.
    """
    hints = typing.get_type_hints(function)
    return {name: _convert(hints[name], argument) for name, argument in arguments.items()}


def _convert(hint: Any, argument: Any) -> Any:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint(argument)
    if hint is int and isinstance(argument, float):
        return int(argument)
    if origin in UNIONS:
        return _convert_to_union(inner, argument)
    if not inner:
        return argument
    if origin is list:
        return [_convert(inner[0], part) for part in argument]
    if origin is tuple:
        parts = zip(inner, argument)  # noqa: B905 - Python 3.9 has no strict
        return tuple(_convert(kind, part) for kind, part in parts)
    if origin is dict:
        return {name: _convert(inner[1], part) for name, part in argument.items()}
    return argument


def _convert_to_union(kinds: Sequence[Any], argument: Any) -> Any:
    """By the first kind that the argument fits."""
    for kind in kinds:
        if _find_misfit(describe_type(kind), argument) is None:
            return _convert(kind, argument)
    return argument
