"""Calls that models write, each in its family's format; what cannot be read is said, not raised."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from operators.kernels.call_reading import CallReading, parameter_kinds
from operators.kernels.tool_calls import FORMATS, find_tool_format
from tests.kit.chat_templates import FAMILIES
from tests.kit.turns import example_count

READERS = {each.name: each.read for each in FORMATS}
TYPES = {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": ["array", "null"]}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": TYPES}}}]
KINDS = parameter_kinds(TOOLS)


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def read(name: str, text: str) -> CallReading:
    return READERS[name](text, KINDS)


ADD, TWO = call("add", a=1), [call("add", a=1), call("go", to="x")]


@pytest.mark.parametrize("name, text, content, calls", [
    ("hermes", 'Hm.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "Hm.",
     [ADD]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n<tool_call>'
     '{"name": "go", "arguments": "{\\"to\\": \\"x\\"}"}', "", TWO),
    ("phi", '<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]<|/tool_call|>', "", [ADD]),
    ("llama", '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 1}}', "",
     [ADD]),
    ("llama", '{"name": "add", "parameters": {"a": 1}}; {"name": "go", "parameters": {"to": "x"}}',
     "", TWO),
    ("llama", 'It is {"name": "add"}.', 'It is {"name": "add"}.', []),
    ("mistral", 'Hm.[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "go",'
     ' "arguments": {"to": "x"}}]', "Hm.", TWO),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]go[CALL_ID]1[ARGS]{"to": "x"}', "", TWO),
    ("coder", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n"
     "</tool_call>", "", [ADD]),
    ("coder", "Hm.\n<function=add><parameter=b>\n1\n\n</parameter></function>", "Hm.",
     [call("add", b="1\n")]),
    ("glm", "\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
     "<tool_call>go<arg_key>to</arg_key><arg_value>x</arg_value></tool_call>", "", TWO),
    ("deepseek", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}'
     '<｜tool▁call▁end｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>go\n```json\n{"to": "x"}\n```'
     "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "", TWO),
    ("harmony", "<|channel|>commentary<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
     ' to=functions.add <|constrain|>json<|message|>{"a": 1}', "Hm.", [ADD]),
    ("harmony", " to=functions.add<|channel|>commentary json<|message|>"
     '{"a": 1}<|call|>', "", [ADD]),
])  # fmt: skip
def test_a_familys_calls_become_openais(
    name: str, text: str, content: str, calls: list[Any]
) -> None:
    reading = read(name, text)
    assert (reading.content.strip(), reading.calls, reading.errors) == (content, calls, [])


def test_the_ids_that_kimi_writes_stay() -> None:
    tags = ("<|tool_calls_section_begin|><|tool_call_begin|>", "<|tool_call_end|>")
    text = 'functions.add:3<|tool_call_argument_begin|>{"a": 1}'
    reading = read("kimi", f"Hm.{tags[0]}{text}{tags[1]}<|tool_calls_section_end|>")
    assert reading.content == "Hm."
    assert reading.calls == [{**ADD, "id": "functions.add:3"}]


def test_harmonys_channel_of_analysis_is_the_reasoning() -> None:
    text = "<|channel|>analysis<|message|>Why<|end|><|start|>assistant<|channel|>final<|message|>4"
    reading = read("harmony", text)
    assert (reading.reasoning, reading.content) == ("Why", "4")
    assert read("harmony", "<|channel|>ana").content == "", "a header is no content"


@pytest.mark.parametrize("name, text, expected", [
    ("hermes", '<tool_call>{"name": "add", "arguments": {</tool_call>', "between <tool_call>"),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "between <tool_call>"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "between <tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "<tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', "<tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}', "<tool_call>"),
    ("hermes", "<tool_call>" + "[" * 100_000, "between <tool_call>"),
    ("phi", "<|tool_call|>[]<|/tool_call|>", "behind <|tool_call|>"),
    ("llama", "<|python_tag|>print(1)", "and nothing else"),
    ("llama", '{"name": "add", "parameters": {"a": ', "and nothing else"),
    ("mistral", "[TOOL_CALLS]add{}", "behind [TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS]add[ARGS]{", "NAME[ARGS]{...}"),
    ("coder", "<function=add><parameter=a>1</function>", "</parameter>"),
    ("coder", '<tool_call>{"name": "add"}</tool_call>', "<function=NAME>"),
    ("glm", "<tool_call>add<arg_key>a</arg_key></tool_call>", "all closed"),
    ("deepseek", "<｜tool▁call▁begin｜>add<｜tool▁sep｜>1", "NAME<｜tool▁sep｜>"),
    ("kimi", "<|tool_call_begin|>functions.add:0", "functions.NAME:0"),
    ("harmony", " to=functions.add<|message|>{", "to=functions.NAME"),
])  # fmt: skip
def test_a_call_that_cannot_be_read_is_an_error_that_says_what_was_expected(
    name: str, text: str, expected: str
) -> None:
    reading = read(name, text)
    assert reading.calls == []
    [error] = reading.errors
    assert error.startswith("expected ")
    assert expected in error
    assert ", found '" in error
    assert len(error) < 400


def test_a_broken_call_beside_a_good_one_leaves_it() -> None:
    good = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    reading = read("hermes", f"{good}<tool_call>no</tool_call>{good}")
    assert (reading.calls, len(reading.errors)) == ([ADD, ADD], 1)


@pytest.mark.parametrize("text, key, expected", [
    ("7", "a", 7), ("seven", "a", "seven"), ("7", "b", "7"), ("True", "b", "True"),
    ("None", "c", None), ("[1]", "c", [1]), ("7", "unknown", 7), ("True", "unknown", True),
    ("x", "unknown", "x"), ('{"a": 1}', "unknown", {"a": 1}),
])  # fmt: skip
def test_texts_become_what_their_tool_declares(text: str, key: str, expected: Any) -> None:
    tagged = f"<function=add><parameter={key}>\n{text}\n</parameter></function>"
    assert read("coder", tagged).calls == [call("add", **{key: expected})]


def test_a_text_of_two_types_stays_one_unless_it_is_the_other() -> None:
    kinds = {("f", "x"): frozenset({"string", "integer"})}
    reading = CallReading()
    for text in ("1", "[1]"):
        reading.add_texts("f", {"x": text}, kinds)
    assert reading.calls == [call("f", x=1), call("f", x="[1]")]


@pytest.mark.parametrize("family, name", [
    ("qwen2", "hermes"), ("qwen3", "hermes"), ("llama3", "llama"), ("mistral", "mistral"),
    ("deepseek", "deepseek"), ("harmony", "harmony"), ("glm", "glm"), ("gemma", None),
])  # fmt: skip
def test_a_template_has_the_markers_of_its_format(family: str, name: str | None) -> None:
    tool_format = find_tool_format(FAMILIES[family][0])
    assert (tool_format.name if tool_format else None) == name


def test_coders_format_comes_before_hermess_whose_tags_it_has() -> None:
    coder = find_tool_format("<tool_call><function=x></function></tool_call>")
    assert coder is not None
    assert coder.name == "coder"


PIECES = [
    *("<tool_call>", "</tool_call>", "<function=add>", "</function>", "<parameter=a>", "{", "}"),
    *("</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]"),
    *("[ARGS]", "[CALL_ID]", "<|python_tag|>", '{"name": "add", "arguments": {}}', "[", "]", ";"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "```json", "```", "null"),
    *("<|start|>", "<|channel|>", "<|message|>", "to=functions.", "<|end|>", "analysis", "\\ud800"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call|>", '"', "add", " ", ","),
]


@settings(max_examples=example_count(200), deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=12))
def test_nothing_that_a_model_writes_is_an_exception(pieces: list[str]) -> None:
    for reader in READERS.values():
        reading = reader("".join(pieces), KINDS)
        for each in reading.calls:
            function = each["function"]
            assert function["name"]
            assert isinstance(function["arguments"], dict)
            json.dumps(function, ensure_ascii=False, allow_nan=False).encode(errors="surrogatepass")
        assert all(error.startswith("expected ") for error in reading.errors)
