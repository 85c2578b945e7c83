"""What a model wrote in a turn, as a message: its content, its reasoning, its tool calls.

Owns: in which way the turns of a tokenizer are read, and the reasoning in them. Does not own:
formats of calls (tool_calls.py), the package `renderers` (model_renderers.py).

In order of precedence: the tokenizer's own description of a response (`response_template`, of older
transformers `response_schema`), the package `renderers` where it knows the Model, and the format of
calls that the chat template has a marker of. Without any, a turn is its reasoning and its text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from dataflow.prompt_types import Message
from operators.kernels.call_reading import CallReading, Tool, parameter_kinds
from operators.kernels.model_renderers import ModelRenderer
from operators.kernels.row_texts import decode_rows
from operators.kernels.text import Tokenizer
from operators.kernels.tool_calls import JSON_CALL, find_tool_format

_REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_DESCRIPTIONS = ("response_template", "response_schema")


class TurnParser:
    """Reads the turns of one tokenizer. way: how, for a log."""

    def __init__(
        self, tokenizer: Tokenizer, generation: str, renderer: ModelRenderer | None = None
    ) -> None:
        """generation: what the chat template renders up to where the assistant begins."""
        self._tokenizer = tokenizer
        self._generation = generation
        self._renderer = renderer
        self._begun = _begun_reasoning(generation)
        self._special_names = _special_names(tokenizer)
        self._special_pattern = _any_of(self._special_names)
        self._format = find_tool_format(str(tokenizer.inner.chat_template or ""))
        self._description = ""
        for name in _DESCRIPTIONS:
            if not self._description and getattr(tokenizer.inner, name, None):
                self._description = name
        self._schema: Any = None
        if self._description:
            self._schema = _compile_description(getattr(tokenizer.inner, self._description))

    @property
    def way(self) -> str:
        """What reads turns: an attribute of the tokenizer, `renderers`, a format's name or text."""
        if self._description:
            return self._description
        if self._renderer is not None:
            return "renderers"
        return self._format.name if self._format else "text"

    def parse_all(
        self, rows: Sequence[list[int]], tools: Sequence[Sequence[Tool]]
    ) -> list[Message]:
        """The message that each row's ids are; an end of turn is not in it. tools: those of each
        row. All rows are decoded in one call.
        """
        if self._description:
            texts = decode_rows(self._tokenizer.inner, rows, special=True)
            described = zip(rows, texts, tools, strict=True)
            return [self._parse_described(ids, text, offered) for ids, text, offered in described]
        if self._renderer is not None:
            renderer = self._renderer
            pairs = zip(rows, tools, strict=True)
            return [as_message(renderer.read(ids, offered)) for ids, offered in pairs]
        written = [self._without_ends(ids) for ids in rows]
        texts = decode_rows(self._tokenizer.inner, written, special=True)
        return [self._read(text, offered) for text, offered in zip(texts, tools, strict=True)]

    def _read(self, text: str, tools: Sequence[Tool]) -> Message:
        """By the format of calls."""
        reading = CallReading(content=text)
        if self._format is None or self._format.name != "harmony":  # whose reasoning is a channel
            reading.reasoning, reading.content = self._split_reasoning(text)
        if self._format is not None:
            reasoning = reading.reasoning
            reading = self._format.read(reading.content, parameter_kinds(tools))
            reading.reasoning += reasoning
        reading.content = self._without_special(reading.content)
        reading.reasoning = self._without_special(reading.reasoning)
        return as_message(reading)

    def _parse_described(self, ids: list[int], text: str, tools: Sequence[Tool]) -> Message:
        """By transformers, whose parsers raise for what they cannot read."""
        parse = partial(self._tokenizer.inner.parse_response, schema=self._schema)
        if self._description == "response_template":
            offered = [dict(tool) for tool in tools] or None
            parse = partial(parse, prefix=self._generation, tools=offered)  # type: ignore[call-arg]
        reading = CallReading()
        try:
            _add_described(reading, parse(text))  # type: ignore[arg-type]
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            reading = CallReading(content=self._tokenizer.text(ids))
            reading.errors = [
                # The model reads this: no longer than it helps.
                f"expected a turn as the tokenizer's {self._description} describes it,"
                f" found {text!r:.60} ({error!s:.60})"
            ]
        return as_message(reading)

    def _without_ends(self, ids: list[int]) -> list[int]:
        last = len(ids)
        while last and ids[last - 1] in self._tokenizer.eos_ids:
            last -= 1
        return ids[:last]

    def _split_reasoning(self, text: str) -> tuple[str, str]:
        """The reasoning of a text, and the rest. What was begun and not ended is all reasoning."""
        for begin, end in _REASONING:
            is_begun = self._begun == begin or text.lstrip().startswith(begin)
            if is_begun or end in text:
                reasoning, _, rest = text.partition(end)
                return reasoning.replace(begin, "", 1), rest.lstrip("\n")
        return "", text

    def _without_special(self, text: str) -> str:
        # Most texts have none, and a tokenizer may have hundreds.
        if not self._special_pattern.search(text):
            return text
        for name in self._special_names:
            if name in text:
                text = text.replace(name, "")
        return text


def as_message(reading: CallReading) -> Message:
    """What was read as OpenAI's form has it: keys that would be empty are left out."""
    content = reading.content
    if reading.calls or reading.errors:
        content = content.strip()
    message: Message = {"role": "assistant", "content": content}
    reasoning = reading.reasoning.strip()
    if reasoning:
        message["reasoning_content"] = reasoning
    if reading.calls:
        message["tool_calls"] = reading.calls
    if reading.errors:
        message["tool_call_errors"] = reading.errors
    return message


def _add_described(reading: CallReading, parsed: Mapping[str, Any]) -> None:
    """Add what a tokenizer's description made of a turn."""
    texts = {name: parsed.get(name) or "" for name in ("content", *_REASONING_KEYS)}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise TypeError(f"{name} is not text: {text!r:.60}")
    reading.content = texts["content"]
    reading.reasoning = next((texts[name] for name in _REASONING_KEYS if texts[name]), "")
    for call in parsed.get("tool_calls") or ():
        function = call.get("function", call)
        reading.add_parsed(
            function.get("name"), function.get("arguments"), f"{JSON_CALL} as a call", f"{call}"
        )


def _compile_description(description: Any) -> Any:
    """A description as transformers makes it of each before it reads a turn, which takes longer
    than the reading; itself where it makes nothing of it, which each turn's reading then says.
    """
    try:
        from transformers.utils.chat_parsing.response_templates import load_response_template
    except ImportError:  # older ones read each turn by a `response_schema`
        return description
    try:
        return load_response_template(description)
    except (ValueError, TypeError, LookupError, AttributeError):
        return description


def _begun_reasoning(generation: str) -> str:
    """The mark of reasoning that is open where the assistant begins; empty for none."""
    for begin, end in _REASONING:
        if generation.rfind(begin) > generation.rfind(end):
            return begin
    return ""


def _any_of(names: Sequence[str]) -> re.Pattern[str]:
    """A pattern of any of these texts; without one, nothing matches."""
    if not names:
        return re.compile(r"(?!)")
    return re.compile("|".join(map(re.escape, names)))


def _special_names(tokenizer: Tokenizer) -> list[str]:
    """The texts of special tokens, without which a content is shown; longer ones first."""
    added = tokenizer.inner.added_tokens_decoder.values()
    names = {token.content for token in added if token.special and token.content}
    return sorted(names, key=len, reverse=True)
