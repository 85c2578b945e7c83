"""Turns of many rows, decoded in one call: the messages are those of each row alone."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast  # type: ignore[attr-defined]

from operators.kernels.row_texts import decode_rows
from operators.kernels.text import Tokenizer
from operators.kernels.turn_rendering import TurnRenderer
from tests.kit.chat_templates import FAMILIES, SPECIAL_TOKENS, family_tokenizer
from tests.kit.environments import VowelTurns
from tests.kit.interact_kernels import kernels as kernels
from tests.kit.interact_kernels import open_interact, run_episodes
from tests.kit.turns import example_count

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}
    for name, properties in (("add", {"a": {"type": "integer"}}), ("say", {"a": {}}))
]
FRAGMENTS = [
    *SPECIAL_TOKENS,
    *('{"name": "add", "arguments": {"a": 1}}', '[{"name": "add"}]', "add", '{"a": 1}', "; "),
    *("<function=add>", "<parameter=a>1</parameter>", "</function>", "[ARGS]", "functions.add:0"),
    *("<arg_key>a</arg_key>", "<arg_value>1</arg_value>", "to=functions.add", "```json", "\n"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_", "end|>", "é", "so"),
]


class DecodedAlone(PreTrainedTokenizerFast):
    """Has a way of its own to decode, which is the usual one."""

    def decode(self, *arguments: Any, **how: Any) -> Any:
        return super().decode(*arguments, **how)


class DecodedAloud(PreTrainedTokenizerFast):
    """Has another way to decode."""

    def decode(self, *arguments: Any, **how: Any) -> Any:
        return str(super().decode(*arguments, **how)).upper()


def tokenizer_of(family: str, kind: type = PreTrainedTokenizerFast) -> Tokenizer:
    tokenizer = family_tokenizer(family)
    tokenizer.inner.__class__ = kind
    return tokenizer


@cache
def usual(family: str) -> tuple[Tokenizer, TurnRenderer]:
    tokenizer = tokenizer_of(family)
    return tokenizer, TurnRenderer(tokenizer)


@cache
def one_by_one(family: str) -> TurnRenderer:
    return TurnRenderer(tokenizer_of(family, DecodedAlone))


ROWS = st.lists(
    st.one_of(
        st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join),
        st.lists(st.integers(0, 1 << 20), max_size=12),
    ),
    max_size=5,
)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=example_count(60), deadline=None)
@given(drawn=ROWS, raw=st.booleans(), has_tools=st.booleans())
def test_a_batch_has_the_messages_of_its_rows(
    family: str, drawn: list[Any], raw: bool, has_tools: bool
) -> None:
    tokenizer, renderer = usual(family)
    rows: list[np.ndarray] = []
    for each in drawn:
        ids = each
        if isinstance(each, str):
            [ids] = tokenizer.encode([each], special=False)
        rows.append(np.array(ids, np.int64) % len(tokenizer.inner))
    tools = [TOOLS if has_tools else []] * len(rows)
    batch = renderer.parse_all(rows, raw=raw, tools=tools)
    expected = [
        one_by_one(family).parse(ids, raw=raw, tools=offered)
        for ids, offered in zip(rows, tools, strict=True)
    ]
    assert batch == expected


def test_each_row_has_its_own_tools() -> None:
    text = "<tool_call>add\n<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
    tokenizer, renderer = usual("glm")
    [ids] = tokenizer.encode([text], special=False)
    text_tools = [{"name": "add", "parameters": {"properties": {"a": {"type": "string"}}}}]
    row = np.array(ids, np.int32)
    messages = renderer.parse_all([row, row], raw=False, tools=[TOOLS, text_tools])
    arguments = [message["tool_calls"][0]["function"]["arguments"] for message in messages]
    assert arguments == [{"a": 1}, {"a": "1"}]


def test_a_tokenizer_with_a_decoder_of_its_own_is_asked() -> None:
    tokenizer = tokenizer_of("qwen2", DecodedAloud)
    rows = tokenizer.encode(["so", "add"], special=False)
    assert decode_rows(tokenizer.inner, rows, special=False) == ["SO", "ADD"]


def test_rows_that_end_together_are_read_in_one_call(
    base: str, kernels: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    parse_all = TurnRenderer.parse_all

    def count_rows(self: TurnRenderer, written: Any, **how: Any) -> Any:
        counts.append(len(written))
        return parse_all(self, written, **how)

    monkeypatch.setattr(TurnRenderer, "parse_all", count_rows)
    kernel = open_interact(base, VowelTurns, n=8)
    kernels.append(kernel)
    batch = run_episodes(kernel, ["hello"])
    assert sum(counts) == batch.ragged("turn_end").lengths.sum()
    assert max(counts) > 1
