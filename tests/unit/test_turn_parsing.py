"""What a model wrote as a message, and ids that no later turn changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from operators.kernels.text import Tokenizer
from operators.kernels.turn_rendering import TurnRenderer
from tests.kit.chat_templates import QWEN2, family_tokenizer
from tests.kit.models import CHARACTERS
from tests.kit.turns import example_count

ADD = {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": ADD}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ASK, RETRY = {"role": "user", "content": "2+2?"}, {"role": "user", "content": "Sure?"}
TOLD = {"role": "tool", "content": "four"}


def parsed(family: str, text: str, tools: Any = ()) -> dict[str, Any]:
    tokenizer = family_tokenizer(family)
    ids = np.array(tokenizer.encode([text], special=False)[0], np.int32)
    message = TurnRenderer(tokenizer).parse(ids, raw=False, tools=tools)
    assert message.pop("role") == "assistant"
    return message


# --- messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family, text, message", [
    ("qwen2", "Four.\n<|im_end|>", {"content": "Four.\n"}),
    ("qwen2", "<think>\nadd\n</think>\n\n4", {"content": "4", "reasoning_content": "add"}),
    ("qwen2", "a <think>", {"content": "a <think>"}),
    ("qwen2", f"So:\n{HERMES}<|im_end|>", {"content": "So:", "tool_calls": [CALL]}),
    ("qwen2", f"<think>{HERMES}</think>4",
     {"content": "4", "reasoning_content": HERMES}),
    ("qwen3", "add\n</think>\n\n4<|im_end|>", {"content": "4", "reasoning_content": "add"}),
    ("qwen3", "add and add", {"content": "", "reasoning_content": "add and add"}),
    ("qwen3", "</think>\n\n4<|endoftext|>", {"content": "4"}),
    ("llama3", '{"name": "add", "parameters": {"a": 1}}<|eot_id|>',
     {"content": "", "tool_calls": [CALL]}),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]</s>',
     {"content": "", "tool_calls": [CALL]}),
    ("gemma", "4<start_of_turn><end_of_turn>", {"content": "4"}),
    ("harmony", "<|channel|>analysis<|message|>add<|end|><|start|>assistant<|channel|>final"
     "<|message|>4<|return|>", {"content": "4", "reasoning_content": "add"}),
    ("glm", "\n<think></think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
     "</tool_call><|observation|>", {"content": "", "tool_calls": [CALL]}),
    ("qwen2", "", {"content": ""}),
])  # fmt: skip
def test_a_turn_is_a_message_of_what_its_family_writes(
    family: str, text: str, message: dict[str, Any]
) -> None:
    assert parsed(family, text, TOOLS) == message


@pytest.mark.parametrize(("declared", "expected"), [("string", "1"), ("integer", 1)])
def test_an_argument_that_was_written_as_text_is_what_the_tool_declares(
    declared: str, expected: Any
) -> None:
    properties = {"a": {"type": declared}}
    tools = [
        {"type": "function", "function": {"name": "add", "parameters": {"properties": properties}}}
    ]
    call = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
    message = parsed("glm", f"<think></think>{call}<|observation|>", tools)
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": expected}


def test_calls_that_cannot_be_read_are_told_in_the_message() -> None:
    message = parsed("qwen2", "So: <tool_call>add(1)</tool_call>")
    assert message["content"] == "So:"
    assert "tool_calls" not in message
    [error] = message["tool_call_errors"]
    assert error.endswith("between <tool_call> and </tool_call>, found 'add(1)'")


DESCRIPTION = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|im_end|>"},
    },
}
"""Of a format that no table of ours has."""


@pytest.mark.skipif(
    not hasattr(PreTrainedTokenizerBase, "get_response_parser"), reason="an older transformers"
)
def test_a_tokenizers_own_description_comes_before_its_templates_markers() -> None:
    tokenizer = family_tokenizer("qwen3")
    tokenizer.inner.response_template = DESCRIPTION  # type: ignore[attr-defined]
    renderer = TurnRenderer(tokenizer)
    assert renderer.way == "response_template"
    texts = ('add</think>4<call>{"name": "add", "arguments": {"a": 1}}</call>', "x</think><call>{")
    rows = [np.array(row, np.int32) for row in tokenizer.encode(texts, special=False)]
    message, broken = (renderer.parse(row, raw=False) for row in rows)
    expected = {"content": "4", "reasoning_content": "add", "tool_calls": [CALL]}
    assert message == {"role": "assistant", **expected}
    assert broken.get("tool_calls") is None
    assert "response_template" in broken["tool_call_errors"][0]


# --- reasoning that a template drops --------------------------------------------------------------


def test_reasoning_is_kept_unless_the_template_is_to_decide() -> None:
    for family in ("qwen3", "deepseek", "glm", "harmony"):
        tokenizer = family_tokenizer(family)
        assert not TurnRenderer(tokenizer).begins_segment([RETRY])
        renderer = TurnRenderer(tokenizer, thinking="template")
        assert renderer.begins_segment([RETRY]), family
        assert renderer.begins_segment([TOLD, RETRY])
        assert not renderer.begins_segment([TOLD])
        assert not renderer.begins_segment([])


@pytest.mark.parametrize("family", ["qwen2", "llama3", "gemma", "phi3"])
def test_a_template_that_keeps_what_was_written_begins_no_segment(family: str) -> None:
    renderer = TurnRenderer(family_tokenizer(family), thinking="template")
    renderer.check([])
    assert not renderer.begins_segment([RETRY])


def test_a_template_that_moves_tools_begins_a_segment_where_it_may() -> None:
    renderer = TurnRenderer(family_tokenizer("mistral"), thinking="template")
    renderer.check(TOOLS)
    assert renderer.begins_segment([RETRY])
    assert not renderer.begins_segment([TOLD])


def test_a_segment_is_the_conversation_as_the_template_shows_it() -> None:
    tokenizer = family_tokenizer("qwen3")
    renderer = TurnRenderer(tokenizer, thinking="template")
    [ids] = tokenizer.encode(["add</think>\n\n4<|im_end|>"], special=False)
    turn = renderer.parse(np.array(ids, np.int32), raw=False)
    [begun] = [renderer.first([[ASK, turn, RETRY]], [[]])[0]]
    shown = tokenizer.inner.decode(begun.tolist())
    between = "<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert shown.endswith(f"assistant\n4{between}")
    appended = TurnRenderer(tokenizer).between(np.array(ids[:-1], np.int32), [RETRY], raw=False)
    assert tokenizer.inner.decode(appended.tolist()) == between


# --- ids that encoding would split otherwise ------------------------------------------------------

MERGES = [("a", "b"), ("ab", "a"), ("b", "a"), ("ba", "b")]
PIECES = ["a", "b", "ab", "aba", "ba", "bab", "c", "1", "\n", " "]
MARKS = ["<|im_start|>", "<|im_end|>"]


def ambiguous_tokenizer() -> Tokenizer:
    """Texts of a and b have many spellings in it, of which encoding knows one."""
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = {letters.pre_tokenize_str(c)[0][0]: i for i, c in enumerate(CHARACTERS)}
    for one, other in MERGES:
        vocabulary[one + other] = len(vocabulary)
    inner = FastTokenizer(models.BPE(vocabulary, MERGES))
    inner.pre_tokenizer = letters
    inner.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>")
    fast.add_tokens(MARKS, special_tokens=True)
    fast.chat_template = QWEN2
    return Tokenizer("ambiguous", fast, frozenset({fast.convert_tokens_to_ids("<|im_end|>")}))  # type: ignore[arg-type]


AMBIGUOUS = ambiguous_tokenizer()
APPENDING = TurnRenderer(AMBIGUOUS)
END = min(AMBIGUOUS.eos_ids)


def piece_ids(pieces: list[str]) -> list[int]:
    """A token for each piece, also where encoding would not choose it."""
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    names = [letters.pre_tokenize_str(piece)[0][0] for piece in pieces]
    return AMBIGUOUS.inner.convert_tokens_to_ids(names)  # type: ignore[return-value]


@settings(max_examples=example_count(100), deadline=None)
@given(
    turns=st.lists(
        st.tuples(
            st.lists(st.sampled_from(PIECES), max_size=6),
            st.booleans(),
            st.lists(st.sampled_from(PIECES), min_size=1, max_size=4),
        ),
        min_size=1,
        max_size=4,
    ),
    raw=st.booleans(),
)
def test_what_was_decoded_is_never_encoded_again(turns: list[Any], raw: bool) -> None:
    prompt: Any = "ab?" if raw else [ASK]
    ids = APPENDING.first([prompt], [[]])[0].tolist()
    conversation: list[Any] = [ASK]
    whole = prompt
    for pieces, is_ended, answer in turns:
        written = [*piece_ids(pieces), *[END] * is_ended]
        reply = {"role": "user", "content": "".join(answer)}
        part = APPENDING.between(np.array(written, np.int32), [reply], raw=raw)
        before = len(ids)
        ids += [*written, *part.tolist()]
        assert ids[before : before + len(written)] == written
        written_message = {"role": "assistant", "content": "".join(pieces)}
        assert APPENDING.parse(np.array(written, np.int32), raw=raw) == written_message
        conversation = [*conversation, written_message, reply]
        if raw:
            whole += "".join(pieces) + "<|im_end|>" * is_ended + reply["content"]
    if not raw:
        whole = AMBIGUOUS.render([conversation], generation=True)[0]
    assert AMBIGUOUS.inner.decode(ids) == whole


def test_encoding_would_have_split_it_otherwise() -> None:
    """Else the test above would prove nothing."""
    written = piece_ids(["a", "ba", "b", "ab"])
    assert AMBIGUOUS.encode(["abab" + "ab"], special=False)[0] != written


def test_a_text_behind_others_begins_with_no_space_of_its_own() -> None:
    """As tokenizers of the kind of Llama 2's put one before every text."""
    vocabulary = {name: index for index, name in enumerate(["<s>", "▁", "a", "b", "▁a", "<unk>"])}
    inner = FastTokenizer(models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    inner.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", unk_token="<unk>")
    tokenizer = Tokenizer("spaced", fast, frozenset({0}))
    assert tokenizer.encode(["ab"], special=False) == [[4, 3]]
    renderer = TurnRenderer(tokenizer)
    reply = {"role": "user", "content": "ab"}
    assert renderer.between(np.array([2], np.int32), [reply], raw=True).tolist() == [2, 3]
