"""Where an assistant's turn is over in what a chat template renders.

Owns: finding it, once for each kind of reply. Does not own: what stands behind it
(turn_templates.py), the ids that end an answer (text.py).

    answer <|im_end|> \\n <|im_start|>user ...     Qwen and most others: the template ends a turn
    answer <|user|> ...                            GLM: the reply's own header ends it
    answer \\n user: ...                           nothing ends it but an id that is never shown
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dataflow.errors import DataError
from dataflow.prompt_types import Message
from operators.kernels.call_reading import Tool
from operators.kernels.stand_in_turns import (
    ANSWER,
    QUESTION,
    answer,
    argument,
    reply,
    with_call_ids,
    with_text_arguments,
    with_thinking,
)
from operators.kernels.text import Tokenizer

_IDS_READ = re.compile(r"tool_call_id|call\.id\b|call\[['\"]id")
"""In a template that shows the ids of calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnd:
    """How a stand-in's turn ends.

    calls: how many it has. mark: the last text of ours in it. close: what a model writes behind
    that before its turn is over. lead: what the template puts before the end of turn. token: the
    end of turn, empty for none. is_header: it begins the reply, and ends the turn by that.
    """

    calls: int
    mark: str
    close: str
    lead: str
    token: str
    is_header: bool


class TurnEnds:
    """The ends of turns under one chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ends: dict[tuple[str, int], TurnEnd] = {}
        self._end_names = _end_names(tokenizer)
        self._special_names = _special_names(tokenizer)
        template = str(tokenizer.inner.chat_template)
        self._reads_ids = _IDS_READ.search(template) is not None
        self._reads_thinking = ".thinking" in template

    def before(self, replies: Sequence[Message]) -> TurnEnd:
        """How the turn before these replies ends. Raises DataError if it cannot be told."""
        tools = sum(message["role"] == "tool" for message in replies)
        role = "user"
        if replies:
            role = replies[0]["role"]
        if (role, tools) not in self._ends:
            self._ends[role, tools] = self._find(role, tools)
        return self._ends[role, tools]

    def render(
        self,
        turns: Sequence[Message],
        *,
        generation: bool,
        question: Sequence[Message] = (QUESTION,),
        tools: Sequence[Tool] = (),
    ) -> str:
        """Turns behind a question, as the template shows them."""
        conversation = self.readable([*question, *turns])
        return self._tokenizer.render([conversation], generation=generation, tools=tools)[0]

    def render_all(self, rows: Sequence[Sequence[Message]]) -> list[str]:
        """The turns of each row behind a question, up to where the assistant begins."""
        conversations = [self.readable([QUESTION, *turns]) for turns in rows]
        return self._tokenizer.render(conversations, generation=True)

    def readable(self, conversation: Sequence[Message]) -> list[Message]:
        """A conversation as the template reads it: calls with ids, or with arguments as JSON text,
        reasoning under its name for it.
        """
        turns = list(conversation)
        if self._reads_ids:
            turns = with_call_ids(turns)
        if self._reads_thinking:  # older transformers do not name it so, too
            turns = with_thinking(turns)
        if any("tool_calls" in turn for turn in turns) and self._wants_text:
            turns = with_text_arguments(turns)
        return turns

    @cached_property
    def _wants_text(self) -> bool:
        """Whether the template fails for arguments that are objects, and not for texts."""
        conversation = with_call_ids([QUESTION, answer(1)])
        for is_text in (False, True):
            if is_text:
                conversation = with_text_arguments(conversation)
            try:
                self._tokenizer.render([conversation], generation=False)
            except DataError:
                continue
            return is_text
        return False

    def _find(self, role: str, tools: int) -> TurnEnd:
        tail = plain_tail = self._render_behind(ANSWER, [answer()])
        lead, plain_end = self._split_at_end(plain_tail)
        calls, mark, close, replies = 0, ANSWER, "", [reply(role)]
        if tools:
            calls = self._count_calls(tools)
            mark = self._last_shown(calls)
            tail = self._render_behind(mark, [answer(calls)])
            replies = [reply("tool", index) for index in range(tools)]
        if mark != ANSWER:
            close = self._find_close(tail, plain_tail)
        region = self._render_behind(mark, [answer(calls), *replies], generation=True)
        before_end = f"{close}{lead}"
        region = region.removeprefix(before_end)
        if plain_end:
            token = self._own_end(region, tail.removeprefix(before_end), replies[-1]["content"])
        else:
            token = _first_at(region, self._end_names)
        return TurnEnd(
            calls=calls, mark=mark, close=close, lead=lead, token=token, is_header=not plain_end
        )

    def _own_end(self, region: str, tail: str, last_reply: str) -> str:
        """The end of turn that stands before replies; tail: what stands there in the last turn.

        Harmony's is another one there: then it stands behind the replies, too, which a header does
        not.
        """
        token = _first_at(region, self._special_names)
        behind_replies = region.partition(last_reply)[2]
        if token and (tail.startswith(token) or token in behind_replies):
            return token
        return ""

    def _split_at_end(self, tail: str) -> tuple[str, str]:
        """What stands before the end of turn in what follows an answer, and the end; all of it and
        none if the template shows no end.
        """
        shown_names = [name for name in self._special_names if name in tail]
        if not shown_names:
            return tail, ""
        first = min(shown_names, key=tail.find)
        return tail[: tail.find(first)], first

    def _find_close(self, tail: str, plain_tail: str) -> str:
        """What a model writes behind its last argument until its turn is over."""
        lead, end = self._split_at_end(plain_tail)
        if not end and tail.endswith(plain_tail):
            return tail.removesuffix(plain_tail)
        ends = [name for name in (*self._end_names, end) if name and name in tail]
        if end and ends:
            position = min(tail.find(name) for name in ends)
            return tail[:position].removesuffix(lead)
        raise DataError(
            f"{self._tokenizer.base}: expected a chat template that ends a turn with calls as it"
            f" ends others, with {plain_tail!r:.60}, found {tail!r:.120}. Fix: another template, or"
            " eos_token_id in generation_config.json with the id that ends a turn."
        )

    def _count_calls(self, tools: int) -> int:
        """One call for each tool's reply, or one alone where the template shows no more."""
        if tools > 1:
            try:
                rendered = self.render([answer(tools)], generation=False)
            except DataError:
                return 1
            if argument(0) in rendered and argument(tools - 1) not in rendered:
                return 1
        return tools

    def _last_shown(self, calls: int) -> str:
        """The last text of ours in a turn with calls; a template may hide arguments."""
        rendered = self.render([answer(calls)], generation=False)
        last_argument = argument(calls - 1)
        if last_argument in rendered:
            return last_argument
        return ANSWER

    def _render_behind(
        self, mark: str, turns: Sequence[Message], *, generation: bool = False
    ) -> str:
        rendered = self.render(turns, generation=generation)
        _, shown, behind = rendered.partition(mark)
        if not shown:
            raise hidden_turn(self._tokenizer, rendered)
        return behind


def hidden_turn(tokenizer: Tokenizer, rendered: str) -> DataError:
    """The error for a template that does not show what we asked it to."""
    return DataError(
        f"{tokenizer.base}: expected a chat template that shows an answer and the user's next turn"
        f" as they are, found {rendered!r:.200}. Fix: another template, or none of its turns"
        " (then=, an environment that replies)."
    )


def _first_at(text: str, names: Sequence[str]) -> str:
    """The first of these names that a text begins with; empty for none."""
    return next((name for name in names if text.startswith(name)), "")


def _end_names(tokenizer: Tokenizer) -> list[str]:
    """The texts of the ids that end an answer."""
    names = [tokenizer.inner.convert_ids_to_tokens(end) for end in sorted(tokenizer.eos_ids)]
    return [name for name in names if isinstance(name, str) and name]


def _special_names(tokenizer: Tokenizer) -> list[str]:
    """The texts of all special tokens, longer ones first."""
    added = tokenizer.inner.added_tokens_decoder.values()
    names = {token.content for token in added if token.special and token.content}
    return sorted({*names, *_end_names(tokenizer)}, key=len, reverse=True)
