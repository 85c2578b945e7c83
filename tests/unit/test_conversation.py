"""Conversations as people read them: messages in JSON, whatever a model wrote into them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.conversation import SaidMessage, read_conversation

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "two"}}}


def read_one(**message: Any) -> SaidMessage:
    conversation = read_conversation(json.dumps([{"role": "assistant", **message}]))
    assert conversation is not None
    return conversation[0]


def test_a_message_has_its_speaker_text_reasoning_and_calls() -> None:
    message = read_one(content="so", reasoning_content="hm", tool_calls=[CALL], name="bob")
    assert (message.who, message.text, message.reasoning) == ("assistant bob", "so", "hm")
    (call,) = message.calls
    assert (call.name, call.arguments) == ("add", (("a", "1"), ("b", "two")))
    assert str(message) == "so; calls add(a=1, b=two)"


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        ({"function": {"name": "add", "arguments": '{"a": 1}'}}, "add(a=1)"),
        ({"function": {"name": "add", "arguments": '{"a'}}, 'add({"a)'),
        ({"function": {"name": "add"}}, "add()"),
        ({"name": "add", "arguments": [1, 2]}, "add([1, 2])"),
        (None, "a tool()"),
        ("add 1 2", "a tool(add 1 2)"),
    ],
)
def test_a_call_of_any_form_is_shown(call: Any, shown: str) -> None:
    assert str(read_one(tool_calls=[call]).calls[0]) == shown


def test_a_call_that_could_not_be_read_is_told() -> None:
    message = read_one(content="<tool", tool_call_errors=["no closing tag"])
    assert str(message) == "<tool; a call that cannot be read: no closing tag"


def test_parts_are_joined_and_other_contents_are_json() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert read_one(content=parts).text == "one\ntwo"
    assert read_one(content=[{"type": "image", "url": "x"}]).text.startswith('[{"type": "image"')
    assert read_one(content=None).text == ""


@pytest.mark.parametrize(
    "text",
    [
        *("", "hello", '{"role": "user"}', '[{"role": 1}]', "[1]", '[{"role": "user"}'),
        *("[" * 100_000, '[{"role": "user", "content": ' + "9" * 5000 + "}]"),
        '[{"role": "user", "content": ' + "[" * 100_000,
        None,
        5,
    ],
)
def test_what_is_no_conversation_is_none(text: Any) -> None:
    assert read_conversation(text) is None


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
NAMES = ("content", "tool_calls", "name", "reasoning_content", "tool_call_errors")


@given(st.lists(st.fixed_dictionaries(dict.fromkeys(NAMES, ANY_JSON)), max_size=3))
def test_messages_of_any_json_are_read(messages: list[dict[str, Any]]) -> None:
    text = json.dumps([{"role": "tool", **message} for message in messages])
    conversation = read_conversation(text)
    assert conversation is not None
    assert len(conversation) == len(messages)
    for said in conversation:
        assert isinstance(str(said), str)
