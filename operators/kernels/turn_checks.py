"""Whether a chat template appends alone: what it rendered stays as it is when turns follow.

Owns: the conversations that are tried, and what is said of a template that changes them. Does not
own: what stands between two turns (turn_templates.py).

A template may still leave the reasoning of earlier turns out, as Qwen3's does: what a model wrote
is kept, or a new segment begins (turn_rendering.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from dataflow.errors import DataError
from dataflow.prompt_types import Message
from operators.kernels.call_reading import Tool
from operators.kernels.conversations import count_same_beginning
from operators.kernels.stand_in_turns import ANSWER, QUESTION, REASONING, answer, reply
from operators.kernels.text import Tokenizer
from operators.kernels.turn_templates import TurnTemplate

REPLIES: dict[str, tuple[Message, ...]] = {
    "user": (reply("user", 0),),
    "tool": (reply("tool", 1),),
    "tools": (reply("tool", 2), reply("tool", 3)),
}
"""Kinds of replies: a user's turn, what one tool said, what several said one after another."""

SYSTEM: Message = {"role": "system", "content": "stand-in system"}
_UNWRITTEN_REASONING = re.compile(r"<think>\s*</think>\s*|\[THINK\]\s*\[/THINK\]\s*")
_BEGUN_REASONING = re.compile(r"(<think>|\[THINK\])\s*$")


def find_faults(
    tokenizer: Tokenizer, template: TurnTemplate, *, system: bool, tools: Sequence[Tool]
) -> dict[str, str]:
    """What is wrong with each kind of REPLIES under a template; a kind without a fault is left out.

    system: whether the conversation begins with a system message.
    """
    trial = _Conversations(tokenizer, template, system, tools)
    faults: dict[str, str] = {}
    for kind in REPLIES:
        _note_fault(faults, kind, trial, (kind,))
    sound_kinds = [kind for kind in REPLIES if kind not in faults]
    for first in sound_kinds:
        for second in sound_kinds:
            _note_fault(faults, second, trial, (first, second))
    return faults


def drops_reasoning(template: TurnTemplate) -> bool:
    """Whether a template leaves the reasoning of a turn out once a user's turn follows."""
    field = {**answer(), "reasoning_content": REASONING}
    inline = {**answer(), "content": f"<think>\n{REASONING}\n</think>\n\n{ANSWER}"}
    for turn in (field, inline):
        alone = template.ends.render([turn], generation=False)
        followed = template.ends.render([turn, reply("user")], generation=True)
        if REASONING in followed:
            return False
        if REASONING in alone or turn is inline:
            return True
    return False


def _note_fault(
    faults: dict[str, str], kind: str, trial: _Conversations, kinds: tuple[str, ...]
) -> None:
    try:
        trial.require_appended(kinds)
    except DataError as error:
        faults.setdefault(kind, str(error))


class _Conversations:
    """Conversations of one or two rounds, each of which has to begin as the one before."""

    def __init__(
        self, tokenizer: Tokenizer, template: TurnTemplate, system: bool, tools: Sequence[Tool]
    ) -> None:
        self._base = tokenizer.base
        self._template = template
        self._question = [SYSTEM, QUESTION] if system else [QUESTION]
        self._tools = tools

    def require_appended(self, kinds: tuple[str, ...]) -> None:
        """Raise DataError unless each round adds to what is rendered, and the last one adds what is
        rendered without the others.
        """
        turns: list[Message] = []
        before = self._render(turns)
        for kind in kinds:
            replies = REPLIES[kind]
            self._require_known_role(replies[0])
            end = self._template.ends.before(replies)
            turns = [*turns, answer(end.calls), *replies]
            rendered = self._render(turns)
            added = _without_reasoning(self._template.text(replies))
            self._require_begins(rendered, before, kind)
            self._require_ends(rendered, added, kind)
            self._require_shown(added, replies)
            before = rendered

    def _render(self, turns: Sequence[Message]) -> str:
        rendered = self._template.ends.render(
            turns, generation=True, question=self._question, tools=self._tools
        )
        return _without_reasoning(rendered)

    def _require_known_role(self, message: Message) -> None:
        """A template that does not know tools may show what they say as the assistant's own."""
        if message["role"] != "tool":
            return
        said_by_tool = self._template.ends.render([answer(1), message], generation=False)
        spoken = {**message, "role": "assistant"}
        try:
            said_by_assistant = self._template.ends.render([answer(1), spoken], generation=False)
        except DataError:  # it refuses two turns of the assistant
            return
        if said_by_tool == said_by_assistant:
            raise DataError(
                f"{self._base}: expected a chat template that knows the role tool, found one that"
                f" shows what a tool said as the assistant's: {said_by_tool!r:.160}. Fix: an"
                " environment that replies with the role user, or a template that knows tools."
            )

    def _require_begins(self, rendered: str, before: str, kind: str) -> None:
        if rendered.startswith(before):
            return
        same = max(0, count_same_beginning(rendered, before) - 20)
        raise DataError(
            f"{self._base}: the chat template changes what it rendered once an answer and a reply"
            f" ({kind}) follow: expected {before[same:]!r:.80}, found {rendered[same:]!r:.80}. Fix:"
            " another template, or prompts without what it moves or drops (a system message,"
            " tools)."
        )

    def _require_ends(self, rendered: str, added: str, kind: str) -> None:
        if rendered.endswith(added):
            return
        same = max(0, count_same_beginning(rendered[::-1], added[::-1]) - 20)
        shown = slice(0, len(added) - same)
        raise DataError(
            f"{self._base}: the chat template renders a reply ({kind}) by the turns before it:"
            f" expected {added[shown][-80:]!r}, found {rendered[: len(rendered) - same][-80:]!r}."
            " Fix: another template."
        )

    def _require_shown(self, added: str, replies: Sequence[Message]) -> None:
        hidden = [message for message in replies if message["content"] not in added]
        if hidden:
            raise DataError(
                f"{self._base}: expected a chat template that shows each reply, found none of"
                f" {hidden[0]!r:.80} in {added!r:.120}. Fix: an environment that replies with"
                " another role, or another template."
            )


def _without_reasoning(rendered: str) -> str:
    """Without reasoning that nobody wrote: templates put it in and leave it out again."""
    return _BEGUN_REASONING.sub("", _UNWRITTEN_REASONING.sub("", rendered))
