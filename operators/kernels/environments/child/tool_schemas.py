"""What a model is told of a Python function: a tool's schema in OpenAI's form.

Owns: schemas from signatures and docstrings, as `transformers.utils.get_json_schema` writes them.
Does not own: the arguments of a call (tool_arguments.py), calls (tool_calls.py).

Type hints become JSON types, the docstring's first part the tool's description, and the entries
below `Args:` those of its arguments. An argument may lack an entry: then it has no description.
"""

from __future__ import annotations

import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union

_NAMED_TYPES = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    type(None): "null",
    list: "array",
    tuple: "array",
    dict: "object",
}
_SCALARS = (int, float, str, bool, type(None))
_SECTIONS = re.compile(r"^[ \t]*(Args|Returns|Raises):[ \t]*", re.MULTILINE)
_ENTRY = re.compile(r"^([ \t]*)(\w+)(?:[ \t]*\([^)\n]*\))?:[ \t]*", re.MULTILINE)
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)
UNIONS = (Union, getattr(types, "UnionType", Union))
"""What `typing.get_origin` says of a union: `X | Y` has its own since Python 3.10."""


class ToolSchemaError(ValueError):
    """A function of which no schema can be written; the text says what it lacks."""


def describe_tool(function: Callable[..., Any]) -> dict[str, Any]:
    """Write the schema of one function or bound method: `{"type": "function", "function": ...}`.

    Raises ToolSchemaError where it has no docstring, a parameter has no type hint, or a type is
    none that JSON has.
    """
    name = getattr(function, "__name__", "operation")
    documentation = inspect.getdoc(function)
    if not documentation:
        problem = f"tool {name!r}: expected a docstring, found none."
        raise ToolSchemaError(f'{problem} Fix: """What it does.""" below its def')
    sections = _split_sections(documentation)
    hints = _read_hints(name, function)
    descriptions = _read_entries(sections.get("Args", ""))
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in _parameters(name, function):
        properties[parameter.name] = _describe_parameter(
            name, parameter.name, hints[parameter.name], descriptions.get(parameter.name)
        )
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    described = {"name": name, "description": sections["description"], "parameters": schema}
    returned = _describe_return(hints, sections)
    if returned is not None:
        described["return"] = returned
    return {"type": "function", "function": described}


