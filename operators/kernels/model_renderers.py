"""Renderers that know a Model's format without its chat template: the optional package `renderers`.

Owns: choosing one, and its API as ids and a CallReading. Does not own: templates
(turn_templates.py), what becomes of a reading (turn_parsing.py).

Prime Intellect's package, the extra `agents`. It knows Models by the names that they have on the
hub; a fine-tuned one in a folder is told its renderer's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from dataflow.errors import DataError
from dataflow.prompt_types import Message
from operators.kernels.call_reading import CallReading, Tool
from operators.kernels.stand_in_turns import QUESTION, reply, with_text_arguments
from operators.kernels.text import Tokenizer


class ModelRenderer:
    """One of the package's renderers. name: as the package has it."""

    def __init__(self, tokenizer: Tokenizer, inner: Any, name: str) -> None:
        self.name = name
        self._base = tokenizer.base
        self._inner = inner
        self._prompt = self.first([QUESTION], ())

    def first(self, conversation: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """The ids of a conversation up to where the assistant begins. Raises DataError for one that
        the renderer does not know, and for one that ends in a turn of the assistant's.
        """
        if conversation and conversation[-1]["role"] == "assistant":
            raise DataError(
                f"{self._base}: expected a conversation that the assistant answers, found one that"
                f" ends in its turn, which the renderer {self.name!r} cannot continue. Fix: prompts"
                " that end in another turn, or the Model without the package renderers."
            )
        messages = with_text_arguments(conversation)
        offered = [dict(tool) for tool in tools] or None
        try:
            return self._inner.render_ids(messages, tools=offered, add_generation_prompt=True)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise DataError(
                f"{self._base}: expected messages that the renderer {self.name!r} renders, found:"
                f" {error!s:.300}. Fix: messages with the roles that it knows, or without the"
                " package renderers."
            ) from error

    def between(
        self, written: Sequence[int], replies: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> list[int]:
        """The ids between a turn and the next one. Raises DataError where the renderer would render
        the turns before anew.
        """
        extended = self._extend(written, replies, tools)
        if extended is None:
            roles = [message["role"] for message in replies]
            raise DataError(
                f"{self._base}: expected replies that the renderer {self.name!r} appends, found"
                f" {roles} behind a turn of {len(written)} tokens, for which it renders the turns"
                " before anew. Fix: replies with the role user or tool, or the Model without the"
                " package renderers."
            )
        return extended

    def drops_reasoning(self) -> bool:
        """Whether a user's turn has the turns before rendered anew."""
        return self._extend(self._prompt[-1:], [reply("user")], ()) is None

    def read(self, ids: Sequence[int], tools: Sequence[Tool] = ()) -> CallReading:
        """The content, the reasoning and the calls of a turn."""
        offered = [dict(tool) for tool in tools] or None
        response = self._inner.parse_response(list(ids), tools=offered, prompt_ids=self._prompt)
        reading = CallReading(content=response.content or "")
        reading.reasoning = response.reasoning_content or ""
        for call in response.tool_calls:
            expected = f"a call in the format of {self.name} ({call.status})"
            if call.status == "ok":
                reading.add_parsed(call.name, call.arguments, expected, call.raw)
            else:
                reading.add_error(expected, call.raw)
        return reading

    def _extend(
        self, written: Sequence[int], replies: Sequence[Message], tools: Sequence[Tool]
    ) -> list[int] | None:
        before = [*self._prompt, *written]
        offered = [dict(tool) for tool in tools] or None
        rendered = self._inner.bridge_to_next_turn(
            self._prompt, list(written), list(replies), tools=offered
        )
        if rendered is None or rendered.token_ids[: len(before)] != before:
            return None
        return rendered.token_ids[len(before) :]


def find_renderer(
    tokenizer: Tokenizer, chosen: str | None, *, keeps_reasoning: bool
) -> ModelRenderer | None:
    """Find the renderer of this name, or that of the Model if the package is installed and knows
    it. Raises DataError for a name without the package, and for one that it does not know.
    """
    if find_spec("renderers") is None:
        if chosen is None:
            return None
        raise DataError(
            f"{tokenizer.base}: expected the package renderers for renderer={chosen!r}, found it"
            " not installed. Fix: pip install 'dataflow-rl[agents]', or renderer=None."
        )
    from renderers import config_from_name, create_renderer  # type: ignore[import-not-found]
    from renderers.base import MODEL_RENDERER_MAP  # type: ignore[import-not-found]

    name = chosen or MODEL_RENDERER_MAP.get(tokenizer.base)
    if name is None:
        return None
    retention = "all" if keeps_reasoning else None
    try:
        config = type(config_from_name(name))(thinking_retention=retention)
        inner = create_renderer(tokenizer.inner, config)
    except (AssertionError, LookupError, TypeError, ValueError) as error:
        raise DataError(
            f"{tokenizer.base}: expected a renderer {name!r} of the package renderers that fits the"
            f" tokenizer, found: {error!s:.300}. Fix: renderer= with another name."
        ) from error
    return ModelRenderer(tokenizer, inner, name)
