"""Conversations as people read them: who says what in a row's messages.

Owns: reading messages in JSON, whatever a model wrote into them, and a line about each. Does not
own: what a chat template makes of messages (operators/), a page of them (engine/watch).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MESSAGES = "messages"
"""The column of an Episode that has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaidCall:
    """A call of a tool. arguments: by name, each as text; what is no object is one with no name."""

    name: str
    arguments: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        parts: list[str] = []
        for name, text in self.arguments:
            if name:
                parts.append(f"{name}={text}")
            else:
                parts.append(text)
        return f"{self.name}({', '.join(parts)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaidMessage:
    """One message. name: of the tool that answers, or of the speaker. errors: of calls that could
    not be read.
    """

    role: str
    text: str
    name: str = ""
    reasoning: str = ""
    calls: tuple[SaidCall, ...] = ()
    errors: tuple[str, ...] = ()

    @property
    def who(self) -> str:
        """`tool search`, `assistant`."""
        return f"{self.role} {self.name}".strip()

    def __str__(self) -> str:
        parts: list[str] = []
        if self.text:
            parts.append(self.text)
        parts += [f"calls {call}" for call in self.calls]
        parts += [f"a call that cannot be read: {error}" for error in self.errors]
        return "; ".join(parts)


def read_conversation(text: Any) -> list[SaidMessage] | None:
    """Read messages in JSON, `[{"role": "user", "content": "hi"}]`; None for anything else. Texts
    of a model are in it: brackets a thousand deep or a number of any length are None, too.
    """
    if not isinstance(text, str) or not text.startswith("["):
        return None
    try:
        messages = json.loads(text)
        if not all(map(_is_message, messages)):
            return None
        return [_read_message(message) for message in messages]
    except (ValueError, RecursionError):
        return None


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)


def _read_message(message: Mapping[str, Any]) -> SaidMessage:
    calls = _list_in(message, "tool_calls")
    errors = _list_in(message, "tool_call_errors")
    return SaidMessage(
        role=message["role"],
        text=_text_of(message.get("content")),
        name=_text_of(message.get("name")),
        reasoning=_text_of(message.get("reasoning_content")),
        calls=tuple(map(_read_call, calls)),
        errors=tuple(map(_text_of, errors)),
    )


def _list_in(message: Mapping[str, Any], name: str) -> list[Any]:
    entries = message.get(name)
    if isinstance(entries, list):
        return entries
    return []


def _text_of(content: Any) -> str:
    """Text as it is; parts of OpenAI's form by their texts; all else as JSON."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content and all(map(_is_text_part, content)):
        return "\n".join(part["text"] for part in content)
    return json.dumps(content, ensure_ascii=False)


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _read_call(call: Any) -> SaidCall:
    """Arguments may be JSON in a text, as servers of OpenAI's form send them."""
    function = call
    if isinstance(call, dict):
        function = call.get("function", call)
    if not isinstance(function, dict):
        return SaidCall(name="a tool", arguments=(("", _text_of(function)),))
    name = _text_of(function.get("name")) or "a tool"
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _object_in(arguments)
    if isinstance(arguments, dict):
        pairs = tuple((str(key), _text_of(argument)) for key, argument in arguments.items())
        return SaidCall(name=name, arguments=pairs)
    if arguments is None or arguments == "":
        return SaidCall(name=name)
    return SaidCall(name=name, arguments=(("", _text_of(arguments)),))


def _object_in(text: str) -> Any:
    """The JSON object that a text is; else the text."""
    if not text.startswith("{"):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text
