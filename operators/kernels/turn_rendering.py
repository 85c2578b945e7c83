"""Turns of a conversation as token ids that are only appended to, and messages of what was written.

Owns: which of template, package and raw text does it, and when a row has to begin anew. Does not
own: what a template renders between turns (turn_templates.py), reading (turn_parsing.py), masks and
rows (interacting.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np

from dataflow.batch import Ragged
from dataflow.errors import DataError
from dataflow.prompt_types import Message
from operators.kernels.call_reading import Tool
from operators.kernels.model_renderers import find_renderer
from operators.kernels.row_texts import decode_rows
from operators.kernels.stand_in_turns import QUESTION
from operators.kernels.text import Tokenizer, to_ragged
from operators.kernels.turn_checks import drops_reasoning, find_faults
from operators.kernels.turn_parsing import TurnParser
from operators.kernels.turn_templates import TurnTemplate


class TurnRenderer:
    """What a model is shown between the turns that it writes, and what it wrote.

    What it wrote is never encoded again. Where a template leaves the reasoning of earlier turns out
    once a user's turn follows (Qwen3's), thinking `keep` keeps what was written, and `template`
    says that such a turn begins a new segment (`begins_segment`), which `first` renders.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        thinking: Literal["keep", "template"] = "keep",
        renderer: str | None = None,
    ) -> None:
        """renderer: the name of one of the package `renderers`; None: that of the Model, if the
        package is installed and knows it.
        """
        self._tokenizer = tokenizer
        self._thinking = thinking
        self._template = TurnTemplate(tokenizer)
        self._renderer = find_renderer(tokenizer, renderer, keeps_reasoning=thinking == "keep")
        self._faults: dict[str, str] = {}
        self._checked: set[tuple[bool, bool]] = set()

    @property
    def way(self) -> str:
        """What reads turns, for a log: `renderers`, `hermes`, ..."""
        return self._parser.way

    def check(self, tools: Sequence[Tool]) -> None:
        """Nothing, if what is rendered between two turns only appends to what is there.

        Tried are answers with and without calls, a user's replies, a tool's and several tools'.
        Raises DataError, which names what the template does, where a user's replies do not append,
        or with tools those of tools or where the template does not show the tools. Any other reply
        that would not append is refused where it comes (`between`).
        """
        self._check(tools, has_system=False)

    def first(
        self, prompts: Sequence[str | list[Message]], tools: Sequence[Sequence[Tool]]
    ) -> Ragged:
        """int32 ids of prompts, ready to be answered; tools: those of each row.

        Texts are raw: they have no template, and so no tools. Raises DataError for a prompt without
        tokens, for texts with tools, and for a conversation that the template cannot render or
        would change when turns follow.
        """
        if not len(prompts) or isinstance(prompts[0], str):
            self._require_no_tools(tools)
            return self._tokenizer.encode_prompts(prompts)  # type: ignore[arg-type]
        rows: list[tuple[Any, Sequence[Tool]]] = list(zip(prompts, tools, strict=True))
        if self._renderer is not None:
            renderer = self._renderer
            return to_ragged([renderer.first(prompt, offered) for prompt, offered in rows])
        texts = [self._first_text(prompt, offered) for prompt, offered in rows]
        ids = self._tokenizer.encode(texts, special=False)
        for index, row in enumerate(ids):
            if not row:
                base = self._tokenizer.base
                raise DataError(f"{base}: prompt {index} has no tokens: {prompts[index]!r:.80}.")
        return to_ragged(ids)

    def between(
        self,
        written: np.ndarray,
        replies: Sequence[Message],
        *,
        raw: bool,
        turn: Message | None = None,
    ) -> np.ndarray:
        """int32 ids between a turn that the model wrote (its ids, perhaps without an end of turn)
        and its next one: the end of turn if it did not write it, the replies, and where the
        assistant begins. Raw: the contents of the replies, and nothing else.

        turn: what `parse` made of the written ids, if it is at hand. Raises DataError for replies
        that cannot be appended.
        """
        turns = None if turn is None else [turn]
        return self.between_all([written], [replies], raw=raw, turns=turns)[0]

    def between_all(
        self,
        written: Sequence[np.ndarray],
        replies: Sequence[Sequence[Message]],
        *,
        raw: bool,
        turns: Sequence[Message] | None = None,
    ) -> list[np.ndarray]:
        """What `between` says of each of several rows, which are encoded in one call."""
        if raw:
            return self._contents(replies)
        rows = list(zip(written, replies, strict=True))
        if self._renderer is not None:
            renderer = self._renderer
            parts = [renderer.between(ids.tolist(), answers) for ids, answers in rows]
            return [np.array(part, np.int32) for part in parts]
        calls: list[Sequence[Mapping[str, Any]]] = []
        for row, (ids, answers) in enumerate(rows):
            self._require_sound(answers)
            turn: Message = {}
            if any(message["role"] == "tool" for message in answers):
                turn = self.parse(ids, raw=False) if turns is None else turns[row]
            calls.append(turn.get("tool_calls", ()))
        changes = self._template.changes(replies, calls)
        return [change.behind(ids) for change, ids in zip(changes, written, strict=True)]

    def parse(self, written: np.ndarray, *, raw: bool, tools: Sequence[Tool] = ()) -> Message:
        """The assistant's message that these ids are. Raw: their text.

        tools: their schemas, by which arguments become numbers where a format has but text. Calls
        that cannot be read are in `tool_call_errors`.
        """
        return self.parse_all([written], raw=raw, tools=[tools])[0]

    def parse_all(
        self, written: Sequence[np.ndarray], *, raw: bool, tools: Sequence[Sequence[Tool]]
    ) -> list[Message]:
        """What `parse` says of each of several rows, which are decoded in one call."""
        rows = [ids.tolist() for ids in written]
        if not raw:
            return self._parser.parse_all(rows, tools)
        texts = decode_rows(self._tokenizer.inner, rows, special=False)
        return [{"role": "assistant", "content": text} for text in texts]

    def begins_segment(self, replies: Sequence[Message]) -> bool:
        """Whether these replies begin a new row, whose prompt `first` renders of the whole
        conversation: those of a user, with thinking `template`, where the turns before are then
        rendered otherwise.
        """
        if self._thinking == "keep":
            return False
        by_user = any(message["role"] == "user" for message in replies)
        return by_user and (self._drops_reasoning or "user" in self._faults)

    # --- first prompts ----------------------------------------------------------------------------

    def _first_text(self, prompt: list[Message], tools: Sequence[Tool]) -> str:
        """One conversation as the template shows it."""
        self._check(tools, has_system=bool(prompt) and prompt[0]["role"] == "system")
        return self._tokenizer.render_prompt(self._template.ends.readable(prompt), tools)

    def _require_no_tools(self, tools: Sequence[Sequence[Tool]]) -> None:
        if any(len(offered) for offered in tools):
            raise DataError(
                f"{self._tokenizer.base}: expected prompts that are messages, as the environment"
                " has tools, which the chat template shows; found texts. Fix: a list of messages in"
                " the column prompt, or an environment without tools that reads the text itself."
            )

    # --- what does not append ---------------------------------------------------------------------

    def _check(self, tools: Sequence[Tool], *, has_system: bool) -> None:
        """Try what has not been tried yet; raise DataError for what is needed in any case."""
        if self._renderer is not None or (has_system, bool(tools)) in self._checked:
            return
        if tools:
            self._require_tools_shown(tools)
        faults = find_faults(self._tokenizer, self._template, system=has_system, tools=tools)
        for kind, fault in faults.items():
            self._faults.setdefault(kind, fault)
        needed_kinds = ("tool", "tools") if tools else ("user",)
        if self._thinking == "template" and not tools:
            needed_kinds = ()
        for kind in needed_kinds:
            if kind in faults:
                raise DataError(faults[kind])
        self._checked.add((has_system, bool(tools)))

    def _require_tools_shown(self, tools: Sequence[Tool]) -> None:
        rendered = self._template.ends.render([], generation=True, tools=tools)
        for tool in tools:
            name = tool.get("function", tool).get("name", "")
            if name not in rendered:
                raise DataError(
                    f"{self._tokenizer.base}: expected a chat template that shows the environment's"
                    f" tools, found no {name!r} in {rendered!r:.160}. Fix: a Model whose template"
                    " knows tools, or an environment without tools that reads the text itself."
                )

    def _require_sound(self, replies: Sequence[Message]) -> None:
        """Raise DataError for replies that the template was found to change earlier turns for."""
        for message in replies:
            if message["role"] == "assistant":
                raise DataError(
                    f"{self._tokenizer.base}: expected replies of a user or a tool, found one of"
                    f" the assistant: {message!r:.120}. Fix: what the environment's step returns."
                )
            fault = self._faults.get(message["role"])
            if fault is not None:
                raise DataError(fault)

    @cached_property
    def _drops_reasoning(self) -> bool:
        if self._renderer is not None:
            return self._renderer.drops_reasoning()
        return drops_reasoning(self._template)

    # --- reading and raw text ---------------------------------------------------------------------

    @cached_property
    def _parser(self) -> TurnParser:
        generation = ""
        if self._tokenizer.inner.chat_template:
            generation = self._template.ends.render([], generation=True)
            generation = generation.partition(QUESTION["content"])[2]
        return TurnParser(self._tokenizer, generation, self._renderer)

    def _contents(self, replies: Sequence[Sequence[Message]]) -> list[np.ndarray]:
        """The contents of each row's replies, each as text of its own."""
        messages = itertools.chain.from_iterable(replies)
        texts = [message.get("content") or "" for message in messages]
        encoded = iter(self._tokenizer.encode_behind(texts))
        parts: list[np.ndarray] = []
        for row in replies:
            ids: list[int] = []
            for _ in row:
                ids += next(encoded)
            parts.append(np.array(ids, np.int32))
        return parts
