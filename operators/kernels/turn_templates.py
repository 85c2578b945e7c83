"""What a chat template renders between a turn that a model wrote and its next one, as ids.

Owns: the rendering of replies behind a turn that stands in for what was written, and its ids. Does
not own: where the stand-in's turn is over (turn_ends.py), whether the template appends alone
(turn_checks.py).

What was written is never rendered or encoded: what comes behind the stand-in is tokenised by
itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataflow.prompt_types import Message
from operators.kernels.stand_in_turns import answer
from operators.kernels.text import Tokenizer
from operators.kernels.turn_ends import TurnEnd, TurnEnds, hidden_turn

Replies = Sequence[Message]
Calls = Sequence[Mapping[str, Any]]
_KEPT_CHANGES = 1024
_SHORT = 2000
"""Characters of replies and calls as JSON, up to which what they become is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnChange:
    """What stands between two turns. ids: int32, from the end of turn on. ends: ids that a written
    turn may end with, in which case the first `end_length` ids are left out.
    """

    ids: np.ndarray
    ends: frozenset[int] = frozenset()
    end_length: int = 0

    def behind(self, written: np.ndarray) -> np.ndarray:
        """The ids that follow these: without an end of turn where they end with one."""
        if len(written) and int(written[-1]) in self.ends:
            return self.ids[self.end_length :]
        return self.ids


class TurnTemplate:
    """The chat template of a tokenizer, asked for what stands between two turns."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.ends = TurnEnds(tokenizer)
        self._changes: dict[str, TurnChange] = {}

    def change(self, replies: Replies, calls: Calls = ()) -> TurnChange:
        """What stands between a turn and the next one, with these replies.

        calls: those of the turn, for templates that show their names with what the tools said.
        Raises DataError for replies that the template cannot render.
        """
        return self.changes([replies], [calls])[0]

    def changes(self, replies: Sequence[Replies], calls: Sequence[Calls]) -> list[TurnChange]:
        """What stands between turns, of many rows: they are encoded in one call."""
        keys: list[str] = []
        new_rows: dict[str, tuple[Replies, Calls]] = {}
        for row_replies, row_calls in zip(replies, calls, strict=True):
            names = [(call["function"]["name"], call.get("id")) for call in row_calls]
            key = json.dumps([row_replies, names])
            keys.append(key)
            if key not in self._changes:
                new_rows[key] = (row_replies, row_calls)
        new_changes = dict(zip(new_rows, self._render(list(new_rows.values())), strict=True))
        row_changes = [new_changes.get(key) or self._changes[key] for key in keys]
        self._keep(new_changes)
        return row_changes

    def text(self, replies: Replies) -> str:
        """The text that stands between a turn without an end and the next one."""
        return self._texts_behind([(replies, ())], [self.ends.before(replies)])[0]

    def _render(self, rows: Sequence[tuple[Replies, Calls]]) -> list[TurnChange]:
        """What stands between turns, with these replies to these calls."""
        if not rows:
            return []
        ends = [self.ends.before(replies) for replies, _ in rows]
        texts = self._texts_behind(rows, ends)
        encoded = self._tokenizer.encode_behind(texts)
        changes = zip(texts, encoded, ends, strict=True)
        return [self._change_of(text, ids, end) for text, ids, end in changes]

    def _keep(self, new_changes: Mapping[str, TurnChange]) -> None:
        """Keep short ones: environments say the same to many rows."""
        if len(self._changes) + len(new_changes) > _KEPT_CHANGES:
            self._changes.clear()
        short_changes = {key: new_changes[key] for key in new_changes if len(key) < _SHORT}
        self._changes.update(short_changes)

    def _change_of(self, text: str, row_ids: Sequence[int], end: TurnEnd) -> TurnChange:
        """The ids of a text, and how many of them are its end of turn."""
        ids = np.array(row_ids, np.int32)
        if not end.token or not text.startswith(end.lead + end.token):
            return TurnChange(ids=ids)
        token: int = self._tokenizer.inner.convert_tokens_to_ids(end.token)  # type: ignore[assignment]
        ends = {token}
        if not end.is_header:
            ends |= self._tokenizer.eos_ids
        position = int(np.argmax(ids == token))
        return TurnChange(ids=ids, ends=frozenset(ends), end_length=position + 1)

    def _texts_behind(
        self, rows: Sequence[tuple[Replies, Calls]], ends: Sequence[TurnEnd]
    ) -> list[str]:
        """The text behind each row's stand-in; all are rendered in one call."""
        stand_ins: list[list[Message]] = []
        for (replies, calls), end in zip(rows, ends, strict=True):
            stand_ins.append([answer(end.calls, calls), *replies])
        texts: list[str] = []
        rendered_rows = self.ends.render_all(stand_ins)
        for (replies, _), end, rendered in zip(rows, ends, rendered_rows, strict=True):
            _, shown, behind = rendered.partition(end.mark)
            if not shown or not behind.startswith(end.close) or _hides_user(behind, replies):
                raise hidden_turn(self._tokenizer, rendered)
            texts.append(behind.removeprefix(end.close))
        return texts


def _hides_user(text: str, replies: Replies) -> bool:
    """Whether a user's turn is not in a text as it is; a tool's may be quoted."""
    for message in replies:
        content = message.get("content")
        if message["role"] == "user" and isinstance(content, str) and content.strip() not in text:
            return True
    return False
