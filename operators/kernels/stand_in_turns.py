"""Turns that stand in for what a model wrote, so that a chat template can be asked about others.

Owns: their texts, and the ids that join calls to what tools said. Does not own: rendering them
(turn_ends.py, turn_templates.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dataflow.prompt_types import Message

QUESTION: Message = {"role": "user", "content": "stand-in question"}
ANSWER = "stand-in answer"
REASONING = "stand-in reasoning"
TOOL = "stand_in_tool"


def answer(calls: int = 0, written_calls: Sequence[Mapping[str, Any]] = ()) -> Message:
    """An assistant's turn with so many calls, of the tools that were called if they are known."""
    turn: Message = {"role": "assistant", "content": ANSWER}
    if not calls:
        return turn
    turn["tool_calls"] = []
    for index in range(calls):
        written: Mapping[str, Any] = {}
        if index < len(written_calls):
            written = written_calls[index]
        name = written.get("function", {}).get("name", TOOL)
        function = {"name": name, "arguments": {"text": argument(index)}}
        call = {"type": "function", "function": function}
        if "id" in written:
            call["id"] = written["id"]
        turn["tool_calls"].append(call)
    return turn


def argument(index: int) -> str:
    """The argument of a stand-in's call."""
    return f"stand-in argument {index}."


def reply(role: str, index: int = 0) -> Message:
    """A reply that can be told from others."""
    return {"role": role, "content": f"stand-in reply {index}."}


def with_call_ids(messages: Sequence[Message]) -> list[Message]:
    """Messages whose calls have ids, where they have none, and whose tools have those of the calls
    that they answer.

    Nine digits, as Mistral's wants; those that a model wrote, as Kimi's does, stay.
    """
    ids: list[str] = []
    joined: list[Message] = []
    for message in messages:
        if message.get("tool_calls"):
            numbered = enumerate(message["tool_calls"])
            calls = [{"id": f"{index:09d}", **call} for index, call in numbered]
            ids = [call["id"] for call in calls]
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            answered = ids.pop(0) if ids else f"{0:09d}"
            message = {"tool_call_id": answered, **message}
        joined.append(message)
    return joined


def with_thinking(messages: Sequence[Message]) -> list[Message]:
    """Messages whose reasoning is named `thinking`, too."""
    named: list[Message] = []
    for message in messages:
        if "reasoning_content" in message:
            message = {"thinking": message["reasoning_content"], **message}
        named.append(message)
    return named


def with_text_arguments(messages: Sequence[Message]) -> list[Message]:
    """Messages whose calls have their arguments as JSON text, as OpenAI sends them."""
    changed: list[Message] = []
    for message in messages:
        if message.get("tool_calls"):
            calls = [_with_text_arguments(call) for call in message["tool_calls"]]
            message = {**message, "tool_calls": calls}
        changed.append(message)
    return changed


def _with_text_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if not isinstance(function["arguments"], str):
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": function}
