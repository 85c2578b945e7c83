"""The package `renderers`, where it is installed and knows the Model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dataflow.errors import DataError
from operators.kernels.model_renderers import find_renderer
from operators.kernels.text import Tokenizer
from operators.kernels.turn_rendering import TurnRenderer
from tests.kit.chat_templates import QWEN2, family_tokenizer

ASK, RETRY = {"role": "user", "content": "2+2?"}, {"role": "user", "content": "Sure?"}
TOLD = {"role": "tool", "content": "four"}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def qwen3_tokenizer(base: str) -> Tokenizer:
    """With the tokens that the package looks for, and a template that it does not read."""
    tokenizer = family_tokenizer("qwen2")
    tags = ("tool_call", "tool_response", "think")
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    tokenizer.inner.add_tokens(marks)
    tokenizer.inner.chat_template = QWEN2
    return Tokenizer(base, tokenizer.inner, tokenizer.eos_ids)


def ids_of(tokenizer: Tokenizer, text: str) -> np.ndarray:
    return np.array(tokenizer.encode([text], special=False)[0], np.int32)


def test_a_name_without_the_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("operators.kernels.model_renderers.find_spec", lambda name: None)
    tokenizer = family_tokenizer("qwen2")
    assert find_renderer(tokenizer, None, keeps_reasoning=True) is None
    with pytest.raises(DataError, match=r"not installed\. Fix: pip install 'dataflow-rl\[agents\]"):
        TurnRenderer(tokenizer, renderer="qwen3")


def test_a_model_that_it_knows_is_rendered_and_read_by_it() -> None:
    pytest.importorskip("renderers")
    tokenizer = qwen3_tokenizer("Qwen/Qwen3-0.6B")
    renderer = TurnRenderer(tokenizer)
    assert renderer.way == "renderers"
    assert TurnRenderer(qwen3_tokenizer("mine")).way == "hermes"
    renderer.check(TOOLS)
    first = tokenizer.inner.decode(renderer.first([[ASK]], [TOOLS])[0].tolist())
    assert first.startswith("<|im_start|>system\n# Tools")
    assert first.endswith("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n")
    written = ids_of(tokenizer, f"<think>\nadd\n</think>\n\n{HERMES}<|im_end|>")
    message = renderer.parse(written, raw=False, tools=TOOLS)
    assert message["tool_calls"] == [CALL]
    assert message["reasoning_content"] == "add"
    broken: Any = renderer.parse(ids_of(tokenizer, "<tool_call>{</tool_call>"), raw=False)
    assert "expected a call in the format of qwen3" in broken["tool_call_errors"][0]


@pytest.mark.parametrize("end", ["", "<|im_end|>"])
def test_it_appends_what_its_own_template_would(end: str) -> None:
    pytest.importorskip("renderers")
    tokenizer = qwen3_tokenizer("mine")
    by_package = TurnRenderer(tokenizer, renderer="qwen3")
    by_template = TurnRenderer(tokenizer)
    written = ids_of(tokenizer, f"<think>\nadd\n</think>\n\n4{end}")
    for replies in ([RETRY], [TOLD], [TOLD, TOLD]):
        parts = [each.between(written, replies, raw=False) for each in (by_package, by_template)]
        assert parts[0].tolist() == parts[1].tolist()


def test_reasoning_that_its_template_drops_begins_a_segment_where_that_decides() -> None:
    pytest.importorskip("renderers")
    tokenizer = qwen3_tokenizer("mine")
    assert not TurnRenderer(tokenizer, renderer="qwen3").begins_segment([RETRY])
    renderer = TurnRenderer(tokenizer, renderer="qwen3", thinking="template")
    assert renderer.begins_segment([RETRY])
    assert not renderer.begins_segment([TOLD])
    with pytest.raises(DataError, match=r"that the renderer 'qwen3' appends, found \['user'\]"):
        renderer.between(ids_of(tokenizer, "4"), [RETRY], raw=False)


def test_a_renderer_that_it_does_not_have_is_refused() -> None:
    pytest.importorskip("renderers")
    with pytest.raises(DataError, match="expected a renderer 'gpt-7' of the package"):
        TurnRenderer(qwen3_tokenizer("mine"), renderer="gpt-7")
    with pytest.raises(DataError, match="that fits the tokenizer, found: Special token"):
        TurnRenderer(family_tokenizer("qwen2"), renderer="qwen3")