def _parameters(name: str, function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters that a model fills in: all but a `self` without a type."""
    parameters = list(inspect.signature(function).parameters.values())
    first = parameters[0] if parameters else None
    if first and first.name in ("self", "cls") and first.annotation is first.empty:
        parameters = parameters[1:]
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            problem = f"tool {name!r}: expected parameters that have a name each"
            raise ToolSchemaError(f"{problem}, found {parameter}. Fix: name what it takes")
        if parameter.annotation is parameter.empty:
            problem = f"tool {name!r}: parameter {parameter.name!r} has no type hint"
            raise ToolSchemaError(f"{problem}. Fix: {parameter.name}: str, or what it is")
    return parameters


def _read_hints(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError) as error:
        problem = f"tool {name!r}: its type hints cannot be read: {error}"
        raise ToolSchemaError(f"{problem}. Fix: types that this Python has") from None


def _describe_parameter(
    tool: str, parameter: str, hint: Any, description: str | None
) -> dict[str, Any]:
    try:
        schema = describe_type(hint)
    except ToolSchemaError as error:
        problem = f"tool {tool!r}: parameter {parameter!r}: {error}"
        raise ToolSchemaError(problem) from None
    if description is None:
        return schema
    choices = _CHOICES.search(description)
    if choices:
        schema["enum"] = [_strip(choice) for choice in json.loads(choices.group(1))]
        description = description[: choices.start()].strip()
    schema["description"] = description
    return schema


def _strip(choice: Any) -> Any:
    return choice.strip() if isinstance(choice, str) else choice


def _describe_return(hints: dict[str, Any], sections: dict[str, str]) -> dict[str, Any] | None:
    """A model writes no return value: a type that JSON does not have is left out."""
    if "return" not in hints:
        return None
    try:
        schema = describe_type(hints["return"])
    except ToolSchemaError:
        return None
    if "Returns" in sections:
        schema["description"] = sections["Returns"]
    return schema


def describe_type(hint: Any) -> dict[str, Any]:
    """Write a type hint as JSON Schema. Raises ToolSchemaError for a type that JSON does not
    have.
    """
    origin = typing.get_origin(hint)
    arguments: tuple[Any, ...] = typing.get_args(hint)
    if origin is None:
        return _describe_plain(hint)
    if origin in _NAMED_TYPES and not arguments:  # List, Dict and Tuple of typing, of anything
        return {"type": _NAMED_TYPES[origin]}
    if origin in UNIONS:
        return _describe_union(arguments)
    if origin is Literal:
        return _describe_values(arguments, "Literal")
    if origin is list:
        return {"type": "array", "items": describe_type(arguments[0])}
    if origin is tuple:
        return _describe_tuple(hint, arguments)
    if origin is dict:
        return {"type": "object", "additionalProperties": describe_type(arguments[1])}
    raise _no_json(hint)


def _describe_plain(hint: Any) -> dict[str, Any]:
    if hint is Any:
        return {}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _describe_values([member.value for member in hint], hint.__name__)
    if isinstance(hint, type) and hint in _NAMED_TYPES:
        return {"type": _NAMED_TYPES[hint]}
    raise _no_json(hint)


def _describe_tuple(hint: Any, arguments: Sequence[Any]) -> dict[str, Any]:
    if len(arguments) < 2 or ... in arguments:
        raise _no_json(hint)
    return {"type": "array", "prefixItems": [describe_type(part) for part in arguments]}


def _no_json(hint: Any) -> ToolSchemaError:
    known = "str, int, float, bool, list, dict, Literal, an Enum, or a union of these"
    return ToolSchemaError(f"expected a type that JSON has, found {hint!r}. Fix: {known}")


def _describe_union(arguments: Sequence[Any]) -> dict[str, Any]:
    inner = [describe_type(part) for part in arguments if part is not type(None)]
    names = sorted({part["type"] for part in inner if _is_plain(part)})
    schema: dict[str, Any]
    if len(inner) == 1:
        schema = inner[0]
    elif all(_is_plain(part) for part in inner):
        schema = {"type": names[0] if len(names) == 1 else names}
    else:
        schema = {"anyOf": inner}
    if type(None) in arguments:
        schema["nullable"] = True
    return schema


def _is_plain(schema: Mapping[str, Any]) -> bool:
    """Whether a schema is one type's name and nothing else."""
    return schema.keys() == {"type"} and isinstance(schema["type"], str)


def _describe_values(values: Sequence[Any], name: str) -> dict[str, Any]:
    """The schema of an Enum or a Literal: its values, and the types that occur among them."""
    if not values or any(type(each) not in _SCALARS for each in values):
        problem = f"expected {name} to have texts, numbers, booleans or None, found {values!r:.80}"
        raise ToolSchemaError(f"{problem}. Fix: values that JSON has")
    names = list(dict.fromkeys(_NAMED_TYPES[type(each)] for each in values))
    return {"type": names[0] if len(names) == 1 else names, "enum": list(values)}


def _split_sections(documentation: str) -> dict[str, str]:
    """A docstring's parts: `description`, and `Args`, `Returns` and `Raises` where it has them."""
    sections: dict[str, str] = {}
    name, start = "description", 0
    for head in _SECTIONS.finditer(documentation):
        sections.setdefault(name, documentation[start : head.start()])
        name, start = head.group(1), head.end()
    sections.setdefault(name, documentation[start:])
    for title in sections.keys() - {"Args"}:
        sections[title] = sections[title].strip()
    return sections


def _read_entries(section: str) -> dict[str, str]:
    """The descriptions below `Args:`, by name. An entry ends where the next one begins that is not
    indented deeper.
    """
    lines = [line for line in section.split("\n") if line.strip()]
    entries: dict[str, list[str]] = {}
    indent, name = "", None
    for line in lines:
        head = _ENTRY.match(line)
        if head and (name is None or not _is_deeper(head.group(1), indent)):
            indent, name = head.groups()
            entries[name] = [line[head.end() :].strip()]
        elif name is not None:
            entries[name].append(line.strip())
    return {each: " ".join(filter(None, parts)) for each, parts in entries.items()}


def _is_deeper(indent: str, outer: str) -> bool:
    return len(indent) > len(outer)
