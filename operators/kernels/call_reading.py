"""What was read in a turn: its content, its calls, and what is wrong with others.

Owns: calls as OpenAI's form has them, JSON that is safe to pass on, and texts as the types that a
tool declares. Does not own: where a call begins and ends (tool_calls.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Tool = Mapping[str, Any]
"""A tool as JSON schema: {"type": "function", "function": {"name": ..., "parameters": {...}}}."""

ParameterKinds = Mapping[tuple[str, str], frozenset[str]]
"""The JSON types of a tool's parameter, by the names of both."""

_LITERALS = {"True": "true", "False": "false", "None": "null"}
"""Python's, which models write in place of JSON's."""


@dataclass(slots=True)
class CallReading:
    """Of one turn. content: what stands outside of calls. errors: what was expected and found."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def add_json(self, text: str, expected: str) -> None:
        """Add the call, or the list of calls, that a JSON text is; else an error."""
        parsed = read_json(text)
        calls = parsed if isinstance(parsed, list) else [parsed]
        if not calls:
            self.add_error(expected, text)
        for call in calls:
            if isinstance(call, dict):
                arguments = call.get("arguments", call.get("parameters", {}))
                self.add_call(call.get("name"), arguments, expected, text)
            else:
                self.add_error(expected, text)

    def add_named(self, name: str, text: str, expected: str, call_id: str = "") -> None:
        """Add the call of a tool whose arguments are a JSON text; else an error."""
        before = len(self.calls)
        self.add_call(name, read_json(text), expected, f"{name} {text}")
        if call_id and len(self.calls) > before:
            self.calls[-1]["id"] = call_id

    def add_parsed(self, name: Any, arguments: Any, expected: str, text: str) -> None:
        """Add a call that another parser read, if its arguments can be sent on as JSON."""
        try:
            as_json = arguments if isinstance(arguments, str) else json.dumps(arguments)
        except (TypeError, ValueError, RecursionError):
            as_json = ""
        self.add_call(name, read_json(as_json), expected, text)

    def add_texts(self, name: str, arguments: Mapping[str, str], kinds: ParameterKinds) -> None:
        """Add a call whose arguments are texts, each as one of its parameter's types; as JSON if it
        is any, where these are unknown.
        """
        typed_arguments: dict[str, Any] = {}
        for key, text in arguments.items():
            typed_arguments[key] = _as_kinds(text, kinds.get((name, key), frozenset()))
        self.add_call(name, typed_arguments, "the name of a function", name)

    def add_error(self, expected: str, text: str) -> None:
        """Add what was expected, and what was found in its place."""
        self.errors.append(f"expected {expected}, found {text.strip()!r:.200}")

    def add_call(self, name: Any, arguments: Any, expected: str, text: str) -> None:
        """Add the call of a tool by its name with these arguments, an object or JSON text of one;
        an error if they are neither.
        """
        if isinstance(arguments, str):  # JSON in a text, as OpenAI sends it
            arguments = read_json(arguments)
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            self.add_error(expected, text)
            return
        function = {"name": name, "arguments": arguments}
        self.calls.append({"type": "function", "function": function})


def read_json(text: str) -> Any:
    """The value of a JSON text; None for what is not JSON, or could not be sent on as UTF-8."""
    try:
        parsed = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
        if "\\u" in text:  # half of a surrogate pair is no text
            json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return parsed


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"{digits} is too large")
    return number


def parameter_kinds(tools: Sequence[Tool]) -> ParameterKinds:
    """The types that tools declare for their parameters."""
    kinds: dict[tuple[str, str], frozenset[str]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        properties = (function.get("parameters") or {}).get("properties") or {}
        for key, schema in properties.items():
            kinds[function.get("name", ""), key] = _kinds_of(schema)
    return kinds


def _kinds_of(schema: Any) -> frozenset[str]:
    """The types of a JSON schema, those of its alternatives included."""
    if not isinstance(schema, dict):
        return frozenset()
    declared = schema.get("type", ())
    kinds = {declared} if isinstance(declared, str) else set(declared)
    for name in ("anyOf", "oneOf"):
        for alternative in schema.get(name) or ():
            kinds |= _kinds_of(alternative)
    return frozenset(kinds)


def _as_kinds(text: str, kinds: frozenset[str]) -> Any:
    """A text that is to be a string stays; another is JSON where it can be."""
    if kinds == {"string"}:
        return text
    stripped = text.strip()
    parsed = read_json(_LITERALS.get(stripped, stripped))
    if parsed is None and stripped not in ("null", "None"):
        return text
    if "string" in kinds and not _is_of(parsed, kinds):
        return text
    return parsed


def _is_of(parsed: Any, kinds: frozenset[str]) -> bool:
    names: dict[type, frozenset[str]] = {
        bool: frozenset({"boolean"}),
        int: frozenset({"integer", "number"}),
        float: frozenset({"number"}),
        dict: frozenset({"object"}),
        list: frozenset({"array"}),
        type(None): frozenset({"null"}),
    }
    return bool(names.get(type(parsed), frozenset()) & kinds)
